"""The cases of JSONTestSuite (github.com/nst/JSONTestSuite, 1ef36fa, MIT): what is JSON, what is
none, and what the standard leaves open."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from frazil.arrow.byte_slices import ByteSlices
from frazil.formats.json_reader import JsonShape
from frazil.formats.json_values import IGNORED
from tests.json_ways import one_by_one

FILE = Path(__file__).parents[1] / "fixtures" / "json-test-suite" / "cases.txt"
CASES = {
    name: base64.b64decode(text)
    for name, _, text in (line.partition(" ") for line in FILE.read_text().splitlines())
}
#: Two of the suite that are larger than all others together.
CASES["n_structure_100000_opening_arrays"] = b"[" * 100_000
CASES["n_structure_open_array_object"] = b'[{"":' * 50_000 + b"\n"
#: What the standard leaves open and is read: numbers of any size and halves of surrogate pairs,
#: where no column holds them.
READ = {
    name
    for name in CASES
    if name.startswith(("i_number_", "i_string_1st", "i_string_incomplete", "i_string_inv"))
    or name in ("i_object_key_lone_2nd_surrogate", "i_string_lone_second_surrogate")
} - {"i_number_huge_exp", "i_string_invalid_utf-8"}
PASSING = pa.schema([("a", pa.int64())], {IGNORED: b"*"})


def test_the_suite_is_whole():
    kinds = [name[0] for name in CASES]
    assert (kinds.count("y"), kinds.count("n"), kinds.count("i")) == (95, 188, 35)


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_read_where_it_is_json(name: str):
    """As the value of a field that is passed over."""
    value = b'{"a":1,"v":%b}' % CASES[name]
    shape = JsonShape(PASSING)
    groups, rejected = shape.decode([value, b'{"a":2}'])
    assert one_by_one(PASSING).decode([value])[1] == rejected
    if name.startswith("y") or name in READ:
        assert not rejected
        assert groups[0].rows.to_pydict() == {"a": [1, 2]}
    else:
        assert [bad.kind for bad in rejected] in (["json"], ["limit"])
        assert groups[0].rows.to_pydict() == {"a": [2]}
        assert shape._program.decode(ByteSlices.of([value]))[1].tolist() == [0]


@pytest.mark.parametrize("metadata", [None, PASSING.metadata])
def test_all_cases_by_themselves_are_decided_as_by_the_one_by_one_reader(metadata: Any):
    columns = pa.schema([("a", pa.large_string()), ("b", pa.large_string())], metadata)
    (groups, rejected), other = (
        shape.decode([*CASES.values()]) for shape in (JsonShape(columns), one_by_one(columns))
    )
    assert rejected == other[1]
    assert [g.rows.to_pylist() for g in groups] == [g.rows.to_pylist() for g in other[0]]
