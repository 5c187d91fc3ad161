"""Ranges in columns say what the ledger's own reader and the index's rows say, one by one."""

from __future__ import annotations

from base64 import b85decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.accounting import OutcomeCounts
from frazil.auditing.ranges import joints
from frazil.errors import Fatal
from frazil.ledger.entry import LedgerEntry, joined, parse, split
from frazil.ledger.packing import pack
from frazil.ledger.range_columns import (
    RangeColumns,
    by_partition,
    codes,
    numbers,
    of_entries,
    of_rows,
)
from frazil.offsets import BATCHES, Cut, Partition, Range

SpanRow = tuple[int, Partition, int, int, OutcomeCounts]
TOPICS = ("orders", "payments", "Zürich.a-b_c", "0")
#: Far apart, so that numbers of every width are packed.
offsets = st.one_of(
    st.integers(0, 3), st.integers(0, 10**6), st.integers(0, 2**31), st.integers(0, 2**63 - 1)
)


def span_rows(spans: RangeColumns) -> Iterator[SpanRow]:
    columns = (spans.source, spans.key, spans.start, spans.end, *spans.outcomes())
    for source, key, start, end, *counts in zip(*(c.tolist() for c in columns), strict=True):
        yield source, spans.partitions[key], start, end, OutcomeCounts(*counts)


@st.composite
def entries(draw: st.DrawFn) -> LedgerEntry:
    """Any that can be written, from one partition to enough of them that its text is packed."""
    begin: dict[Partition, int] = {}
    end: dict[Partition, int] = {}
    outcomes: dict[Partition, OutcomeCounts] = {}
    for topic in draw(st.lists(st.sampled_from(TOPICS), min_size=1, unique=True)):
        held = draw(st.sampled_from((1, 3, 40, 150)))
        numbers = draw(
            st.one_of(
                st.just(range(held)),
                st.sets(st.integers(0, draw(st.sampled_from((5, 300, 2**31 - 1)))), max_size=held),
            )
        )
        base, length = draw(offsets), draw(st.sampled_from((0, 1, 100, 10**9)))
        rnd = draw(st.randoms(use_true_random=False))
        probability = draw(st.sampled_from((0, 0.1, 1)))
        fates = draw(st.integers(3, 6))
        for number in numbers:
            where = Partition(topic, number)
            begin[where] = min(base + rnd.randrange(10**4), 2**63 - 1)
            end[where] = min(begin[where] + rnd.randint(0, length), 2**63 - 1)
            if rnd.random() < probability:
                left, some = end[where] - begin[where], []
                for _ in range(fates):
                    some.append(rnd.randint(0, left))
                    left -= some[-1]
                outcomes[where] = OutcomeCounts(0, *some)
    rows = 0
    if draw(st.booleans()):
        begin[BATCHES] = draw(st.integers(0, 10**6))
        end[BATCHES] = begin[BATCHES] + draw(st.integers(0, 1))
        rows = draw(st.integers(0, 10**9))
    return LedgerEntry("s", 1, ("id",), (0, 0), Cut(begin), Cut(end), outcomes, rows=rows)


def expected(summaries: Sequence[Mapping[str, str]]) -> Iterator[SpanRow]:
    for i, summary in enumerate(summaries):
        entry = parse(summary)
        assert entry is not None
        for partition, end in entry.end.items():
            yield i, partition, entry.begin[partition], end, entry.counts(partition)


def laid(given: Iterable[SpanRow]) -> list[SpanRow]:
    """Partition by partition, in their order."""
    return sorted(given, key=lambda row: row[1])


@settings(max_examples=150, deadline=None)
@given(st.lists(entries(), max_size=5))
def test_columns_of_entries_say_what_the_ledgers_reader_says(made: list[LedgerEntry]):
    summaries = [entry.summary() for entry in made]
    spans = of_entries(summaries)
    assert list(span_rows(spans)) == laid(expected(summaries))
    assert list(spans.partitions) == sorted(spans.partitions)


