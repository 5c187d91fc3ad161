"""Half-open ranges of offsets, cuts, and their algebra. Pure; standard library only.

A *range* is `[start, end)` of one topic partition. A *cut* maps each topic partition to its next
offset. A batch moves the stream from one cut to the next: `cut.after(ranges)`.

A stream that is not from Kafka has positions that only its source can read. There the batches
themselves are counted, in a partition of their own (`BATCHES`): batch n is the range `[n, n+1)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from frazil.errors import ConfigError, Gap, Overlap


class Partition(NamedTuple):
    """`topic` is the ledger's name: `orders@7` where the Kafka topic was dropped and created again,
    and epoch 7 took it over. Its offsets start again and belong to other records."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.number}]"

    @property
    def kafka_topic(self) -> str:
        """The name in Kafka, which allows no `@` in names."""
        return self.topic.partition("@")[0]

    @property
    def generation(self) -> int:
        """The epoch that took the topic over; 0: the first topic of this name."""
        return int(self.topic.partition("@")[2] or 0)


def newest_names(topics: Iterable[str]) -> dict[str, str]:
    """Kafka topic → its newest name in the ledger; `topics` are ledger names."""
    names: dict[str, str] = {}
    for topic in topics:
        base = Partition(topic, 0).kafka_topic
        known = names.setdefault(base, topic)
        if Partition(topic, 0).generation > Partition(known, 0).generation:
            names[base] = topic
    return names


#: Not a name that Kafka allows for a topic.
BATCHES = Partition("(batches)", 0)


@dataclass(frozen=True, slots=True, order=True)
class Range:
    partition: Partition
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ConfigError(
                f"cannot make a range of {self.partition}: "
                f"expected 0 <= start <= end, found [{self.start}, {self.end})"
            )

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.partition} [{self.start}, {self.end})"

    def pieces(self, size: int) -> Iterator[Range]:
        """The range in pieces of at most `size` offsets, of nearly equal length."""
        count = max(1, -(-len(self) // size))
        for i in range(count):
            start = self.start + len(self) * i // count
            end = self.start + len(self) * (i + 1) // count
            yield Range(self.partition, start, end)


def join(ranges: Iterable[Range]) -> list[Range]:
    """Merge adjacent ranges, per partition. An overlap raises; a gap leaves two ranges."""
    joined: list[Range] = []
    for range_ in sorted(ranges):
        last = joined[-1] if joined else None
        if last is None or last.partition != range_.partition or last.end < range_.start:
            joined.append(range_)
        elif last.end > range_.start:
            raise Overlap(f"cannot join ranges: {last} and {range_} overlap")
        else:
            joined[-1] = Range(range_.partition, last.start, range_.end)
    return joined


class Cut(Mapping[Partition, int]):
    """Immutable: topic partition → next offset. Sorted, comparable, hashable."""

    __slots__ = ("_next",)

    def __init__(self, offsets: Mapping[Partition, int] | None = None) -> None:
        self._next = dict(sorted((offsets or {}).items()))

    @classmethod
    def of(cls, topics: Mapping[str, Mapping[int | str, int]]) -> Cut:
        """From the nested form of JSON and TOML: `{"orders": {"0": 17}}`."""
        return cls(
            {
                Partition(topic, int(number)): int(offset)
                for topic, numbers in topics.items()
                for number, offset in numbers.items()
            }
        )

    def nested(self) -> dict[str, dict[str, int]]:
        topics: dict[str, dict[str, int]] = {}
        for partition, offset in self._next.items():
            topics.setdefault(partition.topic, {})[str(partition.number)] = offset
        return topics

    @property
    def topics(self) -> list[str]:
        return sorted({partition.topic for partition in self._next})

    @property
    def current(self) -> Cut:
        """Without topics that were dropped and created again since: they get no more records."""
        newest = newest_names(self.topics)
        return Cut({p: o for p, o in self._next.items() if newest[p.kafka_topic] == p.topic})

    def __getitem__(self, partition: Partition) -> int:
        return self._next[partition]

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._next)

    def __len__(self) -> int:
        return len(self._next)

    def __hash__(self) -> int:
        return hash(tuple(self._next.items()))

    def __repr__(self) -> str:
        return f"Cut({self.nested()})"

    @property
    def text(self) -> str:
        return ", ".join(f"{partition}@{offset}" for partition, offset in self._next.items())

    def reaches(self, other: Mapping[Partition, int]) -> bool:
        """Is this cut at or beyond `other` in every partition that `other` names?"""
        return all(self._next.get(partition, 0) >= offset for partition, offset in other.items())

    def to(self, other: Cut) -> list[Range]:
        """The ranges from this cut to `other`; both must have the same partitions."""
        return [Range(partition, self._next[partition], end) for partition, end in other.items()]

    def continues(self, other: Mapping[Partition, int]) -> bool:
        """Is this cut equal to `other` in every partition that `other` names?"""
        return all(self._next.get(partition) == offset for partition, offset in other.items())

    def after(self, ranges: Iterable[Range]) -> Cut:
        """The cut after `ranges`, which must start exactly at this cut.

        A partition that is not in this cut starts where its range starts.
        """
        ahead = dict(self._next)
        for range_ in join(ranges):
            expected = ahead.get(range_.partition, range_.start)
            if range_.start > expected:
                missing = Range(range_.partition, expected, range_.start)
                raise Gap(
                    f"cannot continue: expected {range_.partition} at {expected}, found "
                    f"{range_}; missing {missing}"
                )
            if range_.start < expected:
                raise Overlap(
                    f"cannot continue: expected {range_.partition} at {expected}, found "
                    f"{range_}; [{range_.start}, {min(expected, range_.end)}) would be "
                    "written twice"
                )
            ahead[range_.partition] = range_.end
        return Cut(ahead)
