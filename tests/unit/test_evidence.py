"""What `frazil audit` says of a sink beside its tables: nothing committed, and how far behind."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from frazil.accounting import OutcomeCounts, RangeCounts
from frazil.auditing import broker, evidence
from frazil.auditing.evidence import AuditLimits, AuditResult
from frazil.auditing.report import Finding, PartitionReport, TableReport
from frazil.errors import ConfigError, NotProven, Unavailable
from frazil.iceberg.table import Snapshot
from frazil.kafka.planner import TopicIdentity, Watermarks
from frazil.offsets import Cut, Partition, Range
from frazil.render import json_values, show
from tests.unit import test_locate
from tests.unit.test_locate import P, Q, tally


class FakePlain(test_locate.FakePlain):
    def map_files(
        self,
        make: Callable[[pa.Table], Any],
        columns: Sequence[str],
        where: Mapping[str, Collection[str]] | None = None,
    ) -> Iterator[Any]:
        yield make(self.rows(columns, where))

    def added(self, snapshot_id: int) -> list[Any]:
        return []

    def tags(self) -> dict[str, Snapshot]:
        return {n: snapshot for n in self.refs if n != "main" and (snapshot := self.tagged(n))}


class World(test_locate.World):
    """The same sink; Kafka's ends are what a test says they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: Mapping[Partition, int]) -> None:
        monkeypatch.setattr(test_locate, "FakePlain", FakePlain)
        super().__init__("db.a")
        self.ends: dict[Partition, int] = dict(ends)
        self.asked = 0
        self.lost: list[Range] = []
        self.error: Exception | None = None
        monkeypatch.setattr(broker.Planner, "of", lambda *_, **__: self)

    def batch(self, **more: Any) -> None:
        super().batch(**more)
        for name, counts in more.items():
            if isinstance(counts, RangeCounts) and name != "total":  # as Iceberg counts them
                newest = next(self.tables[f"db.{name}"].history("main"))
                newest.summary["added-records"] = str(counts.written)  # type: ignore[index]

    def origin(self) -> tuple[TopicIdentity, list[Partition]]:
        self.asked += 1
        if self.error:
            raise self.error
        return TopicIdentity("", {}), sorted(self.ends)

    def watermarks(self, partitions: list[Partition]) -> Watermarks:
        return Watermarks(Cut(dict.fromkeys(partitions, 0)), Cut(self.ends))

    def replaced(self, position: Cut, marks: Watermarks) -> list[Range]:
        return self.lost

    def audit(self, **more: Any) -> AuditResult:
        return evidence.of_config(self.config, self.open, say=self.lines.append, **more)

    @property
    def lines(self) -> list[str]:
        return self.__dict__.setdefault("_lines", [])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, {P: 0, Q: 0})


def shown(result: AuditResult) -> str:
    out = io.StringIO()
    show(result, Console(file=out, width=200))
    return out.getvalue()


def test_a_sink_that_never_committed_while_records_wait_is_not_proven(world: World):
    world.ends[P] = 3000
    result = world.audit()
    assert result.verdict == "nothing_committed"
    assert {report.verdict for report in result.reports} == {"nothing_committed"}
    assert "3,000 offsets wait in Kafka" in shown(result)
    assert "proven" not in shown(result)


def test_a_sink_that_never_committed_over_empty_topics_is_proven(world: World):
    result = world.audit()
    assert (result.verdict, result.lag) == ("proven", 0)
    assert "nothing waits in Kafka" in shown(result)


@pytest.mark.parametrize("ask", [None, False])
def test_a_sink_that_never_committed_is_not_proven_without_an_answer_of_kafka(
    world: World, ask: bool | None
):
    world.error = Unavailable("cannot describe topics: no answer")
    result = world.audit(ask=ask)
    assert (result.verdict, result.lag) == ("nothing_committed", None)
    assert world.asked == (ask is None)
    assert bool(world.lines) == (ask is None)


def test_a_sink_whose_tables_are_not_made_yet_never_committed(world: World):
    del world.tables["db.a"]
    config = test_locate.World("db.a").config
    result = evidence.of_config(config, world.open, ask=False)
    assert result.verdict == "nothing_committed"
    assert [report.table for report in result.reports] == ["db.index"]
    assert result.absent == ("db.a",)


def test_a_table_that_got_nothing_yet_is_proven_where_the_stream_went_on(world: World):
    world.batch(total=tally(0, 10, 0, skipped=10))
    assert world.audit(ask=False).verdict == "proven"


def test_by_its_name_alone_a_table_that_a_sink_never_committed_to_is_not_proven(world: World):
    """A claim does not name the index: nobody can tell what the sink did elsewhere."""
    assert evidence.of_table(world.open, "db.a", "main").verdict == "nothing_committed"


