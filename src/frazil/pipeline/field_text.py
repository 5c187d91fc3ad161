"""Fields and headers of records as text, for the rules that look at them. Runs on executors; pure.

In: the columns of a chunk, its headers, or JSON values that are not decoded yet. Out: one text per
record, null where there is none: `true` and `false`, numbers as Python prints them, strings as they
are, bytes as UTF-8. Lists, maps, structs and invalid UTF-8 are null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.byte_slices import ByteSlices
from frazil.arrow.column_program import in_order
from frazil.formats.json_reader import RAW, JsonProgram
from frazil.formats.json_values import IGNORED
from frazil.kafka.record_batch import Longs


def is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def column_at(rows: pa.Table, path: str) -> pa.Array | None:
    """The column at a dotted path, null where a parent struct is null; None: no such column."""
    head, *below = [path] if path in rows.schema.names else path.split(".")
    if head not in rows.schema.names:
        return None
    column = rows.column(head).combine_chunks()
    for name in below:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return None
        column = pc.struct_field(column, name)
    return column


def header_values(headers: pa.Array | None, name: str) -> pa.Array | None:
    """The value of the last header of this name, for each record."""
    if headers is None:
        return None
    at = np.full(len(headers), -1, np.int64)
    pairs = headers.flatten()
    named = np.flatnonzero(pc.fill_null(pc.equal(pairs.field(0), name), False).to_numpy(False))
    at[pc.list_parent_indices(headers).to_numpy()[named]] = named  # the last one wins
    return pairs.field(1).take(pa.array(at, mask=at < 0))


def distinct_texts(column: pa.Array) -> tuple[Longs, list[str | None]]:
    """The index of each row's text (-1: null), and the distinct texts of the column."""
    kind = column.type
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        return np.full(len(column), -1, np.int64), []
    if pa.types.is_dictionary(kind):
        return distinct_texts(column.dictionary_decode())
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        column = column.cast(pa.large_string() if is_text(kind) else pa.large_binary())
    extended = isinstance(kind, pa.BaseExtensionType)
    coded = (column.storage if extended else column).dictionary_encode()
    distinct = coded.dictionary
    if extended:
        distinct = pa.ExtensionArray.from_storage(kind, distinct)
    if pa.types.is_float32(kind):  # prints 0.1, not the nearest double
        texts: list[str | None] = [str(value) for value in distinct.to_numpy()]
    else:
        texts = [_text(value) for value in distinct.to_pylist()]
    return coded.indices.fill_null(-1).to_numpy().astype(np.int64), texts


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return None if value is None or isinstance(value, (dict, list)) else str(value)


def peek(values: Sequence[bytes | None], paths: Sequence[str]) -> pa.Table:
    """The fields that rules look at, as text, from JSON values before decoding.

    One column per path, named by the path; null where a value is not an object or lacks the field.
    Invalid JSON is rejected later by the decoder; its fields may or may not be seen here.
    """
    if not paths:
        batch = pa.RecordBatch.from_struct_array(pa.array([{}] * len(values), pa.struct([])))
        return pa.Table.from_batches([batch])
    schema = pa.schema([(path, pa.large_string()) for path in paths])
    steps = [path.split(".") for path in paths]
    fields = _fields(steps)
    if fields is None:
        columns = list(zip(*[_picked(value, steps) for value in values], strict=True))
        return pa.table([_texts(column) for column in columns or [()] * len(steps)], schema=schema)
    top = pa.field("", pa.struct(fields), nullable=False, metadata={IGNORED: b"*"})
    slices = ByteSlices.of(values)
    rows, doubtful = JsonProgram(top).decode(slices)
    texts = pa.StructArray.from_arrays([_inside(rows, path) for path in steps], fields=list(schema))
    if len(doubtful):
        picked = [_picked(slices[i], steps) for i in doubtful.tolist()]
        others = [_texts(column) for column in zip(*picked, strict=True)]
        read = pa.StructArray.from_arrays(others, fields=list(schema))
        texts = in_order(texts, read, doubtful)
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(texts)])


def _fields(paths: Sequence[Sequence[str]]) -> list[pa.Field] | None:
    """The fields of objects with these paths, all else passed over; None: one path goes through
    another."""
    inside: dict[str, list[Sequence[str]]] = {}
    for name, *path in paths:
        inside.setdefault(name, []).append(path)
    fields = []
    for name, below in inside.items():
        if not any(below):
            fields.append(pa.field(name, pa.large_string(), metadata={RAW: b"1"}))
            continue
        nested = _fields(below) if all(below) else None
        if nested is None:
            return None
        fields.append(pa.field(name, pa.struct(nested), metadata={IGNORED: b"*"}))
    return fields


def _inside(rows: pa.StructArray, path: Sequence[str]) -> pa.Array:
    """The column at a path, null where an object is."""
    column: pa.Array = rows
    for name in path:
        column = pc.struct_field(column, name)
    return column


def _texts(column: Sequence[Any]) -> pa.Array:
    return pa.array(map(_whole, column), pa.large_string())


def _picked(value: bytes | None, paths: Sequence[Sequence[str]]) -> list[Any]:
    """The values at these paths of a JSON value. Fractions stay text: a float would lose digits and
    trailing zeros."""
    try:
        parsed = None if value is None else json.loads(value.decode(), parse_float=str)
    except (ValueError, RecursionError):
        parsed = None
    values = []
    for path in paths:
        below = parsed
        for name in path:
            below = below.get(name) if type(below) is dict else None
        values.append(below)
    return values


def _whole(value: Any) -> str | None:
    """A value as text; None if it contains half of a surrogate pair, which JSON can escape."""
    text = _text(value)
    return None if text is None or re.search("[\ud800-\udfff]", text) else text
