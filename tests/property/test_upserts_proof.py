"""The judge of `make upserts` is judged: by the slower oracle, and by the engine that adds up."""

from __future__ import annotations

import random

import duckdb
import pyarrow as pa
import pytest

from tests.property.test_planted import bench
from tests.upserts import Oracle, Record, Snapshot, State

upserts = bench("upserts")


@pytest.mark.parametrize("seed", range(20))
def test_arrays_and_a_dictionary_come_to_the_same_batch_by_batch(seed: int):
    chance = random.Random(seed)
    changes = upserts.Changes(600, 30, seed)
    fast = upserts.Dictionary(changes)
    slow = Oracle(key=("id",))
    for number, columns in enumerate(changes.columns):
        names = ("offset", "stamp", "id", "version", "gone")
        rows = zip(*(columns[name].tolist() for name in names), strict=True)
        slow.add(
            Record("changes", number, offset, stamp, (key,), None if gone else {"id": key, "v": v})
            for offset, stamp, key, v, gone in rows
        )
    at, state = dict.fromkeys(range(4), 0), State()
    while any(at[p] < len(changes.columns[p]["id"]) for p in at):
        ends = {p: min(len(changes.columns[p]["id"]), at[p] + chance.randrange(40)) for p in at}
        ranges = {p: (at[p], end) for p, end in ends.items() if end > at[p]}
        at = ends
        if not ranges:
            continue
        fast.take(ranges)
        recorded = {"changes": {str(p): list(span) for p, span in ranges.items()}}
        summary = {"frazil.sink": "s", "frazil.ranges": upserts.json.dumps(recorded)}
        state = slow._after(state, Snapshot(1, None, "", summary))
        actual = {
            int(i): (int(fast.rows["partition"][i]), int(fast.rows["offset"][i]))
            for i in fast.present.nonzero()[0]
        }
        assert actual == {key[0]: (r.partition, r.offset) for key, r in state.rows.items()}


def test_sums_are_those_of_the_engine_and_every_difference_is_reported():
    changes = upserts.Changes(5000, 400, 7)
    dictionary = upserts.Dictionary(changes)
    dictionary.take({p: (0, len(changes.columns[p]["id"])) for p in range(4)})
    present = dictionary.present.nonzero()[0]
    good = {name: column[present] for name, column in dictionary.rows.items()}

    def table(rows: dict[str, upserts.Array]) -> pa.Table:
        return pa.table(
            {
                "id": rows["id"],
                "version": rows["version"],
                "_offset": rows["offset"],
                "amount": pa.array(rows["amount"], pa.int32()),
                "_topic_partition": pa.array(rows["partition"], pa.int32()),
                "kind": [chr(code) for code in rows["kind"]],
                "note": ["x" * n for n in rows["note"]],
            }
        )

    def sums(rows: dict[str, upserts.Array]) -> tuple[int, ...]:
        arrow_table = table(rows)
        assert arrow_table.num_rows
        [row] = duckdb.sql(f"SELECT {upserts.select()} FROM arrow_table").fetchall()
        return tuple(map(int, row))

    assert sums(good) == dictionary.sums
    assert not any(dictionary.differences(good).values())
    first, second = int(good["id"][0]), int(good["id"][1])
    twin = {name: upserts.np.append(column, column[0]) for name, column in good.items()}
    lost = {name: column[1:] for name, column in good.items()}
    swapped = {name: column.copy() for name, column in good.items()}
    swapped["version"][[0, 1]] = swapped["version"][[1, 0]]
    dead = int((~dictionary.present).nonzero()[0][0])
    back = {name: upserts.np.append(column, column[0]) for name, column in good.items()}
    back["id"][-1] = dead
    for rows, kind, keys in (
        (twin, "twins", [first]),
        (lost, "lost", [first]),
        (swapped, "wrong", sorted([first, second])),
        (back, "wrong", [dead]),
    ):
        assert sums(rows) != dictionary.sums
        assert dictionary.differences(rows)[kind] == keys