def test_the_lag_is_reported_beside_the_verdict(world: World):
    world.batch(a=tally(0, 10))
    world.ends[P] = 25
    result = world.audit()
    assert (result.verdict, result.lag) == ("proven", 15)
    assert "15 offsets wait in Kafka and are not part of this proof; the last commit was at" in (
        shown(result)
    )
    last = json_values(result)[-1]
    assert (last["lag"], last["verdict"]) == (15, "proven")
    assert last["last_commit_at"] is not None


def test_a_broker_that_does_not_answer_changes_no_verdict_unless_it_must(world: World):
    world.batch(a=tally(0, 10))
    world.error = Unavailable("cannot describe topics: no answer")
    result = world.audit()
    assert (result.verdict, result.lag) == ("proven", None)
    assert world.lines == ["what waits in Kafka is not known: cannot describe topics: no answer"]
    with pytest.raises(Unavailable):
        world.audit(ask=True)
    world.error = ConfigError("cannot read topic orders: it does not exist")
    assert world.audit().verdict == "proven"


def test_more_lag_than_allowed_is_behind(world: World):
    world.batch(a=tally(0, 10))
    world.ends[P] = 25
    assert world.audit(limits=AuditLimits(lag=15)).verdict == "proven"
    result = world.audit(limits=AuditLimits(lag=14))
    assert result.verdict == "behind"
    assert [str(finding) for finding in result.findings] == [
        "behind: 15 offsets wait in Kafka; expected at most 14"
    ]


def test_a_last_commit_that_is_too_old_is_behind_only_while_records_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    world.batch(a=tally(0, 10))
    for snapshot in world.index.snapshots.values():
        object.__setattr__(snapshot, "timestamp_ms", 1_000_000)
    monkeypatch.setattr(time, "time", lambda: 1_100.0)
    world.ends[P] = 10
    assert world.audit(limits=AuditLimits(age=60)).verdict == "proven"
    world.ends[P] = 11
    assert world.audit(limits=AuditLimits(age=101)).verdict == "proven"
    result = world.audit(limits=AuditLimits(age=60))
    assert result.verdict == "behind"
    assert "the last commit was 100 s ago; expected within 60 s" in str(result.findings[0])


def test_claims_are_no_commits(world: World, monkeypatch: pytest.MonkeyPatch):
    """A sink that dies at each start claims its tables each time."""
    world.batch(a=tally(0, 10))
    committed = max(world.index.snapshots)
    for epoch in range(2, 5):
        test_locate.TableCommitter(world.index, "main", "s", epoch, test_locate.FakeClock()).claim(
            lambda was: was
        )
    for snapshot_id, snapshot in world.index.snapshots.items():
        moment = 1_000_000 if snapshot_id <= committed else 1_090_000
        object.__setattr__(snapshot, "timestamp_ms", moment)
    monkeypatch.setattr(time, "time", lambda: 1_100.0)
    world.ends[P] = 11
    assert len(world.index.snapshots) > 3
    assert world.audit(limits=AuditLimits(age=60)).verdict == "behind"


@pytest.mark.parametrize("limits", [AuditLimits(lag=10**9), AuditLimits(age=10**9)])
@pytest.mark.parametrize("ask", [None, False])
def test_a_limit_that_cannot_be_checked_counts_as_exceeded(
    world: World, limits: AuditLimits, ask: bool | None
):
    world.batch(a=tally(0, 10))
    world.error = Unavailable("cannot describe topics: no answer")
    result = world.audit(limits=limits, ask=ask)
    assert result.verdict == "cannot_tell"
    assert "how far the sink is behind" in str(result.findings[0])


def test_a_proof_says_which_partitions_do_not_begin_at_their_first_offset():
    lines = [
        PartitionReport(Range(P, 7, 10), OutcomeCounts(3)),
        PartitionReport(Range(Q, 0, 4), OutcomeCounts(4)),
    ]
    text = shown(AuditResult([TableReport("db.a", "s", tuple(lines), 2, examined=("ledger",))]))
    assert f"{P} begins at offset 7: earlier offsets are not part of this proof" in text
    assert text.count("begins at offset") == 1


def test_what_was_read_and_is_no_longer_in_the_topic_is_unaccounted(world: World):
    world.ends = {P: 30, Q: 0}
    world.batch(a=tally(0, 20))
    assert world.audit().verdict == "proven"
    world.lost = [Range(P, 12, 20)]
    result = world.audit()
    assert result.verdict == "unaccounted"
    assert f"{Range(P, 12, 20)} were read, but the topic was truncated" in shown(result)


def test_a_result_that_is_not_proven_raises_its_findings():
    finding = Finding("gap", "offsets are missing")
    report = TableReport("db.t", "s", (), 0, (finding,))
    with pytest.raises(NotProven, match=r"gap: db\.t: .*offsets are missing"):
        evidence.AuditResult([report]).raise_unless_proven()
    evidence.AuditResult([TableReport("db.t", "s", (), 0, ())]).raise_unless_proven()
