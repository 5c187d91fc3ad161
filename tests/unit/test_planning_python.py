"""The Python that Spark starts for a planner: its path, and where there is none of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from frazil.spark.planning_python import planning_python

SHOW = "import sys; print(*sys.path, sys.argv, sep='\\n')"


def python_of(given: str) -> str:
    """The command that a data source is registered with."""
    context = SimpleNamespace(pythonExec=given)
    with planning_python(context):
        inside = context.pythonExec
    assert context.pythonExec == given
    return str(inside)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRAZIL_CACHE", str(tmp_path / "with space"))
    return tmp_path / "with space"


def test_zip_files_of_spark_are_not_in_its_path_and_all_else_is():
    zips = ["/opt/spark/python/lib/pyspark.zip", "/opt/spark/python/lib/py4j-0.10.9-src.zip"]
    given = [*zips, "/opt/my pyspark.zip.d", "/opt/jobs.zip", "/opt/spark-core_2.13-4.1.4.jar"]
    ran = subprocess.run(
        [
            python_of(sys.executable),
            "-c",
            "import sys; print(*sys.path, sys.argv, sep='\\n')",
            "a b",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(given)},
        capture_output=True,
        check=True,
        text=True,
    )
    lines = ran.stdout.splitlines()
    assert [line for line in lines if line in given] == ["/opt/my pyspark.zip.d", "/opt/jobs.zip"]
    assert lines[-1] == "['-c', 'a b']"


def test_it_is_made_once(empty_cache: Path):
    first = python_of(sys.executable)
    [script] = (empty_cache / "python").iterdir()
    made = script.stat().st_mtime_ns
    assert python_of(sys.executable) == first == str(script)
    assert script.stat().st_mtime_ns == made


def test_another_python_is_left_as_it_is():
    assert python_of("python3") == "python3"


def test_where_no_program_can_be_kept_spark_starts_its_own(empty_cache: Path):
    empty_cache.write_text("a file, not a folder")
    assert python_of(sys.executable) == sys.executable


def test_a_program_that_does_not_run_is_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "chmod", lambda *_: None)  # as in a folder without execution
    assert python_of(sys.executable) == sys.executable


def test_where_its_commands_are_missing_no_path_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert python_of(sys.executable) == sys.executable
