"""The oracle of upsert tables is looked at itself: it says what it should, and what is wrong with a
table it finds, at the key and the snapshot where it is wrong."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut, Partition
from tests.upserts import Oracle, Record, Snapshot, State, cuts, history, of_envelope

#: A busy machine is no finding.
unhurried = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])

TOPICS = ("a", "b")
PARTITIONS = 2


def snapshot(number: int, ranges: dict[tuple[str, int], tuple[int, int]]) -> Snapshot:
    nested: dict[str, dict[str, list[int]]] = {}
    for (topic, partition), cut in ranges.items():
        nested.setdefault(topic, {})[str(partition)] = list(cut)
    summary = {"frazil.sink": "s", "frazil.ranges": json.dumps(nested)} if ranges else {}
    return Snapshot(number, number - 1 or None, "overwrite", summary)


def row_of(record: Record) -> dict[str, Any]:
    assert record.row is not None
    return {
        **record.row,
        "_topic": record.topic,
        "_topic_partition": record.partition,
        "_offset": record.offset,
        "_timestamp": record.timestamp,
    }


def rows_of(state: State) -> list[dict[str, Any]]:
    return [row_of(record) for record in state.rows.values()]


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Record], list[Snapshot]]:
    """Records of few keys in four partitions, with holes, and the cuts that they were taken in."""
    records: list[Record] = []
    ends: dict[tuple[str, int], int] = {}
    for topic in TOPICS:
        for partition in range(PARTITIONS):
            offset = 0
            for _ in range(draw(st.integers(0, 12))):
                offset += draw(st.integers(0, 2))
                key = draw(st.integers(0, 4))
                value = {"id": key, "n": draw(st.integers(0, 3))}
                op = draw(st.sampled_from(["", "c", "u", "d"]))
                gone = not op and draw(st.booleans())
                when = draw(st.integers(0, 5))
                records.append(
                    Record(topic, partition, offset, when, (key,), None if gone else value, op)
                )
                offset += 1
            ends[topic, partition] = offset + draw(st.integers(0, 2))
    snapshots, at = [], dict.fromkeys(ends, 0)
    for number in range(1, draw(st.integers(1, 5)) + 1):
        to = {place: draw(st.integers(at[place], ends[place])) for place in ends}
        snapshots.append(snapshot(number, {place: (at[place], to[place]) for place in ends}))
        at = to
        if draw(st.integers(0, 4)) == 0:  # maintenance: a snapshot that takes nothing in
            snapshots.append(snapshot(len(snapshots) + 1, {}))
    return records, [
        Snapshot(i, i - 1 or None, snapshot.operation, snapshot.summary)
        for i, snapshot in enumerate(snapshots, 1)
    ]


# ── what it says ─────────────────────────────────────────────────────────────────────────────────


@unhurried
@given(streams())
def test_the_state_is_that_of_changes_put_in_order_one_by_one(
    stream: tuple[list[Record], list[Snapshot]],
):
    records, snapshots = stream
    model: dict[int, Record] = {}
    for taken, state in Oracle(records, key=("id",)).replay(snapshots):
        batch = [
            record
            for record in records
            if record.place in taken.ranges
            and taken.ranges[record.place][0] <= record.offset < taken.ranges[record.place][1]
        ]
        newest: dict[Any, int] = {}
        for record in batch:
            where = (record.key, record.place)
            newest[where] = max(newest.get(where, record.timestamp), record.timestamp)
        batch.sort(
            key=lambda record: (newest[record.key, record.place], record.place, record.offset)
        )
        for record in batch:
            model.pop(record.key[0], None)
            if record.row is not None:
                model[record.key[0]] = record
        assert {key[0]: record for key, record in state.rows.items()} == model


def last(*records: Record) -> Any:
    ends: dict[tuple[str, int], tuple[int, int]] = {record.place: (0, 100) for record in records}
    oracle = Oracle(sorted(records, key=lambda record: record.offset), key=("id",))
    [(_, state)] = oracle.replay([snapshot(1, ends)])
    return {key[0]: record.row["n"] for key, record in state.rows.items() if record.row}


def record(
    partition: int, offset: int, timestamp: int, n: int | None, topic: str = "t", op: str = ""
) -> Record:
    value = None if n is None else {"id": 1, "n": n}
    return Record(topic, partition, offset, timestamp, (1,), value, op)


def test_in_a_partition_offsets_count_and_clocks_do_not():
    assert last(record(0, 1, 900, 1), record(0, 2, 100, 2)) == {1: 2}


def test_of_two_partitions_the_one_with_the_newest_timestamp_wins_with_its_last_record():
    older, newest, after = record(1, 7, 500, 1), record(0, 1, 900, 2), record(0, 2, 100, 3)
    assert last(older, newest, after) == {1: 3}


def test_at_the_same_time_the_higher_topic_wins_and_then_the_higher_partition():
    assert last(record(0, 5, 1, 1), record(1, 2, 1, 2)) == {1: 2}
    assert last(record(9, 5, 1, 1, "a"), record(0, 2, 1, 2, "b")) == {1: 2}
    assert last(record(10, 5, 1, 1), record(9, 6, 1, 2)) == {1: 1}, "numbers, not words"


def test_tombstones_and_deletions_delete_and_a_later_row_brings_the_key_back():
    assert last(record(0, 1, 1, 1), record(0, 2, 2, None)) == {}
    assert last(record(0, 1, 1, 1), record(0, 2, 2, 9, op="d")) == {}
    assert last(record(0, 1, 1, None), record(0, 2, 2, 5, op="c")) == {1: 5}


def test_debeziums_envelopes_become_rows_and_deletions():
    def of(envelope: Any, message_key: Any = None) -> Record:
        return of_envelope(("t", 0), 3, 7, envelope, ("id",), message_key)

    row = {"id": 4, "n": 1}
    assert of({"op": "u", "before": None, "after": row}).row == row
    gone = of({"op": "d", "before": row, "after": None})
    assert (gone.key, gone.row) == ((4,), None)
    assert (of(None, {"id": 4}).key, of(None, {"id": 4}).row) == ((4,), None)
    with pytest.raises(AssertionError, match="op 't'"):
        Record("t", 0, 0, 0, (1,), {}, "t")


# ── what it finds ────────────────────────────────────────────────────────────────────────────────


@unhurried
@given(streams())
def test_a_table_as_it_should_be_has_no_difference(stream: tuple[list[Record], list[Snapshot]]):
    oracle = Oracle(stream[0], key=("id",))
    for _, state in oracle.replay(stream[1]):
        assert oracle.compare(state, rows_of(state)) == []


@unhurried
@given(streams(), st.data())
def test_what_is_planted_is_found_at_its_key_and_nothing_else(
    stream: tuple[list[Record], list[Snapshot]], data: st.DataObject
):
    oracle = Oracle(stream[0], key=("id",))
    states = list(oracle.replay(stream[1]))
    taken, state = data.draw(st.sampled_from(states))
    rows = rows_of(state)
    plants = ["unknown"]
    plants += ["twin", "lost", "wrong"] if rows else []
    plants += ["undeleted"] if state.deleted else []
    brought = [record for record in stream[0] if record.row is not None]
    older = [
        record
        for record in brought
        if record.key in state.rows and record is not state.rows[record.key]
    ]
    plants += ["stale"] if older else []
    plant = data.draw(st.sampled_from(plants))
    if plant == "unknown":
        key = (99,)
        rows.append({**row_of(Record("a", 0, 99, 0, key, {"id": 99, "n": 0}))})
    elif plant == "undeleted":
        key = data.draw(st.sampled_from(sorted(state.deleted)))
        rows.append({**row_of(Record("a", 0, 99, 0, key, {"id": key[0], "n": 0}))})
    elif plant == "stale":
        old = data.draw(st.sampled_from(older))
        key = old.key
        rows = [row_of(old) if row["id"] == key[0] else row for row in rows]
    else:
        place = data.draw(st.integers(0, len(rows) - 1))
        key = (rows[place]["id"],)
        if plant == "lost":
            del rows[place]
        elif plant == "twin":
            rows.append(dict(rows[place]))
        else:
            rows[place]["n"] = -1
    [difference] = oracle.compare(state, data.draw(st.permutations(rows)), "reader", taken.id)
    assert (difference.kind, difference.key, difference.snapshot) == (plant, key, taken.id)
    assert str(key[0]) in str(difference)


def test_a_difference_names_its_place_and_the_row_found_there():
    records = [record(0, 3, 1, 1), record(0, 4, 2, 2)]
    oracle = Oracle(records, key=("id",))
    taken = [snapshot(1, {("t", 0): (0, 4)}), snapshot(2, {("t", 0): (4, 5)})]
    *_, (_, state) = oracle.replay(taken)
    [difference] = oracle.compare(state, [row_of(records[0])], "Spark", 2)
    assert str(difference) == (
        "stale: key 1 in snapshot 2 (number 2), read by Spark: expected t[0]@4: n is 1, not 2, "
        "_offset is 3, not 4; it is the row of t[0]@3"
    )
    [difference] = oracle.compare(state, [row_of(record) for record in records], "Spark", 2)
    assert difference.kind == "twin"
    assert "'t[0]@3': 1" in difference.why


def test_a_row_with_the_right_values_of_another_record_is_found_by_its_origin():
    same = [record(0, 3, 1, 7), record(0, 4, 2, 7)]
    oracle = Oracle(same, key=("id",))
    [(_, state)] = oracle.replay([snapshot(1, {("t", 0): (0, 5)})])
    assert [difference.kind for difference in oracle.compare(state, [row_of(same[0])])] == ["stale"]


def test_columns_that_only_one_side_knows_count_as_null():
    oracle = Oracle([record(0, 0, 1, 7)], key=("id",))
    [(_, state)] = oracle.replay([snapshot(1, {("t", 0): (0, 1)})])
    row = row_of(record(0, 0, 1, 7))
    assert oracle.compare(state, [{**row, "later": None}]) == []
    [difference] = oracle.compare(state, [{**row, "later": 3}])
    assert "later is 3, not None" in difference.why
    [difference] = oracle.compare(state, [{k: v for k, v in row.items() if k != "n"}])
    assert "n is None, not 7" in difference.why


def test_the_same_moment_bytes_and_nan_are_the_same_however_they_are_spelled():
    utc = datetime(2026, 1, 2, 3, tzinfo=timezone.utc)
    value = {"id": 1, "at": utc, "raw": b"x", "f": math.nan, "in": [{"at": utc}]}
    oracle = Oracle([Record("t", 0, 0, 0, (1,), value)], key=("id",))
    [(_, state)] = oracle.replay([snapshot(1, {("t", 0): (0, 1)})])
    local = utc.astimezone(timezone(timedelta(hours=2)))
    row = {**value, "at": local, "raw": bytearray(b"x"), "f": math.nan, "in": [{"at": local}]}
    assert oracle.compare(state, [row]) == []
    assert oracle.compare(state, [{**row, "at": local + timedelta(hours=1)}]) != []


# ── what it reads ────────────────────────────────────────────────────────────────────────────────


def test_a_gap_and_an_overlap_between_snapshots_are_refused():
    for begin in (3, 5):
        taken = [snapshot(1, {("t", 0): (0, 4)}), snapshot(2, {("t", 0): (begin, 9)})]
        with pytest.raises(AssertionError, match=rf"takes t\[0\] from {begin} on.* ended at 4"):
            list(Oracle(key=("id",)).replay(taken))


def test_a_snapshot_that_miscounts_its_records_is_refused():
    records = [record(0, 0, 1, 1), record(0, 1, 1, 2), Record("t", 0, 2, 1, (2,), None)]
    right = snapshot(1, {("t", 0): (0, 3)})

    def counted(written: int, merged: int, keys: int) -> Snapshot:
        counts = json.dumps({"read": written, "written": written, "merged": merged})
        more = {"frazil.counts": counts, "frazil.keys": str(keys)}
        return Snapshot(1, None, "", {**right.summary, **more})

    list(Oracle(records, key=("id",)).replay([counted(1, 2, 2)]))
    for wrong, why in (
        (counted(2, 2, 2), "says 2 written, its records 1"),
        (counted(1, 1, 2), "says 1 merged, its records 2"),
        (counted(1, 2, 1), "says 1 keys, its records 2"),
    ):
        with pytest.raises(AssertionError, match=why):
            list(Oracle(records, key=("id",)).replay([wrong]))


def test_a_snapshot_that_expired_unseen_is_refused_and_one_that_was_seen_is_not():
    oracle = Oracle([record(0, 0, 1, 1)], key=("id",))
    taken = [snapshot(1, {("t", 0): (0, 1)}), snapshot(2, {})]
    with pytest.raises(AssertionError, match="snapshot 1 expired before it was checked"):
        list(oracle.replay(taken[1:]))
    list(oracle.replay(taken))
    [(_, state)] = oracle.replay(taken[1:])
    assert (1,) in state.rows


def test_the_history_is_the_branchs_ancestry_oldest_first():
    def made(number: int, parent: int | None) -> dict[str, Any]:
        return {
            "snapshot-id": number,
            "summary": {"operation": "append", "x": str(number)},
            **({"parent-snapshot-id": parent} if parent else {}),
        }

    document = {
        "snapshots": [made(5, 4), made(3, None), made(4, 3), made(9, 3)],
        "refs": {"main": {"snapshot-id": 5}, "other": {"snapshot-id": 9}},
    }
    assert [snapshot.id for snapshot in history(document)] == [3, 4, 5]
    assert [snapshot.id for snapshot in history(document, "other")] == [3, 9]
    assert history(document)[0] == Snapshot(3, None, "append", {"x": "3"})
    assert history({"refs": {}}) == []


@unhurried
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["orders", "accounts"]), st.integers(0, 400)),
        st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)),
        max_size=20,  # more are packed: this reader knows the readable form alone
    )
)
def test_the_cuts_of_a_summary_are_read_as_they_were_written(
    ranges: dict[tuple[str, int], tuple[int, int]],
):
    begin = Cut({Partition(*place): start for place, (start, _) in ranges.items()})
    end = Cut({Partition(*place): start + more for place, (start, more) in ranges.items()})
    summary = LedgerEntry("s", 1, ("c",), (0, 0), begin, end).summary()
    meant = {place: (start, start + more) for place, (start, more) in ranges.items()}
    assert cuts(summary["frazil.ranges"]) == meant
