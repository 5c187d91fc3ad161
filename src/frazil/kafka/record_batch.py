"""Kafka's record batches and the records in them. Runs on executors.

In: the batches of a chunk, decompressed. Out: values, offsets, timestamps, keys and headers of the
wanted records. No record becomes a Python object: compiled code
(`frazil.native.record_batches`) stores where each part is, values stay slices of one buffer, and
keys and headers become Arrow columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from frazil.arrow.avro_datum import UnreadableDatum
from frazil.arrow.byte_slices import NULL, ByteSlices, joined
from frazil.native import record_batches
from frazil.native.record_batches import KEY, KEY_SIZE, OFFSET, STAMP, VALUE, VALUE_SIZE

Longs = np.ndarray[Any, np.dtype[np.int64]]

#: The headers of a record: in their order, a key as often as it was set.
HEADERS = pa.list_(
    pa.struct([pa.field("key", pa.large_string()), pa.field("value", pa.large_binary())])
)

#: Most records of one batch that are rejected together because the batch cannot be read.
MOST_BROKEN = 1_000_000


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
        #: opened records that lie in an unreadable batch, with the reason
        self.broken: dict[int, str] = {}

    def open(self, envelope: bool = False, schema_ids: bool = False) -> RawRecords:
        """The wanted records; with `envelope` their keys and headers too, and with `schema_ids` if
        one may have its schema id in a header.

        The records of an unreadable batch come without a value, and `broken` lists them.
        `UnreadableDatum` where it is not known which offsets of the batch have a record.
        """
        data = joined([batch.records for batch in self.batches])
        sizes = np.fromiter((len(batch.records) for batch in self.batches), np.int64)
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
        if envelope or (schema_ids and records.may_name_schemas):
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


def _unread(batch: RecordBatchHeader, fact: str) -> tuple[int, int]:
    """The offsets of a batch, each a record; raises where some may have none."""
    behind = batch.last_delta + 1
    if batch.count != behind or behind > MOST_BROKEN:
        raise UnreadableDatum(
            f"the record batch [{batch.base_offset}, {batch.base_offset + behind}) of "
            f"{batch.count} records: {fact}"
        )
    return batch.base_offset, batch.base_offset + behind
