from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product

import pytest

from frazil.accounting import OutcomeCounts
from frazil.errors import Fatal
from frazil.iceberg.table import Snapshot
from frazil.ledger import entry as ledger
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.packing import pack, unpack
from frazil.ledger.range_columns import of_entries
from frazil.offsets import Cut, Partition

P = Partition("orders", 0)


def entry(begin: int, end: int, commit_id: str, **more: object) -> LedgerEntry:
    base = LedgerEntry(
        "s", 1, (commit_id,), (0, 0), Cut({P: begin}), Cut({P: end}), topics={"orders": "t"}
    )
    return replace(base, **more)  # type: ignore[arg-type]


def snapshot(number: int, parent: int | None, summary: dict[str, str]) -> Snapshot:
    return Snapshot(number, parent, number, number, "append", summary)


def test_an_entry_survives_the_summary():
    full = entry(
        3,
        9,
        "c1",
        outcomes={P: OutcomeCounts(0, 1, 0, 2)},
        cluster="k",
        schema_id=4,
        watermark=(5, 6),
        tables={"db.t": "u"},
        commit_ids=("c0", "c1"),
        batches=(7, 9),
    )
    assert ledger.parse(full.summary()) == full
    assert full.total == OutcomeCounts(written=3, rejected=1, skipped=0, invisible=2)


def test_a_foreign_summary_is_no_entry():
    assert ledger.parse({"added-records": "3"}) is None


def test_a_broken_entry_stops_instead_of_being_passed_over():
    with pytest.raises(Fatal, match="cannot read a ledger entry of sink s"):
        ledger.parse({**entry(0, 1, "c").summary(), "frazil.ranges": "{"})


def test_the_two_cuts_of_an_entry_name_the_same_partitions():
    with pytest.raises(Fatal, match="different partitions"):
        LedgerEntry("s", 1, ("c",), (0, 0), Cut(), Cut({P: 1}))


#: topics, and partitions of each
SPREADS = [(1, 1000), (1000, 1), (166, 6)]


def spread(
    topics: int, partitions: int, dice: random.Random
) -> tuple[list[Partition], dict[str, str]]:
    names = [f"shop.server-{i % 7}.public.table_{dice.randrange(10**6)}_{i}" for i in range(topics)]
    ids = {name: dice.randbytes(16).hex()[:22] for name in names}
    return [Partition(name, i) for name in names for i in range(partitions)], ids


def run_entries(
    parts: list[Partition], ids: dict[str, str], dice: random.Random, batches: int, **more: object
) -> Iterator[LedgerEntry]:
    """Entries that follow each other: uneven lengths, some partitions quiet, leaders that move."""
    rate = {p: dice.lognormvariate(6, 1.5) for p in parts}
    at = {p: dice.randrange(10**9) for p in parts}
    leaders = {p: dice.choice([7, 7, 7, 8, 31]) for p in parts}
    for number in range(batches):
        begin = dict(at)
        for p in parts:
            at[p] += int(rate[p] * dice.random()) if dice.random() < 0.9 else 0
        leaders[dice.choice(parts)] += 1
        yield LedgerEntry(
            "a-sink-with-a-name",
            12,
            (str(uuid.UUID(int=dice.getrandbits(128))),),
            (number, number),
            Cut(begin),
            Cut(at),
            topics=ids,
            cluster="y" * 22,
            schema_id=3,
            watermark=(1_790_000_000_000_000, 1_790_000_060_000_000),
            index="prod.shop.offsets",
            leaders=dict(leaders),
            **more,
        )


def size(summary: Mapping[str, str]) -> int:
    return sum(len(key) + len(value) for key, value in summary.items())


@pytest.mark.parametrize("spreading", SPREADS)
@pytest.mark.parametrize("whose", ["index", "table"])
def test_an_entry_of_a_thousand_partitions_stays_within_four_kib(
    spreading: tuple[int, int], whose: str
):
    dice = random.Random(7)
    parts, ids = spread(*spreading, dice)
    tables = {"frazil.tables.a-sink-with-a-name": ""} if whose == "index" else {}
    kept: Mapping[str, str] = {}
    properties: dict[str, str] = {}
    for made in run_entries(parts, ids, dice, 40, tables=next(iter(tables), {})):
        summary = replace(made, kept=kept).summary()
        lean, stored = ledger.split(summary)
        properties |= stored
        assert size(lean) <= 4096
        read = ledger.parse(ledger.joined(lean, properties))
        assert read == made
        kept = read.kept
    names = [key for key in properties if key.startswith("frazil.partitions.")]
    bases = [key for key in properties if key.startswith("frazil.base.")]
    assert len(names) == 1, "what does not change is written once"
    assert len(bases) <= 15, "and a base serves several"
    assert size({key: properties[key] for key in names}) < 60_000
    assert max(len(properties[key]) for key in bases) < 5_600