def history(packed: bool, count: int = 30, tables: int = 1) -> list[LedgerEntry]:
    """A sink's history: batch after batch, and a partition more now and then."""
    position = {Partition("orders", i): 10 * i for i in range(3, 150 if packed else 6)}
    made = []
    for batch in range(count):
        if batch % 7 == 3:
            position[Partition("orders", 1000 + batch)] = 0
        begin = Cut(position)
        position = {where: offset + 5 + batch % 3 for where, offset in position.items()}
        some = list(position)[batch % 3 :: 3]
        fates = OutcomeCounts(0, 1, 0, 1, batch % 2, (batch % 5) // 3, (batch % 7) // 6)
        outcomes = dict.fromkeys(some, fates)
        made.append(LedgerEntry("s", 1, ("id",), (batch, batch), begin, Cut(position), outcomes))
    return made


@pytest.mark.parametrize("packed", [False, True])
def test_a_sinks_whole_history_is_read_alike(packed: bool):
    summaries = [entry.summary() for entry in history(packed)]
    assert summaries[-1]["frazil.ranges"].startswith("packed:") == packed
    assert list(span_rows(of_entries(summaries))) == laid(expected(summaries))


def test_outcomes_that_are_the_rest_of_a_range_are_read_alike():
    """As a sink of many tables writes them, between entries that have none and readable ones."""
    made = []
    for entry in [*history(True, 9), *history(False, 3)]:
        batch = entry.batches[0]
        begin, end, outcomes = {**entry.begin, BATCHES: 7}, {BATCHES: 8}, dict(entry.outcomes)
        for i, where in enumerate(entry.end):
            length = 9 + 7919 * (i + 3) * (batch + 5) % 100_003
            end[where] = begin[where] + length
            if i % 5 and batch % 3:
                fate = "skipped" if i % 50 == 1 else "elsewhere"
                outcomes[where] = OutcomeCounts(**{fate: length - i % 2})
        made.append(replace(entry, begin=Cut(begin), end=Cut(end), outcomes=outcomes, rows=11))
    summaries = [entry.summary() for entry in made]
    assert len([summary for summary in summaries if "frazil.remainder" in summary]) == 6
    assert [parse(summary) for summary in summaries] == made
    assert list(span_rows(of_entries(summaries))) == laid(expected(summaries))


def test_of_nothing_there_are_no_ranges():
    assert len(of_entries([])) == 0
    assert by_partition(of_entries([])) == {}
    assert by_partition(of_rows(rows([]))) == {}


def mended(key: str, value: str) -> dict[str, str]:
    return {**history(True, 1)[0].summary(), key: value}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("frazil.format-version", "2"),
        ("frazil.ranges", "packed:"),
        ("frazil.ranges", pack([[1] * 146, [1] * 146])),
        ("frazil.ranges", pack([[1] * 148, [1] * 148])),
        ("frazil.ranges", pack([[1] * 147])),
        ("frazil.ranges", pack([[1] * 147] * 3)),
        ("frazil.ranges", pack([range(147), range(147)])[:-6]),
        ("frazil.ranges", pack([range(147), range(147)]) + "00000"),
        ("frazil.partitions", "1.0123456789abcdef"),
        ("frazil.ranges", '{"orders":{"0":[1]}}'),
        ("frazil.ranges", '{"orders":{"0":[1,2],"1":[1,2,3]}}'),
        ("frazil.ranges", "{"),
        ("frazil.rows-without-offset", "many"),
        ("frazil.outcomes", '{"orders":{"3":["one"]}}'),
        ("frazil.remainder", pack([[1] * 147, [0] * 147])),
        ("frazil.remainder", pack([[1] * 147, [1] * 147, [0] * 147])),
        ("frazil.remainder", pack([[2] * 147, [0] * 147, [0] * 147])),
        ("frazil.remainder", pack([[1] * 147, [-1] * 147, [0] * 147])),
        ("frazil.remainder", '{"orders":{"3":[1,0,0]}}'),
    ],
)
def test_an_entry_that_cannot_be_read_is_refused(key: str, value: str):
    with pytest.raises(Fatal, match="cannot read"):
        of_entries([history(True, 1)[0].summary(), mended(key, value)])


@pytest.mark.parametrize("letter", ['"', "ü", "/", " "])
def test_text_of_base85_is_refused_where_its_own_decoder_refuses_it(letter: str):
    text = history(True, 1)[0].summary()["frazil.ranges"]
    torn = text[:-7] + letter + text[-6:]
    with pytest.raises(ValueError, match=r"base85|ASCII"):
        b85decode(torn.split(":", 3)[3])
    with pytest.raises(Fatal, match="cannot read"):
        of_entries([{**history(True, 1)[0].summary(), "frazil.ranges": torn}])


def test_entries_that_count_from_one_base_are_read_alike():
    """As a table keeps them: what they refer to stands in properties, and is used again."""
    made, kept, properties = [], {}, {}
    for entry in history(True):
        lean, stored = split(
            replace(entry, kept=kept, leaders={Partition("orders", 5): 3}).summary()
        )
        properties |= stored
        made.append(joined(lean, properties))
        parsed = parse(made[-1])
        assert parsed is not None
        kept = parsed.kept
    assert 1 < len(properties) < 30
    assert list(span_rows(of_entries(made))) == laid(expected(made))
    assert list(span_rows(of_entries(made))) == list(
        span_rows(of_entries([entry.summary() for entry in history(True)]))
    )


