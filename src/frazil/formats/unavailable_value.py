"""Debezium's placeholder for a value that a change does not carry. Runs on executors.

A database does not send unchanged values that it stores out of line: PostgreSQL's TOAST, LOBs in
Oracle, MySQL and SQL Server. Debezium writes a placeholder in their place, the connector's
`unavailable.value.placeholder`, in the type of the column:

    text                         the placeholder
    bytes                        its bytes; in JSON, and by `binary.handling.mode`, as base64 or hex
    arrays of text, bytes, UUID  one item: the placeholder, its bytes, the UUID of its bytes
    arrays of numbers, dates     a number for each of its bytes
    hstore                       one entry, the placeholder as key and value; or that as JSON text

In: columns. Out: masks of the rows that contain it. `pipeline.fitting` decides about such rows.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Placeholder:
    def __init__(self, setting: str) -> None:
        """`setting`: the connector's setting, with `hex:` for bytes that are not text."""
        self._bytes = placeholder_bytes(setting)
        self.text = self._bytes.decode(errors="replace")
        urlsafe = base64.urlsafe_b64encode(self._bytes).decode()
        self._texts = {
            self.text,
            self._bytes.hex(),
            base64.b64encode(self._bytes).decode(),
            urlsafe,
            urlsafe.rstrip("="),
            json.dumps({self.text: self.text}, separators=(",", ":")),
        }
        # Java's nameUUIDFromBytes: a name without a namespace. Only arrays contain it.
        digest = hashlib.md5(self._bytes, usedforsecurity=False).digest()
        self._items = {*self._texts, str(uuid.UUID(bytes=digest, version=3))}
        self._numbers = np.frombuffer(self._bytes, np.int8).astype(np.float64)

    def in_columns(self, rows: pa.Table) -> dict[str, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Masks of the rows with the placeholder, for each column that contains it."""
        masks = {}
        for name in rows.schema.names:
            mask = self._mask(rows.column(name).combine_chunks())
            if mask is not None and mask.any():
                masks[name] = mask
        return masks

    def _mask(self, array: Any, item: bool = False) -> Any:
        """Mask of values that are the placeholder; None: impossible for this type."""
        kind, types = array.type, pa.types
        if types.is_string(kind) or types.is_large_string(kind):
            texts = self._items if item else self._texts
            return _bools(pc.is_in(array, pa.array(sorted(texts), kind)))
        if types.is_binary(kind) or types.is_large_binary(kind):
            return _bools(pc.equal(array, pa.scalar(self._bytes, kind)))
        if types.is_map(kind):
            return self._single(array, lambda one: one.keys, _lengths(array))
        if not types.is_list(kind) and not types.is_large_list(kind):
            return None
        lengths = _lengths(array)
        mask = self._single(array, lambda one: one.flatten(), lengths)
        if _is_number(kind.value_type):
            mask = np.zeros(len(array), bool)
            many = np.flatnonzero(lengths == len(self._numbers))
            flat = _floats(array.take(pa.array(many)).flatten())
            mask[many] = (flat.reshape(-1, len(self._numbers)) == self._numbers).all(axis=1)
        return mask

    def _single(self, array: Any, items: Any, lengths: Any) -> Any:
        """Mask of lists or maps whose only item is the placeholder."""
        one = np.flatnonzero(lengths == 1)
        inner = self._mask(items(array.take(pa.array(one))), item=True)
        if inner is None:
            return None
        mask = np.zeros(len(array), bool)
        mask[one] = inner
        return mask


@functools.lru_cache(maxsize=16)
def placeholder(setting: str) -> Placeholder | None:
    """None for an empty setting: values are not checked."""
    return Placeholder(setting) if setting else None


def placeholder_bytes(setting: str) -> bytes:
    return bytes.fromhex(setting[4:]) if setting.startswith("hex:") else setting.encode()


def _bools(array: Any) -> Any:
    return array.fill_null(False).to_numpy(zero_copy_only=False)


def _lengths(array: Any) -> Any:
    return np.diff(array.offsets.to_numpy()) * _bools(array.is_valid())


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_temporal(kind)
    )


def _floats(array: Any) -> Any:
    """Numbers as floats: exact where small, so that they compare with bytes."""
    if pa.types.is_temporal(array.type):
        array = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64())
    return array.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
