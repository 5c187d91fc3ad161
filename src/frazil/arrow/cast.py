"""Arrays in; the same values in another type out, with nulls where they were, at every depth.

Arrow's own `cast` and `view`, and writing Parquet, refuse a child that may not be null where its
own bits say null, even under a parent that is null. Decoders, `take` and `pa.nulls` make such
children. What comes out of here has none: under a null parent a required child has no nulls of its
own. A null that the type does not allow under a parent that is there is told as `Missing`.
Runs on executors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Mask = np.ndarray[Any, np.dtype[np.bool_]]
#: Of two struct types: for each field of the second its place in the first, -1 where it has none.
Match = Callable[[Any, Any], Sequence[int]]

_ID = b"PARQUET:field_id"
#: A field's metadata with its default: a stream of Arrow's with one value.
DEFAULT = b"frazil.default"


class MissingField(ValueError):
    """So many values lack something that is required, at a path below the column."""

    def __init__(self, path: str, count: int) -> None:
        super().__init__(f"{count} values without {path!r}, which is required")
        self.path = path
        self.count = count


def by_name(given: Any, there: Any) -> list[int]:
    return [given.get_field_index(each.name) for each in there]


def by_place(given: Any, there: Any) -> range:
    return range(len(there))


def by_id(given: Any, there: Any) -> list[int]:
    places = {field_id(each): at for at, each in enumerate(given)}
    return [places.get(field_id(each), -1) for each in there]


def default_of(field: pa.Field) -> pa.Scalar | None:
    """What is written where a record lacks the field, if its metadata says so (`defaults`)."""
    said = (field.metadata or {}).get(DEFAULT)
    return None if said is None else _scalar(said)


@lru_cache(maxsize=1024)
def _scalar(said: bytes) -> pa.Scalar:
    return pa.ipc.open_stream(said).read_all().column(0)[0]


def field_id(field: pa.Field) -> int | None:
    said = (field.metadata or {}).get(_ID)
    return None if said is None else int(said)


def project(
    column: Any,
    field: pa.Field,
    match: Match = by_name,
    defaults: Mapping[int, pa.Scalar] | None = None,
) -> Any:
    """A column, chunked or not, as `field` has it.

    Fields of structs are those that `match` finds; what is not there is its default, or null. The
    `defaults` are told by field id, or by a field's own metadata. Leaves are cast, safely: an
    `ArrowException` tells of values that do not fit.
    """
    work = _Cast(match, defaults or {})
    if isinstance(column, pa.ChunkedArray):
        chunks = [work.value(each, field, None, field.name) for each in column.chunks]
        return pa.chunked_array(chunks, field.type)
    return work.value(column, field, None, field.name)


def absent(
    count: int, field: pa.Field, defaults: Mapping[int, pa.Scalar] | None = None
) -> pa.Array:
    """A column that is not there."""
    return _Cast(by_place, defaults or {}).absent(count, field, None, field.name)


def projected(rows: pa.Table) -> pa.Table:
    """The table as it is, fit to be written. Copies nothing of columns that are so already."""
    columns = [
        project(column, field, by_place) if pa.types.is_nested(field.type) else column
        for column, field in zip(rows.columns, rows.schema, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=rows.schema)


class _Cast:
    def __init__(self, match: Match, defaults: Mapping[int, pa.Scalar]) -> None:
        self._match = match
        self._defaults = defaults

    def value(self, array: Any, field: pa.Field, present: Mask | None, path: str) -> Any:
        """`present`: where everything around the array is there; None: everywhere."""
        kind = field.type
        if not (self._match is not by_id and array.type == kind and _sound(array, field)):
            if pa.types.is_struct(kind):
                array = self._struct(array, kind, present, path)
            elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
                array = self._list(array, kind, present, path)
            elif pa.types.is_map(kind):
                array = self._map(array, kind, present, path)
            else:
                array = _leaf(array, kind)
        if field.nullable or not array.null_count:
            return array
        missing = array.is_null().to_numpy(False)
        if present is not None:
            missing &= present
        if missing.any():
            raise MissingField(path, int(missing.sum()))
        return _filled(array)

    def absent(self, count: int, field: pa.Field, present: Mask | None, path: str) -> Any:
        default = self._defaults.get(field_id(field) or 0, default_of(field))
        if default is not None:
            return pa.repeat(default, count)
        nothing = _Cast(by_place, {})
        return nothing.value(pa.nulls(count, field.type), field, present, path)

    def _struct(self, array: Any, kind: Any, present: Mask | None, path: str) -> Any:
        inside = _both(array, present)
        children = []
        for at, field in zip(self._match(array.type, kind), kind, strict=True):
            here = f"{path}.{field.name}"
            if at < 0:
                children.append(self.absent(len(array), field, inside, here))
            else:
                children.append(self.value(array.field(at), field, inside, here))
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=_nulls(array))

    def _list(self, array: Any, kind: Any, present: Mask | None, path: str) -> Any:
        values, lengths = _items(array)
        inside = None if present is None else np.repeat(present, lengths)
        values = self.value(values, kind.value_field, inside, f"{path}.element")
        large = pa.types.is_large_list(kind)
        offsets = _offsets(lengths, pa.int64() if large else pa.int32())
        made = pa.LargeListArray if large else pa.ListArray
        return made.from_arrays(offsets, values, type=kind, mask=_nulls(array))

    def _map(self, array: Any, kind: Any, present: Mask | None, path: str) -> Any:
        pairs, lengths = _items(array)
        inside = None if present is None else np.repeat(present, lengths)
        keys = self.value(pairs.field(0), kind.key_field, inside, f"{path}.key")
        items = self.value(pairs.field(1), kind.item_field, inside, f"{path}.value")
        offsets = _offsets(lengths, pa.int32())
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=_nulls(array))


def _sound(array: Any, field: pa.Field) -> bool:
    """Has it no nulls where the type has none, its own and those of all that is in it?"""
    kind = field.type
    if not field.nullable and array.null_count:
        return False
    if pa.types.is_struct(kind):
        return all(_sound(array.field(at), each) for at, each in enumerate(kind))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _sound(_items(array)[0], kind.value_field)
    if pa.types.is_map(kind):
        pairs, _ = _items(array)
        fields = kind.key_field, kind.item_field
        return all(_sound(pairs.field(at), each) for at, each in enumerate(fields))
    return True


def _leaf(array: Any, kind: pa.DataType) -> Any:
    if array.type == kind:
        return array
    if isinstance(array.type, pa.BaseExtensionType):  # uuid
        array = array.storage
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _leaf(array, kind.storage_type))
    return array if array.type == kind else pc.cast(array, kind)


def _filled(array: Any) -> Any:
    """Without nulls; what stands where they were is anything."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _filled(array.storage))
    if pa.types.is_struct(kind):
        children = [array.field(at) for at in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind))
    buffers = array.buffers()
    if pa.types.is_nested(kind):
        return pa.Array.from_buffers(
            kind, len(array), [None, buffers[1]], 0, array.offset, [array.values]
        )
    return pa.Array.from_buffers(kind, len(array), [None, *buffers[1:]], 0, array.offset)


def _items(array: Any) -> tuple[Any, Any]:
    """What stands in the lists (or maps, as pairs) of an array, and how many in each. What a null
    may have behind it is left out."""
    offsets = array.offsets.to_numpy(False)
    lengths = np.diff(offsets)
    start, end = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    if array.null_count:
        valid = array.is_valid().to_numpy(False)
        lengths = np.where(valid, lengths, 0)
        if lengths.sum() != end - start:
            kept = np.repeat(valid, np.diff(offsets))
            return array.values.take(pa.array(np.flatnonzero(kept) + start)), lengths
    return array.values.slice(start, end - start), lengths


def _both(array: Any, present: Mask | None) -> Mask | None:
    if not array.null_count:
        return present
    valid: Mask = array.is_valid().to_numpy(False)
    return valid if present is None else valid & present


def _nulls(array: Any) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _offsets(lengths: Any, kind: pa.DataType) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), kind)
