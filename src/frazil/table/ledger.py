"""What a table's own snapshots say about a sink. Pure: plain values in, plain values out.

Each commit of a sink leaves one `Entry` in the snapshot's summary, under keys with one prefix:

    frazil.version     format of these keys
    frazil.sink        who
    frazil.epoch       in which life
    frazil.commit-id   ids of the staged batches in it, made before the commit
    frazil.batches     first and last batch number
    frazil.ranges      from-cut and to-cut of every partition the sink knows
    frazil.counts      read, written, rejected, skipped, invisible
    frazil.unwritten   rejected, skipped, invisible, merged and elsewhere per partition, where not
                       all are 0
    frazil.keys        keys whose older rows it took away; only of an upsert table
    frazil.rows        rows that stand for no single offset: of aggregations, joins, other sources
    frazil.source      where Spark's sources stood before and after, in their own words
    frazil.topics      topic → topic id
    frazil.cluster     cluster id
    frazil.schema-id   the table schema that was written
    frazil.watermark   lowest and highest event time (microseconds)
    frazil.doubt       of lives before this epoch nobody can tell any more what they had under way;
                       only in claims, see `Head`
    frazil.index       the offset index, that whoever audits the table may find it
    frazil.note        what a person did to the stream with it: who, when and why
    frazil.tables      table → uuid, or the name of the index's property that says so where they are
                       many; only in the index, whose position counts on them

The newest entry of a sink in a branch's ancestry is that sink's position in the table. Readable
JSON where it is short; packed bits where there are many partitions, so that an entry stays within
4 KiB at 1,000 partitions.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from frazil.core.errors import Fatal
from frazil.core.offsets import BATCHES, Cut, Partition, Range

PREFIX = "frazil."
VERSION = "1"
_READABLE = 1024


@dataclass(frozen=True, slots=True)
class Snapshot:
    id: int
    parent: int | None
    sequence: int
    timestamp_ms: int
    operation: str
    summary: Mapping[str, str]
    manifest_list: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """The fates of offsets: `read` records were delivered, `invisible` offsets held none, and of
    `merged` ones it is known that they were processed, not which rows they became. `elsewhere` are
    those of batches that held nothing for this table: the index says what became of them. `lost`
    ones were given up by a person, whose note stands beside them."""

    written: int = 0
    rejected: int = 0
    skipped: int = 0
    invisible: int = 0
    merged: int = 0
    elsewhere: int = 0
    lost: int = 0

    @property
    def read(self) -> int:
        return self.written + self.rejected + self.skipped

    @property
    def offsets(self) -> int:
        return self.read + self.invisible + self.merged + self.elsewhere + self.lost

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.written + other.written,
            self.rejected + other.rejected,
            self.skipped + other.skipped,
            self.invisible + other.invisible,
            self.merged + other.merged,
            self.elsewhere + other.elsewhere,
            self.lost + other.lost,
        )


#: The fates that are written down: what is left was written.
_FATES = ("rejected", "skipped", "invisible", "merged", "elsewhere", "lost")


@dataclass(frozen=True, slots=True)
class Note:
    """What a person did to a stream, and signed for."""

    #: the command: `accept-loss`, `adopt` or `rebase`
    did: str
    by: str
    #: ISO 8601, UTC
    at: str
    why: str
    #: what it came to
    says: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def of(text: str | None) -> Note | None:
        """None where it is none, or not signed."""
        try:
            found = Note(**json.loads(text or ""))
        except (ValueError, TypeError):
            return None
        return found if found.did and found.by and found.at and found.why else None

    def __str__(self) -> str:
        return f"{self.did} by {self.by}, {self.at}: {self.why}"


@dataclass(frozen=True, slots=True)
class Entry:
    sink: str
    epoch: int
    commit_ids: tuple[str, ...]
    batches: tuple[int, int]
    begin: Cut
    end: Cut
    unwritten: Mapping[Partition, Counts] = field(default_factory=dict)
    topics: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""
    schema_id: int = 0
    watermark: tuple[int, int] | None = None
    #: table → uuid; or the name of the index's property that has them
    tables: Mapping[str, str] | str = field(default_factory=dict)
    rows: int = 0
    source: tuple[str, str] = ("", "")
    #: the name of the offset index
    index: str = ""
    #: None: of a table whose rows are not replaced
    keys: int | None = None
    doubt: int = 0
    #: a `Note`, as text
    note: str = ""

    def __post_init__(self) -> None:
        if set(self.begin) != set(self.end):
            raise Fatal(f"cannot make a ledger entry of sink {self.sink}: "
                        "its two cuts name different partitions")  # fmt: skip

    @property
    def ranges(self) -> list[Range]:
        """What this entry added, partition by partition; empty ranges left out."""
        return [each for each in self.begin.to(self.end) if len(each)]

    def counts(self, partition: Partition) -> Counts:
        """I3 by construction: what is not accounted for otherwise was written."""
        if partition == BATCHES:
            return Counts(written=self.rows)
        other = self.unwritten.get(partition, Counts())
        length = self.end[partition] - self.begin[partition]
        return replace(other, written=length - other.offsets)

    @property
    def total(self) -> Counts:
        return sum((self.counts(each.partition) for each in self.ranges), Counts())

    def summary(self) -> dict[str, str]:
        total = self.total
        told = [fate for fate in _FATES if fate != "lost" or total.lost]
        counts = {name: getattr(total, name) for name in ("read", "written", *told)}
        values = {
            "version": VERSION,
            "sink": self.sink,
            "epoch": str(self.epoch),
            "commit-id": ",".join(self.commit_ids),
            "batches": f"{self.batches[0]}..{self.batches[1]}",
            "ranges": _encode({p: (self.begin[p], end) for p, end in self.end.items()}),
            "counts": json.dumps(counts, separators=(",", ":")),
            "topics": json.dumps(dict(self.topics), separators=(",", ":")),
            "cluster": self.cluster,
            "schema-id": str(self.schema_id),
        }
        if self.unwritten:
            last = max([2, *(i for i, fate in enumerate(_FATES) if getattr(total, fate))])
            fates = _FATES[: last + 1]
            values["unwritten"] = _encode(
                {p: [getattr(c, fate) for fate in fates] for p, c in self.unwritten.items()}
            )
        if self.rows:
            values["rows"] = str(self.rows)
        if any(self.source):
            values["source"] = json.dumps(self.source, separators=(",", ":"))
        if self.watermark:
            values["watermark"] = f"{self.watermark[0]}..{self.watermark[1]}"
        if self.keys is not None:
            values["keys"] = str(self.keys)
        if self.doubt:
            values["doubt"] = str(self.doubt)
        if self.index:
            values["index"] = self.index
        if self.note:
            values["note"] = self.note
        if self.tables:
            tables = self.tables if isinstance(self.tables, str) else dict(self.tables)
            values["tables"] = json.dumps(tables, separators=(",", ":"))
        return {PREFIX + key: value for key, value in values.items()}


def parse(summary: Mapping[str, str]) -> Entry | None:
    """The entry of a snapshot; None where the snapshot is not a sink's."""
    sink = summary.get(PREFIX + "sink")
    if sink is None:
        return None
    version = summary.get(PREFIX + "version")
    if version != VERSION:
        raise Fatal(f"cannot read a ledger entry of sink {sink}: expected format version {VERSION},"
                    f" found {version}", hint="use the newer Frazil that wrote it")  # fmt: skip

    def value(key: str) -> str:
        return summary[PREFIX + key]

    try:
        ranges = _decode(value("ranges"))
        first, last = value("batches").split("..")
        low, _, high = summary.get(PREFIX + "watermark", "").partition("..")
        return Entry(
            sink=sink,
            epoch=int(value("epoch")),
            commit_ids=tuple(value("commit-id").split(",")),
            batches=(int(first), int(last)),
            begin=Cut({p: begin for p, (begin, _) in ranges.items()}),
            end=Cut({p: end for p, (_, end) in ranges.items()}),
            unwritten={
                p: Counts(0, *numbers)
                for p, numbers in _decode(summary.get(PREFIX + "unwritten", "{}")).items()
            },
            topics=json.loads(value("topics")),
            cluster=value("cluster"),
            schema_id=int(value("schema-id")),
            watermark=(int(low), int(high)) if high else None,
            tables=json.loads(summary.get(PREFIX + "tables", "{}")),
            rows=int(summary.get(PREFIX + "rows", 0)),
            source=tuple(json.loads(summary.get(PREFIX + "source", '["",""]'))),
            index=summary.get(PREFIX + "index", ""),
            keys=int(summary[PREFIX + "keys"]) if PREFIX + "keys" in summary else None,
            doubt=int(summary.get(PREFIX + "doubt", 0)),
            note=summary.get(PREFIX + "note", ""),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise Fatal(f"cannot read a ledger entry of sink {sink}: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Head:
    """Where a sink stands in a table: its newest entry, and how sure that is.

    `complete` says that the walk back reached the table's first snapshot, or the entry itself: only
    then does "no entry" mean "never committed". An expired history is bridged by the witness, a tag
    on the newest entry's snapshot; `bridged` says that snapshots after it are missing. The tag is
    moved after the commit: what was under way when they were made may be among them.
    """

    entry: Entry | None
    snapshot: Snapshot | None
    complete: bool
    bridged: bool = False

    @property
    def commit_id(self) -> str | None:
        return self.entry.commit_ids[-1] if self.entry else None


def head(history: Iterable[Snapshot], sink: str, witness: Snapshot | None = None) -> Head:
    """The newest entry of `sink` in a branch's ancestry (newest snapshot first)."""
    oldest: Snapshot | None = None
    for snapshot in history:
        entry = parse(snapshot.summary)
        if entry is not None and entry.sink == sink:
            return Head(entry, snapshot, complete=True)
        oldest = snapshot
    if oldest is None or oldest.parent is None:
        return Head(None, None, complete=True)
    # The ancestry ends at an expired parent. The witness counts only if it is older than all that
    # is left: a witness that is not is no ancestor, so the branch was moved away from it.
    if witness is not None and witness.sequence < oldest.sequence:
        entry = parse(witness.summary)
        if entry is not None and entry.sink == sink:
            return Head(entry, witness, complete=True, bridged=oldest.parent != witness.id)
    return Head(None, None, complete=False)


def entries(history: Iterable[Snapshot], sink: str) -> Iterable[tuple[Entry, Snapshot]]:
    """All entries of a sink, newest first."""
    for snapshot in history:
        entry = parse(snapshot.summary)
        if entry is not None and entry.sink == sink:
            yield entry, snapshot


def _encode(vectors: Mapping[Partition, Sequence[int]]) -> str:
    nested: dict[str, dict[str, list[int]]] = {}
    for (topic, number), numbers in sorted(vectors.items()):
        nested.setdefault(topic, {})[str(number)] = list(numbers)
    text = json.dumps(nested, separators=(",", ":"))
    if len(text) <= _READABLE:
        return text
    packed = {
        topic: [_pack([int(n) - i for i, n in enumerate(rows)])]  # all 0 for partitions 0, 1, 2, …
        + [_pack(column) for column in _columns(list(rows.values()))]
        for topic, rows in nested.items()
    }
    return "packed:" + json.dumps(packed, separators=(",", ":"))


def _decode(text: str) -> dict[Partition, tuple[int, ...]]:
    if not text.startswith("packed:"):
        return {
            Partition(topic, int(number)): tuple(numbers)
            for topic, rows in json.loads(text).items()
            for number, numbers in rows.items()
        }
    found: dict[Partition, tuple[int, ...]] = {}
    for topic, (numbers, *columns) in json.loads(text.removeprefix("packed:")).items():
        rows = _rows([_unpack(column) for column in columns])
        for i, (number, row) in enumerate(zip(_unpack(numbers), rows, strict=True)):
            found[Partition(topic, number + i)] = row
    return found


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The first column as it is, each further one less the one before: small numbers."""
    first = [[row[0] for row in rows]]
    return first + [[row[i] - row[i - 1] for row in rows] for i in range(1, len(rows[0]))]


def _rows(columns: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    rows = []
    for column in zip(*columns, strict=True):
        total, row = 0, []
        for difference in column:
            total += difference
            row.append(total)
        rows.append(tuple(row))
    return rows


def _pack(numbers: Sequence[int]) -> str:
    """Numbers as differences to their lowest, in the fewest bits that hold the largest."""
    low = min(numbers)
    bits = (max(numbers) - low).bit_length()
    joined = int("1" + "".join(format(n - low, f"0{bits}b") for n in numbers if bits), 2)
    raw = joined.to_bytes((joined.bit_length() + 7) // 8, "big")
    return f"{low}/{bits}/{len(numbers)}/{base64.b85encode(raw).decode()}"


def _unpack(text: str) -> list[int]:
    low, bits, count, raw = text.split("/", 3)
    width = int(bits)
    if not width:
        return [int(low)] * int(count)
    joined = format(int.from_bytes(base64.b85decode(raw), "big"), "b")[1:]
    return [int(low) + int(joined[i * width : (i + 1) * width], 2) for i in range(int(count))]
