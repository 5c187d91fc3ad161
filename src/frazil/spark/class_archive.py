"""A class-data archive for the driver's JVM: Spark and Iceberg load from it in half the time.

`python -m frazil.spark.class_archive` runs a small stream (`class_archive_training`) and has its
JVM write the classes that it loaded into the cache beside the jars, about 170 MB. Sessions use the
archive if it exists. The JVM itself checks its own version and every jar of the archive, and
ignores an archive that does not match.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

from frazil.errors import Unavailable, cause
from frazil.spark import jars

_SECONDS = 600
#: Names the file that the JVM of a session writes when it ends.
_WRITE_TO = "FRAZIL_WRITE_CLASS_ARCHIVE"
#: An archive that does not match is no news for the user.
_SILENT = "-Xlog:cds*=off"


def archive() -> Path:
    """The archive of this Java and this PySpark; it may not exist."""
    java = Path(jars.java()).resolve()
    key = repr((str(java), java.stat().st_mtime_ns, pyspark.__version__, pyspark.__file__))
    name = f"spark-{hashlib.sha256(key.encode()).hexdigest()[:12]}.jsa"
    return jars.cache_dir() / "classes" / name


def jvm_options() -> str:
    if target := os.environ.get(_WRITE_TO):
        return f"-XX:ArchiveClassesAtExit={target} {_SILENT}"
    path = archive()
    return f"-XX:SharedArchiveFile={path} {_SILENT}" if path.exists() else ""


def build() -> None:
    path = archive()
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="archive-", dir=path.parent) as folder:
        written = Path(folder, "classes.jsa")
        # The JVM inherits stdout, so this returns when the JVM has ended, too.
        run = subprocess.run(
            [sys.executable, "-m", "frazil.spark.class_archive_training", folder],
            env={**os.environ, _WRITE_TO: str(written)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if not written.exists():
            fact = cause(run.stderr) or f"exit code {run.returncode}"
            raise Unavailable(f"cannot archive the classes of Spark and Iceberg: {fact}")
        written.replace(path)


if __name__ == "__main__":
    print("archiving the classes of Spark and Iceberg (once)", file=sys.stderr)
    try:
        build()
    except (Unavailable, OSError, subprocess.TimeoutExpired) as error:
        print(f"{error}; Spark starts without an archive, more slowly", file=sys.stderr)
