"""Kafka's record batches, read as what they nearly are: Avro. Runs on executors.

A record of Kafka's format v2 is written in the very encodings Avro uses: zigzag varints, and bytes
behind their length. So the records of a batch *are* an Avro block, of a schema that begins with
Kafka's own fields and goes on with the value's:

    length · attributes · timestamp delta · offset delta · key · value … · number of headers

polars reads that block in one pass, and no record ever becomes a Python object. Nothing else in
the block marks a record's border, so nothing of it is believed (`checked`) before, row by row, the
offset delta is the next one, the record's declared length is the sum of its parts, no header
follows, and, batch by batch, the declared lengths fill the batch exactly. A last record with a
secret in it stands behind them all, for the last row has no neighbour that would notice. A datum
that is one byte too long or too short shifts all that, and the block is opened one by one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from frazil.ingest import avro
from frazil.ingest.avro import Datum

Longs = np.ndarray[Any, np.dtype[np.int64]]

#: The headers of a record: in their order, a key as often as it was set.
HEADERS = pa.list_(
    pa.struct([pa.field("key", pa.large_string()), pa.field("value", pa.large_binary())])
)

_SECRET_NUMBER = int.from_bytes(os.urandom(7), "little")
_SECRET = avro.zigzag(_SECRET_NUMBER)


@dataclass(frozen=True, slots=True)
class Batch:
    """One record batch, decompressed."""

    base_offset: int
    last_delta: int
    count: int
    first_ms: int
    #: set where the broker's clock, not the producer's, stamped the records
    append_ms: int | None
    records: memoryview | bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """What the records of a block have in common, taken from the first and checked on all."""

    keyed: bool

    @property
    def before(self) -> list[tuple[str, Any]]:
        key = "bytes" if self.keyed else "long"  # a null key is its length, -1, and nothing else
        return [("length", "long"), ("attributes", "boolean"), ("time", "long"),
                ("offset", "long"), ("key", key)]  # fmt: skip

    @property
    def after(self) -> list[tuple[str, Any]]:
        return [("headers", "long")]


@functools.cache
def _framing(layout: Layout) -> bytes:
    """Kafka's fields alone, the value as bytes."""
    return avro.preamble([*layout.before, ("value", "bytes"), *layout.after])


class Opened(NamedTuple):
    """Records taken out of their batches, and the envelope (keys, headers) where it was asked for.

    Timestamps are in milliseconds, -1 where a record has none.
    """

    values: list[bytes | None]
    offsets: Longs
    stamps: Longs
    keys: pa.Array | None = None  # large_binary, null where a record has none
    headers: pa.Array | None = None  # HEADERS, an empty list where a record has none


def no_headers(count: int) -> pa.Array:
    """The headers of records that have none."""
    ends = pa.array(np.zeros(count + 1, np.int32))
    return pa.ListArray.from_arrays(ends, pa.array([], HEADERS.value_type), type=HEADERS)


