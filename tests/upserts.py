"""The truth of upsert tables: records into a plain dictionary, compared with every snapshot.

Independent of the code it judges: what a snapshot took in is read from the JSON of the table's own
metadata file, what it holds is read by Spark (`VERSION AS OF`) and by DuckDB (`snapshot_from_id`),
and what it should hold is a dictionary into which the records are put batch by batch.

The order that counts: in a partition, offsets. Of a key that came from several partitions in one
batch, the partition wins whose records of that key carry the newest timestamp (where they are the
same: the higher topic, then the higher partition), and of it the record with the highest offset.
What a later batch says of a key always replaces what an earlier one said.

    oracle = Oracle(records, key=("id",))
    oracle.check(lake.metadata_file("db.t"), Spark=spark_rows(spark, "lake.db.t"))

`check` raises with every key that differs, and in which snapshot; otherwise it says how many
comparisons it made. What was rejected on its way must be left out of the records.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import duckdb
from duckdb_extensions import import_extension

for _extension in ("avro", "iceberg"):
    import_extension(_extension)

Key = tuple[Any, ...]
Place = tuple[str, int]  # topic, partition
Rows = list[dict[str, Any]]
#: a snapshot's id → the rows it holds
Reader = Callable[[int], Rows]

#: What Debezium calls a change; all but the deletion leave a row.
OPS = ("c", "r", "u", "d")
#: Names of the columns that say which record a row came from.
ORIGIN = ("_topic", "_topic_partition", "_offset")


@dataclass(frozen=True, slots=True)
class Record:
    """A record of the topic. `value` is the row it brings; None is a tombstone. With Debezium's
    `op`, a `d` deletes whatever value it carries."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: Key
    value: Mapping[str, Any] | None
    op: str = ""
    #: where a column says which change is the newer one: its value; None: a delete without any
    order: Any = None

    def __post_init__(self) -> None:
        assert not self.op or self.op in OPS, f"no row can be made of op {self.op!r}"

    @property
    def place(self) -> Place:
        return self.topic, self.partition

    @property
    def row(self) -> Mapping[str, Any] | None:
        return None if self.op == "d" else self.value

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def of_envelope(
    place: Place,
    offset: int,
    timestamp: int,
    envelope: Mapping[str, Any] | None,
    key: Sequence[str],
    message_key: Mapping[str, Any] | None = None,
    order: Callable[[Mapping[str, Any]], Any] = lambda _: None,
) -> Record:
    """A change as Debezium tells it; `key` are the key's columns. A tombstone has no value, so its
    key is the message's own."""
    if envelope is None:
        assert message_key is not None, "a tombstone without a key"
        return Record(*place, offset, timestamp, tuple(message_key[k] for k in key), None)
    op = str(envelope["op"])
    row = envelope["before"] if op == "d" else envelope["after"]
    return Record(*place, offset, timestamp, tuple(row[k] for k in key), row, op, order(envelope))


@dataclass(frozen=True, slots=True)
class Snapshot:
    id: int
    parent: int | None
    operation: str
    summary: Mapping[str, str]

    @property
    def ranges(self) -> dict[Place, tuple[int, int]]:
        """What it took in; nothing where it is no batch of a sink."""
        return {
            place: (begin, end)
            for place, (begin, end) in cuts(self.summary.get("frazil.ranges", "{}")).items()
        }


@dataclass(frozen=True, slots=True)
class Difference:
    kind: str  # twin, lost, undeleted, unknown, stale, wrong
    snapshot: int
    number: int  # of the snapshot, counted from the table's first
    reader: str
    key: Key
    why: str

    def __str__(self) -> str:
        shown = self.key[0] if len(self.key) == 1 else self.key
        return (
            f"{self.kind}: key {shown!r} in snapshot {self.snapshot} (number {self.number}), "
            f"read by {self.reader}: {self.why}"
        )


@dataclass(slots=True)
class State:
    """A table as it should be, and how far the sink was."""

    rows: dict[Key, Record] = field(default_factory=dict)
    #: the record that deleted a key last
    deleted: dict[Key, Record] = field(default_factory=dict)
    at: dict[tuple[str, Place], int] = field(default_factory=dict)
    number: int = 0
    #: the highest order that was applied to a key; a delete without one takes what is there
    orders: dict[Key, Any] = field(default_factory=dict)

    def copy(self) -> State:
        return State(
            dict(self.rows), dict(self.deleted), dict(self.at), self.number, dict(self.orders)
        )