Row = tuple[str, int, int, int, int, int, int, int, int | None]
NAMES = (
    "topic",
    "partition",
    "start_offset",
    "end_offset",
    "written",
    "rejected",
    "skipped",
    "invisible",
    "merged",
)


def rows(index_rows: Sequence[Row], chunks: int = 1) -> pa.Table:
    """As the index has them; in several pieces, as a reader of many files gives them."""
    types = [pa.large_string(), pa.int32(), *[pa.int64()] * 7]
    schema = pa.schema(list(zip(NAMES, types, strict=True)))
    size = -(-len(index_rows) // chunks) or 1
    return pa.concat_tables(
        pa.Table.from_arrays(
            [pa.array([row[i] for row in some], kind) for i, kind in enumerate(types)],
            schema=schema,
        )
        for some in ([index_rows[at : at + size] for at in range(0, len(index_rows), size)] or [[]])
    )


amounts = st.integers(0, 9)
index_rows = st.tuples(
    st.sampled_from(TOPICS),
    st.integers(0, 3),
    offsets,
    offsets,
    amounts,
    amounts,
    amounts,
    amounts,
    st.none() | amounts,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(index_rows, max_size=20), st.integers(1, 3), st.booleans())
def test_columns_of_the_indexs_rows_are_theirs_in_order(
    index_rows: list[Row], chunks: int, dictionary: bool
):
    table = rows(index_rows, chunks)
    if dictionary:
        table = table.set_column(0, "topic", table["topic"].dictionary_encode())
    spans = of_rows(table)
    actual = list(span_rows(spans))
    assert actual == sorted(actual, key=lambda row: row[1:3])
    assert sorted(actual) == [
        (i, Partition(topic, number), start, end, OutcomeCounts(*fates[:-1], fates[-1] or 0))
        for i, (topic, number, start, end, *fates) in enumerate(index_rows)
    ]
    assert list(spans.partitions) == sorted({Partition(*row[:2]) for row in index_rows})


def test_an_index_of_an_older_frazil_lacks_a_column():
    table = rows([("orders", 0, 0, 5, 5, 0, 0, 0, 0)]).drop_columns(["merged"])
    ((*_, counts),) = span_rows(of_rows(table))
    assert counts == OutcomeCounts(written=5)


def naive(
    spans: RangeColumns,
) -> dict[Partition, tuple[int, int, OutcomeCounts, list[Range], list[Range]]]:
    """As `joints`, range by range."""
    state: dict[Partition, tuple[int, int, OutcomeCounts, list[Range], list[Range]]] = {}
    for _, where, start, end, counts in span_rows(spans):
        first, reached, total, gaps, overlaps = state.get(
            where, (start, start, OutcomeCounts(), [], [])
        )
        if start > reached:
            gaps = [*gaps, Range(where, reached, start)]
        elif start < min(reached, end):
            overlaps = [*overlaps, Range(where, start, min(reached, end))]
        state[where] = first, max(reached, end), total + counts, gaps, overlaps
    return state


near = st.integers(0, 30)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), near, near, near, amounts), max_size=30))
def test_gaps_overlaps_and_sums_are_those_of_one_range_after_the_other(
    drawn: list[tuple[int, int, int, int, int]],
):
    partitions = (BATCHES, Partition("orders", 1), Partition("orders", 4))
    drawn.sort(key=lambda row: row[0])
    start = np.array([row[1] for row in drawn], np.int64)
    none = np.zeros_like(start)
    end = start + np.array([row[2] for row in drawn], np.int64)
    rejected = np.array([row[4] for row in drawn], np.int64)
    written = end - start - rejected
    key, source = np.array([row[0] for row in drawn], np.int32), np.arange(len(drawn))
    spans = RangeColumns(
        partitions, key, source.astype(np.int32), start, end, written, rejected, *[none] * 5
    )
    model = naive(spans)
    made = by_partition(spans)
    assert list(made) == sorted(model, key=partitions.index)
    for partition, part in made.items():
        first, last, counts, gaps, overlaps = model[partition]
        assert (part.start[0], part.end.max()) == (first, last)
        assert OutcomeCounts(*(int(outcome.sum()) for outcome in part.outcomes())) == counts
        assert joints(part) == (
            [(gap.start, gap.end) for gap in gaps],
            [(overlap.start, overlap.end) for overlap in overlaps],
        )
        assert len(part) == sum(partitions[row[0]] == partition for row in drawn)


