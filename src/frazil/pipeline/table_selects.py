"""Applies the `select` of each table to decoded records, with their keys and headers. Runs on
executors.

In: rows of a chunk, at their positions. Out: rows with the table's columns, and the records that
have none: a cast fails, or a key cannot be decoded. Such a record is alone; all others have their
row. Keys are decoded once for each chunk, and only if a table has their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from frazil.errors import ConfigError
from frazil.formats import debezium
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord, among
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.kafka.record_batch import Longs
from frazil.pipeline.chunk_result import ChunkWork
from frazil.pipeline.selection import (
    RecordEnvelope,
    SelectPlan,
    Unselectable,
    selected,
    selected_keys,
)

#: Position of a record, kind and reason of its rejection.
Reject = Callable[[int, str, str], None]


@dataclass(frozen=True, slots=True)
class DecodedKeys:
    """The keys of a chunk. A record has the number of its group, -1 without a key, and its place in
    that group."""

    group: Longs
    place: Longs
    groups: tuple[pa.Array, ...]
    bad: Mapping[int, UndecodableRecord]

    def parts(self, at: Longs) -> Iterator[tuple[Longs, pa.Array | None]]:
        """The positions of records in `at`, by the schema of their keys, with the keys as structs.
        Records without a key are among the first."""
        numbers = self.group[at]
        present = [number for number in np.unique(numbers).tolist() if number >= 0]
        good = np.array([i not in self.bad for i in at.tolist()]) if self.bad else True
        for turn, number in enumerate(present or [-1]):
            alone = (numbers == number) | ((numbers == -1) & (turn == 0))
            some = np.flatnonzero(alone & good)
            place = self.place[at[some]]
            index = pa.array(place, mask=place < 0)
            yield some, self.groups[number].take(index) if number >= 0 else None


class TableSelects:
    """The selects of one task's tables."""

    def __init__(self, key_format: RecordFormat | None) -> None:
        self._key_format = key_format
        self._decoder: Decoder | None = None

    def rows(
        self, work: ChunkWork, plan: SelectPlan, group: DecodedChunk, reject: Reject
    ) -> Iterator[DecodedChunk]:
        """The rows with the table's columns, in one part or several."""
        count = len(group.rows)
        for some, envelope in self._envelopes(work, plan, count, group.index, reject):
            part = group if some is None else group.take(some)
            yield from _halved(lambda r, e: selected(plan, r, e), part, envelope, reject)

    def keys(
        self,
        work: ChunkWork,
        plan: SelectPlan,
        at: Longs,
        reject: Reject,
        names: Sequence[str] | None = None,
    ) -> Iterator[DecodedChunk]:
        """The columns of records that need no value: key, headers, constants. `names`: only these,
        none of them null."""
        wanted = None if names is None else dict.fromkeys(names)

        def refuse(at: int, kind: str, reason: str) -> None:
            reject(at, "key" if names is not None else kind, reason)

        def made(_: pa.Table, envelope: RecordEnvelope) -> pa.Table:
            table = selected_keys(plan, envelope, wanted)
            for column in names or ():
                if column not in table.schema.names or table.column(column).null_count:
                    raise Unselectable(f"cannot read the key: it has no {column!r}")
            return table

        for some, envelope in self._envelopes(work, plan, len(at), at, refuse):
            part = DecodedChunk(pa.table({"": pa.nulls(envelope.count)}), among(at, some))
            yield from _halved(made, part, envelope, refuse)

    def _envelopes(
        self, work: ChunkWork, plan: SelectPlan, count: int, at: Longs | None, reject: Reject
    ) -> Iterator[tuple[Longs | None, RecordEnvelope]]:
        """What the records have beside their values; positions among `at`, None: all."""
        selection = plan.selection
        keys = work.beside("keys", at) if selection.wants_key else None
        headers = work.beside("headers", at) if selection.wants_headers else None
        whole = RecordEnvelope(count, keys, headers)
        if not selection.decodes_key:
            yield None, whole
            return
        decoded = self._decoded(work)
        positions = np.arange(count) if at is None else at
        for i in positions.tolist() if decoded.bad else ():
            if i in decoded.bad:
                reject(i, "key", f"cannot read the key: {decoded.bad[i].reason}")
        for some, fields in decoded.parts(positions):
            index = pa.array(some)
            yield some, replace(whole.take(index), fields=fields)

    def _decoded(self, work: ChunkWork) -> DecodedKeys:
        if work.decoded_keys is None:
            work.decoded_keys = self._decode(work)
        decoded: DecodedKeys = work.decoded_keys
        return decoded

    def _decode(self, work: ChunkWork) -> DecodedKeys:
        format, count = self._key_format, len(work.opened.offsets)
        if format is None:
            raise ConfigError("cannot decode fields of keys: keys are text")
        if self._decoder is None:
            self._decoder = Decoder(format, format.declared)
        given = [None] * count if work.opened.keys is None else work.opened.keys.to_pylist()
        present = np.array([i for i, key in enumerate(given) if key is not None], np.int64)
        values = [given[i] for i in present.tolist()]
        if format.kind == "json":
            values = [_payload(value, format.declared.names) for value in values]
        decoded, bad = self._decoder.decode(values)
        group, place = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
        for number, chunk in enumerate(decoded):
            where = among(present, chunk.index)
            assert where is not None
            group[where], place[where] = number, np.arange(len(where))
        structs = tuple(
            pa.StructArray.from_arrays(
                [column.combine_chunks() for column in chunk.rows.columns],
                fields=list(chunk.rows.schema),
            )
            for chunk in decoded
        )
        return DecodedKeys(group, place, structs, {int(present[r.index]): r for r in bad})


def _payload(key: bytes, names: Sequence[str]) -> bytes:
    """A key in JSON without Kafka Connect's wrapper; a single value as the only declared field."""
    try:
        text = key.decode().strip()
        if text.startswith("{") and '"payload"' in text:
            members = debezium.members(text)
            if members.keys() <= {"schema", "payload"}:
                text = members["payload"][1]
        if len(names) == 1 and not text.startswith("{"):
            return debezium.object_of({names[0]: text})
        return text.encode()
    except (ValueError, RecursionError, debezium.NotARow):
        return key  # the decoder says what is wrong


def _halved(
    made: Callable[[pa.Table, RecordEnvelope], pa.Table],
    group: DecodedChunk,
    envelope: RecordEnvelope,
    reject: Reject,
) -> Iterator[DecodedChunk]:
    """The rows together, or in halves, down to the record at fault."""
    if not len(group.rows):
        return
    try:
        yield replace(group, rows=made(group.rows, envelope))
    except Unselectable as error:
        if len(group.rows) == 1:
            reject(int(group.positions[0]), "misfit", str(error))
            return
        for part in np.array_split(np.arange(len(group.rows)), 2):
            yield from _halved(made, group.take(part), envelope.take(pa.array(part)), reject)