class Oracle:
    """Lives as long as its table: snapshots that were checked may expire later."""

    def __init__(
        self,
        records: Iterable[Record] = (),
        *,
        key: Sequence[str],
        origin: Sequence[str] = ORIGIN,
        ordered: bool = False,
    ) -> None:
        """`ordered`: changes with a lower order than their key has are not applied."""
        self.ordered = ordered
        self.key, self.origin = tuple(key), tuple(origin)
        self._records: dict[Place, list[Record]] = defaultdict(list)
        self._of_key: dict[Key, list[Record]] = defaultdict(list)
        self._states: dict[int, State] = {}
        self.add(records)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            known = self._records[record.place]
            assert not known or known[-1].offset < record.offset, f"{record} is out of order"
            known.append(record)
            self._of_key[_plain(record.key)].append(record)

    def check(self, metadata: str | Path, branch: str = "main", **readers: Reader) -> int:
        """Every snapshot, by DuckDB and by each other reader; how many comparisons that were."""
        document = json.loads(Path(metadata).read_text())
        every = {"DuckDB": duckdb_rows(metadata), **readers}
        snapshots = history(document, branch)
        assert snapshots, f"{branch} has no snapshot"
        differences: list[Difference] = []
        compared = 0
        for snapshot, state in self.replay(snapshots):
            for name, read in every.items():
                differences += self.compare(state, read(snapshot.id), name, snapshot.id)
                compared += 1
        if differences:
            shown = "\n".join(map(str, differences[:20]))
            raise AssertionError(f"{len(differences)} differences\n{shown}")
        return compared

    def replay(self, snapshots: Iterable[Snapshot]) -> Iterator[tuple[Snapshot, State]]:
        """What each snapshot should hold, oldest first."""
        for snapshot in snapshots:
            if snapshot.id not in self._states:
                if snapshot.parent is not None:
                    assert snapshot.parent in self._states, (
                        f"snapshot {snapshot.parent} expired before it was checked"
                    )
                before = self._states[snapshot.parent] if snapshot.parent else State()
                self._states[snapshot.id] = self._after(before, snapshot)
            yield snapshot, self._states[snapshot.id]

    def _after(self, before: State, snapshot: Snapshot) -> State:
        state = before.copy()
        state.number += 1
        sink = snapshot.summary.get("frazil.sink", "")
        batch: dict[Key, dict[Place, list[Record]]] = defaultdict(lambda: defaultdict(list))
        for place, (begin, end) in snapshot.ranges.items():
            stood = state.at.get((sink, place), begin)
            assert stood == begin, (
                f"snapshot {snapshot.id} takes {place[0]}[{place[1]}] from {begin} on, the one "
                f"before it ended at {stood}"
            )
            state.at[sink, place] = end
            known = self._records.get(place, [])
            first = bisect_left(known, begin, key=lambda record: record.offset)
            for record in known[first:]:
                if record.offset >= end:
                    break
                batch[_plain(record.key)][place].append(record)
        winners: dict[Key, Record] = {}
        for key, places in batch.items():
            last = self._newest(state, key, places) if self.ordered else winner(places)
            if last is None:
                continue
            winners[key] = last
            if last.row is None:
                state.rows.pop(key, None)
                state.deleted[key] = last
            else:
                state.rows[key] = last
                state.deleted.pop(key, None)
        self._assert_counted(snapshot, batch, winners)
        return state

    @staticmethod
    def _newest(state: State, key: Key, places: Mapping[Place, Sequence[Record]]) -> Record | None:
        """The last that is applied, if any is."""
        last = None
        for record in in_turn(places):
            known_order = state.orders.get(key)
            if record.order is not None and known_order is not None and record.order < known_order:
                continue
            if record.order is not None:
                state.orders[key] = record.order
            last = record
        return last

    def _assert_counted(
        self,
        snapshot: Snapshot,
        batch: Mapping[Key, Mapping[Place, Sequence[Record]]],
        winners: Mapping[Key, Record],
    ) -> None:
        """What the snapshot says of its records: those that won are rows, all others merged, and
        of every key of which one won older rows are taken away."""
        if "frazil.counts" not in snapshot.summary:
            return
        counts = json.loads(snapshot.summary["frazil.counts"])
        records = sum(len(at_place) for places in batch.values() for at_place in places.values())
        written = sum(record.row is not None for record in winners.values())
        counts["keys"] = int(snapshot.summary.get("frazil.keys", 0))
        meant = {"written": written, "merged": records - written, "keys": len(winners)}
        for name, number in meant.items():
            assert counts.get(name, 0) == number, (
                f"snapshot {snapshot.id} says {counts.get(name, 0)} {name}, its records {number}"
            )

    def compare(
        self, state: State, rows: Iterable[Mapping[str, Any]], reader: str = "", snapshot: int = 0
    ) -> list[Difference]:
        """What `rows` have other than `state`, key by key."""
        differences: list[Difference] = []

        def differs(kind: str, key: Key, why: str) -> None:
            differences.append(Difference(kind, snapshot, state.number, reader, key, why))

        by_key: dict[Key, Rows] = defaultdict(list)
        for raw in rows:
            row = {name: _plain(value) for name, value in raw.items()}
            by_key[tuple(row[name] for name in self.key)].append(row)
        for key, several in by_key.items():
            if len(several) > 1:
                texts = Counter(self._text(row) for row in several)
                differs("twin", key, f"{len(several)} rows: {dict(texts)}")
            elif key in state.rows:
                if wrong := self._wrong(state.rows[key], several[0]):
                    old = self._older(state.rows[key], key, several[0])
                    kind = "stale" if old else "wrong"
                    more = f"; it is the row of {old}" if old else ""
                    differs(kind, key, f"expected {state.rows[key]}: {wrong}{more}")
            elif key in state.deleted:
                differs(
                    "undeleted",
                    key,
                    f"{state.deleted[key]} deleted it, and it is there as {self._text(several[0])}",
                )
            else:
                differs("unknown", key, f"no record brought it; it is {self._text(several[0])}")
        for key, record in state.rows.items():
            if key not in by_key:
                differs("lost", key, f"{record} brought it")
        return differences

    def _wrong(self, record: Record, row: Mapping[str, Any]) -> str:
        """The columns in which the row is not the record's; empty if there is none. A column that
        the table did not have yet, or the record does not know, counts as null."""
        assert record.row is not None
        meant = {name: _plain(value) for name, value in record.row.items()}
        places = zip(self.origin, (record.topic, record.partition, record.offset), strict=True)
        meant |= {name: value for name, value in places if name in row}
        names = [*meant, *(name for name in row if name not in meant and name[:1] != "_")]
        return ", ".join(
            f"{name} is {row.get(name)!r}, not {meant.get(name)!r}"
            for name in names
            if row.get(name) != meant.get(name)
        )

    def _older(self, expected: Record, key: Key, row: Mapping[str, Any]) -> Record | None:
        """The other record of the key that the row is of."""
        for record in reversed(self._of_key[key]):
            if record is not expected and record.row is not None and not self._wrong(record, row):
                return record
        return None

    def _text(self, row: Mapping[str, Any]) -> str:
        if all(name in row for name in self.origin):
            topic, partition, offset = (row[name] for name in self.origin)
            return f"{topic}[{partition}]@{offset}"
        return repr(dict(row))


