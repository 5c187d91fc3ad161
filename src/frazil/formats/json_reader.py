"""JSON values → columns, or rejected records. Runs on executors.

In: columns, and the values of a chunk. Out: one table with the rows in order, and an
`UndecodableRecord` for each value that does not fit.

Two readers, as for Avro: all values at once by pyarrow, each wrapped with a tag, and one by one by
`frazil.formats.json_values` if anything is wrong. The one-by-one reader is the reference; the fast
one is used only for types on which both are known to agree.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from frazil.arrow.avro import BLOCK_ROWS, sift
from frazil.arrow.cast import by_place, project
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord, kept_positions
from frazil.formats.json_values import (
    NestedTooDeep,
    NotThisShape,
    converter,
    ignored_fields,
    no_json,
    parse_json,
)

# Secret names, so that a value cannot close its wrapper and forge the tag.
_BODY = f"v{os.urandom(8).hex()}"
_TAG = f"t{os.urandom(8).hex()}"
_OPEN = b'{"%s":' % _BODY.encode()
_CLOSE = b',"%s":%%d}\n' % _TAG.encode()
_FAST = (
    pa.types.is_int32,
    pa.types.is_int64,
    pa.types.is_float64,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_null,
)


@functools.cache
def _between() -> list[bytes]:
    """For each row the end of its wrapper and the start of the next."""
    return [_CLOSE % i + _OPEN for i in range(BLOCK_ROWS)]


class JsonShape:
    """Columns, compiled to read JSON objects into them. Fields that are passed over stand in the
    metadata (see `json_values.IGNORED`)."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._struct = pa.struct(list(schema))
        self._top = pa.field("", self._struct, nullable=False, metadata=schema.metadata)
        self._convert = converter(self._top)
        self._plain = [_without_extensions(column.type) for column in schema]
        self._parse: pj.ParseOptions | None = None
        if len(schema) and _fast(self._struct):
            explicit = pa.schema([(_BODY, _loose(self._struct)), (_TAG, pa.int64())])
            ignored = set(_ignored(self._top))
            # `ignore` holds for every object of a value. Where only some pass fields over, or some
            # fields, all are read, and `_check_fields` finds those that must not be there.
            one_way = {"": "error", "all": "ignore"}.get(next(iter(ignored)), "infer")
            unexpected = one_way if len(ignored) == 1 else "infer"
            self._parse = pj.ParseOptions(
                explicit_schema=explicit, unexpected_field_behavior=unexpected
            )

    def decode(
        self, values: Sequence[bytes | None]
    ) -> tuple[list[DecodedChunk], list[UndecodableRecord]]:
        rejected: list[UndecodableRecord] = []
        tables = sift(
            len(values),
            (lambda start, end: self._block(values[start:end])) if self._parse else None,
            lambda start, end: self._each(values, start, end, rejected),
        )
        if not len(self._schema):
            tables = tables[:1]  # there is only one, and concat would lose its row count
        rows = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
        if not rows.num_rows:
            return [], rejected
        bad = [(record.index, None) for record in rejected]
        index = kept_positions(list(range(len(values))), bad) if bad else None
        return [DecodedChunk(rows, index, None)], rejected

    def _block(self, values: Sequence[bytes | None]) -> pa.Table | None:
        count = len(values)
        parts: list[Any] = [b""] * (2 * count)
        parts[::2] = values
        parts[1::2] = _between()[:count]
        parts[-1] = _CLOSE % (count - 1)
        try:
            payload = b"".join((_OPEN, *parts))
        except TypeError:  # one of the values is null
            return None
        # One block, so that a line break inside a value is harmless.
        reading = pj.ReadOptions(use_threads=False, block_size=len(payload) + 1)
        try:
            table = pj.read_json(io.BytesIO(payload), reading, self._parse)
            if table.num_rows != count or table.num_columns != 2:
                return None
            tags = table.column(_TAG).combine_chunks()
            if tags.null_count or not np.array_equal(tags.to_numpy(), np.arange(count)):
                return None
            body = _null_checked(_one(table.column(_BODY)), self._top)
        except (pa.ArrowException, NotThisShape, UnicodeDecodeError):
            return None
        return pa.Table.from_arrays(
            [body.field(i) for i in range(len(self._schema))], schema=self._schema
        )

    def _each(
        self,
        values: Sequence[bytes | None],
        start: int,
        end: int,
        rejected: list[UndecodableRecord],
    ) -> pa.Table:
        rows = []
        for i in range(start, end):
            value = values[i]
            if value is None:
                rejected.append(UndecodableRecord(i, "null", "cannot read the value: found null"))
                continue
            try:
                rows.append(self._convert(parse_json(value)))
            except NotThisShape as error:
                rejected.append(UndecodableRecord(i, "shape", str(error)))
            except (RecursionError, NestedTooDeep):
                rejected.append(UndecodableRecord(i, "limit", str(NestedTooDeep())))
            except ValueError as error:
                rejected.append(UndecodableRecord(i, "json", no_json(value, error)))
        if not len(self._schema):  # rows without columns: only a struct array keeps their number
            batch = pa.RecordBatch.from_struct_array(pa.array(rows, self._struct))
            return pa.Table.from_batches([batch])
        arrays = []
        for column, plain in zip(self._schema, self._plain, strict=True):
            array = pa.array([row[column.name] for row in rows], plain)
            arrays.append(array if plain == column.type else project(array, column, by_place))
        return pa.Table.from_arrays(arrays, schema=self._schema)


