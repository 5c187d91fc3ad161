"""Kafka's record batches, read as Avro blocks. Runs on executors.

A record of Kafka's format v2 uses the encodings of Avro: zigzag varints, and bytes behind their
length. So the records of a batch *are* an Avro block, of a schema that begins with Kafka's own
fields and continues with the value's:

    length · attributes · timestamp delta · offset delta · key · value … · number of headers

polars reads that block in one pass, and no record ever becomes a Python object. Nothing else in the
block marks the boundary of a record, so nothing of it is trusted (`checked`) before, row by row,
the offset delta is the next one, the record's declared length is the sum of its parts, no header
follows, and, batch by batch, the declared lengths fill the batch exactly. A final record with a
secret in it ends the block, because no row behind the last one would show that it was misread. A
datum that is one byte too long or too short fails these checks, and the block is opened record by
record.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from frazil.arrow import avro
from frazil.arrow.avro_types import Datum, UnreadableDatum
from frazil.arrow.avro_unions import width
from frazil.arrow.byte_slices import NULL, ByteSlices
from frazil.native import record_batches
from frazil.native.memory import SLACK
from frazil.native.record_batches import KEY, KEY_SIZE, OFFSET, STAMP, VALUE, VALUE_SIZE

Longs = np.ndarray[Any, np.dtype[np.int64]]

#: The headers of a record: in their order, a key as often as it was set.
HEADERS = pa.list_(
    pa.struct([pa.field("key", pa.large_string()), pa.field("value", pa.large_binary())])
)

#: Most records of one batch that are rejected together because the batch cannot be read.
MOST_BROKEN = 1_000_000

_SECRET_NUMBER = int.from_bytes(os.urandom(7), "little")
_SECRET = avro.zigzag(_SECRET_NUMBER)


@dataclass(frozen=True, slots=True)
class RecordBatchHeader:
    """One record batch, decompressed."""

    base_offset: int
    last_delta: int
    count: int
    first_ms: int
    #: set where the broker's clock, not the producer's, stamped the records
    append_ms: int | None
    records: memoryview | bytes
    #: why it could not be unpacked
    broken: str = ""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Common to the records of a block: taken from the first, and checked on all."""

    keyed: bool

    @property
    def before(self) -> list[tuple[str, Any]]:
        key = "bytes" if self.keyed else "long"  # a null key is its length, -1, and nothing else
        return [
            ("length", "long"),
            ("attributes", "boolean"),
            ("time", "long"),
            ("offset", "long"),
            ("key", key),
        ]

    @property
    def after(self) -> list[tuple[str, Any]]:
        return [("headers", "long")]


@functools.cache
def _framing(layout: RecordLayout) -> bytes:
    """Kafka's fields alone, the value as bytes."""
    return avro.preamble([*layout.before, ("value", "bytes"), *layout.after])


class RawRecords(NamedTuple):
    """Records extracted from their batches, and the envelope (keys, headers) where it was asked
    for.

    Timestamps are in milliseconds, -1 where a record has none.
    """

    values: Sequence[bytes | None]
    offsets: Longs
    stamps: Longs
    keys: pa.Array | None = None  # large_binary, null where a record has none
    headers: pa.Array | None = None  # HEADERS, an empty list where a record has none


def no_headers(count: int) -> pa.Array:
    """The headers of records that have none."""
    ends = pa.array(np.zeros(count + 1, np.int32))
    return pa.ListArray.from_arrays(ends, pa.array([], HEADERS.value_type), type=HEADERS)


