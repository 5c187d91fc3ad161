"""What the index tells, in columns, is what its rows say one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.ledger import index_rows
from frazil.ledger.index_rows import IndexRows

Row = tuple[str, int, int, int, str, int, int, int, int | None, int | None]
NAMES = (
    "table_name",
    "partition",
    "start_offset",
    "end_offset",
    "commit_id",
    "snapshot_id",
    "batch",
    "epoch",
    "min_offset",
    "max_offset",
)


def parsed_rows(rows: pa.Table) -> IndexRows:
    """Rows of one table."""
    return index_rows.by_table([[("", index_rows._parsed(rows))]])[""]


def rows(listed: Sequence[Row]) -> pa.Table:
    kinds = [
        pa.large_string(),
        pa.int32(),
        pa.int64(),
        pa.int64(),
        pa.large_string(),
        *[pa.int64()] * 5,
    ]
    columns = {
        name: pa.array([row[i] for row in listed], kind)
        for i, (name, kind) in enumerate(zip(NAMES, kinds, strict=True))
    }
    columns["topic"] = pa.array(["orders"] * len(listed), pa.large_string())
    columns["written"] = pa.array([row[3] - row[2] for row in listed], pa.int64())
    for name in ("rejected", "skipped", "invisible", "merged"):
        columns[name] = pa.array([0] * len(listed), pa.int64())
    return pa.table(columns)


def row(table: str = "db.a", partition: int = 0, batch: int = 0, **changed: object) -> Row:
    start, end = 10 * batch, 10 * batch + 10
    usual = (table, partition, start, end, f"c{batch}", 100 + batch, batch, 1, start, end - 1)
    values = dict(zip(NAMES, usual, strict=True))
    return tuple((values | changed).values())  # type: ignore[return-value]


def contents(parsed: IndexRows) -> list[tuple[object, ...]]:
    """Partition, range, commit, snapshot, batch and epoch of each row."""
    spans = parsed.spans
    return sorted(
        (
            spans.partitions[key].number,
            start,
            end,
            parsed.commit_ids[source],
            *(int(facts[source]) for facts in (parsed.snapshots, parsed.batches, parsed.epochs)),
        )
        for key, start, end, source in zip(
            spans.key.tolist(),
            spans.start.tolist(),
            spans.end.tolist(),
            spans.source.tolist(),
            strict=True,
        )
    )


any_row = st.builds(
    lambda table, partition, batch, snapshot, epoch: row(
        table, partition, batch, snapshot_id=100 + batch + snapshot, epoch=epoch
    ),
    st.sampled_from(["db.a", "db.b", "*"]),
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from([0, 0, 0, 7]),
    st.integers(1, 2),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(any_row, max_size=12), max_size=4), st.booleans())
def test_files_have_for_each_table_what_their_rows_have(files: list[list[Row]], ordered: bool):
    if ordered:
        files = [sorted(file, key=lambda index_row: index_row[:3]) for file in files]
    by_table = index_rows.by_table(index_rows.of_file(rows(file)) for file in files)
    every = [index_row for file in files for index_row in file]
    assert set(by_table) == {index_row[0] for index_row in every}
    for name, parsed in by_table.items():
        assert contents(parsed) == sorted(
            index_row[1:8] for index_row in every if index_row[0] == name
        )
        assert not len(parsed.strange)
        one = parsed_rows(rows([index_row for index_row in every if index_row[0] == name]))
        assert contents(one) == contents(parsed)


def test_a_commit_is_kept_once_and_a_row_that_differs_speaks_for_itself():
    many = [row(partition=i, batch=batch) for i in range(50) for batch in range(3)]
    parsed = parsed_rows(rows(many))
    assert sorted(parsed.commit_ids) == ["c0", "c1", "c2"]
    many[7] = row(partition=2, batch=1, snapshot_id=99)
    parsed = parsed_rows(rows(many))
    assert sorted(parsed.commit_ids) == ["c0", "c1", "c1", "c2"]
    assert (2, 10, 20, "c1", 99, 1, 1) in contents(parsed)
    assert len(contents(parsed)) == len(many)


@pytest.mark.parametrize(
    ("low", "high", "strange"),
    [(None, None, False), (10, 19, False), (9, 19, True), (10, 20, True), (12, 19, True)],
)
def test_rows_whose_lowest_and_highest_offset_cannot_be_are_strange(
    low: int | None, high: int | None, strange: bool
):
    parsed = parsed_rows(rows([row(batch=0), row(batch=1, min_offset=low, max_offset=high)]))
    assert parsed.strange.start.tolist() == ([10] if strange else [])


def test_rows_that_lie_where_others_are_none():
    """Of a run that tells of the whole stream nothing is filled in: what it lacks is lost."""
    epochs = {0: 1, 1: 2, 2: 3, 3: 2, 4: 3, 5: 2}
    parsed = parsed_rows(rows([row(batch=batch, epoch=epochs[batch]) for batch in range(5)]))
    whole = parsed_rows(rows([row(batch=batch, epoch=2) for batch in (1, 3)]))
    lost = parsed_rows(rows([row(batch=batch, epoch=epochs[batch]) for batch in range(6)]))
    assert [index_row[1] for index_row in contents(index_rows.outside(lost, whole))] == [0, 20, 40]
    rest = index_rows.outside(parsed, whole)
    assert [index_row[1] for index_row in contents(rest)] == [0, 20, 40]
    assert contents(index_rows.one([rest, whole])) == contents(parsed)
    assert contents(index_rows.outside(parsed, index_rows.NOTHING)) == contents(parsed)
    assert len(index_rows.one([])) == 0


def test_an_index_without_names_still_has_its_ranges():
    bare = rows([row(batch=batch) for batch in range(3)]).drop_columns(
        ["commit_id", "snapshot_id", "min_offset", "max_offset"]
    )
    parsed = parsed_rows(bare)
    assert parsed.spans.start.tolist() == [0, 10, 20]
    assert parsed.commit_ids == ()
