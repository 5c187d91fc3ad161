"""Sample rows in; the Parquet encoding of each column out. Runs on executors; pure.

A column gets a dictionary where values repeat, delta encoding where integers or times lie close to
their neighbours, byte-stream-split where the bytes of floats compress better apart, else plain.
Only encodings that Spark's vectorised Iceberg reader, DuckDB and pyiceberg read. Iceberg's Spark
reader before 1.10 reads plain and dictionary alone: table property `frazil.parquet.encodings`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: Table property: `auto`, or `compatible` for readers that know plain and dictionary alone.
PROPERTY = "frazil.parquet.encodings"
CHOICES = ("auto", "compatible")

#: Rows of the sample.
SAMPLE = 4096
#: A column gets a dictionary where at most this share of the row group's values are distinct, as
#: far as can be estimated: not if more of the sample than the second share is distinct.
DICTIONARY_SHARE, ESTIMATED_SHARE = 0.25, 0.9
#: Parquet gives up a dictionary of more bytes, so one is not begun.
DICTIONARY_BYTES = 1024**2
#: An encoding must save this share of the bytes, or plain is kept.
SAVING = 0.1
#: Values per block of Parquet's delta encoding, and parts of a block with a bit width of their own.
BLOCK, PARTS = 128, 4


class Encodings(NamedTuple):
    """As pyarrow's Parquet writer takes them: Parquet's paths of columns."""

    dictionary: list[str]
    others: dict[str, str]


def choose(rows: pa.Table, compatible: bool, compressed: bool) -> Encodings:
    """The encodings of a file that begins with `rows`. `compressed`: pages are compressed."""
    chosen = Encodings([], {})
    sample = rows.slice(0, SAMPLE).combine_chunks()
    for column in sample.schema:
        for path, leaf in _leaves(_array(sample, column.name), column.name):
            if isinstance(leaf.type, pa.BaseExtensionType) or pa.types.is_boolean(leaf.type):
                continue
            values = pc.drop_null(leaf)
            distinct = pc.count_distinct(values).as_py()
            repeated = _repeated(values, distinct, len(values) * len(rows) // len(sample))
            if not compatible and _as_delta(values, distinct if repeated else None):
                chosen.others[path] = "DELTA_BINARY_PACKED"
            elif repeated:
                chosen.dictionary.append(path)
            elif not compatible and compressed and _apart(values):
                chosen.others[path] = "BYTE_STREAM_SPLIT"
    return chosen


def _array(rows: pa.Table, name: str) -> pa.Array:
    column = rows.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _leaves(values: pa.Array, path: str) -> Iterator[tuple[str, pa.Array]]:
    """The columns that Parquet makes of a column: path and values."""
    kind = values.type
    if pa.types.is_struct(kind):
        for child, inner in zip(kind, values.flatten(), strict=True):
            yield from _leaves(inner, f"{path}.{child.name}")
    elif pa.types.is_map(kind):
        rows = slice(values.offsets[0].as_py(), values.offsets[-1].as_py())
        yield from _leaves(values.keys[rows], f"{path}.key_value.key")
        yield from _leaves(values.items[rows], f"{path}.key_value.value")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        rows = slice(values.offsets[0].as_py(), values.offsets[-1].as_py())
        yield from _leaves(values.values[rows], f"{path}.list.element")
    else:
        yield path, values


def _repeated(values: pa.Array, distinct: int, rows: int) -> bool:
    """Are few of the values of all rows distinct, by a sample with so many distinct values?"""
    count = len(values)
    if distinct <= max(2, count * DICTIONARY_SHARE):
        return True
    if distinct > count * ESTIMATED_SHARE:
        return False
    # `number` values, equally likely, would show this many in the sample: the least that fits.
    low, high = distinct, rows
    while low < high:
        number = (low + high) // 2
        if -math.expm1(count * math.log1p(-1 / number)) * number < distinct:
            low = number + 1
        else:
            high = number
    few = low <= rows * DICTIONARY_SHARE
    return few and low * values.nbytes <= DICTIONARY_BYTES * count


def _as_delta(values: pa.Array, distinct: int | None) -> bool:
    """Is delta encoding smaller than plain and, with `distinct` repeated values, a dictionary?"""
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_temporal(kind)) or len(values) < 2:
        return False
    wide = np.int64 if kind.bit_width == 64 else np.int32
    numbers = np.asarray(values.view(pa.int64() if wide is np.int64 else pa.int32()))
    bits = _delta_bits(numbers.astype(np.int64))
    if bits > (1 - SAVING) * kind.bit_width:
        return False
    if distinct is None:
        return True
    ascending = distinct > 1 and bool((numbers[1:] >= numbers[:-1]).all())
    return ascending or bits < max(1, (distinct - 1).bit_length())


def _delta_bits(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    """Bits of a value in delta encoding, on average."""
    steps = np.diff(numbers)  # wraps beyond 64 bits, as the encoding does
    if len(steps) > BLOCK:
        blocks = steps[: len(steps) // BLOCK * BLOCK].reshape(-1, PARTS, BLOCK // PARTS)
    else:
        blocks = steps.reshape(1, 1, -1)
    over = (blocks - blocks.min(axis=(1, 2), keepdims=True)).view(np.uint64).max(axis=2)
    return float(np.ceil(np.log2(over.astype(np.float64) + 1)).mean())


def _apart(values: pa.Array) -> bool:
    """Do floats compress better with their first bytes together, then their second bytes, …?"""
    if not (pa.types.is_float32(values.type) or pa.types.is_float64(values.type)):
        return False
    data = np.asarray(values).view(np.uint8).reshape(len(values), -1)
    plain, apart = (len(pa.compress(part.tobytes(), "zstd")) for part in (data, data.T))
    return bool(apart < (1 - SAVING) * plain)
