"""JSON is read by compiled code where a record is plain, and one by one where not: a value is the
same, or rejected, both ways, whatever stands beside it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from frazil.formats.json_reader import JsonShape
from tests.json_ways import Maker, compare

COLUMNS = pa.schema(
    [
        pa.field("r", pa.int64(), nullable=False),
        ("i", pa.int32()),
        ("d", pa.float64()),
        ("b", pa.bool_()),
        ("s", pa.large_string()),
        ("t", pa.string()),
        (
            "o",
            pa.struct(
                [
                    ("x", pa.float64()),
                    pa.field("y", pa.int64(), nullable=False),
                    ("z", pa.large_string()),
                ]
            ),
        ),
        ("f", pa.large_list(pa.field("element", pa.float64()))),
        ("l", pa.list_(pa.field("element", pa.struct([("q", pa.int64())]), nullable=False))),
    ]
)


@pytest.mark.parametrize("seed", range(3))
def test_compiled_code_reads_what_the_reference_and_the_standard_library_read(seed: int):
    make = Maker(seed)
    read, rejected = compare(COLUMNS, [make.record(COLUMNS) for _ in range(3_000)])
    assert read > 1_000, "the comparison means something"
    assert rejected > 200


@pytest.mark.parametrize("seed", range(40))
def test_any_columns_and_mutated_records_are_read_alike(seed: int):
    """A share of `make proof WHAT=json_ways`."""
    make = Maker(1_000 + seed)
    columns = make.columns()
    records = [make.record(columns) for _ in range(150)]
    compare(columns, [*records, *(make.mutated(record) for record in records)])


@pytest.mark.parametrize("seed", range(3))
def test_a_value_does_not_depend_on_its_neighbours(seed: int):
    make, shape = Maker(100 + seed), JsonShape(COLUMNS)
    values = [make.record(COLUMNS) for _ in range(1_500)]
    alone = [shape.decode([value]) for value in values]
    together, rejected = shape.decode(values)
    rows = [row for group in together for row in group.rows.to_pylist()]
    parts = [group.rows for groups, _ in alone for group in groups]
    assert repr(rows) == repr([row for part in parts for row in part.to_pylist()])
    assert [(rejection.index, rejection.kind, rejection.reason) for rejection in rejected] == [
        (i, rejection.kind, rejection.reason)
        for i, (_, bad) in enumerate(alone)
        for rejection in bad
    ]


@pytest.mark.parametrize("neighbour", [b'{"d":1}', b'{"d":1.5,"new":null}', b"{"])
def test_minus_zero_is_minus_zero_in_a_double_and_zero_in_a_whole_number(neighbour: bytes):
    shape = JsonShape(pa.schema([("d", pa.float64()), ("i", pa.int64())]))
    [group], _ = shape.decode([b'{"d":-0,"i":-0}', neighbour])
    assert repr(group.rows.slice(0, 1).to_pylist()) == "[{'d': -0.0, 'i': 0}]"
