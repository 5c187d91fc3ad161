from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frazil.errors import ConfigError, Unavailable
from frazil.spark import jars

MAVEN = "{http://ant.apache.org/ivy/maven}"
ONE = ("org.example:thing:1.2",)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRAZIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)


class Ivy:
    """In place of Java: does what Ivy does with `-retrieve`, or fails on request."""

    def __init__(self, *files: str, code: int = 0, output: str = "") -> None:
        self.files, self.code, self.output = files, code, output
        self.runs: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.runs.append(command)
        libs = Path(command[command.index("-retrieve") + 1]).parent
        self.xml = Path(command[command.index("-ivy") + 1]).read_text()
        for name in self.files:
            libs.mkdir(exist_ok=True)
            (libs / name).write_bytes(b"jar")
        return SimpleNamespace(returncode=self.code, stdout=self.output, stderr="")


@pytest.fixture
def ivy(monkeypatch: pytest.MonkeyPatch) -> Ivy:
    stub = Ivy("thing-1.2.jar", "below-3.jar")
    monkeypatch.setattr("subprocess.run", stub)
    monkeypatch.setattr(jars, "java", lambda: "java")
    monkeypatch.setattr(jars, "_PAUSES", (0.0, 0.0))
    return stub


def xml(*coordinates: str, transitive: bool = True, **more: Any) -> ET.Element:
    given = {"overrides": (), "excludes": (), **more}
    dependencies = ET.fromstring(jars._ivy_xml(coordinates, transitive, **given)).find(
        "dependencies"
    )
    assert dependencies is not None
    return dependencies


# ── what Ivy is asked ────────────────────────────────────────────────────────────────────────


def test_each_coordinate_is_a_dependency_with_its_version_forced():
    first, second = xml("org.a:one:1", "org.b:two:2.0-x")
    assert first.attrib == {
        "org": "org.a",
        "name": "one",
        "rev": "1",
        "force": "true",
        "conf": "default->default",
        "transitive": "true",
    }
    assert (second.get("org"), second.get("name"), second.get("rev")) == ("org.b", "two", "2.0-x")
    assert list(first) == []


def test_what_is_needed_below_can_be_left_out():
    (only,) = xml(*ONE, transitive=False)
    assert only.get("transitive") == "false"


def test_a_classifier_names_its_artifact():
    (only,) = xml("org.a:one:1:tests")
    (artifact,) = only
    assert artifact.attrib == {
        "name": "one",
        "type": "jar",
        "ext": "jar",
        f"{MAVEN}classifier": "tests",
    }


def test_a_kind_of_file_can_be_named():
    (only,) = xml("org.a:one:1:all@tar.gz")
    (artifact,) = only
    assert (artifact.get("type"), artifact.get("ext")) == ("tar.gz", "tar.gz")
    assert artifact.get(f"{MAVEN}classifier") == "all"


def test_an_override_replaces_a_version_below():
    override = xml(*ONE, overrides=("org.c:deep:9",)).find("override")
    assert override is not None
    assert override.attrib == {"org": "org.c", "module": "deep", "rev": "9"}


def test_a_group_can_be_excluded():
    assert [
        exclude.attrib for exclude in xml(*ONE, excludes=("org.x", "org.y")).findall("exclude")
    ] == [
        {"org": "org.x"},
        {"org": "org.y"},
    ]


def test_ivy_wants_dependencies_before_excludes_before_overrides():
    tags = [element.tag for element in xml(*ONE, excludes=("org.x",), overrides=("org.c:deep:9",))]
    assert tags == ["dependency", "exclude", "override"]


def test_signs_that_mean_something_in_xml_are_escaped():
    (only,) = xml('org.a:on"e:<1&2>')
    assert (only.get("name"), only.get("rev")) == ('on"e', "<1&2>")


# ── the cache ────────────────────────────────────────────────────────────────────────────────


def test_jars_are_fetched_once_and_answered_from_the_folder_then(ivy: Ivy, cache: Path):
    lines: list[str] = []
    first = jars.fetch(ONE, say=lines.append)
    assert [path.name for path in first] == ["below-3.jar", "thing-1.2.jar"]
    assert lines == ["fetching thing:1.2"]
    assert jars.fetch(ONE, say=lines.append) == first
    assert len(ivy.runs) == len(lines) == 1
    assert 'name="thing"' in ivy.xml