class Records:
    """The batches of a chunk, unopened, and the offsets `[start, end)` that are wanted of them."""

    def __init__(self, batches: Sequence[Batch], start: int, end: int) -> None:
        self.batches = batches
        self.start = start
        self.end = end
        self.count = sum(batch.count for batch in batches)

    @functools.cached_property
    def block(self) -> bytes:
        return b"".join([*(batch.records for batch in self.batches), self._seal])

    @property
    def layout(self) -> Layout:
        return self._first[0]

    @property
    def first_value(self) -> bytes | None:
        return self._first[1]

    @property
    def rows_in_block(self) -> int:
        return self.count + 1

    @property
    def _seal(self) -> bytes:
        layout, value = self._first
        key = b"\0" if layout.keyed else b"\1"  # empty, or null
        inner = (
            b"\0" + _SECRET + b"\0" + key + avro.zigzag(len(value or b"")) + (value or b"") + b"\0"
        )
        return avro.zigzag(len(inner)) + inner

    @functools.cached_property
    def _first(self) -> tuple[Layout, bytes | None]:
        record = Datum(bytes(self.batches[0].records), 0)
        record.long()
        record.take(1)
        record.long()
        record.long()
        key = record.long()
        record.take(max(0, key))
        size = record.long()
        return Layout(keyed=key >= 0), None if size < 0 else record.take(size)

    def open(self, envelope: bool = False) -> Opened:
        """The wanted records; with `envelope` their keys and headers too."""
        if not self.count:  # nothing but invisible offsets
            return self._one_by_one(envelope)
        frame = avro.open_block(_framing(self.layout), self.block, self.rows_in_block)
        if frame is not None and frame.height == self.rows_in_block:
            sizes = frame["value"].bin.size().to_numpy().astype(np.int64)
            known = self.checked(frame, sizes)
            if known is not None:
                offsets, stamps = known
                rows = self.rows(offsets)
                opened = Opened(frame["value"][rows].to_list(), offsets[rows], stamps[rows])
                if not envelope:
                    return opened
                keys = self.keys(frame, rows)
                count = len(opened.values)
                return opened._replace(
                    keys=pa.nulls(count, pa.large_binary()) if keys is None else keys,
                    headers=no_headers(count),  # `checked` has seen to it
                )
        return self._one_by_one(envelope)

    def checked(self, frame: pl.DataFrame, value_sizes: Longs) -> tuple[Longs, Longs] | None:
        """Offsets and timestamps of all rows, if every row stands where Kafka put it."""
        if frame["time"][-1] != _SECRET_NUMBER:
            return None
        frame, value_sizes = frame[:-1], value_sizes[:-1]
        delta = frame["offset"].to_numpy()
        time = frame["time"].to_numpy()
        length = frame["length"].to_numpy()
        if frame["headers"].to_numpy().any():
            return None
        key_bytes: Longs | int
        if self.layout.keyed:
            keys = frame["key"].bin.size().to_numpy().astype(np.int64)
            key_bytes = _width(keys) + keys
        else:
            key_bytes = 1
            if (frame["key"].to_numpy() != -1).any():
                return None
        parts = 2 + _width(time) + _width(delta) + key_bytes + _width(value_sizes) + value_sizes
        if not np.array_equal(length, parts):
            return None
        counts = np.array([batch.count for batch in self.batches])
        starts = np.cumsum(counts) - counts
        filled = np.add.reduceat(length + _width(length), starts)
        if not np.array_equal(filled, [len(batch.records) for batch in self.batches]):
            return None
        # Within a batch deltas grow one by one; compaction may leave holes, never go back.
        expected = np.arange(self.count) - np.repeat(starts, counts)
        if not np.array_equal(delta, expected):
            last = np.repeat([batch.last_delta for batch in self.batches], counts)
            inner = np.ones(self.count, bool)
            inner[starts] = False
            if (np.diff(delta, prepend=-1)[inner] <= 0).any() or (delta < 0).any():
                return None
            if (delta > last).any():
                return None
        offsets = np.repeat([batch.base_offset for batch in self.batches], counts) + delta
        stamps = np.repeat([batch.first_ms for batch in self.batches], counts) + time
        if any(batch.append_ms is not None for batch in self.batches):
            appended = [-1 if b.append_ms is None else b.append_ms for b in self.batches]
            fixed = np.repeat(appended, counts)
            stamps = np.where(fixed >= 0, fixed, stamps)
        return offsets, stamps

    def rows(self, offsets: Longs) -> slice:
        """Which of all rows are wanted: a batch may begin before the range or end behind it."""
        first, behind = np.searchsorted(offsets, [self.start, self.end])
        return slice(int(first), int(behind))

    def keys(self, frame: pl.DataFrame, rows: slice) -> pa.Array | None:
        """Of the wanted rows of a block that was `checked`; None: no record has one."""
        return frame["key"][rows].to_arrow() if self.layout.keyed else None

    def _one_by_one(self, envelope: bool = False) -> Opened:
        """Null values, headers, keys now and then: what one schema cannot say for all rows."""
        values: list[bytes | None] = []
        offsets: list[int] = []
        stamps: list[int] = []
        keys: list[bytes | None] = []
        headers: list[list[tuple[str, bytes | None]]] = []
        for batch in self.batches:
            datum = Datum(bytes(batch.records), 0)
            for _ in range(batch.count):
                datum.long()
                datum.take(1)
                time, delta = datum.long(), datum.long()
                size = datum.long()
                key = None if size < 0 else datum.take(size)
                size = datum.long()
                value = None if size < 0 else datum.take(size)
                found: list[tuple[str, bytes | None]] = []
                for _ in range(datum.long()):
                    name, size = datum.take(datum.long()), datum.long()
                    content = None if size < 0 else datum.take(size)
                    if envelope:
                        found.append((name.decode(errors="replace"), content))
                if self.start <= batch.base_offset + delta < self.end:
                    values.append(value)
                    offsets.append(batch.base_offset + delta)
                    stamps.append(
                        batch.first_ms + time if batch.append_ms is None else batch.append_ms
                    )
                    if envelope:
                        keys.append(key)
                        headers.append(found)
        opened = Opened(values, np.array(offsets, np.int64), np.array(stamps, np.int64))
        if not envelope:
            return opened
        return opened._replace(
            keys=pa.array(keys, pa.large_binary()), headers=pa.array(headers, HEADERS)
        )


def _width(numbers: Longs) -> Longs:
    """Bytes of each number as a zigzag varint in its shortest form."""
    zigzag = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    width = np.ones(len(numbers), np.int64)
    limit = 1 << 7
    highest = int(zigzag.max()) if len(zigzag) else 0
    while limit <= highest:
        width += zigzag >= np.uint64(limit)
        limit <<= 7
    return width
