"""What the self-test makes, refuses, and how it compares rows with records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frazil.config.model import Config, from_document, load
from frazil.errors import ConfigError, Unavailable
from frazil.offsets import Partition, Range
from frazil.steps import STEPS
from frazil.testing.process import toml
from frazil.testing.scratch import Scratch, plan
from frazil.testing.selftest import PartReport, SelfTestReport, appended, upserted

RECORDS = {(0, 0): (1, 10), (0, 1): (2, 11), (1, 0): (3, 12), (0, 2): (1, 13), (1, 1): (3, None)}
ROWS = [(p, o, number, n) for (p, o), (number, n) in RECORDS.items() if n is not None]


@pytest.fixture
def given() -> Config:
    return from_document(
        {
            "sink": {"id": "mine", "topics": ["mine"]},
            "kafka": {"bootstrap.servers": "b:1"},
            "decode": {"format": "raw"},
            "catalog": {"type": "rest"},
            "table": [{"name": "db.mine"}],
        }
    )


def test_everything_that_is_made_has_the_name_of_the_self_test(given: Config):
    made = plan(given, rows=1000)
    assert made.name.startswith("frazil_selftest_")
    assert made.steps == STEPS
    assert all(made.name in created for created in made.creates)
    assert plan(given, rows=1000).name != made.name
    elsewhere = plan(given, rows=1000, namespace="db", modes=["upsert"])
    [part] = elsewhere.parts
    assert part.table == f"db.{elsewhere.name}_upsert"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"steps": ["comitted"]}, "cannot kill at step 'comitted'"),
        ({"rows": 29}, "expected at least 30"),
    ],
)
def test_what_makes_no_sense_is_refused(given: Config, options: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        plan(given, **{"rows": 1000, **options})


def test_append_every_record_once_as_it_is():
    present = {at: record for at, record in RECORDS.items() if record[1] is not None}
    assert appended(present, ROWS) == (set(), set(), set())
    assert appended(present, ROWS[1:]) == ({(0, 0)}, set(), set())
    assert appended(present, [*ROWS, ROWS[2]]) == (set(), {(1, 0)}, set())
    assert appended(present, [(0, 0, 1, 99), *ROWS[1:]]) == (set(), set(), {(0, 0)})
    beyond = (0, 7, 5, 20)
    assert appended(present, [*ROWS, beyond]) == (set(), set(), {(0, 7)})


def test_upsert_the_last_record_of_each_key_and_none_that_was_deleted():
    right = [(0, 2, 1, 13), (0, 1, 2, 11)]
    assert upserted(RECORDS, right) == (set(), set(), set())
    assert upserted(RECORDS, right[1:]) == ({(0, 2)}, set(), set())
    # An older row instead of the newest: the newest is lost, the older one wrong.
    assert upserted(RECORDS, [(0, 0, 1, 10), right[1]]) == ({(0, 2)}, set(), {(0, 0)})
    # Both of them: a twin.
    assert upserted(RECORDS, [(0, 0, 1, 10), *right]) == (set(), {(0, 2)}, {(0, 0)})
    # One that was deleted.
    assert upserted(RECORDS, [*right, (1, 0, 3, 12)]) == (set(), set(), {(1, 0)})


def test_the_exit_code_says_whether_it_is_proven_and_then_whether_all_is_gone():
    well = PartReport("append", "t", "db.t", audit="proven")
    lost = PartReport("append", "t", "db.t", audit="proven", lost=[Range(Partition("t", 0), 3, 5)])
    assert (lost.verdict, lost.spans["lost"]) == ("lost", [[0, 3, 5]])
    assert SelfTestReport("x", "x", [well]).exit_code == 0
    assert SelfTestReport("x", "x", [well], not_removed=["topic t: why"]).exit_code == 1
    assert SelfTestReport("x", "x", [well, lost], not_removed=["topic t: why"]).exit_code == 3
    assert SelfTestReport("x", "x", [PartReport("append", "t", "db.t", audit="gap")]).exit_code == 3


def test_a_childs_config_says_what_the_document_says(tmp_path: Any):
    document = {
        "sink": {"id": "a", "topics": ["t", "u"], "starting_offsets": {"t": {"0": 17}}},
        "kafka": {"bootstrap.servers": "b:1", "sasl.password": "env:NAME"},
        "decode": {"format": "json"},
        "catalog": {"type": "rest", "uri": 'http://h/ü\\"q'},
        "table": [{"name": "db.a", "properties": {"write.x": "1"}, "partitioned_by_key": False}],
    }
    path = tmp_path / "sink.toml"
    path.write_text(toml(document))
    assert load(path, {}) == from_document(document)


class Refusing:
    """A catalog that makes no table, or drops none."""

    def __init__(self, table: Any = None) -> None:
        self.table, self.dropped = table, []

    def make_namespace(self, name: str) -> bool:
        return True

    def create(self, name: str, *_: Any, **__: Any) -> None:
        raise ConfigError(f"cannot create table {name}: ForbiddenException: no")

    def load(self, name: str) -> Any:
        return self.table

    def drop(self, name: str) -> None:
        raise Unavailable(f"cannot drop table {name}: it does not answer")

    def drop_namespace(self, name: str) -> None:
        self.dropped.append(name)


def made(given: Config, catalog: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    class Admin:
        def __init__(self, _: Any) -> None: ...

        def list_topics(self, timeout: float) -> None: ...

    monkeypatch.setattr("frazil.testing.scratch.AdminClient", Admin)
    folder = tmp_path / "scratch"
    folder.mkdir()
    return Scratch(given, plan(given, rows=100), catalog, folder)


def test_a_catalog_that_refuses_is_reported_before_a_topic_is_made(
    given: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    catalog = Refusing()
    scratch = made(given, catalog, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="ForbiddenException") as caught:
        scratch.make()
    assert "--namespace" in caught.value.hint
    assert scratch.clear() == []
    assert catalog.dropped == [scratch.plan.name]
    assert not scratch.folder.exists()


def test_what_cannot_be_removed_is_listed_and_the_rest_is_removed(
    given: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Table:
        location = "s3://lake/t"

    scratch = made(given, Refusing(Table()), tmp_path, monkeypatch)
    left = scratch.clear()
    assert len(left) == 4, "two tables and their indexes"
    assert all(f"table {scratch.plan.name}." in line and "does not answer" in line for line in left)
    assert not scratch.folder.exists()