def test_a_cached_folder_is_answered_without_java(ivy: Ivy, monkeypatch: pytest.MonkeyPatch):
    first = jars.fetch(ONE)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("ran something"))
    monkeypatch.setattr(jars, "java", lambda: pytest.fail("asked for Java"))
    assert jars.fetch(ONE) == first


def test_another_question_has_another_folder(ivy: Ivy):
    folders = {
        jars.fetch(ONE)[0].parent,
        jars.fetch(ONE, transitive=False)[0].parent,
        jars.fetch(ONE, overrides=("org.c:deep:9",))[0].parent,
        jars.fetch(ONE, excludes=("org.x",))[0].parent,
        jars.fetch(("org.example:thing:1.3",))[0].parent,
    }
    assert len(folders) == 5


def test_what_fails_leaves_no_folder_behind(ivy: Ivy, cache: Path):
    ivy.files, ivy.code = ("thing-1.2.jar",), 1
    ivy.output = "a\n\t\tUNRESOLVED DEPENDENCIES: thing\nb"
    with pytest.raises(
        Unavailable, match=r"org\.example:thing:1\.2: UNRESOLVED DEPENDENCIES: thing"
    ):
        jars.fetch(ONE)
    assert list((cache / "jars").iterdir()) == []
    ivy.code = 0
    assert [path.name for path in jars.fetch(ONE)] == ["thing-1.2.jar"]


def test_ivy_that_says_well_and_brings_nothing_has_failed(ivy: Ivy):
    ivy.files = ()
    with pytest.raises(Unavailable, match=r"cannot fetch org\.example:thing:1\.2"):
        jars.fetch(ONE)


def test_an_artifact_that_a_mirror_misses_once_is_asked_for_again(
    ivy: Ivy, monkeypatch: pytest.MonkeyPatch
):
    def found_at_the_second_try(command: list[str], **options: Any) -> Any:
        ivy.code = 0 if ivy.runs else 1
        return ivy(command, **options)

    monkeypatch.setattr("subprocess.run", found_at_the_second_try)
    lines: list[str] = []
    assert [path.name for path in jars.fetch(ONE, say=lines.append)] == [
        "below-3.jar",
        "thing-1.2.jar",
    ]
    assert len(ivy.runs) == 2
    assert any("trying again" in line for line in lines)


def test_an_artifact_that_no_server_has_is_requested_three_times(ivy: Ivy):
    ivy.code = 1
    with pytest.raises(Unavailable):
        jars.fetch(ONE)
    assert len(ivy.runs) == 3


def test_of_two_processes_that_fetch_at_once_both_are_served(
    ivy: Ivy, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    def other_first(self: Path, target: Path) -> None:
        target.mkdir()
        (target / "thing-1.2.jar").write_bytes(b"theirs")
        raise OSError("Directory not empty")

    monkeypatch.setattr(Path, "rename", other_first)
    assert [path.read_bytes() for path in jars.fetch(ONE)] == [b"theirs"]


def test_the_cache_is_in_the_home_folder_unless_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FRAZIL_CACHE")
    assert jars.cache_dir() == Path.home() / ".cache" / "frazil"
    monkeypatch.setenv("FRAZIL_CACHE", "~/elsewhere")
    assert jars.cache_dir() == Path.home() / "elsewhere"


# ── Java ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_java")
def test_without_java_one_sentence_says_how_to_get_it():
    with pytest.raises(ConfigError, match=r"cannot find Java: .*expected Java 17") as caught:
        jars.fetch(ONE)
    assert "apt-get install -y openjdk-17-jre-headless" in caught.value.hint


def test_java_home_comes_before_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", "/opt/jdk")
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert jars.java() == "/opt/jdk/bin/java"


def test_a_java_home_that_leads_nowhere_falls_back_to_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", "/gone")
    monkeypatch.setattr("shutil.which", {"java": "/usr/bin/java"}.get)
    assert jars.java() == "/usr/bin/java"


def test_a_class_path_joins_its_jars():
    assert jars.classpath([Path("/a.jar"), Path("/b.jar")]) == "/a.jar:/b.jar"


def test_a_folder_for_jars_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FRAZIL_CACHE", "/dev/null/x")
    with pytest.raises(
        ConfigError, match="cannot keep jars in /dev/null/x/jars: Not a dir"
    ) as error:
        jars.fetch(jars.ICEBERG)
    assert "FRAZIL_CACHE" in error.value.hint
