"""The class-data archive of the driver's JVM."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from frazil.errors import Unavailable
from frazil.spark import class_archive, jars


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRAZIL_CACHE", str(tmp_path))
    return tmp_path


def loading(monkeypatch: pytest.MonkeyPatch, writes: bool) -> list[dict[str, Any]]:
    """In place of the stream that loads classes."""
    calls: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(options)
        if writes:
            Path(options["env"][class_archive._WRITE_TO]).write_text("classes")
        return subprocess.CompletedProcess(command, 1, "", "RuntimeError: no room")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_session_uses_the_archive_if_there_is_one(monkeypatch: pytest.MonkeyPatch):
    assert class_archive.jvm_options() == ""
    calls = loading(monkeypatch, writes=True)
    class_archive.build()
    class_archive.build()
    assert len(calls) == 1, "it is built once"
    assert f"-XX:SharedArchiveFile={class_archive.archive()} " in class_archive.jvm_options()
    assert [path.name for path in class_archive.archive().parent.iterdir()] == [
        class_archive.archive().name
    ]


def test_an_archive_that_was_not_written_is_said_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path
):
    loading(monkeypatch, writes=False)
    with pytest.raises(Unavailable, match=r"cannot archive the classes of Spark.*no room"):
        class_archive.build()
    assert list((cache / "classes").iterdir()) == []
    assert class_archive.jvm_options() == ""


def test_the_jvm_that_writes_an_archive_uses_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(class_archive._WRITE_TO, "to.jsa")
    assert "-XX:ArchiveClassesAtExit=to.jsa" in class_archive.jvm_options()


def test_another_java_has_another_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    before = class_archive.archive()
    other = tmp_path / "java"
    other.write_text("")
    monkeypatch.setattr(jars, "java", lambda: str(other))
    assert class_archive.archive() != before


def test_java_ignores_an_archive_that_does_not_match_without_a_word():
    path = class_archive.archive()
    path.parent.mkdir()
    path.write_bytes(b"not an archive")
    run = subprocess.run(
        [jars.java(), *class_archive.jvm_options().split(), "-version"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0
    assert "archive" not in run.stdout + run.stderr