def _without_extensions(kind: pa.DataType) -> pa.DataType:
    """The type that Arrow builds from Python values: in nested types bytes instead of UUIDs."""

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(_without_extensions(field.type))

    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([inside(child) for child in kind])
    if pa.types.is_map(kind):
        return pa.map_(inside(kind.key_field), inside(kind.item_field))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = inside(kind.value_field)
        return pa.large_list(element) if pa.types.is_large_list(kind) else pa.list_(element)
    return kind


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _fast(kind: pa.DataType) -> bool:
    """Do pyarrow's JSON reader with `_null_checked` and the one-by-one reader agree on it?"""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_fast(child.type) for child in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _fast(kind.value_type)
    return any(is_kind(kind) for is_kind in _FAST)


def _loose(kind: pa.DataType) -> pa.DataType:
    """The type for pyarrow's reader: all nullable, since `_null_checked` checks the nulls."""
    if pa.types.is_struct(kind):
        return pa.struct([(child.name, _loose(child.type)) for child in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_loose(kind.value_type))
    return kind


def _ignored(field: pa.Field) -> Iterator[str]:
    """Of each struct, itself and inner ones: `all`, `some` or nothing, the fields passed over."""
    kind = field.type
    if pa.types.is_struct(kind):
        names = ignored_fields(field.metadata)
        yield "all" if names is None else "some" if names else ""
        for child in kind:
            yield from _ignored(child)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _ignored(kind.value_field)


def _null_checked(array: pa.Array, field: pa.Field, nullable: bool | None = None) -> pa.Array:
    """The array in its real type; raises where the one-by-one reader would reject a row."""
    kind = field.type
    nullable = field.nullable if nullable is None else nullable
    if array.offset or (array.null_count and not nullable):
        raise NotThisShape("a value", "null")
    if pa.types.is_struct(kind):
        _check_fields(array, field)
        children = []
        for i, target in enumerate(kind):
            child = array.field(i)
            if not target.nullable and array.null_count:
                if child.filter(array.is_valid()).null_count:
                    raise NotThisShape("a value", "null")
                children.append(_null_checked(child, target, nullable=True))
            else:
                children.append(_null_checked(child, target))
        return pa.Array.from_buffers(kind, len(array), array.buffers()[:1], children=children)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        buffers = array.buffers()[:2]
        if pa.types.is_large_list(kind):
            wide = np.frombuffer(buffers[1], np.int32, len(array) + 1).astype(np.int64)
            buffers = [buffers[0], pa.py_buffer(wide)]
        values = _null_checked(array.values, kind.value_field)
        return pa.Array.from_buffers(kind, len(array), buffers, children=[values])
    if pa.types.is_floating(kind) and not pc.all(pc.is_finite(array), min_count=0).as_py():
        raise NotThisShape("a finite number", "another")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        array.validate(full=True)  # pyarrow's reader accepts invalid UTF-8
    return array


def _check_fields(array: pa.Array, field: pa.Field) -> None:
    """Every field that was read beyond those of the struct is one that is passed over, or null."""
    ignored = ignored_fields(field.metadata)
    if ignored is None:
        return
    for i in range(field.type.num_fields, array.type.num_fields):
        child = array.type.field(i)
        if child.name not in ignored and array.field(i).null_count < len(array):
            raise NotThisShape("no such field", "one")
