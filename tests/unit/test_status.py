"""What `frazil status` says of a sink, from metadata alone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from frazil.commit.protocol import TableCommitter
from frazil.config.model import from_document
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.tags import ledger_tag
from frazil.offsets import Cut
from frazil.ops.offsets import show_offsets
from frazil.ops.startup_checks import in_doubt
from frazil.ops.status import _counts, _kinds, _last_move, _summary, status
from frazil.render import output, show
from tests.fakes import FakeClock
from tests.unit.test_locate import P, World, tally
from tests.unit.test_static_table import Made, data, parquet

CONFIG = from_document(
    {
        "sink": {"id": "s", "topics": ["t"], "commit_interval": "1m"},
        "kafka": {"bootstrap.servers": "b"},
        "decode": {"format": "raw"},
        "table": [{"name": "db.t"}],
    }
)


@pytest.mark.parametrize(
    ("lag", "ago", "state"),
    [
        (0, None, "nothing committed yet; nothing waits"),
        (1, None, "nothing committed yet; 1 offset waits"),
        (0, 7200, "last commit 2 h ago; nothing waits"),
        (5, 12, "last commit 12 s ago; 5 offsets wait"),
        (5, 181, "last commit 3 m ago; 5 offsets wait: that is late"),
    ],
)
def test_the_state_says_when_and_asks_only_where_records_wait(
    lag: int, ago: float | None, state: str
):
    moved = None if ago is None else int((time.time() - ago) * 1000)
    assert _summary(CONFIG, lag, moved) == state


class Index:
    schema = "{}"

    def __init__(self, *rows: tuple[int, str, int, int, int]) -> None:
        names = ("batch", "table_name", "written", "rejected", "skipped")
        self._rows = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))

    def rows(self, columns: list[str], where: dict[str, list[str]]) -> Any:
        return self._rows.select(columns)


def test_records_are_counted_once_whatever_tables_they_went_to():
    index = Index(
        (0, "db.t", 7, 0, 1),  # of the time when there was one table
        (1, "db.t", 5, 2, 3),
        (1, "db.dead", 2, 0, 8),
        (1, "*", 5, 2, 3),
    )
    assert _counts(index, "s").values == {"written": 12, "rejected": 2, "skipped": 4}  # type: ignore[arg-type]


# ── tables in doubt ──────────────────────────────────────────────────────────────────────────────


def filled(*names: str) -> World:
    """Two batches in each of the tables."""
    world = World(*names)
    for start in (0, 10):
        whole = tally(start, start + 10)
        world.batch(
            **{name.removeprefix("db."): whole for name in names},
            total=whole if len(names) > 1 else None,
        )
    return world


def roll_back(world: World) -> None:
    """To before the last commit, which the tag still names."""
    table = world.tables["db.a"]
    table.refs[ledger_tag("s")] = table.refs["main"]
    table.refs["main"] = table.snapshots[table.refs["main"]].parent  # type: ignore[assignment]


def put_back(world: World) -> None:
    """To older metadata: the tag is of that time as well."""
    roll_back(world)
    table = world.tables["db.a"]
    table.refs[ledger_tag("s")] = table.refs["main"]


def expire_all(world: World) -> None:
    """Others commit, and every entry is expired, the tag's as well."""
    table = world.tables["db.a"]
    table.add(["x"], {})
    table.untag(ledger_tag("s"))
    table.expire()


def expire_the_index(world: World) -> None:
    world.index.add(["x"], {})
    world.index.untag(ledger_tag("s"))
    world.index.expire()


def drop(world: World) -> None:
    del world.tables["db.a"]


def make_again(world: World) -> None:
    world.tables["db.a"].uuid = "another"


DOUBTS: dict[Callable[[World], None], tuple[str, str, str]] = {
    roll_back: ("db.a", "Gap", "rolled back to before snapshot"),
    put_back: ("db.a", "Gap", "was rolled back; the index records orders\\[0\\] \\[10, 20\\)"),
    expire_all: ("db.a", "Expired", "its tag was removed"),
    expire_the_index: ("db.index", "Expired", "not its ledger, which records the position"),
    drop: ("db.a", "IdentityMismatch", "it does not exist"),
    make_again: ("db.a", "IdentityMismatch", "dropped and recreated"),
}


@pytest.mark.parametrize("names", [("db.a",), ("db.a", "db.b")], ids=["one", "several"])
@pytest.mark.parametrize("harm", DOUBTS, ids=lambda harm: harm.__name__)
def test_a_table_that_stops_the_next_start_is_in_doubt(
    harm: Callable[[World], None], names: tuple[str, ...]
):
    world = filled(*names)
    config = world.config
    assert in_doubt(config, world.open) == {}
    harm(world)
    ((name, doubt),) = in_doubt(config, world.open).items()
    where, kind, says = DOUBTS[harm]
    assert (name, doubt["class"]) == (where, kind)
    assert re.search(says, doubt["message"])
    assert doubt["hint"]


