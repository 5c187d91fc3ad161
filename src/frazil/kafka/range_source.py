"""Planned offset ranges as a stream of Spark. Runs on the driver, and in Spark's planning process.

In: a config, a start and the topics' identity, as options. Out: a Python DataSource whose rows are
ranges, not records. Spark plans in a process of its own without Py4J, so all it needs travels as
options, secrets as references only. `frazil.kafka.planner` decides what to read; `BatchGathering`
decides when.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from frazil import format_version, logs
from frazil.config.model import Config
from frazil.config.settings import Settings
from frazil.config.units import duration, size
from frazil.errors import FrazilError, Unavailable, encode_for_spark
from frazil.kafka.planner import Planner, TopicIdentity, split
from frazil.offsets import Cut, Range

FORMAT = "frazil_ranges"
RANGES = "topic string, partition int, start bigint, end bigint, pieces int, origin string"


#: Version of an offset as Spark keeps it.
OFFSET_VERSION = 1


def spark_offset(
    cut: Cut, *, start: Cut, cluster: str, topics: Mapping[str, str]
) -> dict[str, Any]:
    """An offset as Spark keeps it in its checkpoint: the cut, the stream's first cut, and the
    identity of the topics."""
    return {
        "version": OFFSET_VERSION,
        "cut": cut.nested(),
        "start": start.nested(),
        "cluster": cluster,
        "topics": dict(topics),
    }


def check_offset(offset: Mapping[str, Any]) -> None:
    """Raises Fatal for an offset in a checkpoint of a newer Frazil."""
    format_version.check(
        "read an offset in Spark's checkpoint", offset.get("version"), OFFSET_VERSION
    )


class RangeDataSource(DataSource):
    """Spark's view of the planner: a stream whose rows are ranges."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return RANGES

    def streamReader(self, schema: Any) -> RangeStreamReader:
        if _plans_for_spark():
            logs.of_environment()
        return RangeStreamReader(json.loads(self.options["plan"]))


def _plans_for_spark() -> bool:
    """Is this process one that Spark has started, and not the driver?"""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


#: Files by which the driver tells the planning process how long records may gather.
_HURRY, _PACE = "hurry", "pace"


class BatchGathering:
    """How long records may wait in Kafka for a batch, and whether a caller waits for them.

    Spark plans in a process of its own on the driver's machine, so the driver signals it by files:
    while `hurry` exists, nothing gathers; `pace`, once it exists, says how long.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._folder = ""
        self._closed = False
        self._hurrying = 0
        self._lock = threading.Lock()

    @property
    def hurry(self) -> str:
        """The file's path."""
        with self._lock:
            if not self._folder:
                self._folder = tempfile.mkdtemp(prefix="frazil-gathering-")
            return os.path.join(self._folder, _HURRY)

    def adapt(self, seconds: float) -> None:
        """From now on records may wait so long."""
        with self._lock:
            self.seconds = seconds
            if self._folder:  # else nothing is planned yet, or no more
                path = os.path.join(self._folder, _PACE)
                with open(f"{path}.new", "w") as file:
                    file.write(repr(seconds))
                os.replace(f"{path}.new", path)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """A caller waits for the available records: nothing gathers meanwhile."""
        if not self.seconds or self._closed:
            yield
            return
        path = self.hurry
        self._wait(path, +1)
        try:
            yield
        finally:
            self._wait(path, -1)

    def _wait(self, path: str, more: int) -> None:
        with self._lock:
            self._hurrying += more
            if not self._folder:
                return  # closed meanwhile
            if self._hurrying:
                open(path, "w").close()
            else:
                os.remove(path)

    def close(self) -> None:
        with self._lock:
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder, self._closed = "", True


