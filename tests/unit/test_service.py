"""Several sinks in one process: what a change means, what a sink does next, which files count."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from frazil.config.model import Config
from frazil.config.sections import (
    ConfigSections,
    RouteConfig,
    SinkConfig,
    TableConfig,
)
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Expired,
    Fenced,
    FrazilError,
    Gap,
    Unavailable,
)
from frazil.service import service as services
from frazil.service.changes import EFFECTS, LIVE, OUTSIDE, REFUSED, RESTART, changes
from frazil.service.definitions import (
    ConfigFiles,
    Definition,
    Definitions,
    FixedConfigs,
    Several,
    source_of,
)
from frazil.service.service import Service
from frazil.service.sink_thread import SinkThread
from frazil.service.supervision import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    UNKNOWN_FAILURES,
    Adapt,
    End,
    Restart,
    Sleep,
    Start,
    State,
    Stop,
    Supervision,
    Watch,
)
from frazil.spark.shared_session import SharedSession
from frazil.sql import definitions as definitions_of_sql
from frazil.sql.definition_files import DefinitionFiles

WITHIN = 20.0


def config(sink: str = "orders", /, **sections: Any) -> Config:
    given: dict[str, Any] = {
        "sink": {"id": sink, "topics": ["orders"]},
        "kafka": {"bootstrap.servers": "b:1"},
        "tables": [{"name": "shop.orders"}],
        "decode": {"format": "json"},
        "catalog": {"type": "hadoop", "warehouse": "/lake"},
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values} if isinstance(values, dict) else values
    return Config(**given)


def defined(sink: str = "orders", origin: str = "orders.toml", /, **sections: Any) -> Definition:
    return Definition(config(sink, **sections), origin)


# ── what a change means ──────────────────────────────────────────────────────────────────────────


def test_effects_are_those_of_keys_that_are_there():
    names = {"tables": "table", "routes": "route"}
    kinds = {"sink": SinkConfig, "tables": TableConfig, "routes": RouteConfig}
    sections = {names.get(f.name, f.name): f for f in dataclasses.fields(ConfigSections)}
    for section, keys in EFFECTS.items():
        field = sections[section]
        if section != "catalog" and keys.keys() != {"*"}:
            kind: Any = kinds.get(field.name, field.default_factory)
            assert keys.keys() <= {f.name for f in dataclasses.fields(kind)}


def test_what_takes_effect_at_once_is_what_a_run_adapts():
    """`Run.adapt` is the other side of this list."""
    live = {(s, k) for s, keys in EFFECTS.items() for k, effect in keys.items() if effect is LIVE}
    bounds = {"max_pending_batches", "max_pending_bytes", "max_pending_age"}
    assert live == {
        *(("sink", key) for key in ("commit_interval", *bounds)),
        *(("table", key) for key in ("commit_interval", "commit_bytes", "priority")),
    }


@pytest.mark.parametrize(
    ("effect", "key", "sections"),
    [
        (LIVE, "[sink] commit_interval", {"sink": {"commit_interval": "5s"}}),
        (
            LIVE,
            "[[table]] shop.orders priority",
            {"tables": [{"name": "shop.orders", "priority": 2}]},
        ),
        (RESTART, "[sink] topics", {"sink": {"topics": ["orders", "refunds"]}}),
        (RESTART, "[kafka] client.id", {"kafka": {"client.id": "x"}}),
        (RESTART, "[catalog] io-impl", {"catalog": {"io-impl": "x"}}),
        (
            RESTART,
            "[spark] spark.sql.shuffle.partitions",
            {"spark": {"spark.sql.shuffle.partitions": "2"}},
        ),
        (RESTART, "[[route]]", {"routes": [{"to": ["shop.orders"]}]}),
        (RESTART, "[dead_letters] table", {"dead_letters": {"table": "shop.dead"}}),
        (
            RESTART,
            "[[table]] shop.more",
            {
                "tables": [{"name": "shop.orders"}, {"name": "shop.more"}],
                "routes": [{"to": ["shop.more"]}],
            },
        ),
        (OUTSIDE, "[log] level", {"log": {"level": "DEBUG"}}),
        (REFUSED, "[sink] index_table", {"sink": {"index_table": "shop.other"}}),
        (REFUSED, "[sink] index_table", {"tables": [{"name": "store.orders"}]}),
        (REFUSED, "[catalog] warehouse", {"catalog": {"warehouse": "/other"}}),
        (REFUSED, "[spark] spark.driver.memory", {"spark": {"spark.driver.memory": "2g"}}),
        (REFUSED, "[spark] spark.sql.extensions", {"spark": {"spark.sql.extensions": "x"}}),
    ],
)
def test_each_change_is_named_with_its_effect(effect: Any, key: str, sections: dict[str, Any]):
    differences = changes(config(), config(**sections))
    assert key in differences.of(effect).split(", ")
    assert changes(config(**sections), config(**sections)).keys == ()


def test_the_default_index_written_out_is_no_change():
    assert not changes(config(), config(sink={"index_table": "shop.frazil_index"}))


# ── what a sink does next ────────────────────────────────────────────────────────────────────────


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def sink(clock: Time, lines: list[str]) -> Supervision:
    made = Supervision(defined(), lines.append, clock)
    assert made.next() == Start(made.definition)
    made.started()
    assert made.next() == Watch()
    return made


def test_a_live_change_is_adapted_and_any_other_restarts(sink: Supervision, lines: list[str]):
    live = defined(sink={"commit_interval": "5s"})
    sink.define(live)
    assert sink.next() == Adapt(live)
    assert sink.next() == Watch()
    other = defined(sink={"topics": ["orders", "refunds"]})
    sink.define(other)
    assert sink.next() == Restart(other)
    sink.stopped()
    assert sink.next() == Start(other)
    assert lines == [
        "[sink] commit_interval changed: in effect now",
        "restarting: [sink] topics changed",
    ]


def test_a_change_of_the_log_restarts_nothing(sink: Supervision, lines: list[str]):
    sink.define(defined(log={"level": "DEBUG"}))
    assert isinstance(sink.next(), Watch)
    assert lines[-1].startswith("[log] level changed: in a process of several sinks")


def test_a_change_that_would_leave_the_ledger_behind_is_refused_once(
    sink: Supervision, lines: list[str]
):
    sink.define(defined(catalog={"warehouse": "/other"}))
    assert sink.next() == Watch()
    assert sink.next() == Watch()
    assert len(lines) == 1
    assert "[catalog] warehouse changed, and the ledger" in lines[0]
    assert "the sink goes on as before" in lines[0]
    assert sink.status.refused
    sink.define(defined())
    assert sink.next() == Watch()
    assert not sink.status.refused


def test_a_changed_definition_that_cannot_start_gives_way_to_the_former(sink: Supervision):
    former, bad = sink.definition, defined(sink={"topics": ["nothing"]})
    sink.define(bad)
    assert sink.next() == Restart(bad)
    sink.stopped()
    assert sink.next() == Start(bad)
    sink.failed(ConfigError("cannot read topic nothing: it does not exist"))
    assert sink.next() == Start(former)
    sink.started()
    assert sink.next() == Watch()
    assert "nothing" in sink.status.refused
    assert sink.status.state == "running"


def test_a_definition_is_replaced_only_for_errors_that_an_operator_must_fix(
    sink: Supervision, clock: Time
):
    new = defined(sink={"topics": ["orders", "refunds"]})
    sink.define(new)
    sink.next()
    sink.stopped()
    sink.failed(Unavailable("cannot reach the catalog"))
    clock.now += FIRST_PAUSE
    assert sink.next() == Start(new)
    sink.started()
    sink.failed(Gap("cannot go on"))
    assert sink.status.state == "failed"
    assert isinstance(sink.next(), Sleep)


def test_pauses_grow_and_are_short_again_after_a_long_run(sink: Supervision, clock: Time):
    pauses = []
    for _ in range(9):
        sink.failed(Unavailable("away"))
        action = sink.next()
        assert isinstance(action, Sleep)
        assert action.seconds is not None
        pauses.append(action.seconds)
        clock.now += action.seconds
        assert isinstance(sink.next(), Start)
        sink.started()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    clock.now += LONGEST_PAUSE
    sink.failed(CommitStateUnknown("no answer"))
    assert sink.next() == Sleep(FIRST_PAUSE)


def test_what_frazil_does_not_know_is_not_tried_for_ever(sink: Supervision, clock: Time):
    for _ in range(UNKNOWN_FAILURES - 1):
        sink.failed(FrazilError("unexpected error: KeyError"))
        assert sink.status.state == "retrying"
        clock.now += LONGEST_PAUSE
        assert isinstance(sink.next(), Start)
        sink.started()
    sink.failed(FrazilError("unexpected error: KeyError"))
    assert sink.status.state == "failed"


@pytest.mark.parametrize(
    ("error", "state"), [(Fenced("newer"), "fenced"), (Expired("gone"), "failed"), (None, "ended")]
)
def test_a_final_state_lasts_until_the_definition_changes(
    sink: Supervision, clock: Time, error: FrazilError | None, state: str
):
    sink.ended() if error is None else sink.failed(error)
    assert sink.status.state == state
    clock.now += 1e6
    assert sink.next() == Sleep()
    touched = dataclasses.replace(sink.definition, version="later")
    sink.define(touched)
    assert sink.next() == Start(touched)


def test_a_definition_may_stop_the_sink(sink: Supervision):
    still = dataclasses.replace(sink.definition, running=False)
    sink.define(still)
    assert sink.next() == Stop()
    sink.stopped()
    assert sink.next() == Sleep()
    assert sink.status.state == "stopped"
    again = defined()
    sink.define(again)
    assert sink.next() == Start(again)


def test_a_failure_during_the_stop_is_reported_and_not_retried(sink: Supervision):
    sink.leave("the service ends")
    assert sink.next() == Stop()
    sink.failed(Unavailable("cannot end: 3 batches are staged"))
    assert sink.next() == End()
    assert (sink.status.state, str(sink.status.error)) == (
        "stopped",
        "cannot end: 3 batches are staged",
    )


class SupervisionModel(RuleBasedStateMachine):
    """Any orders, any failures, at any time: never two runs, nothing after the end, nothing
    without a person after what a person must mend."""

    @initialize()
    def begin(self) -> None:
        self.clock = Time()
        self.sink = Supervision(defined(), lambda line: None, self.clock)
        self.live = self.left = self.ended = self.hopeless = False
        self.number = 0

    def _definition(self, kind: str) -> Definition:
        self.number += 1
        sections: dict[str, Any] = {
            "live": {"sink": {"commit_interval": f"{self.number}s"}},
            "restart": {"sink": {"topics": [f"t{self.number}"]}},
            "refused": {"catalog": {"warehouse": f"/w{self.number}"}},
            "touch": {},
            "still": {},
        }[kind]
        made = defined(**sections)
        return dataclasses.replace(made, version=str(self.number), running=kind != "still")

    @rule(kind=st.sampled_from(["live", "restart", "refused", "touch", "still"]))
    def define(self, kind: str) -> None:
        self.sink.define(self._definition(kind))
        self.hopeless = False

    @rule()
    def leave(self) -> None:
        self.sink.leave("it ends")
        self.left = True

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        error=st.sampled_from(
            [None, Unavailable("u"), FrazilError("f"), Gap("g"), Fenced("n"), ConfigError("c")]
        )
    )
    def step(self, error: FrazilError | None) -> None:
        if self.ended:
            return
        action = self.sink.next()
        if isinstance(action, (Watch, Adapt, Restart, Stop)):
            assert self.live
        if isinstance(action, Start):
            assert not self.live
            assert not self.left
            assert not self.hopeless
            assert action.definition.running
            if error is None:
                self.sink.started()
                self.live = True
            else:
                self._fails(error)
        elif isinstance(action, Watch) and error is not None:
            self._fails(error)
        elif isinstance(action, Restart) and error is not None:
            self.sink.refuse("it cannot")
        elif isinstance(action, (Stop, Restart)):
            self.sink.stopped()
            self.live = False
        elif isinstance(action, End):
            assert self.left
            self.ended = True

    def _fails(self, error: FrazilError) -> None:
        self.sink.failed(error)
        self.live = False
        self.hopeless = self.sink.state in (State.FAILED, State.FENCED)

    @invariant()
    def it_is_as_it_says(self) -> None:
        assert (self.sink.state is State.RUNNING) == self.live

    def teardown(self) -> None:
        """From any state it ends."""
        if not hasattr(self, "sink"):
            return
        self.sink.leave("the end")
        for _ in range(3):
            if isinstance(action := self.sink.next(), End):
                return
            assert action == Stop()
            self.sink.stopped()
        raise AssertionError("it does not end")


SupervisionModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestSupervision = SupervisionModel.TestCase


# ── which files count ────────────────────────────────────────────────────────────────────────────


TOML = """
[sink]
id = "{0}"
topics = ["{1}"]
[kafka]
"bootstrap.servers" = "b:1"
[decode]
format = "json"
[catalog]
type = "hadoop"
warehouse = "/lake"
[[table]]
name = "shop.{0}"
"""


def write(folder: Path, name: str, sink: str, topic: str = "t") -> Path:
    path = folder / name
    path.write_text(TOML.format(sink, topic))
    return path


def test_a_folder_defines_a_sink_for_each_file(tmp_path: Path):
    write(tmp_path, "a.toml", "a")
    write(tmp_path, "b.toml", "b")
    write(tmp_path, ".hidden.toml", "c")
    write(tmp_path, "d.toml~", "d")
    now = ConfigFiles([tmp_path]).read()
    assert {sink: made.origin for sink, made in now.sinks.items()} == {"a": "a.toml", "b": "b.toml"}
    assert now.problems == {}


def test_a_file_counts_when_two_reads_agree(tmp_path: Path):
    path = write(tmp_path, "a.toml", "a")
    files = ConfigFiles([tmp_path])
    first = files.read().sinks["a"]
    path.write_text(TOML.format("a", "half")[:40])  # it is being written
    assert files.read().sinks["a"] is first
    write(tmp_path, "a.toml", "a", "whole")
    assert files.read().sinks["a"] is first
    assert files.read().sinks["a"].config.sink.topics == ("whole",)
    assert files.read().sinks["a"] is files.read().sinks["a"]


def test_a_file_that_is_not_read_takes_no_sink_away(tmp_path: Path):
    path = write(tmp_path, "a.toml", "a")
    files = ConfigFiles([tmp_path])
    first = files.read().sinks["a"]
    for content in ("[sink\n", "", "[sink]\nid = 'a'\n[nonsense]\n"):
        path.write_text(content)
        files.read()
        now = files.read()
        assert now.sinks == {}
        assert now.keeps(first)
    path.unlink()
    files.read()
    assert not files.read().keeps(first)


def test_a_renamed_file_and_swapped_contents_change_no_sink(tmp_path: Path):
    one, other = write(tmp_path, "a.toml", "a"), write(tmp_path, "b.toml", "b")
    files = ConfigFiles([tmp_path])
    first = files.read().sinks
    one.rename(tmp_path / "c.toml")
    files.read()
    now = files.read()
    assert now.sinks["a"].origin == "c.toml"
    assert now.sinks["a"].config == first["a"].config
    texts = (tmp_path / "c.toml").read_text(), other.read_text()
    (tmp_path / "c.toml").write_text(texts[1])
    other.write_text(texts[0])
    files.read()
    now = files.read()
    assert {s: made.origin for s, made in now.sinks.items()} == {"a": "b.toml", "b": "c.toml"}
    assert now.problems == {}


def test_an_id_in_two_files_is_a_problem_of_both(tmp_path: Path):
    write(tmp_path, "a.toml", "a")
    files = ConfigFiles([tmp_path])
    first = files.read().sinks["a"]
    write(tmp_path, "b.toml", "a", "other")
    files.read()
    now = files.read()
    assert now.sinks == {}
    assert now.keeps(first)
    assert {name: problem.message for name, problem in now.problems.items()} == dict.fromkeys(
        ["a.toml", "b.toml"], "cannot run sink a: it is defined 2 times: in a.toml and b.toml"
    )


def test_a_folder_that_cannot_be_listed_takes_no_sink_away(tmp_path: Path):
    folder = tmp_path / "sinks"
    folder.mkdir()
    write(folder, "a.toml", "a")
    files = ConfigFiles([folder])
    first = files.read().sinks["a"]
    folder.rename(tmp_path / "away")
    for _ in range(3):
        now = files.read()
        assert now.keeps(first)
        assert list(now.problems) == [str(folder)]
    (tmp_path / "away").rename(folder)
    files.read()
    assert files.read().problems == {}


def test_touching_a_file_makes_another_version_of_it(tmp_path: Path):
    path = write(tmp_path, "a.toml", "a")
    files = ConfigFiles([tmp_path])
    first = files.read().sinks["a"]
    os.utime(path, ns=(1, 1))
    files.read()
    now = files.read().sinks["a"]
    assert now.config == first.config
    assert now.version != first.version


SQL = """
CREATE CONNECTION k TO KAFKA (BROKER 'b:1');
CREATE CONNECTION c TO ICEBERG CATALOG (TYPE = 'hadoop', WAREHOUSE = '/lake');
CREATE SINK {0} FROM KAFKA CONNECTION k (TOPIC '{1}') FORMAT JSON
  TO ICEBERG CATALOG c NAMESPACE 'shop' TABLE '{0}';
