"""Which Parquet encoding a column gets, and that files with them hold what was written."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.errors import ConfigError
from frazil.files.encodings import PROPERTY, choose
from tests.unit.test_write import facts, shape, written

DELTA, APART = "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"
COUNT = 20_000


def chosen(values: Any, *, compatible: bool = False, compressed: bool = True) -> str:
    encodings = choose(pa.table({"x": values}), compatible, compressed)
    return "dictionary" if "x" in encodings.dictionary else encodings.others.get("x", "plain")


def drawn(values: int) -> list[int]:
    """Many draws from so many values."""
    return random.Random(1).choices(range(values), k=COUNT)


@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (pa.array(range(COUNT)), DELTA),  # offsets
        (pa.array(range(0, 7 * COUNT, 7), pa.timestamp("us", "UTC")), DELTA),
        (pa.array([number // 50 for number in range(COUNT)], pa.int64()), DELTA),  # ascending
        (pa.array(range(COUNT), pa.date32()), DELTA),
        (pa.array(drawn(9), pa.int32()), "dictionary"),
        (pa.array(drawn(9)), "dictionary"),
        (pa.array([number * 2**47 for number in drawn(2**16)]), "plain"),  # hashes
        (pa.array([f"sku-{number}" for number in drawn(2_000)]), "dictionary"),
        (pa.array([f"order-{number}" for number in range(COUNT)]), "plain"),
        (pa.array(np.random.default_rng(1).normal(1e6, 1, COUNT)), APART),
        (pa.array(np.random.default_rng(1).integers(0, 10**6, COUNT) / 100), "plain"),
        (pa.array([None] * COUNT, pa.int64()), "dictionary"),
        (pa.array([number % 2 == 0 for number in range(COUNT)]), "plain"),
        (pa.array([2**63 - 1, -(2**63)] * COUNT), "dictionary"),
        (pa.array([7], pa.int64()), "dictionary"),
    ],
)
def test_an_encoding_suits_the_values(values: pa.Array, encoding: str):
    assert chosen(values) == encoding


def test_a_repetition_that_a_sample_does_not_show_is_estimated_for_all_rows():
    few = [f"sku-{number}" for number in random.Random(1).choices(range(4_000), k=40_000)]
    assert chosen(pa.array(few)) == "dictionary"
    assert chosen(pa.array(few[:5_000])) == "plain"  # most values stand once
    assert chosen(pa.array([text * 100 for text in few])) == "plain"  # more than a dictionary holds


def test_readers_of_plain_and_dictionary_alone_get_only_these():
    assert chosen(pa.array(range(COUNT)), compatible=True) == "plain"
    assert chosen(pa.array(np.random.default_rng(1).random(COUNT)), compatible=True) == "plain"
    assert chosen(pa.array(drawn(9)), compatible=True) == "dictionary"


def test_floats_are_split_for_a_codec_only():
    floats = pa.array(np.random.default_rng(1).normal(1e6, 1, COUNT))
    assert chosen(floats, compressed=False) == "plain"


def test_values_inside_structs_lists_and_maps_have_encodings_of_their_own():
    rows = {
        "s": [{"n": number, "w": "same"} if number % 3 else None for number in range(COUNT)],
        "l": [[number, number + 1] for number in range(COUNT)],
        "m": pa.array(
            [[("key", number)] for number in range(COUNT)], pa.map_(pa.string(), pa.int64())
        ),
    }
    encodings = choose(pa.table(rows), False, True)
    assert set(encodings.dictionary) == {"s.w", "m.key_value.key"}
    assert set(encodings.others) == {"s.n", "l.list.element", "m.key_value.value"}


def test_a_table_has_the_encodings_that_its_property_allows(tmp_path: Path):
    columns = pa.schema({"n": pa.int64()})

    def encodings(**properties: str) -> set[str]:
        where = shape(tmp_path, columns, properties=properties)
        (fact,) = facts(written(where, {"n": list(range(COUNT))}))
        footer = pq.read_metadata(fact["file-path"])
        return set(footer.row_group(0).column(0).encodings)

    assert DELTA in encodings()
    assert DELTA not in encodings(**{PROPERTY: "compatible"})
    with pytest.raises(ConfigError, match=f"expected {PROPERTY} auto or compatible"):
        encodings(**{PROPERTY: "v3"})
