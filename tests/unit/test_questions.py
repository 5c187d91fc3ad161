"""Every query of docs/guide/questions.md, run by DuckDB on rows of the index with known faults.

`tests/system/test_questions.py` runs them on a real index, in Spark and in DuckDB.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from frazil.accounting import RangeCounts
from frazil.iceberg.table import Snapshot
from frazil.ledger import index as offset_index
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Cut, Partition, Range

PAGE = Path(__file__).parents[2] / "docs/guide/questions.md"
P, Q = Partition("orders", 0), Partition("orders", 1)
NOON = datetime(2026, 11, 15, 12, tzinfo=timezone.utc)
#: What stands on the page for a snapshot's id.
SNAPSHOT = "3821550127947089009"


def blocks() -> dict[str, tuple[str, str]]:
    """Heading and number → engine (empty: both) and statements."""
    queries: dict[str, tuple[str, str]] = {}
    heading = ""
    pieces = re.findall(r"^## ([^\n]+)$|^```sql\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    for title, sql in pieces:
        heading = title or heading
        if sql:
            engine = re.match(r"-- (Spark|DuckDB)\n", sql)
            number = sum(key.startswith(f"{heading} ") for key in queries) + 1
            queries[f"{heading} {number}"] = (engine[1] if engine else "", sql)
    return queries


BLOCKS = blocks()
#: Those that ask, in words that both engines know.
QUERIES = [key for key, (engine, sql) in BLOCKS.items() if not engine and "CREATE" not in sql]


def test_the_page_has_all_the_questions():
    assert {key.rsplit(" ", 1)[0] for key in QUERIES} == {
        "Gaps",
        "Overlaps",
        "Where offset N is",
        "What became of a range",
        "Rows per hour",
        "Rejected by day",
        "Position",
        "Slowest batches",
        "Runs",
    }
    assert [engine for engine, _ in BLOCKS.values()].count("DuckDB") == 2
    assert [engine for engine, _ in BLOCKS.values()].count("Spark") == 3


def batch(
    number: int, *tallies: RangeCounts, epoch: int = 1, sink: str = "one", **tables: RangeCounts
) -> Any:
    """Of one table, or, with `tables`, of several and the whole stream."""
    several = {f"shop.{name}": (tally,) for name, tally in tables.items()} or {"shop.one": tallies}
    staged = tuple(StagedTable(n, "u", 0, (), (), 0, 0, tallies) for n, tallies in several.items())
    began = NOON + timedelta(hours=number)
    whole = tallies if tables else ()
    made = StagedBatch(
        sink,
        epoch,
        number,
        f"c{number}",
        Cut(),
        Cut(),
        {},
        "",
        0,
        int(began.timestamp() * 1000),
        staged,
        whole,
    )
    rows = offset_index.rows(
        [(made, {name: Snapshot(100 + number, None, 0, 0, "", {}) for name in several})]
    )
    at = rows.schema.get_field_index("committed_at")
    moment = [began + timedelta(seconds=2 + number)] * len(rows)
    return rows.set_column(at, rows.schema.field(at), pa.array(moment, rows.schema.field(at).type))


def tally(
    start: int, end: int, where: Partition = P, rejected: int = 0, **more: Any
) -> RangeCounts:
    return RangeCounts(Range(where, start, end), end - start - rejected, rejected, **more)


def minutes(first: int, last: int) -> tuple[int, int]:
    low, high = (NOON + timedelta(minutes=minute) for minute in (first, last))
    return int(low.timestamp() * 10**6), int(high.timestamp() * 10**6)


#: Sink one: a gap [1500, 1600) of P, an overlap [900, 1000), and Q whole. Sink two: several tables.
ROWS = pa.concat_tables(
    [
        batch(0, tally(0, 1000, watermark=minutes(0, 30)), tally(0, 500, Q, rejected=5)),
        batch(1, tally(900, 1500, rejected=10, watermark=minutes(30, 70))),
        batch(2, tally(1600, 2000), tally(500, 700, Q), epoch=2),
        batch(
            0, tally(0, 10, rejected=1), sink="two", a=RangeCounts(Range(P, 0, 10), 9, skipped=1)
        ),
        batch(1, tally(10, 20), sink="two", b=tally(10, 20)),
        batch(2, tally(20, 30), sink="two", a=tally(20, 30)),
    ]
)


@pytest.fixture
def ask() -> Any:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("rows_of_index", ROWS)
    connection.execute("CREATE TEMPORARY VIEW idx AS SELECT * FROM rows_of_index")
    (view,) = (sql for _, sql in BLOCKS.values() if "VIEW stream" in sql)
    connection.execute(view)
    return lambda key: connection.execute(BLOCKS[key][1]).fetchall()


@pytest.mark.parametrize("key", QUERIES)
def test_every_question_is_answered(ask: Any, key: str):
    ask(key)


def test_the_gap_is_found_and_what_went_elsewhere_is_none(ask: Any):
    assert ask("Gaps 1") == [("one", "orders", 0, 1500, 1600, 100, 2)]


def test_the_overlap_is_found(ask: Any):
    assert ask("Overlaps 1") == [("one", "orders", 0, 900, 1000, 1)]


def test_an_offset_is_found_in_its_snapshot(ask: Any):
    ((sink, table, number, snapshot, start, end, *_),) = ask("Where offset N is 1")
    assert (sink, table, number, snapshot, start, end) == ("one", "shop.one", 2, 102, 1600, 2000)


def test_what_became_of_a_range(ask: Any):
    assert ask("What became of a range 1") == [("shop.one", 900, 2000, 990, 10, 0, 0, 0)]


def test_rows_of_an_hour(ask: Any):
    answers = {(hour, table): written for hour, table, written, _ in ask("Rows per hour 1")}
    assert answers[NOON, "shop.one"] == 1495
    assert answers[NOON + timedelta(hours=1), "shop.b"] == 10
    assert [row[1:] for row in ask("Rows per hour 2")] == [("shop.one", 1590, 590)]


def test_rejected_of_a_day_and_positions(ask: Any):
    ((day, topic, rejected, read, percent),) = ask("Rejected by day 1")
    assert (day, topic, rejected, read) == (NOON.replace(hour=0), "orders", 16, 2730)
    assert float(percent) == 0.586
    answers = {(sink, number): position for sink, _, number, position, _ in ask("Position 1")}
    assert answers == {("one", 0): 2000, ("one", 1): 700, ("two", 0): 30}


def test_the_slowest_batch_is_the_first_and_runs_are_listed(ask: Any):
    slowest = ask("Slowest batches 1")
    assert [row[:3] for row in slowest[:2]] == [
        ("one", 2, timedelta(seconds=4)),
        ("two", 2, timedelta(seconds=4)),
    ]
    assert [row[:4] for row in ask("Runs 1")] == [
        ("one", 1, 0, 1),
        ("one", 2, 2, 2),
        ("two", 1, 0, 2),
    ]
