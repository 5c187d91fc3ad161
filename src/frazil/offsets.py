"""Half-open ranges of offsets, cuts, and their algebra. Pure; standard library only.

A *range* is `[start, end)` of one topic partition. A *cut* says for each topic partition which
offset comes next. A batch takes the stream from one cut to the next: `cut.after(ranges)`.

A stream that is no Kafka topic has positions that only its source can read. There the batches
themselves are counted, in a partition of their own (`BATCHES`): batch n is its range `[n, n+1)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from frazil.errors import ConfigError, Gap, Overlap


class Partition(NamedTuple):
    """`topic` as the ledger calls it: where Kafka's topic was dropped and made again, and taken
    over by epoch 7, that is `orders@7`. Its offsets begin anew, and are other records."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.number}]"

    @property
    def kafka_topic(self) -> str:
        """As Kafka calls it; there no name has an `@`."""
        return self.topic.partition("@")[0]

    @property
    def generation(self) -> int:
        """The epoch that took the topic over; 0: it is the first of its name."""
        return int(self.topic.partition("@")[2] or 0)


def newest_names(topics: Iterable[str]) -> dict[str, str]:
    """Of Kafka's topics, by what the ledger calls them: the newest name of each."""
    found: dict[str, str] = {}
    for topic in topics:
        base = Partition(topic, 0).kafka_topic
        known = found.setdefault(base, topic)
        if Partition(topic, 0).generation > Partition(known, 0).generation:
            found[base] = topic
    return found


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
    """Touching ranges made one, per partition. An overlap raises; a hole leaves two ranges."""
    joined: list[Range] = []
    for each in sorted(ranges):
        last = joined[-1] if joined else None
        if last is None or last.partition != each.partition or last.end < each.start:
            joined.append(each)
        elif last.end > each.start:
            raise Overlap(f"cannot join ranges: {last} and {each} overlap")
        else:
            joined[-1] = Range(each.partition, last.start, each.end)
    return joined


class Cut(Mapping[Partition, int]):
    """Immutable: topic partition → next offset. Sorted, comparable, hashable."""

    __slots__ = ("_next",)

    def __init__(self, offsets: Mapping[Partition, int] | None = None) -> None:
        self._next = dict(sorted((offsets or {}).items()))

    @classmethod
    def of(cls, topics: Mapping[str, Mapping[int | str, int]]) -> Cut:
        """From the nested form that JSON and TOML have: `{"orders": {"0": 17}}`."""
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
        """Without topics that were dropped and made again since: nothing more comes of them."""
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

    def reaches(self, other: Mapping[Partition, int]) -> bool:
        """Is this cut at or beyond `other` in every partition that `other` names?"""
        return all(self._next.get(partition, 0) >= offset for partition, offset in other.items())

    def to(self, other: Cut) -> list[Range]:
        """The ranges from this cut to `other`, which name the same partitions."""
        return [Range(partition, self._next[partition], end) for partition, end in other.items()]

    def continues(self, other: Mapping[Partition, int]) -> bool:
        """Does this cut stand exactly where `other` stands? It may know more partitions."""
        return all(self._next.get(partition) == offset for partition, offset in other.items())

    def after(self, ranges: Iterable[Range]) -> Cut:
        """The cut after `ranges`, which must go on exactly where this one stands.

        A partition this cut does not know begins where its range begins.
        """
        ahead = dict(self._next)
        for each in join(ranges):
            here = ahead.get(each.partition, each.start)
            if each.start > here:
                missing = Range(each.partition, here, each.start)
                raise Gap(
                    f"cannot go on: expected {each.partition} at {here}, found {each}; "
                    f"missing {missing}"
                )
            if each.start < here:
                raise Overlap(
                    f"cannot go on: expected {each.partition} at {here}, found {each}; "
                    f"[{each.start}, {min(here, each.end)}) would be there twice"
                )
            ahead[each.partition] = each.end
        return Cut(ahead)