def winner(places: Mapping[Place, Sequence[Record]]) -> Record:
    """Of all records of one key in one batch, the one that counts."""

    return in_turn(places)[-1]


def in_turn(places: Mapping[Place, Sequence[Record]]) -> list[Record]:
    """All of them as they follow each other: by offset within a Kafka partition, and of partitions
    the one later that has the newest record."""

    def newest(place: Place) -> tuple[int, Place]:
        return max(record.timestamp for record in places[place]), place

    ordered = sorted(places, key=newest)
    return [r for place in ordered for r in sorted(places[place], key=lambda record: record.offset)]


# ── what the table says ──────────────────────────────────────────────────────────────────────────


def history(metadata: Mapping[str, Any], branch: str = "main") -> list[Snapshot]:
    """The ancestry of a branch, as far as it is kept, oldest first; from a metadata file's JSON."""
    known = {snapshot["snapshot-id"]: snapshot for snapshot in metadata.get("snapshots", [])}
    at = metadata.get("refs", {}).get(branch, {}).get("snapshot-id")
    snapshots = []
    while at in known:
        snapshot = known[at]
        summary = dict(snapshot.get("summary", {}))
        parent = snapshot.get("parent-snapshot-id")
        snapshots.append(Snapshot(at, parent, summary.pop("operation", ""), summary))
        at = parent
    return snapshots[::-1]


def cuts(text: str) -> dict[Place, tuple[int, int]]:
    """`{"topic": {"0": [begin, end]}}`; so few partitions are never packed."""
    return {
        (topic, int(number)): (begin, end)
        for topic, partitions in json.loads(text).items()
        for number, (begin, end) in partitions.items()
    }


def spark_rows(spark: Any, table: str) -> Reader:
    def read(snapshot: int) -> Rows:
        frame = spark.sql(f"SELECT * FROM {table} VERSION AS OF {snapshot}")
        return list(frame.toArrow().to_pylist())

    return read


def duckdb_rows(metadata: str | Path) -> Reader:
    engine = duckdb.connect()
    engine.execute("LOAD avro; LOAD iceberg; SET TimeZone='UTC'")

    def read(snapshot: int) -> Rows:
        scan = f"iceberg_scan('{metadata}', snapshot_from_id => {snapshot})"
        return list(engine.execute(f"SELECT * FROM {scan}").to_arrow_table().to_pylist())

    return read


def _plain(value: Any) -> Any:
    """One spelling for values that readers spell differently, and that can be compared."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return value
        return value.astimezone(timezone.utc).replace(tzinfo=None)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
