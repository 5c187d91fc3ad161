"""The Python that Spark starts to plan a query, without Spark's zip files. Runs on the driver.

Spark starts a Python process for the planner of each query, and puts its own zip files in front of
Python's path. Modules in them are not compiled: Python would compile all that it imports of PySpark
at each start. An installed PySpark has them compiled. (`worker_daemon` does the same for workers.)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frazil.spark.jars import cache_dir

_SCRIPT = r"""#!/bin/sh
PYTHONPATH=$(printf %s "$PYTHONPATH" | tr : '\n' |
  grep -Ev '(^|/)(pyspark[^/]*\.zip|py4j[^/]*\.zip|spark-core[^/]*\.jar)$' | paste -sd: -)
export PYTHONPATH
exec {python} "$@"
"""


@contextmanager
def planning_python(context: Any) -> Iterator[None]:
    """Data sources that are registered meanwhile are planned by such a Python, if there can be one.
    Their rows must not be read by tasks, which may run on another machine."""
    given = context.pythonExec
    context.pythonExec = _script(given) or given
    try:
        yield
    finally:
        context.pythonExec = given


def _script(given: str) -> str:
    """A command that runs this Python without zip files; empty: Spark runs another Python, PySpark
    is only in a zip file, or the cache holds no programs."""
    spec = find_spec("pyspark")
    if given != sys.executable or spec is None or ".zip" in (spec.origin or ""):
        return ""
    text = _SCRIPT.format(python=shlex.quote(given))
    path = cache_dir() / "python" / hashlib.sha256(text.encode()).hexdigest()[:20]
    if not path.exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # or another was first
            _write(path, text)
    return str(path) if path.exists() else ""


def _write(path: Path, text: str) -> None:
    """Writes the command, once it has run and kept a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o755)
        probe = {**os.environ, "PYTHONPATH": "/probe"}  # a system may lack one of its commands
        keeps = "import sys; sys.exit('/probe' not in sys.path)"
        subprocess.run(
            [name, "-c", keeps], env=probe, check=True, timeout=60, stderr=subprocess.DEVNULL
        )
        os.link(name, path)
    finally:
        os.unlink(name)