def test_an_index_that_is_gone_leaves_its_tables_in_doubt():
    world = filled("db.a", "db.b")
    del world.tables["db.index"]
    config = replace(world.config)
    assert set(in_doubt(config, world.open)) == {"db.a", "db.b"}


def test_others_commits_and_their_expiry_are_no_doubt():
    world = filled("db.a", "db.b")
    world.tables["db.a"].metadata_kept = True
    world.tables["db.a"].add(["x"], {})
    world.tables["db.a"].expire()
    assert in_doubt(world.config, world.open) == {}


def test_status_and_offsets_show_name_tables_in_doubt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    world = filled("db.a", "db.b")
    put_back(world)
    ends = Cut({P: 20})
    for part, answer in (
        ("origin", (SimpleNamespace(topics={}, cluster=""), [P])),
        ("watermarks", SimpleNamespace(low=Cut({P: 0}), end=ends)),
        ("require", None),
    ):
        monkeypatch.setattr(f"frazil.kafka.planner.Planner.{part}", lambda *_, a=answer: a)
    monkeypatch.setattr("frazil.kafka.planner.TopicIdentity.check", lambda *_: None)
    monkeypatch.setattr("frazil.kafka.planner.TopicIdentity.differs", lambda *_: False)
    monkeypatch.setattr("frazil.ops.status.staged_batches", lambda *_: [])
    monkeypatch.setattr("frazil.ops.status.run_state.read", lambda *_: {})
    monkeypatch.setattr("frazil.ops.status.run_state.read_start", lambda *_: None)
    monkeypatch.setattr(type(world.index), "schema", "{}", raising=False)
    shown_status = status(world.config, world.open)
    assert "in doubt: db.a" in shown_status["summary"]
    assert set(shown_status["in_doubt"]) == {"db.a"}
    shown = show_offsets(world.config, world.open)
    assert shown["in_doubt"] == shown_status["in_doubt"]
    show(shown, output())
    assert "in doubt: db.a: Gap: cannot commit to table db.a" in capsys.readouterr().out


# ── rejected records ─────────────────────────────────────────────────────────────────────────────


def test_the_newest_rejected_records_are_reported_by_kind(tmp_path: Path):
    fields = [
        ("topic", 1, "string"),
        ("partition", 2, "int"),
        ("offset", 3, "long"),
        ("kind", 4, "string"),
        ("message", 5, "string"),
    ]
    made = Made(tmp_path / "dead", fields=fields)
    manifests: list[Any] = []
    for number, kinds in enumerate((["decode"] * 3, ["fit", "decode", "fit"])):
        first = 3 * number
        path = parquet(
            made,
            f"{number}.parquet",
            {
                "topic": ["t"] * 3,
                "partition": pa.array([0] * 3, pa.int32()),
                "offset": [first, first + 1, first + 2],
                "kind": kinds,
                "message": [f"why {first + at}" for at in range(3)],
            },
            ids=range(1, 6),
        )
        entry = LedgerEntry(
            "s", 1, (f"c{number}",), (number, number), Cut({P: first}), Cut({P: first + 3}), rows=3
        )
        new = made.manifest(data(path))
        manifests.append({**new, "added_snapshot_id": number + 1})
        made.commit(*manifests, **entry.summary())
    made.commit(*manifests)  # of others: none of the sink's
    config = replace(CONFIG, dead_letters={"table": "db.dead"})  # type: ignore[arg-type]
    assert _kinds(config, {"db.dead": made.plain()}.get) == {
        "decode": {"records": 4, "last": "t[0] offset 4: why 4"},
        "fit": {"records": 2, "last": "t[0] offset 5: why 5"},
    }
    assert _kinds(config, lambda _: None) == {}
    assert _kinds(CONFIG, made.plain) == {}  # type: ignore[arg-type]


def test_a_claim_is_no_commit_of_records():
    world = filled("db.a")
    world.index.refs[ledger_tag("s")] = world.index.refs["main"]
    moved = _last_move(world.index, "s")  # type: ignore[arg-type]
    assert moved == next(world.index.history("main")).timestamp_ms
    TableCommitter(world.index, "main", "s", 2, FakeClock()).claim()
    assert next(world.index.history("main")).timestamp_ms > moved
    assert _last_move(world.index, "s") == moved  # type: ignore[arg-type]
