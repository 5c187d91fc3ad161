"""A share of `make faults`, on a real REST catalog: cells that others fail."""

from __future__ import annotations

import pytest

from tests.bench import faults

#: fault, after it was applied?, into what, other writers
WORST = [
    ("503 later", True, "append", 1),  # H1 and H2
    ("503 later", True, "upsert", 2),
    ("timeout", False, "append", 1),  # applied late, when it was looked for already
    ("dropped", True, "branch", 1),
    ("truncated", True, "upsert", 0),
    ("409", True, "append", 1),
    ("409", False, "upsert", 2),
    ("duplicated", False, "append", 2),
]
#: The answer of the very first tag of a table is lost, and that of a claim and of the index.
PLACES = [("503 later", "first tag"), ("409", "index tag"), ("dropped", "claim"), ("502", "index")]


def test_every_row_is_there_once_and_every_other_writers_too(world: faults.World):
    cells = [faults.Cell(*worst) for worst in WORST]
    cells += [faults.Cell(kind, True, "append", 0, place) for kind, place in PLACES]
    outcomes = faults.measure(world, "ours", cells, 4)
    assert all(outcome.fired for outcome in outcomes), [o for o in outcomes if not o.fired]
    assert [o for o in outcomes if not o.well] == []
    assert [(str(o.cell), o.trouble) for o in outcomes if o.trouble] == []


@pytest.mark.parametrize(
    ("who", "cell", "verdict"),
    [
        ("naive", faults.Cell("500", False, "append", 0), "exact"),  # it is not always wrong
        ("naive", faults.Cell("timeout", True, "append", 0), "unreadable"),
        ("naive", faults.Cell("duplicated", False, "append", 1), "foreign"),
        ("fenced", faults.Cell("503 later", True, "append", 1), "unreadable"),
    ],
    ids=lambda given: str(given),
)
def test_what_is_wrong_with_others_is_seen(
    world: faults.World, who: str, cell: faults.Cell, verdict: str
):
    outcome = faults.run(world, who, cell)
    assert (outcome.verdict, outcome.fired) == (verdict, True), outcome
