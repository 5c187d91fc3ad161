"""Every value that is sent comes back, whatever the schema: from bytes to data files and compacted.

`make roundtrip N=20000` runs more of the same; `python bench/roundtrip.py --seed N` shows one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from frazil.arrow import avro_types, cast
from frazil.files import column_bounds, parquet, writer
from frazil.formats import json_columns, json_inference, json_values, schema_registry
from frazil.native import avro
from frazil.pipeline import projection as route
from tests import roundtrip
from tests.roundtrip import Case


@pytest.mark.parametrize("share", range(10))
def test_every_value_of_any_schema_comes_back_and_every_bound_covers_it(share: int, tmp_path: Path):
    for seed in range(50 * share, 50 * share + 50):
        try:
            Case(seed).check(tmp_path / str(seed))
        except BaseException as error:
            raise AssertionError(f"python bench/roundtrip.py --seed {seed}: {error}") from error


def nothing_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "projected", lambda rows: rows)
    monkeypatch.setattr(route, "project", lambda column, field: column.cast(field.type))


def bounds_of_those_that_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    extent = column_bounds._extent
    monkeypatch.setattr(
        column_bounds, "_extent", lambda *given: replace(extent(*given), complete=True)
    )


def null_lists_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "_nulls", lambda array: None)


def columns_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "by_id", cast.by_name)


def json_widens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_columns, "_wider", lambda value, kind: "")


def json_adds_nothing_inside_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = json_inference._changed
    monkeypatch.setattr(
        json_inference,
        "_changed",
        lambda field, kind: field if type(kind) is list else changed(field, kind),
    )


def json_reads_moments_as_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "_ticks", lambda *clock: 0)


def json_knows_one_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "_MINUS", re.compile(rb"(?!)"))


def json_takes_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_values, json_columns):
        monkeypatch.setattr(module, "to_float", lambda value, kind: float(value))


def json_types_by_the_first_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole number makes a long, whatever its neighbours."""
    elected = json_inference._elected

    def hasty(votes: json_inference.Votes) -> json_inference.Kind:
        return "whole" if "whole" in votes.get("kinds", {}) else elected(votes)

    monkeypatch.setattr(json_inference, "_elected", hasty)


def decimals_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made = avro_types._decimal

    def wide(schema, read, size):
        decimal = made(schema, read, size)
        return decimal and replace(decimal, words={**decimal.words, avro.MOST_HIGH: 2**63 - 1})

    monkeypatch.setattr(avro_types, "_decimal", wide)
    monkeypatch.setattr(schema_registry, "_writers", {})  # schemas that were read before


def decimals_that_trouble_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of more than 38 digits fits no table."""
    made = avro_types._decimal

    def strict(schema, read, size):
        if isinstance(schema.get("precision"), int) and schema["precision"] > 38:
            raise avro_types.UnsupportedSchema("more than 38 digits")
        return made(schema, read, size)

    monkeypatch.setattr(avro_types, "_decimal", strict)
    monkeypatch.setattr(schema_registry, "_writers", {})  # schemas that were read before


def only_duckdb_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundtrip, "READERS", [roundtrip.read_by_duckdb])
    null_lists_are_empty(monkeypatch)


#: With the seed from which on it is looked for; any is right, a near one saves time.
PLANTS = [
    (nothing_projected, 0),
    (bounds_of_those_that_tell, 70),
    (null_lists_are_empty, 0),
    (columns_by_name, 0),
    (json_widens_nothing, 0),
    (json_adds_nothing_inside_lists, 0),
    (json_reads_moments_as_dates, 0),
    (json_knows_one_zero, 150),
    (json_takes_infinity, 0),
    (json_types_by_the_first_vote, 0),
    (decimals_of_any_size, 145),
    (decimals_that_trouble_their_neighbours, 0),
    (only_duckdb_looks, 0),
]


@pytest.mark.parametrize(("plant", "start"), PLANTS)
def test_a_planted_bug_is_found(plant, start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    plant(monkeypatch)
    for seed in (*range(start, 500), *range(start)):
        try:
            Case(seed).check(tmp_path / str(seed))
        except Exception:
            monkeypatch.undo()
            Case(seed).check(tmp_path / "without")
            return
    pytest.fail("nothing was found in 500 schemas")
