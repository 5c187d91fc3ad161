"""Spark's checkpoint: where the sources of a query stand, read from its offset log and, for a new
life, written into a fresh one.

Spark plans batch N by writing `offsets/N`, where every source stands *after* it, and ends it with
`commits/N`. So batch N goes from `offsets/N-1` to `offsets/N`, whatever the sources are: that pair
is the batch's identity. A `Place` is one end of it in the form the ledger keeps: the offsets of
sources that are Kafka's as a cut, all else as text that is compared as it is and never understood.

A query is *bound* to its checkpoint if there is more in it than offsets: state of operators, or
notes of a source. Then the number of the batch and the query's id belong to the place as well: a
batch without new data, which closes windows, moves no offset. Other queries begin each life with
a fresh checkpoint made from the ledger (`seed`), and no old one can matter.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frazil.errors import Fatal, IdentityMismatch
from frazil.iceberg.java import HadoopFolder
from frazil.offsets import Cut, Partition

_LONGEST = 512


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """Where the sources of a query stand. Two places are the same if cut and text are."""

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
        """The id that Spark gave the query when the checkpoint was new."""
        if not self._query:
            text = self._folder.read("metadata")
            self._query = str(json.loads(text)["id"]) if text else ""
        return self._query

    def last(self) -> int | None:
        """The newest batch that was planned."""
        numbers = [int(name) for name in self._folder.names("offsets") if name.isdigit()]
        return max(numbers, default=None)

    def ended(self, batch: int) -> bool:
        return self._folder.read(f"commits/{batch}") is not None

    def after(self, batch: int) -> SourceOffsets:
        """Where the sources stand after `batch`."""
        return self._place(batch, self._sources(batch))

    def before(self, batch: int) -> SourceOffsets:
        if batch:
            return self.after(batch - 1)
        first = self._sources(0)
        return self._place(-1, [self._beginning(i, first) for i in range(len(first))])

    def seed(self, place: SourceOffsets, kinds: Sequence[str]) -> None:
        """Make Spark believe that batch 0 is done and ended at `place`.

        `kinds`: of the query's sources in their order, frazil, kafka or another.
        """
        offsets = [
            _offset(each, place, kind) for each, kind in zip(known(place), kinds, strict=True)
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
                hint="another query, or somebody's clean-up, works in the same folder",
            )
        version, _, *offsets = text.split("\n")
        if version != "v1":
            raise Fatal(
                f"cannot read checkpoint {self.path}: expected an offset log of version v1,"
                f" found {version!r}"
            )
        # A source that has brought nothing yet stands at its beginning.
        return [
            self._note(i, len(offsets)) if each == "-" else each for i, each in enumerate(offsets)
        ]

    def _beginning(self, number: int, sources: Sequence[str | None]) -> str | None:
        """Where a source stood before batch 0, as far as anybody wrote it down."""
        first = sources[number]
        if first is not None and _kafka(first)[0] == "frazil":
            offset = json.loads(first)
            return json.dumps({**offset, "cut": offset["start"]})
        return self._note(number, len(sources))

    def _note(self, number: int, count: int) -> str | None:
        """What Kafka's source, and Iceberg's, wrote down of their beginning. Spark counts a source
        that is read twice once, so the notes can be told apart only if there is one for each."""
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
        for each in sources:
            kind, offsets = _kafka(each)
            if kind and all(cut.get(p, offset) == offset for p, offset in offsets.items()):
                cut.update(offsets)
                texts.append({kind: offsets.topics})
            else:  # not Kafka's; or a topic that is read twice, with two positions
                long = self._bound and each is not None and len(each) > _LONGEST
                texts.append(_digest(each) if long and each else each)
            if kind == "frazil" and each:
                found = json.loads(each)
                cluster, topics = found["cluster"], {**topics, **found["topics"]}
        text: dict[str, Any] = {"sources": texts}
        if self._bound:
            text |= {"batch": batch, "query": self.query}
        return SourceOffsets(Cut(cut), json.dumps(text, separators=(",", ":")), cluster, topics)


def began(before: SourceOffsets, after: SourceOffsets) -> Cut:
    """Where the batch between two places began, partitions that are new in it included.

    Spark's Kafka source reads a new partition from its very first offset, and insists on that being
    0. Ours names a new partition, with its beginning, a batch before it reads from it.
    """
    sources = json.loads(after.text)["sources"]
    kafka = {t for each in sources if isinstance(each, dict) for t in each.get("kafka", ())}
    new = {p: 0 if p.topic in kafka else offset for p, offset in after.cut.items()}
    return Cut({**new, **before.cut})


def _kafka(offset: str | None) -> tuple[str, Cut]:
    """Whose offset it is, if Kafka's, and the cut it stands for."""
    try:
        found = json.loads(offset or "null")
        if isinstance(found, dict) and found:
            if isinstance(found.get("cut"), dict):
                return "frazil", Cut.of(found["cut"])
            return "kafka", Cut.of(found)
    except (ValueError, TypeError, AttributeError):
        pass
    return "", Cut()


def known(place: SourceOffsets) -> list[Any]:
    """What a place knows of each source. One of Kafka's ranges has no text, and one source."""
    if place.text:
        return list(json.loads(place.text)["sources"])
    return [{"frazil": place.cut.topics}] if place.cut else []


def _offset(source: Any, place: SourceOffsets, kind: str) -> str:
    """What the offset log says of a source that stands at `place`."""
    if not isinstance(source, dict):
        return "-" if source is None else str(source)
    [topics] = source.values()
    cut = Cut({p: offset for p, offset in place.cut.items() if p.topic in topics}).nested()
    if kind == "kafka":
        return json.dumps(cut)
    ids = {topic: place.topics[topic] for topic in topics if topic in place.topics}
    return json.dumps({"cut": cut, "start": cut, "cluster": place.cluster, "topics": ids})


def _digest(text: str) -> str:
    """Of a text too long for a ledger, where it is compared and never read back."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