def joined_by_partition(entries: Sequence[LedgerEntry]) -> Iterator[tuple[Partition, Any, Any]]:
    """Of each partition its gaps and overlaps."""
    spans = of_entries([entry.summary() for entry in entries])
    for partition, part in by_partition(spans).items():
        yield partition, *joints(part)


@pytest.mark.parametrize("packed", [False, True])
def test_a_whole_history_joins_and_a_missing_entry_leaves_a_gap(packed: bool):
    made = history(packed)
    assert all(not gaps and not overlaps for _, gaps, overlaps in joined_by_partition(made))
    spans = of_entries([entry.summary() for entry in made])
    assert sum((counts for *_, counts in span_rows(spans)), OutcomeCounts()) == sum(
        (e.total for e in made), OutcomeCounts()
    )
    for partition, gaps, _ in joined_by_partition(made[:4] + made[5:]):
        lost = made[4].begin.get(partition), made[4].end.get(partition)
        assert gaps == ([lost] if lost[0] is not None else [])
    for partition, _, overlaps in joined_by_partition(made[:5] + made[4:]):
        lost = made[4].begin.get(partition), made[4].end.get(partition)
        assert overlaps == ([lost] if lost[0] is not None else [])


@pytest.mark.parametrize("gone", [None, 70])
def test_files_that_are_sorted_each_are_laid_side_by_side(gone: int | None):
    """As the sink compacts its index: some batches to a file, by partition and offset in it."""
    made: list[Row] = []
    for first in (80, 0, 40):  # files come in any order
        made += [
            ("orders", where, 10 * batch, 10 * batch + 10, 9 - where, 1, where, 0, 0)
            for where in range(3)
            for batch in range(first, first + 40)
            if batch != gone
        ]
    table = rows(made, 3 if gone is None else 1)
    spans = of_rows(table)
    actual = list(span_rows(spans))
    assert [row[1:4] for row in actual] == sorted(row[1:4] for row in actual)
    assert sorted(row[0] for row in actual) == list(range(len(made)))
    for source, where, start, end, counts in actual:
        assert (*where, start, end, counts.written, counts.rejected, counts.skipped) == (
            made[source][:7]
        )
    lost = [] if gone is None else [(10 * gone, 10 * gone + 10)]
    assert [joints(part)[0] for part in by_partition(spans).values()] == [lost] * 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(index_rows, max_size=8), max_size=5))
def test_files_one_after_the_other_are_as_good_as_one_table(files: list[list[Row]]):
    whole = of_rows(rows([row for file in files for row in file]))
    spans = of_rows(rows(file) for file in files)
    assert spans.partitions == whole.partitions
    assert sorted(span_rows(spans)) == sorted(span_rows(whole))
    assert [row[1:3] for row in span_rows(spans)] == [row[1:3] for row in span_rows(whole)]


def test_files_that_reach_into_each_other_are_joined():
    hole, filled = (
        rows([("o", 0, 0, 2, 2, 0, 0, 0, 0), ("o", 0, 4, 6, 2, 0, 0, 0, 0)]),
        rows([("o", 0, 2, 4, 2, 0, 0, 0, 0)]),
    )
    assert [joints(part) for part in by_partition(of_rows([hole, filled])).values()] == [([], [])]


def test_fates_can_be_added_to_each_other():
    """In as few bits as they are read, a hundred and a hundred would be less than nothing."""
    where = Partition("orders", 0)
    entry = LedgerEntry(
        "s",
        1,
        ("id",),
        (0, 0),
        Cut({where: 0}),
        Cut({where: 300}),
        {where: OutcomeCounts(0, 100, 100)},
    )
    table = rows([("orders", 0, 0, 300, 100, 100, 100, 0, 0)])
    for spans in (of_entries([entry.summary()]), of_rows(table), of_rows([table])):
        assert (spans.written + spans.rejected + spans.skipped).tolist() == [300]


@given(
    st.lists(st.lists(st.none() | st.integers(-5, 5), max_size=20), max_size=3),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_numbers_and_texts_are_read_from_any_part_of_a_column(
    chunks: list[list[int | None]], skip: int, count: int
):
    column = pa.chunked_array([pa.array(chunk, pa.int64()) for chunk in chunks], pa.int64())
    part = column.slice(skip, count)
    assert numbers(part, -9).tolist() == [-9 if n is None else n for n in part.to_pylist()]
    texts = pa.chunked_array(
        [pa.array(map(str, chunk), pa.string()) for chunk in chunks], pa.string()
    )
    for kind in (texts, texts.dictionary_encode()):
        known, code = codes(kind.slice(skip, count))
        assert [known[i] for i in code.tolist()] == kind.slice(skip, count).to_pylist()
