"""Spark's checkpoint: the offsets of a query's sources, read from its offset log and, for a new
run, written into a fresh one.

Spark plans batch N by writing `offsets/N`, the offsets of every source *after* it, and ends it with
`commits/N`. So batch N goes from `offsets/N-1` to `offsets/N`, whatever the sources are: that pair
is the batch's identity. `SourceOffsets` is one end of it in the form that the ledger keeps: offsets
of Kafka sources as a cut, everything else as opaque text that is only compared.

A query is *bound* to its checkpoint if that holds more than offsets: state of operators, or notes
of a source. Then batch number and query id are part of `SourceOffsets` as well: a batch without new
data, which closes windows, moves no offset. Other queries begin each run with a fresh checkpoint
made from the ledger (`seed`), and older checkpoints have no effect.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frazil.errors import Fatal, IdentityMismatch
from frazil.iceberg.java_spark import HadoopFolder
from frazil.kafka.range_source import check_offset, spark_offset
from frazil.offsets import Cut, Partition

_LONGEST = 512


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """Offsets of the sources of a query. Two are equal if cut and text are."""

    cut: Cut = field(default_factory=Cut)
    text: str = ""
    cluster: str = field(default="", compare=False)
    topics: Mapping[str, str] = field(default_factory=dict, compare=False)


class Checkpoint:
    def __init__(self, folder: HadoopFolder, *, bound: bool) -> None:
        self.path = folder.path
        self._folder = folder
        self._bound = bound
        self._query = ""

    @property
    def query(self) -> str:
        """The query id that Spark assigned when the checkpoint was new."""
        if not self._query:
            text = self._folder.read("metadata")
            self._query = str(json.loads(text)["id"]) if text else ""
        return self._query

    def last(self) -> int | None:
        """The newest planned batch."""
        numbers = [int(name) for name in self._folder.names("offsets") if name.isdigit()]
        return max(numbers, default=None)

    def ended(self, batch: int) -> bool:
        return self._folder.read(f"commits/{batch}") is not None

    def after(self, batch: int) -> SourceOffsets:
        """The source offsets after `batch`."""
        return self._place(batch, self._sources(batch))

    def before(self, batch: int) -> SourceOffsets:
        if batch:
            return self.after(batch - 1)
        first = self._sources(0)
        return self._place(-1, [self._beginning(i, first) for i in range(len(first))])

    def seed(self, end: SourceOffsets, kinds: Sequence[str]) -> None:
        """Write a checkpoint in which batch 0 is committed and ended at `end`.

        `kinds`: of the query's sources in their order: frazil, kafka or another.
        """
        offsets = [
            _offset(source, end, kind) for source, kind in zip(known(end), kinds, strict=True)
        ]
        metadata = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {}}
        self._folder.write("metadata", json.dumps({"id": str(uuid.uuid4())}))
        self._folder.write("offsets/0", "\n".join(["v1", json.dumps(metadata), *offsets]))
        self._folder.write("commits/0", 'v1\n{"nextBatchWatermarkMs":0}')

    def _sources(self, batch: int) -> list[str | None]:
        text = self._folder.read(f"offsets/{batch}")
        if text is None:
            raise IdentityMismatch(
                f"cannot read where batch {batch} ends: checkpoint {self.path} has no offsets/"
                f"{batch}",
                hint="another query or a clean-up job uses the same folder",
            )
        version, _, *offsets = text.split("\n")
        if version != "v1":
            raise Fatal(
                f"cannot read checkpoint {self.path}: expected an offset log of version v1,"
                f" found {version!r}"
            )
        # A source without records so far is at its first offset.
        return [
            self._note(i, len(offsets)) if offset == "-" else offset
            for i, offset in enumerate(offsets)
        ]

    def _beginning(self, number: int, sources: Sequence[str | None]) -> str | None:
        """The offset of a source before batch 0, as far as the checkpoint records it."""
        first = sources[number]
        if first is not None and _kafka(first)[0] == "frazil":
            offset = json.loads(first)
            return json.dumps({**offset, "cut": offset["start"]})
        return self._note(number, len(sources))

    def _note(self, number: int, count: int) -> str | None:
        """The first offsets that the Kafka and Iceberg sources record. Spark counts a source that
        is read twice once, so the notes are unambiguous only if there is one for each source."""
        if len(self._folder.names("sources")) != count:
            return None
        if note := self._folder.read(f"sources/{number}/offsets/0"):
            return note
        note = (self._folder.read(f"sources/{number}/0") or "").partition("\n")[2]
        return note if _kafka(note)[0] else None

    def _place(self, batch: int, sources: Sequence[str | None]) -> SourceOffsets:
        cut: dict[Partition, int] = {}
        texts: list[Any] = []
        cluster, topics = "", dict[str, str]()
        for source in sources:
            kind, offsets = _kafka(source)
            if kind and all(cut.get(p, offset) == offset for p, offset in offsets.items()):
                cut.update(offsets)
                texts.append({kind: offsets.topics})
            else:  # not Kafka's; or a topic that is read twice, with two positions
                long = self._bound and source is not None and len(source) > _LONGEST
                texts.append(_digest(source) if long and source else source)
            if kind == "frazil" and source:
                identity = json.loads(source)
                cluster, topics = identity["cluster"], {**topics, **identity["topics"]}
        text: dict[str, Any] = {"sources": texts}
        if self._bound:
            text |= {"batch": batch, "query": self.query}
        return SourceOffsets(Cut(cut), json.dumps(text, separators=(",", ":")), cluster, topics)


def began(before: SourceOffsets, after: SourceOffsets) -> Cut:
    """The beginning of the batch between two ends, including partitions that are new in it.

    Spark's Kafka source reads a new partition from its first offset, which must be 0. Our source
    adds a new partition, with its first offset, one batch before it reads from it.
    """
    sources = json.loads(after.text)["sources"]
    kafka = {t for source in sources if isinstance(source, dict) for t in source.get("kafka", ())}
    new = {p: 0 if p.topic in kafka else offset for p, offset in after.cut.items()}
    return Cut({**new, **before.cut})


def _kafka(offset: str | None) -> tuple[str, Cut]:
    """The kind of a Kafka offset, frazil or kafka, and its cut; empty for other sources."""
    try:
        value = json.loads(offset or "null")
        if isinstance(value, dict) and value:
            # A topic of Spark's Kafka source may have any name, but no number as its value.
            if isinstance(value.get("version"), int) and "cut" in value:
                check_offset(value)
                return "frazil", Cut.of(value["cut"])
            return "kafka", Cut.of(value)
    except (ValueError, TypeError, AttributeError):
        pass
    return "", Cut()


def known(end: SourceOffsets) -> list[Any]:
    """The entries of each source in `end`. A sink fed by ranges has no text, and one source."""
    if end.text:
        return list(json.loads(end.text)["sources"])
    return [{"frazil": end.cut.topics}] if end.cut else []


def _offset(source: Any, end: SourceOffsets, kind: str) -> str:
    """The line of a source in the offset log for `end`."""
    if not isinstance(source, dict):
        return "-" if source is None else str(source)
    [topics] = source.values()
    cut = Cut({p: offset for p, offset in end.cut.items() if p.topic in topics})
    if kind == "kafka":
        return json.dumps(cut.nested())
    ids = {topic: end.topics[topic] for topic in topics if topic in end.topics}
    return json.dumps(spark_offset(cut, start=cut, cluster=end.cluster, topics=ids))


def _digest(text: str) -> str:
    """A digest for a text that is too long for the ledger; it is only compared."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