def options(
    config: Config,
    *,
    start: Cut,
    origin: TopicIdentity,
    parallelism: int,
    until: Cut | None,
    gathering: BatchGathering | None = None,
) -> dict[str, str]:
    """Options for the planning process. Secrets stay `env:` and `file:` references."""
    gather = gathering.seconds if gathering and until is None else 0.0
    plan = {
        "kafka": dict(config.kafka),
        "topics": config.sink.topics,
        "pattern": config.sink.topic_pattern,
        "cluster": origin.cluster,
        "known": dict(origin.topics),
        "leaders": Cut(origin.leaders).nested(),
        "start": start.nested(),
        "until": None if until is None else until.nested(),
        "records": config.sink.max_records_per_trigger,
        "bytes": size(config.sink.max_bytes_per_trigger),
        "task": config.sink.max_records_per_task,
        "parallelism": parallelism,
        "patience": duration(config.sink.unavailable_timeout),
        "gather": gather,
        "hurry": gathering.hurry if gathering and until is None else "",
    }
    return {"plan": json.dumps(plan)}


class RangeStreamReader(DataSourceStreamReader):
    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self._planner: Planner | None = None
        self._start = Cut.of(self._plan["start"])
        self._at = self._start
        self._until = None if self._plan["until"] is None else Cut.of(self._plan["until"])
        leaders = Cut.of(self._plan["leaders"])
        self._origin = TopicIdentity(self._plan["cluster"], self._plan["known"], leaders)
        self._silent_since: float | None = None
        self._planned_at: float | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._offset(self._start)  # Spark may ask after the first latestOffset

    def latestOffset(self) -> dict[str, Any]:
        try:
            self._advance()
        except FrazilError as error:
            raise encode_for_spark(error) from None
        return self._offset(self._at)

    def _offset(self, cut: Cut) -> dict[str, Any]:
        known = self._planner.known if self._planner else self._origin
        return spark_offset(cut, start=self._start, cluster=known.cluster, topics=known.topics)

    def _advance(self) -> None:
        """One step, or none while Kafka is unavailable, for at most the configured patience."""
        try:
            if self._planner is None:
                self._planner = Planner(
                    Settings(self._plan["kafka"]).resolved(),
                    topics=tuple(self._plan["topics"]),
                    pattern=self._plan["pattern"],
                    origin=self._origin,
                )
            ahead = self._planner.advance(
                self._at,
                records=self._plan["records"],
                bytes=self._plan["bytes"],
                until=self._until,
            )
            # A new partition enters the cut meanwhile: its records come with the cut after that.
            self._at = ahead if self._due(ahead) else Cut({**ahead, **self._at})
            self._silent_since = None
        except Unavailable:
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since > self._plan["patience"]:
                raise

    def _due(self, ahead: Cut) -> bool:
        """Is it time for a batch up to `ahead`? The first batch, a full one, and one that a caller
        waits for are due at once; others gather records for as long as they may."""
        if not any(offset > self._at[p] for p, offset in ahead.items() if p in self._at):
            return True  # no records
        now = time.monotonic()
        rested = self._planned_at is None or now - self._planned_at >= self._gather
        assert self._planner is not None
        if not (rested or self._planner.full or os.path.exists(self._plan["hurry"])):
            return False
        self._planned_at = now
        return True

    @property
    def _gather(self) -> float:
        """Seconds that records may wait for their batch, as the driver says it now."""
        given: float = self._plan["gather"]
        if not self._plan["hurry"]:
            return given
        try:
            with open(os.path.join(os.path.dirname(self._plan["hurry"]), _PACE)) as file:
                return float(file.read())
        except FileNotFoundError:
            return given

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        try:
            check_offset(start)
            check_offset(end)
        except FrazilError as error:
            raise encode_for_spark(error) from None
        begin, reach = Cut.of(start["cut"]), Cut.of(end["cut"])
        if start == end:
            # Spark's first call for a restarted query, with its position. Start and topic identity
            # in the options were for the first run.
            self._start, self._at = Cut.of(start["start"]), reach
            self._origin = TopicIdentity(start["cluster"], start["topics"])
            return []
        ranges = [Range(p, begin[p], offset) for p, offset in reach.items() if p in begin]
        pieces = split(ranges, most=self._plan["task"], parallelism=self._plan["parallelism"])
        known = self._planner.known if self._planner else self._origin
        origin = json.dumps([known.cluster, dict(known.topics)])
        return [InputPartition((*p.partition, p.start, p.end, len(pieces), origin)) for p in pieces]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        yield partition.value

    def commit(self, end: dict[str, Any]) -> None: ...

    def stop(self) -> None: ...
