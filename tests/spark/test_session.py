"""What `session` sets, seen from a worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from frazil.config.spark_settings import STATIC, of_process


def test_workers_check_no_archive_before_each_task(spark: Any):
    def archives(_: int) -> Iterator[str]:
        import sys

        for path, finder in sys.path_importer_cache.items():
            if type(finder).__name__ == "zipimporter":
                yield path

    assert spark.sparkContext.parallelize([0], 1).flatMap(archives).collect() == []


def test_a_worker_is_forked_with_all_that_its_first_task_imports(spark: Any):
    def facts(_: int) -> Iterator[object]:
        import os
        import sys

        yield {name: name in sys.modules for name in ["frazil.pipeline.task"]}
        yield os.environ["MIMALLOC_ALLOW_THP"]

    loaded, huge_pages = spark.sparkContext.parallelize([0], 1).flatMap(facts).collect()
    assert loaded["frazil.pipeline.task"]
    assert huge_pages == "0"


def test_what_spark_takes_only_at_its_start_is_known_to_be_of_the_process(spark: Any):
    """A new version of Spark may have more of them."""
    known = spark._jvm.java.lang.Class.forName("org.apache.spark.sql.internal.SQLConf$")
    settings = known.getField("MODULE$").get(None)
    keys = [str(entry.key()) for entry in settings.getConfigEntries().toArray()]
    static = {key for key in keys if settings.isStaticConfigKey(key)}
    assert len(static) > 20
    assert {key for key in static if not of_process(key)} == set()
    assert static >= STATIC
    assert not of_process("spark.sql.shuffle.partitions")