@pytest.mark.parametrize("spreading", SPREADS)
def test_so_does_one_with_transactions_and_a_few_rejected_records(spreading: tuple[int, int]):
    dice = random.Random(7)
    parts, ids = spread(*spreading, dice)
    [made] = run_entries(parts, ids, dice, 1)
    fates = {
        p: OutcomeCounts(0, 1 if dice.random() < 0.01 else 0, 0, dice.randrange(1, 4))
        for p in parts
    }
    made = replace(
        made, outcomes={p: c for p, c in fates.items() if made.end[p] - made.begin[p] > 4}
    )
    lean, kept = ledger.split(made.summary())
    assert size(lean) <= 4096
    assert ledger.parse({**lean, **kept}) == made


def world(
    spreading: tuple[int, int], longest: int, taken: Callable[[int, Partition], OutcomeCounts]
) -> LedgerEntry:
    """An entry of random ranges, up to `longest` offsets from anywhere below 2^40, and of what
    `taken` says of each length and partition. The index's, which is a little larger."""
    dice = random.Random(f"{spreading}{longest}")
    parts, ids = spread(*spreading, dice)
    [made] = run_entries(parts, ids, dice, 1, tables="frazil.tables.a-sink-with-a-name")
    begin = {p: dice.randrange(2**40) for p in parts}
    length = {p: dice.randrange(longest) for p in parts}
    counts = {p: taken(length[p], p) for p in parts}
    return replace(
        made,
        begin=Cut(begin),
        end=Cut({p: begin[p] + length[p] for p in parts}),
        outcomes={p: count for p, count in counts.items() if count != OutcomeCounts()},
    )


@pytest.mark.parametrize("spreading", SPREADS)
@pytest.mark.parametrize("outcome", ["elsewhere", "skipped"])
@pytest.mark.parametrize("share", [1, 0.99])
def test_a_table_that_takes_few_topics_of_many_stays_within_four_kib(
    spreading: tuple[int, int], outcome: str, share: float
):
    """Sinks of many tables: in each table's entry most partitions have one outcome. A batch of
    500 million records, or of 30 million where a few have another one."""
    dice = random.Random(3)

    def taken(length: int, p: Partition) -> OutcomeCounts:
        if p.number == 0 and p.topic.endswith("7"):
            return OutcomeCounts()
        return OutcomeCounts(**{outcome: length - (dice.random() > share and length > 9) * 3})

    made = world(spreading, 2**20 if share == 1 else 2**16, taken)
    lean, kept = ledger.split(made.summary())
    assert size(lean) <= 4096
    assert ledger.parse({**lean, **kept}) == made


#: Offsets per partition, at most → characters of an entry, at most: where two outcomes are random
#: in every partition, and where all seven are. This is the bound of decision 059.
LARGEST = {2**10: (4_096, 10_400), 2**16: (6_000, 17_000), 2**20: (7_200, 21_400)}


@pytest.mark.parametrize(
    ("spreading", "longest", "outcomes"),
    [*product(SPREADS, LARGEST, (2, 7)), ((3000, 6), 2**20, 7)],
)
def test_random_counts_of_every_partition_take_little_more_than_their_information(
    spreading: tuple[int, int], longest: int, outcomes: int
):
    dice = random.Random(5)

    def taken(length: int, _: Partition) -> OutcomeCounts:
        cuts = sorted(dice.randint(0, length) for _ in range(outcomes - 1))
        counts = [high - low for low, high in pairwise([0, *cuts, length])][1:]
        return OutcomeCounts(skipped=counts[0]) if outcomes == 2 else OutcomeCounts(0, *counts)

    made = world(spreading, longest, taken)
    lean, kept = ledger.split(made.summary())
    assert ledger.parse({**lean, **kept}) == made
    assert [*of_entries([{**lean, **kept}]).skipped] == [
        made.counts(p).skipped for p in sorted(made.end)
    ]
    many = spreading[0] * spreading[1]
    assert size(lean) <= LARGEST[longest][outcomes > 2] * many / 1000
    bits = many * math.log2(longest) + sum(
        math.log2(math.comb(end - made.begin[p] + outcomes - 1, outcomes - 1))
        for p, end in made.end.items()
    )
    assert size(lean) <= 600 + 1.2 * bits / 8 * 5 / 4


