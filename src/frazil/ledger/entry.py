"""The ledger of a sink in a table's snapshots. Pure: plain values in, plain values out.

Each commit of a sink writes one `LedgerEntry` to the snapshot's summary, with these keys:

    frazil.format-version        version of these keys: 1
    frazil.sink                  id of the sink
    frazil.epoch                 epoch of the sink
    frazil.commit-id             ids of the staged batches in it, made before the commit
    frazil.batches               first and last batch number
    frazil.ranges                begin and end offset of every partition of the sink
    frazil.counts                totals: read, written, and every other outcome that is not 0
    frazil.outcomes              rejected, skipped, invisible, merged, elsewhere and lost per
                                 partition, where not all are 0; trailing zeros are omitted after
                                 the third
    frazil.remainder             in a large entry: per partition the outcome with the largest count,
                                 if that is not `written`. `outcomes` then has the count of written
                                 offsets in its place; the largest count is the remainder of the
                                 range
    frazil.keys                  number of keys whose older rows it deleted; upsert tables only
    frazil.rows-without-offset   rows that have no single offset: from aggregations, joins, other
                                 sources
    frazil.source                positions of Spark's sources before and after (`spark.checkpoint`)
    frazil.topics                topic → topic id
    frazil.cluster               cluster id
    frazil.leader-epochs         leader epoch of the last record batch below each partition's
                                 position, if known: detects a log that was truncated and grew again
                                 (KIP-320)
    frazil.schema-id             the table schema that was written
    frazil.event-time            lowest and highest event time (microseconds)
    frazil.unknown-before-epoch  the outcome of commits in flight before this epoch is unknown; only
                                 in claims, see `LedgerHead`
    frazil.index                 name of the offset index, for audits that start from the table
    frazil.operator-note         an operator's change to the stream: an `OperatorNote`
    frazil.tables                table → uuid, or the name of the index property that contains this
                                 mapping if there are many; only in the index, whose position
                                 depends on these tables
    frazil.partitions            in a large entry: the table property with its partitions and topic
                                 ids
    frazil.base                  in a large entry: the table property with the offsets its ranges
                                 start from

The newest entry of a sink in a branch's ancestry is that sink's position in the table.

A short entry is readable JSON. With many partitions the numbers are packed, and values common to
all entries are stored once, in properties of the table:

    frazil.partitions.<sink>.<epoch>.<digest>   topics, their ids, and their partitions
    frazil.base.<sink>.<epoch>.<digest>         an offset for each of them

`epoch` is the epoch that wrote the property, `digest` the digest of its text: a property never
changes, and a missing or altered one is an error. `summary()` returns entry and properties in one
mapping, and `parse` expects the same: `split` separates them for a table, `joined` merges them.
A new base is written if an entry would otherwise exceed 4 KiB.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from frazil import format_version
from frazil.accounting import OUTCOME_NAMES, OutcomeCounts
from frazil.errors import Fatal
from frazil.iceberg.table import Snapshot
from frazil.ledger.packing import PACKED, based, pack, unpack
from frazil.offsets import BATCHES, Cut, Partition, Range

PREFIX = "frazil."
#: Version of an entry, and of the table properties that it refers to.
VERSION = "1"
#: Maximum characters of a partition value that is kept as readable JSON.
_READABLE = 1024
#: Maximum size of an entry, keys and values, before it gets a new base.
_MOST = 4096
#: Kinds of values stored in table properties.
_KEPT = ("partitions", "base")


#: The outcomes that are stored; the remaining offsets of a range were written.
_STORED_OUTCOMES = OUTCOME_NAMES[1:]


@dataclass(frozen=True, slots=True)
class OperatorNote:
    """An operator's signed change to a stream."""

    #: `accept-loss`, `adopt-topic`, `seek` or `confirm`
    command: str
    by: str
    #: ISO 8601, UTC
    at: str
    reason: str
    #: what the command did
    result: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def of(text: str | None) -> OperatorNote | None:
        """None if the text is not a note, or not signed."""
        try:
            note = OperatorNote(**json.loads(text or ""))
        except (ValueError, TypeError):
            return None
        return note if note.command and note.by and note.at and note.reason else None

    def __str__(self) -> str:
        return f"{self.command} by {self.by}, {self.at}: {self.reason}"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    sink: str
    epoch: int
    commit_ids: tuple[str, ...]
    batches: tuple[int, int]
    begin: Cut
    end: Cut
    #: outcomes other than written, of partitions that have any
    outcomes: Mapping[Partition, OutcomeCounts] = field(default_factory=dict)
    topics: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""
    schema_id: int = 0
    watermark: tuple[int, int] | None = None
    #: table → uuid; or the name of the index property that contains this mapping
    tables: Mapping[str, str] | str = field(default_factory=dict)
    rows: int = 0
    source: tuple[str, str] = ("", "")
    #: the name of the offset index
    index: str = ""
    #: None: not an upsert table
    keys: int | None = None
    #: the outcome of batches staged before this epoch is unknown; 0: of none
    unknown_before: int = 0
    #: an `OperatorNote`, as text
    note: str = ""
    leaders: Mapping[Partition, int] = field(default_factory=dict)
    #: the table properties that the entry was read with: key → text
    kept: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if set(self.begin) != set(self.end):
            raise Fatal(
                f"cannot make a ledger entry of sink {self.sink}: "
                "its two cuts name different partitions"
            )

    @property
    def ranges(self) -> list[Range]:
        """The ranges that this entry added, by partition, without empty ones."""
        return [span for span in self.begin.to(self.end) if len(span)]

    def counts(self, partition: Partition) -> OutcomeCounts:
        """I3 by construction: offsets without another outcome were written."""
        if partition == BATCHES:
            return OutcomeCounts(written=self.rows)
        other = self.outcomes.get(partition, OutcomeCounts())
        length = self.end[partition] - self.begin[partition]
        return replace(other, written=length - other.offsets)

    @property
    def total(self) -> OutcomeCounts:
        return sum((self.counts(span.partition) for span in self.ranges), OutcomeCounts())

    def summary(self) -> dict[str, str]:
        total = self.total
        outcome_names = [outcome for outcome in _STORED_OUTCOMES if getattr(total, outcome)]
        counts = {name: getattr(total, name) for name in ("read", "written", *outcome_names)}
        values = {
            "format-version": VERSION,
            "sink": self.sink,
            "epoch": str(self.epoch),
            "commit-id": ",".join(self.commit_ids),
            "batches": f"{self.batches[0]}..{self.batches[1]}",
            "counts": json.dumps(counts, separators=(",", ":")),
            "cluster": self.cluster,
            "schema-id": str(self.schema_id),
        }
        if self.rows:
            values["rows-without-offset"] = str(self.rows)
        if any(self.source):
            values["source"] = json.dumps(self.source, separators=(",", ":"))
        if self.watermark:
            values["event-time"] = f"{self.watermark[0]}..{self.watermark[1]}"
        if self.keys is not None:
            values["keys"] = str(self.keys)
        if self.unknown_before:
            values["unknown-before-epoch"] = str(self.unknown_before)
        if self.index:
            values["index"] = self.index
        if self.note:
            values["operator-note"] = self.note
        if self.tables:
            tables = self.tables if isinstance(self.tables, str) else dict(self.tables)
            values["tables"] = json.dumps(tables, separators=(",", ":"))
        last = max(
            [2, *(i for i, outcome in enumerate(_STORED_OUTCOMES) if getattr(total, outcome))]
        )
        values |= self._of_partitions(_STORED_OUTCOMES[: last + 1], _size(values))
        return {PREFIX + key: value for key, value in values.items()}

    def _of_partitions(self, outcome_names: Sequence[str], size: int) -> dict[str, str]:
        """The values per partition; `size`: characters of the entry's other values."""
        values = {
            "ranges": _json({p: (self.begin[p], end) for p, end in self.end.items()}),
            "topics": json.dumps(dict(self.topics), separators=(",", ":")),
        }
        if self.outcomes:
            values["outcomes"] = _json(
                {
                    p: [getattr(c, outcome) for outcome in outcome_names]
                    for p, c in self.outcomes.items()
                }
            )
        if self.leaders:
            values["leader-epochs"] = _json({p: (epoch,) for p, epoch in self.leaders.items()})
        if max(map(len, values.values())) <= _READABLE:
            return values
        parts = tuple(self.end)
        names = _names_text(parts, self.topics)
        key = self._key("partitions", names)
        values = {"partitions": _reference(key)}
        if self.outcomes:
            values |= self._outcomes(parts, outcome_names)
        return {
            **values,
            **self._ranges(parts, names, size + _size(values)),
            key.removeprefix(PREFIX): names,
        }

    def _outcomes(self, parts: Sequence[Partition], outcome_names: Sequence[str]) -> dict[str, str]:
        """Counts per partition. The largest is omitted: it is the remainder of the range."""
        nothing = OutcomeCounts()
        others = [self.outcomes.get(p, nothing) for p in parts]
        counts = np.array(
            [[getattr(c, outcome) for c in others] for outcome in outcome_names], np.int64
        )
        lengths = np.array([self.end[p] - self.begin[p] for p in parts], np.int64)
        every = np.vstack([lengths - counts.sum(axis=0), counts])
        # Ties (an empty range has only zeros) go to the outcome with the most offsets in the
        # entry: equal marks compress to almost nothing.
        order = np.argsort(-every.sum(axis=1), kind="stable")
        largest = order[every[order].argmax(axis=0)]
        largest[[p == BATCHES for p in parts]] = 0  # rows of batches are not counted by offsets
        marks = largest == np.arange(1, len(every))[:, None]
        plain = {"outcomes": pack(counts)}
        short = {
            "outcomes": pack(np.where(marks, every[0], counts)),
            "remainder": pack(marks.astype(np.int64)),
        }
        return min(plain, short, key=_size)

    def _ranges(self, parts: Sequence[Partition], names: str, size: int) -> dict[str, str]:
        """Ranges relative to the base that the entry was read with, to 0, or to a new base."""
        lengths = [self.end[p] - self.begin[p] for p in parts]
        begins, leaders = self._columns(parts)
        bases = (text for key, text in self.kept.items() if key.startswith(f"{PREFIX}base."))
        before = next((text for text in bases if text.startswith(_digest(names))), "")
        start, led = _base(before, len(parts)) if before else _nothing(len(parts))
        values = {"ranges": pack([begins - start, lengths]), "leader-epochs": pack([leaders - led])}
        if before:
            key = self._key("base", before)
            values |= {"base": _reference(key), key.removeprefix(PREFIX): before}
        if size + _size(values, lean=True) <= _MOST:
            return values
        fresh = f"{_digest(names)}:{pack([begins, leaders])}"
        key = self._key("base", fresh)
        again = {
            "ranges": pack([begins * 0, lengths]),
            "leader-epochs": pack([leaders * 0]),
            "base": _reference(key),
            key.removeprefix(PREFIX): fresh,
        }
        # If both exceed the limit, a new base is written only if it saves a quarter.
        worth = size + _size(again, lean=True) <= _MOST or 4 * len(again["ranges"]) < 3 * len(
            values["ranges"]
        )
        return again if worth else values

    def _columns(self, parts: Sequence[Partition]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        begins = np.array([self.begin[p] for p in parts], np.int64)
        return begins, np.array([self.leaders.get(p, -1) for p in parts], np.int64)

    def _key(self, kind: str, text: str) -> str:
        """The property with this text: the one it was read from, or a new one of this epoch."""
        start, end = f"{PREFIX}{kind}.{self.sink}.", f".{_digest(text)}"
        for key in self.kept:
            if key.startswith(start) and key.endswith(end):
                return key
        return f"{start}{self.epoch}{end}"


def parse(summary: Mapping[str, str]) -> LedgerEntry | None:
    """The entry of a snapshot; None if no sink committed the snapshot."""
    sink = summary.get(PREFIX + "sink")
    if sink is None:
        return None
    format_version.check(
        f"read a ledger entry of sink {sink}", summary.get(format_version.KEY), VERSION
    )

    def value(key: str) -> str:
        return summary[PREFIX + key]

    try:
        parts, topics = partitions_of(summary)
        base = base_of(summary, len(parts))
        ranges = _decode(value("ranges"), parts, base[0])
        first, last = value("batches").split("..")
        low, _, high = summary.get(PREFIX + "event-time", "").partition("..")
        return LedgerEntry(
            sink=sink,
            epoch=int(value("epoch")),
            commit_ids=tuple(value("commit-id").split(",")),
            batches=(int(first), int(last)),
            begin=Cut({p: begin for p, (begin, _) in ranges.items()}),
            end=Cut({p: end for p, (_, end) in ranges.items()}),
            outcomes={
                p: OutcomeCounts(0, *numbers)
                for p, numbers in _other_outcomes(summary, parts, ranges).items()
                if any(numbers)
            },
            topics=topics if topics is not None else json.loads(value("topics")),
            cluster=value("cluster"),
            schema_id=int(value("schema-id")),
            watermark=(int(low), int(high)) if high else None,
            tables=json.loads(summary.get(PREFIX + "tables", "{}")),
            rows=int(summary.get(PREFIX + "rows-without-offset", 0)),
            source=tuple(json.loads(summary.get(PREFIX + "source", '["",""]'))),
            index=summary.get(PREFIX + "index", ""),
            keys=int(summary[PREFIX + "keys"]) if PREFIX + "keys" in summary else None,
            unknown_before=int(summary.get(PREFIX + "unknown-before-epoch", 0)),
            note=summary.get(PREFIX + "operator-note", ""),
            leaders={
                p: epoch
                for p, (epoch,) in _decode(
                    summary.get(PREFIX + "leader-epochs", "{}"), parts, base[1]
                ).items()
                if epoch >= 0
            },
            kept=split(summary)[1],
        )
    except (KeyError, ValueError, TypeError) as error:
        raise Fatal(f"cannot read a ledger entry of sink {sink}: {error!r}") from None


@dataclass(frozen=True, slots=True)
class LedgerHead:
    """A sink's position in a table: its newest entry, and how certain it is.

    `complete`: the walk back reached the table's first snapshot or the entry itself; only then does
    "no entry" mean "never committed". The sink's tag, on the newest entry's snapshot, bridges an
    expired history; `bridged`: snapshots after the tagged one are missing. The tag is moved after
    the commit, so the missing snapshots may include a commit of this sink. The tag's sequence
    number does not prove that it is an ancestor: `protocol.TableCommitter` checks this.
    """

    entry: LedgerEntry | None
    snapshot: Snapshot | None
    complete: bool
    bridged: bool = False
    #: the expired snapshot at which the branch's own history ends, if it ends above the entry
    missing: int | None = None
    #: the tagged entry, if nothing proves that its snapshot is an ancestor
    unshown: LedgerEntry | None = None

    @property
    def commit_id(self) -> str | None:
        return self.entry.commit_ids[-1] if self.entry else None

    @property
    def epoch(self) -> int:
        return self.entry.epoch if self.entry else 0


def head(history: Iterable[Snapshot], sink: str, tagged: Snapshot | None = None) -> LedgerHead:
    """The newest entry of `sink` in a branch's ancestry (newest snapshot first)."""
    oldest: Snapshot | None = None
    for snapshot in history:
        if (entry := own_entry(snapshot, sink)) is not None:
            return LedgerHead(entry, snapshot, complete=True)
        oldest = snapshot
    if oldest is None or oldest.parent is None:
        return LedgerHead(None, None, complete=True)
    # The ancestry ends at an expired parent. The tagged snapshot counts only if it is older than
    # all remaining ones: otherwise it is no ancestor, because the branch was moved away from it.
    if tagged is not None and tagged.sequence < oldest.sequence:
        entry = own_entry(tagged, sink)
        if entry is not None:
            return LedgerHead(entry, tagged, True, oldest.parent != tagged.id, oldest.parent)
    return LedgerHead(None, None, complete=False, missing=oldest.parent)


def entries(history: Iterable[Snapshot], sink: str) -> Iterable[tuple[LedgerEntry, Snapshot]]:
    """All entries of a sink, newest first."""
    for snapshot in history:
        if (entry := own_entry(snapshot, sink)) is not None:
            yield entry, snapshot


def own_entry(snapshot: Snapshot, sink: str) -> LedgerEntry | None:
    """The snapshot's entry, if it is the sink's. Entries of other sinks may have a newer format."""
    return parse(snapshot.summary) if snapshot.summary.get(PREFIX + "sink") == sink else None


# ── entries and the properties they refer to ─────────────────────────────────────────────────────


def split(summary: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The parts for the snapshot's summary and for the table's properties."""
    marks = tuple(f"{PREFIX}{kind}." for kind in _KEPT)
    kept = {key: text for key, text in summary.items() if key.startswith(marks)}
    return {key: text for key, text in summary.items() if key not in kept}, kept


def referred(summary: Mapping[str, str]) -> list[str]:
    """The properties that an entry refers to."""
    sink = summary.get(PREFIX + "sink", "")
    return [
        f"{PREFIX}{kind}.{sink}.{summary[PREFIX + kind]}"
        for kind in _KEPT
        if PREFIX + kind in summary
    ]


def joined(summary: Mapping[str, str], properties: Mapping[str, str]) -> Mapping[str, str]:
    """A summary as `parse` expects it. `parse` reports missing properties."""
    wanted = [key for key in referred(summary) if key in properties]
    return {**summary, **{key: properties[key] for key in wanted}} if wanted else summary


def forgotten(
    properties: Mapping[str, str], summaries: Iterable[Mapping[str, str]], sink: str, epoch: int
) -> list[str]:
    """Properties of a sink's epochs up to `epoch` that no snapshot of the table refers to.

    Empty until `epoch` has an entry in the table: until then an older epoch may commit an entry
    that refers to a property just written. Properties of newer epochs are kept.
    """
    needed: set[str] = set()
    claimed = False
    for summary in summaries:
        needed.update(referred(summary))
        same_sink = summary.get(PREFIX + "sink") == sink
        claimed |= same_sink and summary.get(PREFIX + "epoch") == str(epoch)
    unused = []
    for key in properties if claimed else ():
        kind, _, rest = key.removeprefix(PREFIX).partition(".")
        whose, _, mark = rest.rpartition(".")[0].rpartition(".")
        own = key.startswith(PREFIX) and kind in _KEPT and whose == sink and mark.isdigit()
        if own and int(mark) <= epoch and key not in needed:
            unused.append(key)
    return unused


def _kept(summary: Mapping[str, str], kind: str) -> str:
    """The text of a property that an entry refers to."""
    key = f"{PREFIX}{kind}.{summary.get(PREFIX + 'sink')}.{summary[PREFIX + kind]}"
    text = summary.get(key)
    if text is None or not key.endswith(f".{_digest(text)}"):
        fact = "is gone" if text is None else "was altered"
        raise Fatal(
            f"cannot read a ledger entry of sink {summary.get(PREFIX + 'sink')}: the table "
            f"property {key}, which it refers to, {fact}",
            hint="restore the property from an earlier metadata file of the table",
        )
    return text


def partitions_of(
    summary: Mapping[str, str],
) -> tuple[tuple[Partition, ...], dict[str, str] | None]:
    """The partitions of a large entry, in order, and topic → topic id; empty for a short one."""
    if PREFIX + "partitions" not in summary:
        return (), None
    parts, ids = _names(_kept(summary, "partitions"))
    return parts, dict(ids)


def base_of(summary: Mapping[str, str], count: int) -> NDArray[np.int64]:
    """The offsets and leader epochs that a large entry is relative to."""
    if PREFIX + "base" not in summary:
        return _nothing(count)
    text = _kept(summary, "base")
    if not text.startswith(_digest(_kept(summary, "partitions"))):
        raise Fatal(
            f"cannot read a ledger entry of sink {summary[PREFIX + 'sink']}: its base is "
            "of other partitions"
        )
    return _base(text, count)


def _base(text: str, count: int) -> NDArray[np.int64]:
    return based(text.partition(":")[2], count)


def _nothing(count: int) -> NDArray[np.int64]:
    return np.zeros((2, count), np.int64)


def _names_text(parts: Sequence[Partition], ids: Mapping[str, str]) -> str:
    """Topics with their ids and partitions: their number if they are 0..n-1, else a list."""
    topics: dict[str, list[int]] = {topic: [] for topic in sorted(ids)}
    for topic, number in parts:
        topics.setdefault(topic, []).append(number)
    rows = [
        [topic, ids.get(topic), len(numbers) if numbers == list(range(len(numbers))) else numbers]
        for topic, numbers in sorted(topics.items())
    ]
    raw = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 9)
    return base64.b85encode(raw).decode()


@lru_cache(maxsize=64)
def _names(text: str) -> tuple[tuple[Partition, ...], Mapping[str, str]]:
    try:
        rows = json.loads(zlib.decompress(base64.b85decode(text)))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    parts = [
        Partition(topic, number)
        for topic, _, numbers in rows
        for number in (range(numbers) if isinstance(numbers, int) else numbers)
    ]
    return tuple(parts), {topic: id for topic, id, _ in rows if id is not None}


@lru_cache(maxsize=256)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _reference(key: str) -> str:
    """Epoch and digest, the last two parts of a property's name."""
    return ".".join(key.rsplit(".", 2)[1:])


def _size(values: Mapping[str, str], lean: bool = False) -> int:
    """Characters of keys and values; `lean`: without table properties."""
    return sum(
        len(PREFIX) + len(key) + len(value)
        for key, value in values.items()
        if not (lean and key.split(".")[0] in _KEPT and "." in key)
    )


def _json(vectors: Mapping[Partition, Sequence[int]]) -> str:
    nested: dict[str, dict[str, list[int]]] = {}
    for (topic, number), numbers in sorted(vectors.items()):
        nested.setdefault(topic, {})[str(number)] = list(numbers)
    return json.dumps(nested, separators=(",", ":"))


def _other_outcomes(
    summary: Mapping[str, str],
    parts: Sequence[Partition],
    ranges: Mapping[Partition, Sequence[int]],
) -> dict[Partition, tuple[int, ...]]:
    counts = _decode(summary.get(PREFIX + "outcomes", "{}"), parts)
    for p, marks in _decode(summary.get(PREFIX + "remainder", "{}"), parts).items():
        if sum(marks) > 1 or not {*marks} <= {0, 1}:
            raise ValueError(f"expected at most one outcome of {p} as the remainder, found {marks}")
        begin, end = ranges[p]
        remainder = end - begin - sum(counts[p])
        counts[p] = tuple(
            remainder if mark else count for count, mark in zip(counts[p], marks, strict=True)
        )
    return counts


def _decode(
    text: str, parts: Sequence[Partition], base: NDArray[np.int64] | None = None
) -> dict[Partition, tuple[int, ...]]:
    if not text.startswith(PACKED):
        return {
            Partition(topic, int(number)): tuple(numbers)
            for topic, rows in json.loads(text).items()
            for number, numbers in rows.items()
        }
    columns = unpack(text, len(parts))
    if base is not None:
        columns[0] += base
    if base is not None and len(columns) > 1:  # begin and length
        columns[1] += columns[0]
    return dict(zip(parts, map(tuple, columns.T.tolist()), strict=True))
