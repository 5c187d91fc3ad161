"""Casts arrays to another type and preserves nulls at every depth. Runs on executors.

Arrow's own `cast` and `view`, and its Parquet writer, refuse a required child with null bits, even
under a null parent. Decoders, `take` and `pa.nulls` produce such children. The arrays returned from
here contain none: under a null parent a required child has no nulls of its own. A null in a
required child under a non-null parent raises `MissingField`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Mask = np.ndarray[Any, np.dtype[np.bool_]]
#: Two struct types → for each field of the second its position in the first, -1 if absent.
Match = Callable[[Any, Any], Sequence[int]]

_ID = b"PARQUET:field_id"
#: Metadata key of a field's default: an Arrow IPC stream with one value.
DEFAULT = b"frazil.default"


class MissingField(ValueError):
    """`count` values lack the required field at `path`."""

    def __init__(self, path: str, count: int) -> None:
        super().__init__(f"{count} values without {path!r}, which is required")
        self.path = path
        self.count = count


def by_name(given: Any, target: Any) -> list[int]:
    return [given.get_field_index(field.name) for field in target]


def by_place(given: Any, target: Any) -> range:
    return range(len(target))


def by_id(given: Any, target: Any) -> list[int]:
    places = {field_id(field): at for at, field in enumerate(given)}
    return [places.get(field_id(field), -1) for field in target]


def default_of(field: pa.Field) -> pa.Scalar | None:
    """The write default in the field's metadata (see `default_values`), or None."""
    encoded = (field.metadata or {}).get(DEFAULT)
    return None if encoded is None else _scalar(encoded)


@lru_cache(maxsize=1024)
def _scalar(encoded: bytes) -> pa.Scalar:
    return pa.ipc.open_stream(encoded).read_all().column(0)[0]


def field_id(field: pa.Field) -> int | None:
    encoded = (field.metadata or {}).get(_ID)
    return None if encoded is None else int(encoded)


def project(
    column: Any,
    field: pa.Field,
    match: Match = by_name,
    defaults: Mapping[int, pa.Scalar] | None = None,
) -> Any:
    """A column, chunked or not, converted to `field`.

    `match` pairs the fields of structs; an absent field gets its default, or null. Defaults come
    from `defaults`, by field id, or from the field's own metadata. Leaves are cast safely: a value
    that does not fit raises `ArrowException`.
    """
    work = _Cast(match, defaults or {})
    if isinstance(column, pa.ChunkedArray):
        chunks = [work.value(chunk, field, None, field.name) for chunk in column.chunks]
        return pa.chunked_array(chunks, field.type)
    return work.value(column, field, None, field.name)


def absent(
    count: int, field: pa.Field, defaults: Mapping[int, pa.Scalar] | None = None
) -> pa.Array:
    """An absent column: `count` defaults, or nulls."""
    return _Cast(by_place, defaults or {}).absent(count, field, None, field.name)


def projected(rows: pa.Table) -> pa.Table:
    """The same table, ready to be written. Does not copy columns that are ready already."""
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
        """`present`: mask of values with no null ancestor; None: all."""
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
            child_path = f"{path}.{field.name}"
            if at < 0:
                children.append(self.absent(len(array), field, inside, child_path))
            else:
                children.append(self.value(array.field(at), field, inside, child_path))
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
    """Is the array free of nulls in required fields, at every depth?"""
    kind = field.type
    if not field.nullable and array.null_count:
        return False
    if pa.types.is_struct(kind):
        return all(_sound(array.field(at), child) for at, child in enumerate(kind))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _sound(_items(array)[0], kind.value_field)
    if pa.types.is_map(kind):
        pairs, _ = _items(array)
        fields = kind.key_field, kind.item_field
        return all(_sound(pairs.field(at), child) for at, child in enumerate(fields))
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
    """The array without nulls; the values in their place are arbitrary."""
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
    """The items of an array's lists (of maps: its pairs), and the number of items per list. Items
    behind a null list are left out."""
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