"""


def test_statements_define_sinks_too_and_stop_and_start_them(tmp_path: Path):
    path = tmp_path / "all.sql"
    path.write_text(SQL.format("a", "t"))
    write(tmp_path, "b.toml", "b")
    source = source_of([tmp_path])
    first = source.read().sinks
    assert {sink: (d.origin, d.running) for sink, d in first.items()} == {
        "a": ("all.sql", True),
        "b": ("b.toml", True),
    }

    def taken() -> Definitions:
        source.read()
        return source.read()

    path.write_text(SQL.format("a", "t") + "STOP SINK a;")
    assert source.read().sinks["a"] == first["a"]
    assert not taken().sinks["a"].running
    path.write_text(SQL.format("a", "other"))
    assert taken().sinks["a"].config.sink.topics == ("other",)
    path.write_text(SQL.format("a", "other") + "CREATE nonsense")
    now = taken()
    assert list(now.sinks) == ["b"]
    assert now.keeps(first["a"])
    path.unlink()
    assert not taken().keeps(first["a"])


def test_a_file_of_statements_may_be_named_and_define_several(tmp_path: Path):
    path = tmp_path / "all.sql"
    create = SQL.format("a", "t")
    path.write_text(create + create[create.index("CREATE SINK") :].replace("SINK a", "SINK b"))
    assert set(source_of([path]).read().sinks) == {"a", "b"}


def test_a_folder_of_toml_files_alone_is_left_as_it_is(tmp_path: Path):
    write(tmp_path, "a.toml", "a")
    source = source_of([tmp_path])
    source.read()
    with source.watching():
        assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]
    (tmp_path / "b.sql").write_text(SQL.format("b", "t"))
    source = source_of([tmp_path])
    source.read()
    with source.watching():
        assert DefinitionFiles(tmp_path).watched()
    assert not DefinitionFiles(tmp_path).watched()


def test_files_and_configs_together_have_one_sink_of_an_id(tmp_path: Path):
    source = Several([FixedConfigs([config("a")]), ConfigFiles([write(tmp_path, "x.toml", "a")])])
    assert "in config 1 and x.toml" in source.read().problems["x.toml"].message


# ── threads, with runs that are none ─────────────────────────────────────────────────────────────


class FakeRun:
    """A run that does as the test says."""

    def __init__(self, config: Config, log: list[tuple[str, str]], errors: list[Exception]) -> None:
        if config.sink.topics == ("refused",):
            raise ConfigError("cannot read it")
        self.config, self.log, self.errors = config, log, errors
        self.over = False

    def start(self) -> None:
        self._log("start")
        if self.errors:
            raise self.errors.pop(0)

    def watch(self, ordered: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + WITHIN
        while not ordered():
            if self.over:
                return True
            if self.errors:
                raise self.errors.pop(0)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return False

    def adapt(self, config: Config) -> None:
        self._log("adapt")

    def stop(self, error: FrazilError | None = None) -> None:
        self._log(f"stop {type(error).__name__}" if error else "stop")

    def cancel(self) -> None:
        self._log("cancel")

    def _log(self, event: str) -> None:
        self.log.append((self.config.sink.id, event))


class World:
    """A service whose runs are fakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.removed: list[str] = []
        self.errors: dict[str, list[Exception]] = {}
        self.runs: dict[str, FakeRun] = {}
        self.failure: FrazilError | None = None
        world = self

        class FakeSession:
            def __init__(self, configs: Any, **_: Any) -> None:
                self.configs = configs

            @property
            def failure(self) -> FrazilError | None:
                return world.failure

            def forget(self, sink: str) -> None: ...

        monkeypatch.setattr(services, "SharedSession", FakeSession)
        monkeypatch.setattr(services, "ObservedRun", self._make)
        monkeypatch.setattr("frazil.service.supervision.FIRST_PAUSE", 0.01)

    def _make(self, config: Config, *_: Any) -> FakeRun:
        sink = config.sink.id
        made = FakeRun(config, self.log, self.errors.setdefault(sink, []))
        self.runs[sink] = made
        return made

    def service(self, *paths: Path, watch: float | None = 0.01) -> Service:
        return Service(
            ConfigFiles(paths),
            watch=watch,
            say=lambda sink, text: self.said.append(f"{sink}: {text}"),
            removed=self.removed.append,
        )

    def of(self, sink: str) -> list[str]:
        return [event for name, event in self.log if name == sink]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def eventually(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WITHIN
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for sink in "abc":
        write(tmp_path, f"{sink}.toml", sink)
    return tmp_path


def test_one_sink_in_trouble_does_not_stop_the_others(world: World, folder: Path):
    world.errors["b"] = [Unavailable("away"), Unavailable("away")]
    world.errors["c"] = [Gap("a range is gone")]
    with world.service(folder).start() as service:
        eventually(lambda: service.sinks["c"].state == "failed")
        eventually(lambda: service.sinks["b"].state == "running")
        assert service.sinks["a"].state == "running"
        assert (world.of("a"), service.sinks["b"].restarts) == (["start"], 2)
        assert world.of("c") == ["start", "stop Gap"]
        assert not service.over
        (folder / "c.toml").touch()
        eventually(lambda: service.sinks["c"].state == "running")
    assert {status.state for status in service.sinks.values()} == {"stopped"}
    assert world.of("a") == ["start", "stop"]


def test_a_failed_sink_is_forgotten_with_its_definition(world: World, folder: Path):
    world.errors["c"] = [Gap("a range is gone")]
    with world.service(folder).start() as service:
        eventually(lambda: service.sinks["c"].state == "failed")
        (folder / "c.toml").unlink()
        eventually(lambda: world.removed)
    assert (world.removed, service.sinks["c"].state) == (["c"], "failed")


def test_a_defect_is_a_failure_of_its_sink_only(world: World, folder: Path):
    world.errors["a"] = [KeyError("x")] * UNKNOWN_FAILURES
    with world.service(folder).start() as service:
        eventually(lambda: service.sinks["a"].state == "failed")
        error = service.sinks["a"].error
        assert error is not None
        assert error.message == "unexpected error: KeyError: 'x'"
        assert "Traceback" in error.detail
        assert [service.sinks[sink].state for sink in "bc"] == ["running"] * 2


def test_a_defect_in_a_look_does_not_end_the_looks(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with world.service(folder).start() as service:
        take = service._take
        defects = [KeyError("x")]

        def broken(now: Definitions) -> None:
            if defects:
                raise defects.pop()
            take(now)

        monkeypatch.setattr(service, "_take", broken)
        write(folder, "d.toml", "d")
        eventually(lambda: "d" in service.sinks)
    assert ": cannot look at the definitions: KeyError('x')" in world.said


def test_a_defect_in_one_definition_concerns_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = definitions_of_sql.config_of

    def config_of(objects: Any, name: str, *rest: Any) -> Any:
        return {}["defect"] if name == "bad" else made(objects, name, *rest)

    monkeypatch.setattr(definitions_of_sql, "config_of", config_of)
    (tmp_path / "connections.sql").write_text(
        "CREATE CONNECTION k TO KAFKA (BROKER 'b:1');"
        "CREATE CONNECTION c TO ICEBERG CATALOG (TYPE 'hadoop', WAREHOUSE '/lake');"
    )
    for sink in ("bad", "good"):
        (tmp_path / f"{sink}.sql").write_text(
            f"CREATE SINK {sink} FROM KAFKA CONNECTION k (TOPIC 't') FORMAT JSON "
            "TO ICEBERG CATALOG c TABLE 'shop.t'"
        )
    look = source_of([tmp_path]).read()
    assert list(look.sinks) == ["good"]
    assert "KeyError: 'defect'" in look.problems["bad.sql"].message


def test_files_that_come_change_and_go_are_followed(world: World, folder: Path):
    with world.service(folder).start() as service:
        eventually(lambda: all(s.state == "running" for s in service.sinks.values()))
        write(folder, "d.toml", "d")
        eventually(lambda: "d" in service.sinks and service.sinks["d"].state == "running")
        write(folder, "a.toml", "a", "other")
        eventually(lambda: world.of("a") == ["start", "stop", "start"])
        (folder / "b.toml").unlink()
        eventually(lambda: service.sinks["b"].state == "stopped")
        write(folder, "b.toml", "b")
        eventually(lambda: world.of("b") == ["start", "stop", "start"])
        (folder / "c.toml").write_text("[sink")
        eventually(lambda: "c.toml" in service.problems)
        eventually(lambda: sum("cannot read config" in line for line in world.said) == 1)
        write(folder, "c.toml", "c", "refused")
        eventually(lambda: service.sinks["c"].refused)
        assert world.of("c") == ["start"]
    assert "a: restarting: [sink] topics changed" in world.said
    assert "b: stopping: b.toml no longer defines it" in world.said
    assert sum("not TOML" in line for line in world.said) == 1, "once, and not at every look"


def test_it_is_over_when_no_sink_will_run_by_itself(world: World, folder: Path):
    world.errors["a"], world.errors["b"] = [Fenced("newer")], [Gap("gap")]
    with world.service(folder).start() as service:
        assert not service.wait(0.1)
        eventually(lambda: "c" in world.runs)
        world.runs["c"].over = True
        assert service.wait(WITHIN)
        states = {sink: status.state for sink, status in service.sinks.items()}
    assert states == {"a": "fenced", "b": "failed", "c": "ended"}


def test_two_files_with_one_id_start_nothing(world: World, folder: Path):
    write(folder, "z.toml", "a")
    with pytest.raises(ConfigError, match=r"defined 2 times: in a\.toml and z\.toml"):
        world.service(folder).start()
    assert world.log == []


def test_a_folder_without_a_sink_is_refused(world: World, tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no file of a sink") as error:
        world.service(tmp_path).start()
    assert "frazil sql FILE --definitions DIR defines one" in error.value.hint
    (tmp_path / "x.toml").touch()
    with pytest.raises(ConfigError, match=r"there is no \[sink\]"):
        world.service(tmp_path).start()


def test_when_sparks_process_has_ended_nothing_is_tried_again(world: World, folder: Path):
    with world.service(folder).start() as service:
        eventually(lambda: all(s.state == "running" for s in service.sinks.values()))
        world.failure = FrazilError("cannot continue: Spark's process has ended")
        world.errors["a"].append(ConnectionRefusedError("refused"))
        assert service.wait(WITHIN)
        with pytest.raises(FrazilError, match="process has ended"):
            service.check()


def test_a_start_that_waits_for_a_server_ends_with_the_service():
    log: list[tuple[str, str]] = []
    begun, cancelled = threading.Event(), threading.Event()

    class Waiting(FakeRun):
        def start(self) -> None:
            begun.set()
            assert cancelled.wait(WITHIN)
            raise Unavailable("cannot reach the broker")

        def cancel(self) -> None:
            cancelled.set()

    thread = SinkThread(defined(), lambda c: Waiting(c, log, []), lambda line: None)
    thread.start()
    assert begun.wait(WITHIN)
    thread.leave("the service ends")
    assert thread.join(WITHIN)
    assert thread.status.state == "stopped"


# ── one process for all ──────────────────────────────────────────────────────────────────────────


def spark_of(*configs: Config) -> SharedSession:
    session: Any = SimpleNamespace(newSession=None)
    shared = SharedSession({}, spark=session)
    shared._given = False  # as if started by the configs
    for one in configs:
        shared.check(one.sink.id, one) if shared._settings else shared.take(one.sink.id, one)
    return shared


@pytest.mark.parametrize("key", ["spark.driver.memory", "spark.master", "spark.jars"])
def test_settings_of_the_process_must_agree(key: str):
    values = ("local[1,4]", "local[2,4]")
    one, other = (config(s, spark={key: value}) for s, value in zip("ab", values, strict=True))
    with pytest.raises(ConfigError) as raised:
        spark_of(one, other)
    assert raised.value.message == (
        f"cannot run sinks a and b in one process: [spark] {key} concerns the whole process, and "
        "is 'local[1,4]' for a, 'local[2,4]' for b"
    )
    spark_of(one, config("b", spark={key: values[0]}), config("c"))


def test_a_process_of_several_sinks_shares_fairly(monkeypatch: pytest.MonkeyPatch):
    settings: list[dict[str, str]] = []
    monkeypatch.setattr(
        "frazil.spark.shared_session.started", lambda given, *_: settings.append(given)
    )
    SharedSession({"a": config("a"), "b": config("b")})
    fifo = {"spark": {"spark.scheduler.mode": "FIFO"}}
    SharedSession({"a": config("a", **fifo)})
    assert [given["spark.scheduler.mode"] for given in settings] == ["FAIR", "FIFO"]


def test_settings_of_a_session_are_each_sinks_own():
    spark_of(*(config(s, spark={"spark.sql.shuffle.partitions": s}) for s in ("1", "2")))


def test_a_secret_of_the_process_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    key = "spark.hadoop.fs.s3a.secret.key"
    monkeypatch.setenv("FIRST_SECRET", "hunter2")
    monkeypatch.setenv("OTHER_SECRET", "hunter3")
    one, other = (config(n, spark={key: f"env:{n}_SECRET"}) for n in ("FIRST", "OTHER"))
    with pytest.raises(ConfigError) as raised:
        spark_of(one, other)
    assert "hunter" not in str(raised.value)


def test_what_the_process_has_not_loaded_needs_another_start():
    shared = spark_of(config("a"))
    for sections in ({"spark": {"spark.executor.cores": "2"}}, {"catalog": {"s3.endpoint": "x"}}):
        with pytest.raises(ConfigError, match="the whole process, which") as e:
            shared.check("b", config("b", **sections))
        assert e.value.hint == "start the process again"
