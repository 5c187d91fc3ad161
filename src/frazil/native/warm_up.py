"""Compiles what executors will call, into the cache, or loads it from there. Runs at set-up, when
an image is built, and in Spark's worker daemon before it forks.

python -m frazil.native.warm_up
"""

from __future__ import annotations

import importlib

from frazil.native.compiler import CHAPTER, folders, warm_up


def warm_up_all() -> None:
    """All functions of this chapter that Python calls."""
    for source in sorted(CHAPTER.glob("*.py")):
        if source.stem not in ("__init__", "warm_up"):
            importlib.import_module(f"frazil.native.{source.stem}")
    warm_up()


if __name__ == "__main__":
    warm_up_all()
    print(*(folder for folder in folders() if folder.is_dir()), sep="\n")
