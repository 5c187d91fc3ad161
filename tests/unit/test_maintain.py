from __future__ import annotations

from uuid import uuid4

from frazil.table.maintain import leftovers
from tests.unit.test_stage import batch


def name(epoch: int, number: int, sink: str = "s", end: str = ".parquet") -> str:
    return f"/lake/t/data/day=1/frazil-{sink}-{epoch}-{number}-{uuid4()}{end}"


def test_only_files_of_older_lives_that_nothing_refers_to_are_left_over():
    dead, manifest = name(1, 4), name(1, 4, end="-m0.avro")
    live, staged, present = name(1, 3), name(2, 5), name(3, 6)
    other, foreign, near = (
        name(1, 4, sink="s2"),
        "/lake/t/data/part-0.parquet",
        name(1, 4, sink="s-1"),
    )
    found = leftovers(
        [dead, manifest, live, staged, present, other, foreign, near],
        sink="s",
        epoch=3,
        referenced=[f"file:{live}"],
        staged=[batch(epoch=2, number=5)],
    )
    assert found == [dead, manifest]


def test_a_local_path_is_the_same_however_it_is_written():
    path = name(1, 1)
    for spelled in (path, f"file:{path}", f"file://{path}"):
        assert leftovers([f"file:{path}"], sink="s", epoch=2, referenced=[spelled], staged=[]) == []
