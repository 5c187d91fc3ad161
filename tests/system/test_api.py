"""The lines of the README: one import from a config file to the proof."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import frazil
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.system.streams import produce


def test_one_import_goes_from_a_config_file_to_the_proof(
    broker: Broker, spark: Any, name: str, write_toml: Callable[..., Path]
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, [json.dumps({"id": i}).encode() for i in range(4)])
    path = write_toml(decode={"format": "json"})
    with pytest.raises(frazil.errors.NotProven, match="never committed"):
        frazil.audit(path).raise_unless_proven()
    with frazil.Sink.from_toml(path).start() as run:
        assert run.wait_until_caught_up(timeout=120)
        assert run.wait_until({name: {0: 4}}, timeout=10)
        assert run.position == frazil.Cut.of({name: {0: 4}})
        run.check()
    assert not run.isActive
    assert spark.table(f"lake.db.{name}").count() == 4
    proof = frazil.audit(path)
    proof.raise_unless_proven()
    assert proof.proven
    assert frazil.status(path)["lag"] == 0
    assert frazil.locate(path, name, 0, 3).contained
    assert not frazil.locate(path, name, 0, 9).contained
    spark.sql(f"DELETE FROM lake.db.{name} WHERE _offset = 2")
    with pytest.raises(frazil.errors.NotProven, match="rows are missing") as error:
        frazil.audit(path, deep=True).raise_unless_proven()
    assert error.value.exit_code == 3