def test_a_few_partitions_are_readable():
    summary = entry(3, 9, "c", leaders={P: 4}, outcomes={P: OutcomeCounts(0, 1)}).summary()
    assert ledger.split(summary) == (summary, {})
    assert summary["frazil.ranges"] == '{"orders":{"0":[3,9]}}'
    assert summary["frazil.leader-epochs"] == '{"orders":{"0":[4]}}'
    assert summary["frazil.topics"] == '{"orders":"t"}'


@pytest.mark.parametrize("kind", ["partitions", "base"])
def test_a_property_that_is_gone_or_altered_stops_instead_of_being_guessed(kind: str):
    dice = random.Random(7)
    [made] = run_entries(*spread(1000, 1, dice), dice, 1)
    lean, kept = ledger.split(made.summary())
    [key] = [name for name in kept if name.startswith(f"frazil.{kind}.")]
    rest = {name: text for name, text in kept.items() if name != key}
    with pytest.raises(Fatal, match=f"property {key}, which it refers to, is gone"):
        ledger.parse(ledger.joined(lean, rest))
    with pytest.raises(Fatal, match=f"property {key}, which it refers to, was altered"):
        ledger.parse(ledger.joined(lean, {**kept, key: kept[key] + "0"}))
    with pytest.raises(Fatal, match=f"property {key}"):
        of_entries([ledger.joined(lean, rest)])


def test_properties_without_a_reference_are_removed_of_this_and_older_runs_only():
    dice = random.Random(7)
    one, two = run_entries(*spread(1000, 1, dice), dice, 2)
    kept = {}
    summaries = []
    for epoch, made in ((3, one), (4, two)):
        lean, stored = ledger.split(replace(made, epoch=epoch).summary())
        kept |= stored
        summaries.append(lean)
    old = [key for key in kept if ".3." in key]
    assert len(old) == 2
    sink = one.sink
    newer = {f"frazil.base.{sink}.5.x": "t", f"frazil.base.{sink}.other.4.x": "t", "frazil.x": "t"}
    assert ledger.forgotten({**kept, **newer}, summaries, sink, 4) == []
    assert ledger.forgotten({**kept, **newer}, summaries[1:], sink, 4) == old
    # Before its own claim is there, a run that is still under way may need them.
    assert ledger.forgotten({**kept, **newer}, summaries[:1], sink, 4) == []
    assert ledger.forgotten(kept, summaries[1:], "another", 4) == []
    assert ledger.forgotten(kept, summaries[1:], sink, 3) == []


def test_packed_columns_of_any_size_come_back_as_they_were():
    dice = random.Random(3)
    for _ in range(50):
        width, count = dice.randrange(1, 7), dice.randrange(0, 300)
        bits = dice.choice([1, 8, 40, 63])
        columns = [
            [dice.randrange(-(2**bits), 2**bits) for _ in range(count)] for _ in range(width)
        ]
        assert unpack(pack(columns), count).tolist() == columns


def test_the_newest_entry_of_the_sink_counts_and_foreign_commits_are_passed_over():
    other = replace(entry(0, 99, "x"), sink="other")
    history = [
        snapshot(4, 3, {}),
        snapshot(3, 2, other.summary()),
        snapshot(2, 1, entry(3, 9, "new").summary()),
        snapshot(1, None, entry(0, 3, "old").summary()),
    ]
    head = ledger.head(history, "s")
    assert head.commit_id == "new"
    assert head.snapshot is not None
    assert head.snapshot.id == 2


def test_an_entry_of_another_sink_may_have_a_newer_format():
    newer = {**replace(entry(0, 99, "x"), sink="other").summary(), "frazil.format-version": "2"}
    history = [snapshot(2, 1, newer), snapshot(1, None, entry(0, 3, "own").summary())]
    assert ledger.head(history, "s").commit_id == "own"
    assert [entry.commit_ids for entry, _ in ledger.entries(history, "s")] == [("own",)]
    with pytest.raises(Fatal, match="of sink other: expected Frazil format version 1, found 2"):
        ledger.head(history, "other")


def test_no_entry_in_a_whole_history_means_never_committed():
    assert ledger.head([snapshot(1, None, {})], "s").complete
    assert ledger.head([], "s").complete


def test_no_entry_in_an_expired_history_means_nothing_without_the_tag():
    expired = [snapshot(9, 8, {})]
    assert not ledger.head(expired, "s").complete
    tagged = snapshot(5, 4, entry(0, 3, "seen").summary())
    head = ledger.head(expired, "s", tagged)
    assert head.complete
    assert head.commit_id == "seen"


def test_a_tag_that_the_branch_was_moved_away_from_does_not_count():
    """Newer than what is left of the branch: it cannot be an ancestor."""
    tagged = snapshot(12, 11, entry(0, 3, "gone").summary())
    assert not ledger.head([snapshot(9, 8, {})], "s", tagged).complete
