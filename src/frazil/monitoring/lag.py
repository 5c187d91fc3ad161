"""Lag of a sink in offsets and seconds. Pure.

In: the ends of the topics and the committed position, from time to time. Out: the lag by topic and
partition. The age of the oldest offset that is not committed is the time since an end beyond the
position was first seen; before there is such an observation, the age of the partition's newest
committed event, if known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from frazil.offsets import BATCHES, Partition

#: Ends that are remembered for each partition; of more, every other one is forgotten.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Lag:
    records: int
    seconds: float


class LagTracker:
    def __init__(self) -> None:
        #: partition → (time, end), oldest first: the end was reached at this time or before
        self._ends: dict[Partition, deque[tuple[float, int]]] = {}

    def lag(
        self,
        ends: Mapping[Partition, int],
        position: Mapping[Partition, int],
        event_times: Mapping[Partition, int],
        now: float,
    ) -> dict[Partition, Lag]:
        """`event_times`: newest committed event by partition, in microseconds; `now`: seconds."""
        for partition in [known for known in self._ends if known not in ends]:
            del self._ends[partition]
        return {
            partition: self._of(
                partition, end, position.get(partition, 0), event_times.get(partition), now
            )
            for partition, end in ends.items()
            if partition != BATCHES
        }

    def _of(
        self, partition: Partition, end: int, position: int, event_time: int | None, now: float
    ) -> Lag:
        seen = self._ends.setdefault(partition, deque())
        if not seen or end > seen[-1][1]:
            seen.append((now, end))
        elif end < seen[-1][1]:  # the topic was made again
            seen.clear()
            seen.append((now, end))
        while len(seen) > 1 and seen[1][1] <= position:
            seen.popleft()
        if len(seen) > _REMEMBERED:
            known = list(seen)  # the first two tell the age while the position stands still
            seen.clear()
            seen.extend([*known[:2], *known[2:-1:2], known[-1]])
        if end <= position:
            return Lag(0, 0.0)
        first = next(at for at, reached in seen if reached > position)
        if seen[0][1] > position and event_time is not None:
            first = min(first, event_time / 1_000_000)
        return Lag(end - position, max(0.0, now - first))
