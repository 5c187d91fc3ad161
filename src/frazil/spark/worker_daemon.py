"""Spark's worker daemon, without two costs that every task would pay again.

Modules are imported and compiled code is loaded once, before the workers are forked. polars is not
imported, because it starts a thread then, and threads do not survive a fork. PySpark is imported
from its installation instead of the zip file that Spark puts in front, along with its own jar:
Spark has Python scan its path before each task, which reads the whole directory of each such file
again, tens of milliseconds for the jar alone.
"""

import gc
import importlib
import importlib.machinery
import os
import re
import sys

# mimalloc, Arrow's allocator, asks for huge pages, and reads this when it is loaded. Where the
# kernel must first make room for one, each takes milliseconds: seconds in a worker's first batch.
os.environ.setdefault("MIMALLOC_ALLOW_THP", "0")

_SPARKS = re.compile(r".*\b(pyspark.*\.zip|py4j.*\.zip|spark-core.*\.jar)")
_zips = [path for path in sys.path if _SPARKS.fullmatch(path)]
_elsewhere = [path for path in sys.path if path not in _zips]
if all(importlib.machinery.PathFinder.find_spec(name, _elsewhere) for name in ("pyspark", "py4j")):
    sys.path[:] = _elsewhere
    for _path in [path for path in sys.path_importer_cache if path.startswith(tuple(_zips))]:
        del sys.path_importer_cache[_path]
    # The standard library's `copy` looks for Jython's package `org`, and finds a folder of the jar.
    sys.modules.pop("org", None)

if __name__ == "__main__":
    from pyspark.daemon import manager

    # Spark has one such daemon for its tasks, and others for inspecting sources and planning.
    tasks = sys.argv[1:] == ["pyspark.worker"]
    importlib.import_module("frazil.pipeline.task" if tasks else "frazil.kafka.range_source")
    if tasks:
        importlib.import_module("frazil.native.warm_up").warm_up_all()

    gc.freeze()  # Spark collects garbage after every task; these modules are none
    assert "polars" not in sys.modules
    manager()  # type: ignore[no-untyped-call]