class RecordBatches:
    """The batches of a chunk, unopened, and the wanted offsets `[start, end)`."""

    def __init__(
        self, batches: Sequence[RecordBatchHeader], start: int, end: int, leader: int = -1
    ) -> None:
        self.batches = batches
        #: the leader epoch of the last batch that was seen, also behind `end`; -1: not known
        self.leader = leader
        self.start = start
        self.end = end
        self.count = sum(batch.count for batch in batches)
        #: opened records that lie in an unreadable batch, with the reason
        self.broken: dict[int, str] = {}

    @functools.cached_property
    def block(self) -> bytes:
        return b"".join([*(batch.records for batch in self.batches), self._seal])

    @property
    def layout(self) -> RecordLayout:
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
    def _first(self) -> tuple[RecordLayout, bytes | None]:
        record = Datum(bytes(self.batches[0].records), 0)
        try:
            record.long()
            record.take(1)
            record.long()
            record.long()
            key = record.long()
            record.take(max(0, key))
            size = record.long()
            return RecordLayout(keyed=key >= 0), None if size < 0 else record.take(size)
        except UnreadableDatum:  # `open` raises it
            return RecordLayout(keyed=False), None

    def open(self, envelope: bool = False) -> RawRecords:
        """The wanted records; with `envelope` their keys and headers too.

        The records of an unreadable batch come without a value, and `broken` lists them.
        `UnreadableDatum` where it is not known which offsets of the batch have a record.
        """
        parts = [batch.records for batch in self.batches]
        data = np.frombuffer(b"".join([*parts, bytes(SLACK)]), np.uint8)
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        starts = np.cumsum(sizes) - sizes
        rows = [
            (
                start,
                size,
                batch.count,
                batch.base_offset,
                batch.last_delta,
                batch.first_ms,
                batch.append_ms is not None,
                batch.append_ms or 0,
            )
            for start, size, batch in zip(starts, sizes, self.batches, strict=True)
        ]
        records = record_batches.walked(data.ctypes.data, rows, self.start, self.end)
        part = records.parts
        values = ByteSlices(data, part[VALUE], part[VALUE_SIZE])
        opened = RawRecords(values, part[OFFSET], part[STAMP])
        if envelope:
            opened = opened._replace(
                keys=ByteSlices(data, part[KEY], part[KEY_SIZE]).to_arrow(),
                headers=record_batches.headers_of(data.ctypes.data, records, HEADERS),
            )
        facts = records.facts | {i: b.broken for i, b in enumerate(self.batches) if b.broken}
        return self._with_unread(opened, records.rows, facts) if facts else opened

    def _with_unread(self, opened: RawRecords, rows: Longs, facts: Mapping[int, str]) -> RawRecords:
        """Adds a record without a value for each wanted offset of the unreadable batches."""
        self.broken = {}
        index: list[Longs] = []  # of the opened records, -1 for the others
        offsets: list[Longs] = []
        done = count = 0
        for number, batch in enumerate(self.batches):
            behind = done + int(rows[number])
            if number in facts:
                wanted = np.arange(*_unread(batch, facts[number]))
                wanted = wanted[(wanted >= self.start) & (wanted < self.end)]
                self.broken.update(dict.fromkeys(range(count, count + len(wanted)), facts[number]))
                offsets.append(wanted)
                index.append(np.full(len(wanted), -1))
            else:
                offsets.append(opened.offsets[done:behind])
                index.append(np.arange(done, behind))
            done = behind
            count += len(index[-1])
        at = np.concatenate(index)
        values = opened.values
        assert isinstance(values, ByteSlices)
        starts, sizes = np.append(values.starts, 0), np.append(values.sizes, NULL)
        whole = RawRecords(
            ByteSlices(values.data, starts[at], sizes[at]),
            np.concatenate(offsets),
            np.append(opened.stamps, -1)[at],
        )
        if opened.keys is None or opened.headers is None:
            return whole
        places = pa.array(at % len(starts))
        none = pa.nulls(1, pa.large_binary()), no_headers(1)
        keys, headers = (
            pa.concat_arrays([column, absent]).take(places)
            for column, absent in zip((opened.keys, opened.headers), none, strict=True)
        )
        return whole._replace(keys=keys, headers=headers)

    def checked(self, frame: pl.DataFrame, value_sizes: Longs) -> tuple[Longs, Longs] | None:
        """Offsets and timestamps of all rows, if every row is where Kafka put it."""
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
            key_bytes = width(keys) + keys
        else:
            key_bytes = 1
            if (frame["key"].to_numpy() != -1).any():
                return None
        parts = 2 + width(time) + width(delta) + key_bytes + width(value_sizes) + value_sizes
        if not np.array_equal(length, parts):
            return None
        counts = np.array([batch.count for batch in self.batches])
        starts = np.cumsum(counts) - counts
        filled = np.add.reduceat(length + width(length), starts)
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
        first = np.repeat([batch.first_ms for batch in self.batches], counts)
        stamps = first + time
        if ((first ^ stamps) & (time ^ stamps) < 0).any():  # beyond 64 bits
            return None
        if any(batch.append_ms is not None for batch in self.batches):
            appended = [-1 if b.append_ms is None else b.append_ms for b in self.batches]
            fixed = np.repeat(appended, counts)
            stamps = np.where(fixed >= 0, fixed, stamps)
        return offsets, stamps

    @staticmethod
    def ends(frame: pl.DataFrame) -> Longs:
        """The ends of the values in a `checked` block: before the number of headers."""
        length = frame["length"].to_numpy()
        return np.asarray(np.cumsum(length + width(length)) - 1, np.int64)

    def rows(self, offsets: Longs) -> slice:
        """The wanted rows: a batch may begin before the range or end behind it."""
        first, behind = np.searchsorted(offsets, [self.start, self.end])
        return slice(int(first), int(behind))

    def keys(self, frame: pl.DataFrame, rows: slice) -> pa.Array | None:
        """The keys of the wanted rows of a `checked` block; None: no record has a key."""
        return frame["key"][rows].to_arrow() if self.layout.keyed else None


def _unread(batch: RecordBatchHeader, fact: str) -> tuple[int, int]:
    """The offsets of a batch, each a record; raises where some may have none."""
    behind = batch.last_delta + 1
    if batch.count != behind or behind > MOST_BROKEN:
        raise UnreadableDatum(
            f"the record batch [{batch.base_offset}, {batch.base_offset + behind}) of "
            f"{batch.count} records: {fact}"
        )
    return batch.base_offset, batch.base_offset + behind
