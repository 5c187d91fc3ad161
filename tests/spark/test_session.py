"""What `session` sets, seen from a worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def test_workers_have_no_archive_to_look_over_before_each_task(spark: Any):
    def archives(_: int) -> Iterator[str]:
        import sys

        for path, finder in sys.path_importer_cache.items():
            if type(finder).__name__ == "zipimporter":
                yield path

    assert spark.sparkContext.parallelize([0], 1).flatMap(archives).collect() == []
