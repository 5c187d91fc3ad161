"""Spark's checkpoint on a folder in memory: where sources stand, and a place put back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frazil.errors import Fatal, IdentityMismatch
from frazil.offsets import Cut, Partition
from frazil.spark.checkpoint import Checkpoint, SourceOffsets, began

A, B, C = Partition("orders", 0), Partition("orders", 1), Partition("other", 0)
METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1700000000000,"conf":{}}'

#: Offsets as Spark's own sources write them, none of them Kafka's.
FILE = '{"logOffset":3}'
ICEBERG = '{"version":1,"snapshot_id":8270633197658268308,"position":2,"scan_all_files":false}'
RATE = "17"
RATE_MICRO_BATCH = '{"offset":20,"timestamp":2000}'
OPAQUE = [FILE, ICEBERG, RATE, RATE_MICRO_BATCH, '"text"', "[1,2]", "{}", "null", "no json at all"]


class Folder:
    """A folder with the calls of `java_spark.HadoopFolder`."""

    path = "mem:/checkpoint"

    def __init__(self, **files: str) -> None:
        self.files = files

    def names(self, folder: str) -> list[str]:
        head = f"{folder}/"
        inside = [name.removeprefix(head) for name in self.files if name.startswith(head)]
        return sorted({name.split("/")[0] for name in inside})

    def read(self, name: str) -> str | None:
        return self.files.get(name)

    def write(self, name: str, text: str) -> None:
        assert name not in self.files, "a checkpoint's files are never written over"
        self.files[name] = text


def log(
    *batches: list[str], bound: bool = False, ended: int = -1, query: str = "q-1", **more: str
) -> Checkpoint:
    """The checkpoint of a query with these offsets after each batch."""
    files = {f"offsets/{n}": "\n".join(["v1", METADATA, *batch]) for n, batch in enumerate(batches)}
    files |= {f"commits/{n}": 'v1\n{"nextBatchWatermarkMs":0}' for n in range(ended + 1)}
    files["metadata"] = json.dumps({"id": query})
    return Checkpoint(Folder(**files, **more), bound=bound)  # type: ignore[arg-type]


def ours(cut: Cut, start: Cut | None = None, cluster: str = "k", **topics: str) -> str:
    """An offset as our own source writes it."""
    first = cut if start is None else start
    return json.dumps(
        {
            "version": 1,
            "cut": cut.nested(),
            "start": first.nested(),
            "cluster": cluster,
            "topics": topics,
        }
    )


def sources(place: SourceOffsets) -> list[Any]:
    listed: list[Any] = json.loads(place.text)["sources"]
    return listed


# ── where sources stand ──────────────────────────────────────────────────────────────────────


def test_our_own_offsets_are_a_cut_with_the_topics_ids():
    place = log([ours(Cut({A: 5, B: 7}), orders="id-1")]).after(0)
    assert place.cut == Cut({A: 5, B: 7})
    assert (place.cluster, place.topics) == ("k", {"orders": "id-1"})
    assert sources(place) == [{"frazil": ["orders"]}]


def test_offsets_of_sparks_kafka_source_are_a_cut():
    place = log(['{"orders":{"1":7,"0":5},"other":{"0":1}}']).after(0)
    assert place.cut == Cut({A: 5, B: 7, C: 1})
    assert (place.cluster, place.topics) == ("", {})
    assert sources(place) == [{"kafka": ["orders", "other"]}]


def test_a_topic_of_sparks_kafka_source_may_have_the_name_of_a_key_of_ours():
    place = log(['{"cut":{"0":5},"version":{"0":1}}']).after(0)
    assert place.cut == Cut({Partition("cut", 0): 5, Partition("version", 0): 1})
    assert sources(place) == [{"kafka": ["cut", "version"]}]


@pytest.mark.parametrize("text", OPAQUE)
def test_offsets_of_other_sources_are_text_that_is_compared_as_it_is(text: str):
    place = log([text]).after(0)
    assert place.cut == Cut()
    assert sources(place) == [text]
    assert place == log([text]).after(0)
    assert place != log([f"{text} "]).after(0)


def test_a_text_too_long_for_a_ledger_is_stored_as_its_digest_where_it_is_only_compared():
    long = json.dumps({"files": "x" * 600})
    place = log([long], bound=True).after(0)
    assert sources(place) == [f"sha256:{hashlib.sha256(long.encode()).hexdigest()}"]
    assert place != log([long.replace("x", "y")], bound=True).after(0)
    assert sources(log([long]).after(0)) == [long], "a new run must be able to begin there"


def test_a_source_without_batches_is_at_its_beginning_or_has_no_position():
    place = log(["-", ours(Cut({A: 1}))]).after(0)
    assert place.cut == Cut({A: 1})
    assert sources(place) == [None, {"frazil": ["orders"]}]
    notes = {"sources/0/0": '\0v1\n{"other":{"0":7}}', "sources/1/0": ""}
    place = log(["-", ours(Cut({A: 1}))], **notes).after(0)
    assert place.cut == Cut({A: 1, C: 7})


def test_two_sources_keep_their_order():
    one, other = ours(Cut({A: 5}), orders="id-1"), ours(Cut({C: 2}), other="id-2")
    place = log([one, RATE, other, '{"third":{"0":4}}']).after(0)
    assert place.cut == Cut({A: 5, C: 2, Partition("third", 0): 4})
    assert place.topics == {"orders": "id-1", "other": "id-2"}
    assert sources(place) == [
        {"frazil": ["orders"]},
        RATE,
        {"frazil": ["other"]},
        {"kafka": ["third"]},
    ]
    assert place != log([RATE, one, other, '{"third":{"0":4}}']).after(0)


def test_a_topic_that_two_sources_read_has_two_places():
    """One cut cannot hold both: the second stays as text, and either of them moves the place."""
    same = log(['{"orders":{"0":4}}', '{"orders":{"0":4,"1":2}}']).after(0)
    assert same.cut == Cut({A: 4, B: 2})
    assert sources(same) == [{"kafka": ["orders"]}, {"kafka": ["orders"]}]
    ahead, behind = '{"orders":{"0":9}}', '{"orders":{"0":4}}'
    place = log([ahead, behind]).after(0)
    assert place.cut == Cut({A: 9})
    assert sources(place) == [{"kafka": ["orders"]}, behind]
    assert place != log([ahead, '{"orders":{"0":5}}']).after(0)
    assert place != log([behind, ahead]).after(0)


def test_batches_without_a_file_and_logs_of_an_unknown_version_are_refused():
    with pytest.raises(IdentityMismatch, match="has no offsets/1"):
        log([RATE]).after(1)
    newer = Checkpoint(Folder(**{"offsets/0": f"v2\n{METADATA}\n{RATE}"}), bound=False)  # type: ignore[arg-type]
    with pytest.raises(Fatal, match="expected an offset log of version v1, found 'v2'"):
        newer.after(0)


# ── which batches there are ──────────────────────────────────────────────────────────────────


def test_the_newest_planned_batch_and_whether_it_ended():
    made = log([RATE], [RATE], [RATE], ended=1)
    assert made.last() == 2
    assert [made.ended(n) for n in range(3)] == [True, True, False]
    assert made.query == "q-1"


def test_numbers_are_compared_as_numbers_and_sparks_own_files_beside_them_do_not_count():
    folder = Folder(**{f"offsets/{name}": "" for name in ("9", "10", ".11.crc", "12.tmp")})
    assert Checkpoint(folder, bound=False).last() == 10  # type: ignore[arg-type]


def test_an_empty_folder_has_no_batch_and_no_query():
    empty = Checkpoint(Folder(), bound=True)  # type: ignore[arg-type]
    assert (empty.last(), empty.query, empty.ended(0)) == (None, "", False)


# ── before a batch ───────────────────────────────────────────────────────────────────────────


def test_before_a_batch_is_after_the_one_before_it():
    made = log([ours(Cut({A: 5}))], [ours(Cut({A: 8}))])
    assert made.before(1) == made.after(0)
    assert made.before(1) != made.after(1)


def test_before_its_first_batch_our_own_source_is_at_its_start():
    made = log([ours(Cut({A: 9, B: 4}), start=Cut({A: 5, B: 4}), orders="id-1")])
    assert made.before(0).cut == Cut({A: 5, B: 4})
    assert made.before(0).topics == {"orders": "id-1"}


NOTE = '\0v1\n{"orders":{"0":5}}'  # a zero byte stands before the version


def test_before_its_first_batch_sparks_kafka_source_is_at_its_recorded_position():
    notes = {"sources/0/0": NOTE, "sources/1/0": "\0v1\n17", "sources/2/0": NOTE.replace("s", "x")}
    made = log(['{"orders":{"0":9}}', RATE, '{"orderx":{"0":9}}'], **notes)
    assert made.before(0).cut == Cut({A: 5, Partition("orderx", 0): 5})
    assert sources(made.before(0)) == [{"kafka": ["orders"]}, None, {"kafka": ["orderx"]}]


def test_before_its_first_batch_an_iceberg_table_is_at_its_recorded_position():
    made = log(
        [ICEBERG], **{"sources/0/offsets/0": ICEBERG.replace('"position":2', '"position":0')}
    )
    assert sources(made.before(0)) == [ICEBERG.replace('"position":2', '"position":0')]


def test_notes_that_cannot_be_distinguished_are_not_used():
    """Spark counts a source that is read twice once: whose note is whose is not known."""
    twice = log(['{"orders":{"0":9}}', '{"orders":{"0":9}}'], **{"sources/0/0": NOTE})
    assert twice.before(0).cut == Cut()
    assert sources(twice.before(0)) == [None, None]


def test_before_their_first_batch_other_sources_have_no_position():
    made = log([FILE, RATE], **{"sources/0/0": f"v1\n{FILE}", "sources/1/0": "v1\n1700000000000"})
    assert made.before(0).cut == Cut()
    assert sources(made.before(0)) == [None, None]


# ── a query that is bound to its checkpoint ──────────────────────────────────────────────────


def test_a_bound_place_names_batch_and_query():
    """A batch that closes windows and reads nothing moves no offset."""
    made = log([RATE], [RATE], bound=True)
    assert json.loads(made.after(1).text) == {"sources": [RATE], "batch": 1, "query": "q-1"}
    assert made.after(0) != made.after(1)
    assert json.loads(made.before(0).text)["batch"] == -1
    assert made.after(1) != log([RATE], [RATE], bound=True, query="q-2").after(1)


def test_a_place_that_is_not_bound_is_the_same_whichever_batch_and_query_it_is():
    assert log([RATE], [RATE]).after(0) == log([RATE], [RATE], query="q-2").after(1)
    assert set(json.loads(log([RATE]).after(0).text)) == {"sources"}


def test_whose_topics_they_are_does_not_make_two_places_of_one():
    assert log([ours(Cut({A: 5}), orders="a")]).after(0) == log([ours(Cut({A: 5}))]).after(0)


# ── a place put into a fresh checkpoint ──────────────────────────────────────────────────────


def seeded(place: SourceOffsets, *kinds: str) -> Checkpoint:
    fresh = Checkpoint(Folder(), bound=False)  # type: ignore[arg-type]
    fresh.seed(place, kinds)
    return fresh


topics = st.sampled_from(["orders", "other", "a.b-c_d", "größe"])
cuts = st.dictionaries(
    st.builds(Partition, topics, st.integers(0, 999)), st.integers(0, 2**62), min_size=1, max_size=9
).map(Cut)
of_kafka = st.sampled_from(["frazil", "kafka"])


def offset_of(cut: Cut, kind: str) -> str:
    if kind == "kafka":
        return json.dumps(cut.nested())
    return ours(cut, Cut(), **{topic: f"id of {topic}" for topic in cut.topics})


@given(cuts, of_kafka)
def test_a_place_that_is_seeded_comes_back(cut: Cut, kind: str):
    place = log([offset_of(cut, kind)]).after(0)
    fresh = seeded(place, kind)
    assert fresh.after(0) == place
    assert fresh.before(1) == place
    assert (fresh.last(), fresh.ended(0)) == (0, True)
    if kind == "frazil":
        assert fresh.after(0).cluster == "k"
        assert fresh.after(0).topics == {topic: f"id of {topic}" for topic in cut.topics}
        assert fresh.before(0).cut == cut, "the stream has no beginning before the seed"


@given(cuts, of_kafka, of_kafka)
def test_a_stream_of_kafkas_may_be_read_by_the_other_source_from_now_on(
    cut: Cut, before: str, now: str
):
    place = seeded(log([offset_of(cut, before)]).after(0), now).after(0)
    assert place.cut == cut
    assert sources(place) == [{now: cut.topics}]


@given(cuts, of_kafka)
def test_a_cut_of_a_sink_that_was_fed_by_ranges_is_seeded_for_the_source_that_there_is(
    cut: Cut, kind: str
):
    place = seeded(SourceOffsets(cut, "", "k", dict.fromkeys(cut.topics, "id")), kind).after(0)
    assert place.cut == cut
    assert sources(place) == [{kind: cut.topics}]
    assert place.cluster == ("k" if kind == "frazil" else "")


@given(st.lists(st.sampled_from([*OPAQUE, "-", "kafka", "frazil"]), min_size=1, max_size=5))
def test_several_sources_that_are_seeded_come_back(kinds: list[str]):
    texts = [
        kind if kind in (*OPAQUE, "-") else offset_of(Cut({Partition(f"topic{n}", 1): n}), kind)
        for n, kind in enumerate(kinds)
    ]
    place = log(texts).after(0)
    assert seeded(place, *kinds).after(0) == place


def test_a_topic_that_two_sources_read_is_seeded_at_both_places():
    place = log(['{"orders":{"0":9}}', '{"orders":{"0":4}}']).after(0)
    again = seeded(place, "kafka", "kafka")
    assert again.after(0) == place
    offsets = again._folder.read("offsets/0").splitlines()[2:]  # type: ignore[union-attr]
    assert [json.loads(offset) for offset in offsets] == [
        {"orders": {"0": 9}},
        {"orders": {"0": 4}},
    ]


def test_a_place_of_more_or_fewer_sources_is_not_seeded():
    with pytest.raises(ValueError, match="zip"):
        seeded(log([RATE, RATE]).after(0), "rate")


def test_each_seed_is_a_query_of_its_own():
    place = log([RATE]).after(0)
    assert seeded(place, "rate").query != seeded(place, "rate").query


# ── where a batch began ──────────────────────────────────────────────────────────────────────


def test_a_batch_began_where_the_place_before_it_is():
    before, after = log([ours(Cut({A: 5, B: 1}))]), log([ours(Cut({A: 8, B: 1}))])
    assert began(before.after(0), after.after(0)) == Cut({A: 5, B: 1})


def test_a_new_partition_of_sparks_kafka_source_began_at_zero():
    made = log(['{"orders":{"0":5}}'], ['{"orders":{"0":6,"1":3},"other":{"0":7}}'])
    assert began(made.before(1), made.after(1)) == Cut({A: 5, B: 0, C: 0})


def test_a_new_partition_of_our_own_source_is_named_before_it_is_read():
    """It stands in the cut with its beginning, which retention may have moved."""
    made = log([ours(Cut({A: 5}))], [ours(Cut({A: 6, B: 40}))])
    assert began(made.before(1), made.after(1)) == Cut({A: 5, B: 40})


def test_new_partitions_of_both_kinds_in_one_batch():
    made = log(
        [ours(Cut({A: 5})), '{"other":{"0":5}}'],
        [ours(Cut({A: 5, B: 40})), '{"other":{"0":6,"1":3}}'],
    )
    assert began(made.before(1), made.after(1)) == Cut(
        {A: 5, B: 40, C: 5, Partition("other", 1): 0}
    )
