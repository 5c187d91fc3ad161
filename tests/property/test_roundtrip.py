"""Every value that is sent comes back, whatever the schema: from bytes to data files and compacted.

`make roundtrip N=20000` runs more of the same; `python bench/roundtrip.py --seed N` shows one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frazil.arrow import cast
from frazil.files import column_bounds, parquet, writer
from frazil.pipeline import projection as route
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
    found = column_bounds._extent
    monkeypatch.setattr(
        column_bounds, "_extent", lambda *given: replace(found(*given), complete=True)
    )


def null_lists_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "_nulls", lambda array: None)


def columns_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "by_id", cast.by_name)


@pytest.mark.parametrize(
    "plant", [nothing_projected, bounds_of_those_that_tell, null_lists_are_empty, columns_by_name]
)
def test_a_planted_bug_is_found(plant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    plant(monkeypatch)
    for seed in range(500):
        try:
            Case(seed).check(tmp_path / str(seed))
        except Exception:
            return
    pytest.fail("nothing was found in 500 schemas")
