"""Verdict, health of a sink and of a process, heartbeats: from facts, at a time that tests move."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frazil.cli.health import probe
from frazil.commit.committer import Progress
from frazil.config.model import Config, from_document
from frazil.errors import (
    ConfigError,
    Fenced,
    FrazilError,
    Gap,
    IdentityMismatch,
    Unavailable,
    Undecodable,
    kinds,
)
from frazil.monitoring import process_health
from frazil.monitoring.health_state import (
    REMEDIES,
    STATES,
    SinkFacts,
    StageLag,
    Wait,
    judge,
    remedy_of,
)
from frazil.monitoring.process_health import HealthFile, healthz, readyz
from frazil.monitoring.setup import monitoring_of
from frazil.monitoring.sink_health import SinkHealth, late_after, moment
from frazil.offsets import BATCHES, Cut, Partition
from frazil.ops import run_state
from frazil.steps import COMMIT_FAILED, Step

P, Q = Partition("t", 0), Partition("t", 1)
AWAY = Unavailable("cannot reach the catalog")
GONE = IdentityMismatch("cannot commit to table db.b: it is gone", hint="restore the table")


def config(**sections: Any) -> Config:
    document = {
        "sink": {"id": "s", "topics": ["t"], **sections.pop("sink", {})},
        "kafka": {"bootstrap.servers": "b"},
        "decode": {"format": "raw"},
        "table": [{"name": "db.t"}],
        **sections,
    }
    return from_document(document)


# ── the verdict ──────────────────────────────────────────────────────────────────────────────────

WAITS = (Wait("table db.a", "no answer", 5.0, AWAY), Wait("table db.b", "gone", 9.0, GONE, True))


@pytest.mark.parametrize(
    ("facts", "text", "operator"),
    [
        (SinkFacts(), "starting: taking over from the previous run", False),
        (SinkFacts(running=True), "ok", False),
        (SinkFacts(running=True, lag=StageLag(0)), "ok", False),
        (SinkFacts(running=True, lag=StageLag(9, seconds=59.0)), "ok", False),
        (
            SinkFacts(running=True, lag=StageLag(8, 1, seconds=61.0), rate=1234.5),
            "catching up: 9 offsets behind, 1,234 rows/s",
            False,
        ),
        (
            SinkFacts(running=True, lag=StageLag(1, seconds=1.0), reached=False),
            "catching up: 1 offset behind",
            False,
        ),
        (
            SinkFacts(running=True, waits=WAITS[:1], lag=StageLag(9, seconds=999.0)),
            "waiting: table db.a: no answer",
            False,
        ),
        (
            SinkFacts(running=True, waits=WAITS),
            "waiting: table db.b: gone; table db.a: no answer",
            True,
        ),
        (
            SinkFacts(running=True, waits=[Wait(f"table {n}", "x", float(n)) for n in range(9)]),
            "waiting: table 0: x; table 1: x; table 2: x; and 6 more",
            False,
        ),
        (SinkFacts(running=True, ended=True), "stopped", False),
        (
            SinkFacts(running=True, ended=True, error=AWAY, waits=WAITS),
            "failed: cannot reach the catalog",
            False,
        ),
        (SinkFacts(ended=True, error=Gap("cannot go on")), "failed: cannot go on", True),
        (
            SinkFacts(ended=True, error=Undecodable("cannot decode t[0] offset 5: canary")),
            "failed: cannot decode t[0] offset 5 (Undecodable; values are not logged)",
            True,
        ),
    ],
)
def test_a_sink_has_one_verdict(facts: SinkFacts, text: str, operator: bool):
    verdict = judge(facts)
    assert (verdict.text, verdict.operator) == (text, operator)
    assert verdict.state in STATES


def test_a_wait_for_an_operator_has_the_remedy_of_its_error():
    assert judge(SinkFacts(running=True, waits=WAITS)).remedy.startswith("restore the table")
    assert "the sink retries" in judge(SinkFacts(running=True, waits=WAITS[:1])).remedy


@pytest.mark.parametrize("name", [n for n, k in kinds().items() if k.__module__ == "frazil.errors"])
def test_every_error_has_a_remedy(name: str):
    error = kinds()[name]("cannot x")
    assert remedy_of(error)
    assert remedy_of(kinds()[name]("cannot x", hint="do this")) == "do this"
    assert set(REMEDIES) <= set(kinds())


# ── the health of a sink ─────────────────────────────────────────────────────────────────────────


class World:
    """A run of values, and its health, at a time that tests move."""

    def __init__(self, given: Config | None = None) -> None:
        self.now = 1_000_000.0
        self.run: Any = SimpleNamespace(
            epoch=3, position=Cut({P: 10}), staged=Cut({P: 10}), progress=Progress()
        )
        self.health = SinkHealth(given or config(), lambda: self.now)

    def started(self, ends: Cut | None = None) -> World:
        """`ends` of the topics; by default all is committed."""
        self.health.started(self.run)
        self.health.saw_ends(Cut({P: 10}) if ends is None else ends)
        return self

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.health.tick(self.run)

    def step(self, name: str, batch: int = 0, **values: Any) -> None:
        self.health.step(Step(name, batch, self.now, **values))

    @property
    def verdict(self) -> str:
        return self.health.verdict().text


def test_offsets_are_counted_at_the_stage_that_they_have_reached():
    world = World()
    world.health.started(world.run)
    assert world.health.lag() == StageLag(None)
    assert world.verdict == "catching up: the ends of the topics are not known yet"
    world.health.saw_ends(Cut({P: 100}))
    assert world.health.lag() == StageLag(90, seconds=0.0)
    world.step("planned", records=30)
    assert world.health.lag() == StageLag(60, 30, seconds=0.0)
    world.run.staged = Cut({P: 40})
    world.step("staged")
    assert world.health.lag() == StageLag(60, 0, 30, seconds=0.0)
    world.run.progress.stuck["db.t"] = "no answer"
    world.after(7)
    assert world.health.lag() == StageLag(60, 0, 0, 30, seconds=7.0)
    del world.run.progress.stuck["db.t"]
    world.run.position = world.run.staged = Cut({P: 100})
    world.after(1)
    assert world.health.lag() == StageLag(0, seconds=0.0)


def test_a_backlog_is_caught_up_with_and_fresh_records_are_not_late():
    world = World().started(Cut({P: 100}))
    assert world.verdict == "catching up: 90 offsets behind"
    world.run.position = world.run.staged = Cut({P: 100})
    assert world.verdict == "ok"
    world.after(5)
    world.health.saw_ends(Cut({P: 150}))
    assert world.verdict == "ok", "a commit is due once a minute"
    world.after(late_after(config()))
    assert world.verdict == "ok"
    world.after(1)
    assert world.verdict == "catching up: 50 offsets behind"


def test_the_age_of_the_lag_is_that_of_the_oldest_end_that_is_not_reached():
    world = World().started()
    for second in range(1000):
        world.health.saw_ends(Cut({P: 10 + second}))
        world.after(1)
    lag = world.health.lag()
    assert lag is not None
    assert lag.seconds == pytest.approx(999, abs=20)
    world.run.position = world.run.staged = Cut({P: 900})
    lag = world.health.lag()
    assert lag is not None
    assert lag.seconds == pytest.approx(109, abs=20)


def test_partitions_that_are_new_and_batches_of_a_dataframe_are_no_lag():
    world = World().started()
    world.run.position = world.run.staged = Cut({P: 10, BATCHES: 4})
    world.health.saw_ends(Cut({P: 10, Q: 5000}))
    assert world.health.lag() == StageLag(0, seconds=0.0)


def test_a_table_whose_commits_fail_is_waited_for_until_it_takes_one():
    world = World().started()
    world.step("commit", table="db.t")
    world.step(COMMIT_FAILED, -1, table="db.t", error=AWAY)
    world.run.progress.stuck["db.t"] = AWAY.message
    world.after(1)
    assert world.verdict == "waiting: table db.t: cannot reach the catalog"
    assert world.health.values()["last_failure"]["error"]["class"] == "Unavailable"
    world.run.progress.stuck.clear()
    world.after(1)
    assert world.verdict == "ok"
    assert world.health.values()["last_failure"]["table"] == "db.t", "it is remembered"


def test_the_index_is_named_by_its_table():
    world = World().started()
    world.run.progress.stuck["(index)"] = "no answer"
    world.after(1)
    assert world.verdict == "waiting: table db.frazil_index: no answer"


def test_a_commit_without_an_answer_becomes_a_wait():
    world = World().started()
    world.step("commit", table="db.t")
    world.after(59)
    assert world.verdict == "ok"
    world.after(2)
    assert world.verdict == "waiting: table db.t: its commit has taken 61 s so far"
    world.step("committed", table="db.t")
    assert world.verdict == "ok"


def test_kafka_without_an_answer_is_a_wait_until_it_answers():
    world = World().started()
    world.health.saw_no_ends(Unavailable("cannot reach b:9092"))
    assert world.verdict == "waiting: Kafka: cannot reach b:9092"
    world.health.saw_ends(Cut({P: 10}))
    assert world.verdict == "ok"


def test_a_stream_at_its_bounds_is_a_wait():
    world = World().started()
    world.run.progress.blocked = "64 batches wait for a commit; the bound is 64"
    world.after(1)
    assert world.verdict.startswith("waiting: the stream: 64 batches wait")


def test_rows_rejections_and_the_rate_are_counted():
    world = World().started()
    world.now += 10
    world.step("written", 1, records=400, rejected={"json": (3, "t[0] offset 7: found 'canary'")})
    world.step("written", 2, records=600)
    world.step("done", 2)
    values = world.health.values()
    assert (values["rows"], values["rate"], values["rejected"]) == (1000, 100.0, {"json": 3})
    assert values["last_rejected"]["location"] == "t[0] offset 7"
    assert "canary" not in json.dumps(values)
    world.now += 3600
    assert world.health.values()["rate"] == 0.0


# ── the health of a process ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def alone() -> Iterator[None]:
    process_health._sinks.clear()
    yield
    process_health._sinks.clear()


def answers() -> tuple[int, int]:
    return healthz()[0], readyz()[0]


def test_probes_distinguish_a_wait_from_a_dead_stream(alone: None):
    assert answers() == (503, 503), "nothing runs"
    world = World(config(health={"max_wait": "5m"}))
    process_health.add(world.health)
    assert answers() == (200, 503), "it starts"
    world.started()
    assert answers() == (200, 200)
    world.run.progress.blocked = "no answer"
    world.after(1)
    assert answers() == (200, 200), "a short wait"
    world.after(299)
    assert answers() == (200, 200)
    for _ in range(3):
        world.after(60)
    assert answers() == (200, 503), "a long wait: nothing is gained by a restart"
    world.run.progress.blocked = ""
    world.after(1)
    assert answers() == (200, 200)
    world.now += 121
    assert answers() == (503, 503), "nobody looks after the run: it stands still"
    world.after(1)
    assert answers() == (200, 200)
    world.health.ended(Gap("cannot go on"))
    assert answers() == (503, 503)


def test_a_start_that_hangs_is_unhealthy_after_a_bound(alone: None):
    world = World(config(health={"max_start": "10m"}))
    process_health.add(world.health)
    world.now += 599
    assert (answers(), world.verdict) == (
        (200, 503),
        "starting: taking over from the previous run",
    )
    world.step("commit", table="db.t")
    world.step("committed", table="db.t")
    world.now += 600
    assert answers() == (200, 503), "a step is progress"
    world.now += 1
    assert answers() == (503, 503)
    assert world.verdict == "waiting: the start: no progress for 601 s"
    assert "frazil check CONFIG" in world.health.verdict().remedy
    world.started()
    assert answers() == (200, 200)


def test_a_table_that_waits_for_an_operator_is_not_ready_at_once(alone: None):
    world = World().started()
    process_health.add(world.health)
    world.step(COMMIT_FAILED, -1, table="db.b", error=GONE)
    world.run.progress.stuck["db.b"] = GONE.message
    world.after(1)
    assert answers() == (200, 503)


def test_of_several_sinks_one_that_failed_does_not_make_the_process_unhealthy(alone: None):
    first, second = World().started(), World(config(sink={"id": "s2"})).started()
    process_health.add(first.health)
    process_health.add(second.health)
    assert answers() == (200, 200)
    first.health.ended(Gap("cannot go on"))
    assert answers() == (200, 503)
    _, kind, body = readyz()
    assert kind == "application/json"
    shown = {sink["sink"]: sink["verdict"] for sink in json.loads(body)["sinks"]}
    assert shown == {"s": "failed: cannot go on", "s2": "ok"}
    again = World().started()
    process_health.add(again.health)
    assert answers() == (200, 200), "the sink was started again"
    again.health.ended(None)
    assert answers() == (200, 200), "one that was stopped is not missed"
    second.health.ended(AWAY)
    assert answers() == (200, 503), "it is started again after a pause, or its process ends"
    second.health.ended(None)
    assert answers() == (503, 503)


def test_a_health_file_is_replaced_as_a_whole_and_ages(alone: None, tmp_path: Path):
    path = tmp_path / "health.json"
    world = World().started()
    process_health.add(world.health)
    file = HealthFile.open(str(path))
    again = HealthFile.open(str(path))
    assert again is file
    now = time.time()
    assert probe(path, False, 30, now).exit_code == probe(path, True, 30, now).exit_code == 0
    assert probe(path, False, 30, now + 60).exit_code == 3
    assert "hangs" in probe(path, False, 30, now + 60).reason
    world.health.ended(Gap("cannot go on", hint="look"))
    file.close()
    again.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["health.json"]
    report = probe(path, False, 30, time.time())
    assert report.exit_code == 3
    assert [*report.lines()][1] == "s: failed: cannot go on; remedy: look"
    assert probe(tmp_path / "none", False, 30, now).exit_code == 3
    with pytest.raises(ConfigError, match="cannot write health file"):
        HealthFile.open(str(tmp_path / "no" / "folder"))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b'{"written_at": 5}', b"[" * 100_000]
)
def test_a_file_that_is_no_health_file_is_named(content: bytes, tmp_path: Path):
    path = tmp_path / "health"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="it is not a health file"):
        probe(path, False, 30, 0.0)


# ── heartbeats, as others read them ──────────────────────────────────────────────────────────────

NOW = 2_000_000.0


def beat(age: float, epoch: int = 3, **values: Any) -> dict[int, dict[str, Any]]:
    world = World().started()
    world.run.epoch = epoch
    world.now = NOW - age
    world.health.tick(world.run)
    return {epoch: {**world.health.values(), "host": "a", "pid": 7, "interval": 10.0, **values}}


def test_a_fresh_heartbeat_is_a_run_with_its_own_verdict():
    state = run_state.run_state(beat(12), 3, NOW)
    assert (state["verdict"], state["run"]["state"]) == ("ok", "running")
    assert (state["run"]["host"], state["run"]["pid"], state["run"]["heartbeat_age"]) == (
        "a",
        7,
        12,
    )


def test_a_killed_process_is_not_running_since_its_last_heartbeat():
    state = run_state.run_state(beat(3600), 3, NOW)
    since = moment(NOW - 3600)
    assert state["verdict"] == (
        f"failed: not running since about {since} (last heartbeat, from a, pid 7)"
    )
    assert (state["run"]["state"], state["operator"]) == ("silent", True)
    assert "start the sink again" in state["remedy"]
    assert run_state.run_state(beat(95, interval=60.0), 3, NOW)["run"]["state"] == "running"


@pytest.mark.parametrize("error", [None, Gap("cannot go on", hint="look")])
def test_a_run_that_ended_says_how(error: FrazilError | None):
    world = World().started()
    world.health.ended(error)
    beats = {3: {**world.health.values(), "interval": 10.0}}
    state = run_state.run_state(beats, 3, NOW)
    assert state["run"]["state"] == "ended"
    assert state["verdict"] == ("failed: cannot go on" if error else "stopped")
    after_an_operator = run_state.run_state(beats, 4, NOW)
    assert after_an_operator["run"]["state"] == ("fenced" if error else "ended")


def test_a_run_that_another_took_over_from_is_fenced():
    state = run_state.run_state(beat(2), 5, NOW)
    assert state["verdict"].startswith("failed: epoch 3 (a, pid 7) was fenced by epoch 5")
    assert state["error"]["class"] == "Fenced"
    both = run_state.run_state({**beat(2), **beat(1, 4, host="b", pid=8)}, 4, NOW)
    assert both["verdict"] == "ok"
    assert both["fenced_runs"] == [{"epoch": 3, "fenced_by": 4, "host": "a", "pid": 7}]
    assert run_state.run_state({**beat(99), **beat(1, 4)}, 4, NOW)["fenced_runs"] == []


def test_without_a_heartbeat_nothing_is_claimed():
    state = run_state.run_state({}, 3, NOW)
    assert (state["state"], state["run"]) == ("unknown", {"state": "none"})


class Folder:
    location = "/lake/index"

    def __init__(self, **files: bytes) -> None:
        self.files = {f"/lake/index/stage/s/{name}": content for name, content in files.items()}

    def listing(self, prefix: str) -> list[str]:
        return [path for path in self.files if path.startswith(prefix)]

    def fetch(self, path: str) -> bytes:
        return self.files[path]


def test_heartbeats_that_are_torn_or_none_are_left_out():
    good = json.dumps(beat(1)[3]).encode()
    folder = Folder(
        **{
            "heartbeat-3": good,
            "heartbeat-4": good[:50],
            "heartbeat-5": b"[]",
            "heartbeat-6": b'{"written_at": "yesterday"}',
            ".heartbeat-7.crc": b"",
            "heartbeat-x": good,
            "3-0-abc.json": b"",
        }
    )
    assert set(run_state.read(config(), folder)) == {3}  # type: ignore[arg-type]


def test_a_fenced_run_says_so_in_its_last_heartbeat():
    world = World().started()
    world.health.ended(Fenced("cannot commit: sink s has a newer run; this one is epoch 3"))
    state = run_state.run_state({3: {**world.health.values(), "interval": 10.0}}, 3, NOW)
    assert state["error"]["class"] == "Fenced"
    assert "newer run" in state["verdict"]


# ── a start ──────────────────────────────────────────────────────────────────────────────────────


def start_beat(age: float, error: FrazilError | None = None, **values: Any) -> dict[str, Any]:
    world = World()
    world.now = NOW - age
    world.step("commit", table="db.t")
    if error is not None:
        world.health.ended(error)
    return {**world.health.values(), "host": "b", "pid": 8, "interval": 10.0, **values}


def test_a_start_counts_where_no_run_is_alive():
    start = start_beat(2)
    first = run_state.run_state({}, None, NOW, start)
    assert (first["verdict"], first["run"]["state"], first["run"]["epoch"]) == (
        "starting: taking over from the previous run",
        "starting",
        None,
    )
    assert run_state.run_state(beat(3600), 3, NOW, start)["run"]["state"] == "starting"
    assert run_state.run_state(beat(60), 4, NOW, start)["run"]["state"] == "starting", "claimed"
    assert run_state.run_state(beat(3), 3, NOW, start)["run"]["state"] == "running"
    assert run_state.run_state(beat(60), 3, NOW, start_beat(70))["run"]["state"] == "silent"


def test_a_start_that_failed_says_why():
    error = Unavailable("cannot ask the catalog for db.t: found none", hint="look at the server")
    state = run_state.run_state({}, None, NOW, start_beat(3600, error))
    assert (state["verdict"], state["remedy"], state["error"], state["run"]["state"]) == (
        "failed: cannot ask the catalog for db.t: found none",
        "look at the server",
        {
            "class": "Unavailable",
            "message": "cannot ask the catalog for db.t: found none",
            "hint": "look at the server",
        },
        "ended",
    )
    killed = run_state.run_state({}, None, NOW, start_beat(3600))
    assert killed["verdict"].startswith("failed: a start shows no sign since about ")
    assert (killed["run"]["state"], killed["operator"]) == ("silent", True)


def local(tmp_path: Path, **sections: Any) -> Config:
    catalog = {"type": "hadoop", "warehouse": str(tmp_path / "lake")}
    return config(catalog=catalog, **sections)


def shown(given: Config) -> dict[str, Any]:
    return run_state.run_state({}, None, time.time(), run_state.read_start(given, None))


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_first_start_shows_before_there_is_a_table(alone: None, tmp_path: Path):
    given = local(tmp_path)
    monitoring = monitoring_of(given)
    wait_for(lambda: shown(given)["state"] == "starting")
    monitoring.ended(ConfigError("cannot start: no Java", hint="set JAVA_HOME"))
    assert shown(given)["verdict"] == "failed: cannot start: no Java"
    assert shown(given)["remedy"] == "set JAVA_HOME"
    # The next one has claimed: from now on it has a heartbeat with its epoch.
    monitoring = monitoring_of(given)
    wait_for(lambda: shown(given)["state"] == "starting")
    run: Any = SimpleNamespace(
        epoch=1, position=Cut(), staged=Cut(), progress=Progress(), advice=[]
    )
    run.beat, run.ends = lambda _: None, Cut
    monitoring.started(run)
    wait_for(lambda: run_state.read_start(given, None) is None)
    monitoring.ended(None)
    assert run_state.read_start(given, None) is None


def test_a_start_that_is_refused_at_once_shows(alone: None, tmp_path: Path):
    given = local(tmp_path, health={"file": str(tmp_path / "absent" / "health.json")})
    with pytest.raises(ConfigError, match="cannot write health file"):
        monitoring_of(given)
    assert shown(given)["verdict"].startswith("failed: cannot write health file")


def test_without_heartbeats_a_start_writes_nothing(alone: None, tmp_path: Path):
    given = local(tmp_path, health={"heartbeat_interval": "never"})
    monitoring_of(given).ended(AWAY)
    assert not (tmp_path / "lake").exists()


def test_the_pid_of_the_process_is_shown():
    assert World().started().health.values()["pid"] == os.getpid()
