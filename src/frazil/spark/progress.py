"""The progress of Spark's query counts records: for the Spark UI and listeners. Runs on the driver.

Spark itself has seen offset ranges, or nothing, where the tasks have read records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from frazil.errors import FrazilError
from frazil.iceberg.java_spark import set_input_rows
from frazil.offsets import Cut, Partition

_log = logging.getLogger("frazil")
#: Queries whose counts could not be corrected: one warning for each.
_failing: set[str] = set()


def report_records(spark: SparkSession, query: str, records: Mapping[Partition, int]) -> None:
    """`records`: how many a batch of the query read of each partition."""

    def rows(end: Mapping[str, Any]) -> int | None:
        known = Cut.of(end["cut"]) if "cut" in end else ()  # else not an offset of ours
        return sum(records.get(partition, 0) for partition in known) if known else None

    if not records:
        return
    try:
        set_input_rows(spark, query, rows)
    except FrazilError as error:  # a figure for people to look at: no reason to stop
        level = logging.DEBUG if query in _failing else logging.WARNING
        _failing.add(query)
        _log.log(level, "the Spark UI shows too few records for %s: %s", query, error.message)
