"""Kafka's record batches (format v2, decompressed) → where each record has its parts. Runs on
executors.

    record │ length │ attributes │ time │ offset │ key │ value │ headers │
           │ varint │ 1 byte     │ varints       │ size, bytes │ count, (key, value) …

In: the bytes of some batches, and what the header of each says. Out: offset, timestamp, and the
start and size of key and value of each wanted record; a size of -1 is a null. Every border is
checked: a part lies within its batch, a record is as long as it says, offsets grow within what the
header says, and the records fill the batch. A batch that breaks one of these gives no row, and the
reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from frazil.native.columns import ENDLESS, ENDS, Longs, copy, is_utf8, new_longs, store_bit, varint
from frazil.native.compiler import cached, compiled
from frazil.native.memory import SLACK, load8, store4, store8

#: Reasons of a broken batch, beside `ENDS` and `ENDLESS`.
SHORT, MISPLACED, LEFT = -3, -4, -5

#: Words of a batch: of its header, and then what is records.
BATCH_WORDS = 16
_START, _SIZE, _COUNT, _BASE, _LAST, _FIRST, _APPENDED, _APPEND = range(0, 64, 8)
_ROWS, _REASON, _EXPECTED, _FOUND = range(64, 96, 8)

#: Parts of a row. Each is a column of its own: `stride` bytes lie between the parts of a row.
PARTS = 8
OFFSET, STAMP, VALUE, VALUE_SIZE, KEY, KEY_SIZE, HEADERS, HEADER_COUNT = range(PARTS)
#: The smallest record, in bytes.
SMALLEST = 7

#: Words of the totals of all rows. `_TOTAL_SCHEMA_IDS`: headers named `SCHEMA_ID`, or more.
_TOTAL_ROWS, _TOTAL_HEADERS, _TOTAL_NAMES, _TOTAL_CONTENTS, _TOTAL_SCHEMA_IDS = range(0, 40, 8)

#: The header in which Confluent's serializers put a schema id, if not before the value.
SCHEMA_ID = "__value_schema_id"
_SCHEMA_ID_SIZE = len(SCHEMA_ID)
_SCHEMA_ID_HEAD, _SCHEMA_ID_NEXT = (
    int.from_bytes(SCHEMA_ID[at : at + 8].encode(), "little") for at in (0, 8)
)


@compiled
def _broken(batch: int, reason: int, expected: int, actual: int) -> int:
    store8(batch + _REASON, reason)
    store8(batch + _EXPECTED, expected)
    store8(batch + _FOUND, actual)
    return -1


@compiled
def _headers(at: int, end: int, count: int, batch: int, totals: int) -> int:
    """The address behind the headers of a record; -1: broken."""
    names = contents = 0
    for _ in range(count):
        size, at = varint(at, end)
        if at < 0:
            return _broken(batch, at, 0, 0)
        if size < 0 or size > end - at:
            return _broken(batch, SHORT, size, end - at)
        names += size
        if size == _SCHEMA_ID_SIZE and load8(at) == _SCHEMA_ID_HEAD:
            named = load8(at + 8) == _SCHEMA_ID_NEXT
            store8(totals + _TOTAL_SCHEMA_IDS, load8(totals + _TOTAL_SCHEMA_IDS) + named)
        size, at = varint(at + size, end)
        if at < 0:
            return _broken(batch, at, 0, 0)
        if size > end - at:
            return _broken(batch, SHORT, size, end - at)
        contents += max(size, 0)
        at += max(size, 0)
    store8(totals + _TOTAL_NAMES, load8(totals + _TOTAL_NAMES) + names)
    store8(totals + _TOTAL_CONTENTS, load8(totals + _TOTAL_CONTENTS) + contents)
    store8(totals + _TOTAL_HEADERS, load8(totals + _TOTAL_HEADERS) + max(count, 0))
    return at


@compiled
def _record(at: int, end: int, batch: int, row: int, stride: int, totals: int) -> int:
    """Stores the parts of a record, the offset as a delta; returns the address behind it, or -1."""
    length, at = varint(at, end)
    if at < 0:
        return _broken(batch, at, 0, 0)
    behind = length + at
    if at >= end:
        return _broken(batch, SHORT, 1, 0)
    time, at = varint(at + 1, end)
    if at < 0:
        return _broken(batch, at, 0, 0)
    store8(row + stride * STAMP, time)
    delta, at = varint(at, end)
    if at < 0:
        return _broken(batch, at, 0, 0)
    last = load8(row + stride * OFFSET)
    for part in (KEY, VALUE):
        size, at = varint(at, end)
        if at < 0:
            return _broken(batch, at, 0, 0)
        if size > end - at:
            return _broken(batch, SHORT, size, end - at)
        size = max(size, -1)
        store8(row + stride * part, at)
        store8(row + stride * part + stride, size)
        at += max(size, 0)
    count, at = varint(at, end)
    if at < 0:
        return _broken(batch, at, 0, 0)
    store8(row + stride * HEADERS, at)
    store8(row + stride * HEADER_COUNT, max(count, 0))
    if count > 0:
        at = _headers(at, end, count, batch, totals)
        if at < 0:
            return -1
    if at != behind or delta <= last or delta > load8(batch + _LAST):
        return _broken(batch, MISPLACED, last, 0)
    store8(row + stride * OFFSET, delta)
    return at


@compiled
def _stamp(batch: int, time: int) -> int:
    """The timestamp of a record; at a bound of 64 bits if it is beyond."""
    if load8(batch + _APPENDED):
        return load8(batch + _APPEND)
    first = load8(batch + _FIRST)
    stamp = first + time
    if (first ^ stamp) & (time ^ stamp) < 0:
        return 0x7FFF_FFFF_FFFF_FFFF if time > 0 else -0x7FFF_FFFF_FFFF_FFFF - 1
    return stamp


@cached("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def walk(
    data: int,
    batches: int,
    count: int,
    start: int,
    end: int,
    rows: int,
    stride: int,
    totals: int,
) -> None:
    """Fills `rows` with the records of `[start, end)`, and each batch with what was found in it.

    `rows` has room for each record that the batches can have, and for one more. Starts become
    positions in `data`.
    """
    row = rows
    for _ in range(count):
        first = row
        at = data + load8(batches + _START)
        limit = at + load8(batches + _SIZE)
        names, contents = load8(totals + _TOTAL_NAMES), load8(totals + _TOTAL_CONTENTS)
        headers = load8(totals + _TOTAL_HEADERS)
        delta = -1
        expected = load8(batches + _COUNT)
        seen = 0
        while seen < expected:
            before = load8(totals + _TOTAL_HEADERS)
            store8(row + stride * OFFSET, delta)
            at = _record(at, limit, batches, row, stride, totals)
            if at < 0:
                break
            seen += 1
            delta = load8(row + stride * OFFSET)
            offset = load8(batches + _BASE) + delta
            if offset < start or offset >= end:
                store8(totals + _TOTAL_HEADERS, before)
                continue
            store8(row + stride * OFFSET, offset)
            store8(row + stride * STAMP, _stamp(batches, load8(row + stride * STAMP)))
            for part in (KEY, VALUE, HEADERS):
                store8(row + stride * part, load8(row + stride * part) - data)
            row += 8
        if at >= 0 and (at != limit or expected < 0):
            at = _broken(batches, LEFT, expected, limit - at)
        if at < 0:
            row = first
            store8(totals + _TOTAL_HEADERS, headers)
            store8(totals + _TOTAL_NAMES, names)
            store8(totals + _TOTAL_CONTENTS, contents)
        store8(batches + _ROWS, (row - first) // 8)
        batches += 8 * BATCH_WORDS
    store8(totals + _TOTAL_ROWS, (row - rows) // 8)


@cached("int64(int64, int64, int64, int64, int64)")
def fill_headers(data: int, rows: int, stride: int, count: int, columns: int) -> int:
    """The headers of rows as columns; returns the number of keys that are not UTF-8.

    `columns`: addresses of the lists' offsets, the keys' offsets and bytes, the values' offsets,
    bytes and validity.
    """
    lists, names, name_bytes = load8(columns), load8(columns + 8), load8(columns + 16)
    contents, content_bytes = load8(columns + 24), load8(columns + 32)
    validity = load8(columns + 40)
    item = name_end = content_end = wrong = 0
    store4(lists, 0)
    store8(names, 0)
    store8(contents, 0)
    for i in range(count):
        at = data + load8(rows + stride * HEADERS)
        for _ in range(load8(rows + stride * HEADER_COUNT)):
            size, at = varint(at, at + 16)  # `walk` has checked the borders
            copy(name_bytes + name_end, at, size)
            wrong += not is_utf8(at, size)
            name_end += size
            size, at = varint(at + size, at + size + 16)
            store_bit(validity, item, size >= 0)
            if size > 0:
                copy(content_bytes + content_end, at, size)
                content_end += size
                at += size
            item += 1
            store8(names + 8 * item, name_end)
            store8(contents + 8 * item, content_end)
        store4(lists + 4 * i + 4, item)
        rows += 8
    return wrong


class Walk(NamedTuple):
    """What `walk` records. Starts are positions in the data."""

    parts: Longs  # (PARTS, rows)
    rows: Longs  # of each batch
    facts: dict[int, str]  # broken batch → why
    totals: Longs

    @property
    def may_name_schemas(self) -> bool:
        """May a record have its schema id in a header?"""
        return bool(self.totals[_TOTAL_SCHEMA_IDS // 8])


def walked(data: int, batches: Sequence[tuple[int, ...]], start: int, end: int) -> Walk:
    """The records of `[start, end)` in batches, each given as the start and size in `data`, count,
    base offset, last delta, first timestamp, and whether and when the broker stamped it."""
    words = np.zeros((len(batches), BATCH_WORDS), np.int64)
    if batches:
        words[:, : _ROWS // 8] = batches
    counts, sizes = words[:, _COUNT // 8], words[:, _SIZE // 8]
    room = int(np.clip(counts, 0, sizes // SMALLEST).sum()) + 1
    parts = new_longs(PARTS, room)
    totals = np.zeros(8, np.int64)
    addresses = words.ctypes.data, len(words), start, end, parts.ctypes.data, 8 * room
    walk(data, *addresses, totals.ctypes.data)
    reasons = words[:, _REASON // 8 : _FOUND // 8 + 1].tolist()
    facts = {i: FACTS[why].format(*numbers) for i, (why, *numbers) in enumerate(reasons) if why}
    return Walk(parts[:, : totals[0]], words[:, _ROWS // 8], facts, totals)


def headers_of(data: int, records: Walk, kind: pa.DataType) -> pa.Array:
    """The headers of all rows, as a list of structs of key and value. Bytes of a key that are not
    UTF-8 become U+FFFD."""
    rows = records.parts.shape[1]
    _, count, names, contents = records.totals[:4].tolist()
    sizes = 4 * rows + 4, 8 * count + 8, names, 8 * count + 8, contents, count // 8 + 1
    lists, *buffers = [pa.allocate_buffer(size + SLACK) for size in sizes]
    addresses = np.array([buffer.address for buffer in (lists, *buffers)], np.int64)
    stride = records.parts.strides[0]
    wrong = fill_headers(data, records.parts.ctypes.data, stride, rows, addresses.ctypes.data)
    item = kind.value_type
    name_ends, name_bytes, content_ends, content_bytes, validity = buffers
    keys = pa.Array.from_buffers(pa.large_binary(), count, [None, name_ends, name_bytes])
    if wrong:
        texts = [key.decode(errors="replace") for key in keys.to_pylist()]
        keys = pa.array(texts, pa.large_string())
    values = pa.Array.from_buffers(
        pa.large_binary(), count, [validity, content_ends, content_bytes]
    )
    pairs = pa.StructArray.from_arrays([keys.view(item[0].type), values], fields=list(item))
    return pa.Array.from_buffers(kind, rows, [None, lists], children=[pairs])


#: Also the reasons of datums.
FACTS = {
    ENDS: "the datum ends within a number",
    ENDLESS: "expected a number of at most 10 bytes, found more",
    SHORT: "the datum ends too early; expected {0} bytes, found {1}",
    MISPLACED: "the record behind offset delta {0} is not where its length says",
    LEFT: "expected {0} records, found {1} bytes behind them",
}
