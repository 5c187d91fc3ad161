"""Kafka's states, as bytes: what no real broker can be made to send, and what it must come to."""

from __future__ import annotations

import contextlib
import gzip
import struct
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from frazil.errors import FrazilError, Unavailable, Undecodable
from frazil.kafka import connection, protocol
from frazil.kafka import fetch as fetching
from frazil.kafka.fetch import fetch
from frazil.kafka.leader_epochs import epoch_ends
from frazil.offsets import Partition, Range
from tests.byte_broker import ByteBroker, batch, compressed, old, record, values

HERE = Partition("t", 0)
CONTROL, TRANSACTIONAL = 1 << 5, 1 << 4
ABORT = struct.pack(">hh", 0, 0)
Read = tuple[dict[int, bytes | None], dict[int, str], int]


def marker(base: int, producer: int, *records: bytes) -> bytes:
    return batch(
        base,
        records,
        count=len(records),
        last_delta=0,
        producer=producer,
        attributes=CONTROL | TRANSACTIONAL,
    )


def read(
    broker: ByteBroker, start: int, end: int, client: bool = False, patience: float = 1
) -> Read:
    """Values by offset, broken records by offset, and how many offsets were invisible."""
    records: dict[int, bytes | None] = {}
    broken: dict[int, str] = {}
    invisible, at = 0, start
    wanted = Range(HERE, start, end)
    for chunk in fetch(broker.kafka, wanted, patience=patience, client=client):
        opened = chunk.open()
        assert chunk.span.start == at
        at = chunk.span.end
        for i, (offset, value) in enumerate(
            zip(opened.offsets.tolist(), opened.values, strict=True)
        ):
            assert offset not in records
            records[offset] = value
            if i in chunk.broken:
                broken[offset] = chunk.broken[i]
        invisible += len(chunk.span) - len(opened.offsets)
    assert at == end
    return records, broken, invisible


@pytest.fixture
def serve() -> Iterator[Callable[..., ByteBroker]]:
    with contextlib.ExitStack() as stack:
        yield lambda *log, end: stack.enter_context(ByteBroker(*log, end=end))
    forget_clients()


def forget_clients() -> None:
    """A client that outlives its broker calls the port again and again, whoever gets it next: once
    Spark has it for a Python worker, that worker's stream stops."""
    connection._admins.clear()
    for consumer in fetching._consumers.values():
        consumer.close()
    fetching._consumers.clear()


def expected(*spans: tuple[int, int]) -> dict[int, bytes | None]:
    return {i: b"v%d" % i for start, end in spans for i in range(start, end)}


WAYS = pytest.mark.parametrize("client", [False, True], ids=["wire", "client"])
Serve = Callable[..., ByteBroker]

# ── transactions and what the log cleaner leaves of them ─────────────────────────────────────────


@WAYS
def test_a_control_batch_that_the_cleaner_emptied_is_passed_over(serve: Serve, client: bool):
    log = [values(0, 3), marker(3, 7), marker(4, 8, record(0, b"", ABORT)), values(5, 2)]
    records, broken, invisible = read(serve(*log, end=7), 0, 7, client)
    assert (records, broken, invisible) == (expected((0, 3), (5, 7)), {}, 2)


@WAYS
def test_a_batch_that_the_cleaner_emptied_is_passed_over(serve: Serve, client: bool):
    log = [values(0, 2), batch(2, [], last_delta=5), values(8, 1)]
    records, _, invisible = read(serve(*log, end=9), 0, 9, client)
    assert (records, invisible) == (expected((0, 2), (8, 9)), 6)


def test_an_emptied_marker_ends_its_producers_transaction(serve: Serve):
    """The next records of the producer are committed, though no marker says so any more."""
    sent = {"attributes": TRANSACTIONAL, "producer": 7}
    log = [values(0, 2, **sent), marker(2, 7), values(3, 2, **sent), marker(5, 7, record(0, b""))]
    broker = serve(*log, end=6)
    broker.aborted = [(7, 0)]
    records, _, invisible = read(broker, 0, 6)
    assert (records, invisible) == (expected((3, 5)), 4)


@WAYS
def test_control_records_of_other_kinds_are_invisible(serve: Serve, client: bool):
    odd = [record(0, b"x", struct.pack(">hh", 0, kind)) for kind in (1, 2, 5)]
    log = [values(0, 1), *(marker(1 + i, 9, kind) for i, kind in enumerate(odd)), values(4, 1)]
    records, _, invisible = read(serve(*log, end=5), 0, 5, client)
    assert (records, invisible) == (expected((0, 1), (4, 5)), 3)


# ── older formats ────────────────────────────────────────────────────────────────────────────────


@WAYS
@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("size", [1, 26, 27, 28, 200])
def test_messages_of_older_formats_are_left_to_the_client_however_small(
    serve: Serve, magic: int, size: int, client: bool
):
    given = {i: b"%d" % (i % 10) * size for i in range(5)}
    log = [old(i, value, magic) for i, value in given.items()]
    broker = serve(*log, end=5)
    records, broken, invisible = read(broker, 0, 5, client, patience=5)
    assert (records, broken, invisible) == (given, {}, 0)
    # The last message of a log, alone.
    assert read(broker, 4, 5, client, patience=5)[0] == {4: given[4]}


# ── compression ──────────────────────────────────────────────────────────────────────────────────

CODECS = pytest.mark.parametrize("codec", [1, 2, 3, 4], ids=["gzip", "snappy", "lz4", "zstd"])
RECORDS = b"".join(record(i, b"v%d" % (10 + i)) for i in range(20))


@WAYS
@CODECS
def test_each_codec_gives_the_records(serve: Serve, codec: int, client: bool):
    packed = batch(10, compressed(codec, RECORDS), count=20, attributes=codec)
    records, broken, _ = read(serve(packed, end=30), 10, 30, client)
    assert (records, broken) == (expected((10, 30)), {})


def test_gzip_of_two_members_gives_all_records(serve: Serve):
    packed = gzip.compress(RECORDS[:50]) + gzip.compress(RECORDS[50:])
    records, broken, _ = read(serve(batch(10, packed, count=20, attributes=1), end=30), 10, 30)
    assert (records, broken) == (expected((10, 30)), {})


@CODECS
@pytest.mark.parametrize("how", ["cut", "garbage", "empty", "bit"])
def test_broken_compression_rejects_the_records_of_its_batch_and_no_others(
    serve: Serve, codec: int, how: str
):
    whole = compressed(codec, RECORDS)
    packed = {
        "cut": whole[: len(whole) // 2],
        "garbage": b"\xde\xad" * 30,
        "empty": b"",
        "bit": whole[:4] + bytes([whole[4] ^ 0xFF]) + whole[5:],
    }[how]
    log = [values(0, 10), batch(10, packed, count=20, attributes=codec), values(30, 5)]
    try:
        records, broken, invisible = read(serve(*log, end=35), 0, 35)
    except Undecodable as error:
        pytest.fail(str(error))
    assert invisible == 0
    if broken:  # a turned bit may hit what does not matter
        assert set(broken) == set(range(10, 30))
        assert all(records[i] is None for i in broken)
    assert how == "bit" or broken
    assert {i: v for i, v in records.items() if i not in broken} == {
        i: v for i, v in expected((0, 35)).items() if i not in broken
    }


@CODECS
def test_a_batch_that_unpacks_to_too_much_is_rejected_with_its_offsets(
    serve: Serve, codec: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(protocol, "LARGEST_BATCH", 5_000)
    large = record(0, b"x" * 2_000) + record(1, b"y" * 4_000)
    log = [
        values(0, 3),
        batch(3, compressed(codec, large), count=2, attributes=codec),
        values(5, 2),
    ]
    broker = serve(*log, end=7)
    records, broken, invisible = read(broker, 0, 7)
    assert set(broken) == {3, 4}
    assert "unpacks to more than" in broken[3]
    assert {i: v for i, v in records.items() if i not in broken} == expected((0, 3), (5, 7))
    assert (invisible, broker.fetches) == (0, 1), "it is not asked for again and again"


# ── lengths and counts that lie ──────────────────────────────────────────────────────────────────


def test_records_that_the_count_leaves_out_are_not_left_out_in_silence(serve: Serve):
    three = b"".join(record(i, b"v%d" % i) for i in range(3))
    records, broken, _ = read(serve(batch(0, three, count=2, last_delta=1), end=2), 0, 2)
    assert set(broken) == set(records) == {0, 1}


def test_a_count_beyond_what_the_batch_holds_rejects_it(serve: Serve):
    log = [batch(0, [record(0, b"v0")], count=3), values(3, 1)]
    records, broken, _ = read(serve(*log, end=4), 0, 4)
    assert set(broken) == {0, 1, 2}
    assert records[3] == b"v3"


def test_a_batch_that_counts_no_record_is_read_over_only_if_it_has_no_bytes(serve: Serve):
    log = [values(0, 2), batch(2, b"", count=0, last_delta=2), values(5, 1)]
    records, broken, invisible = read(serve(*log, end=6), 0, 6)
    assert (set(records), broken, invisible) == ({0, 1, 5}, {}, 3)


@pytest.mark.parametrize("value", [b"v", None], ids=["in a block", "one by one"])
def test_a_timestamp_beyond_64_bits_is_not_another_moment(serve: Serve, value: bytes | None):
    log = batch(0, [record(0, value, later=1000), record(1, value, later=-5)], stamp=2**63 - 1)
    [chunk] = fetch(serve(log, end=2).kafka, Range(HERE, 0, 2), patience=1)
    assert chunk.open().stamps.tolist() == [2**63 - 1, 2**63 - 6]


def test_too_little_memory_to_unpack_a_batch_says_nothing_of_the_batch(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> bytes:
        raise pa.ArrowMemoryError("malloc of size 536870912 failed")

    monkeypatch.setattr(protocol, "_unsnapped", full)
    log = batch(0, compressed(2, RECORDS), count=20, attributes=2)
    with pytest.raises(MemoryError):
        read(serve(log, end=20), 0, 20)


@pytest.mark.parametrize("count", [-1, -(2**31), 0, 2, 2**31 - 1])
def test_a_batch_with_unknown_offsets_stops_the_reader(serve: Serve, count: int):
    log = [values(0, 2), batch(2, b"\x7f\xff", count=count, last_delta=4)]
    with pytest.raises(Undecodable, match=r"t\[0\].*\[2, 7\) of -?\d+ records"):
        read(serve(*log, end=7), 0, 7)


@pytest.mark.parametrize(
    "records",
    [
        [record(0, b"a"), record(0, b"b")],
        [record(1, b"a"), record(0, b"b")],
        [record(0, b"a"), record(7, b"b")],
        [record(0, b"a"), record(-3, b"b")],
        [zero := record(0, b"a"), bytes([zero[0] + 2]) + zero[1:]],
        [b"\xff" * 11],
    ],
    ids=["twice", "backwards", "beyond", "before", "length", "endless"],
)
def test_records_that_are_not_where_they_say_reject_the_batch(serve: Serve, records: list[bytes]):
    made = batch(0, b"".join(records), count=2, last_delta=1)
    assert set(read(serve(made, end=2), 0, 2)[1]) == {0, 1}


#: Batches from offset 10 on, and which offset librdkafka stops at. (Cut gzip keeps a thread of
#: librdkafka busy for ever, and cut lz4 ends its process.)
BROKEN = {
    **{
        f"codec {codec}": (batch(10, b"\xde\xad" * 30, count=20, attributes=codec), 10)
        for codec in (1, 2, 3, 4)
    },
    **{
        f"no bytes of codec {codec}": (batch(10, b"", count=20, attributes=codec), 10)
        for codec in (2, 3, 4)
    },
    "an offset twice": (batch(10, [record(0, b"a"), record(0, b"b")]), 10),
    "backwards": (batch(10, [record(1, b"a"), record(0, b"b")]), 10),
    "beyond": (batch(10, [record(0, b"a"), record(7, b"b")]), 12),
    "more than counted": (batch(10, [record(i, b"a") for i in range(3)], count=2), 12),
}


@pytest.mark.parametrize("name", BROKEN)
def test_of_a_broken_batch_the_client_stops_where_our_own_fetch_rejects_its_records(
    serve: Serve, name: str
):
    made, at = BROKEN[name]
    end = 10 + struct.unpack_from(">i", made, 23)[0] + 1
    log = [values(0, 10), made, values(end, 5)]
    records, broken, _ = read(serve(*log, end=end + 5), 0, end + 5)
    assert set(broken) == set(range(10, end))
    good = {i: v for i, v in records.items() if i not in broken}
    assert good == expected((0, 10), (end, end + 5))
    with pytest.raises(Undecodable, match=rf"cannot read t\[0\] at offset {at}: \S+") as stopped:
        read(serve(*log, end=end + 5), 0, end + 5, client=True)
    assert "--to t:0:OFFSET" in stopped.value.hint
    # What lies before it and behind it, both ways read alike.
    for start, stop in ((0, 10), (end, end + 5)):
        ways = [read(serve(*log, end=end + 5), start, stop, client) for client in (False, True)]
        assert ways[0] == ways[1] == (expected((start, stop)), {}, 0)


def test_the_client_names_where_it_waits_for_a_batch_that_it_does_not_report(serve: Serve):
    log = [values(0, 2), batch(2, b"\x7f\xff", count=2, last_delta=4), values(7, 1)]
    with pytest.raises(Unavailable, match=r"t\[0\].*no record and no error.*offset 2") as stopped:
        read(serve(*log, end=8), 0, 8, client=True, patience=0.5)
    assert "broken" in stopped.value.hint


@pytest.mark.parametrize("length", [-12, -1, 0, 3, 48, 2**31 - 1, -(2**31)])
def test_a_length_that_lies_ends_within_the_patience_and_is_named(serve: Serve, length: int):
    with pytest.raises(Unavailable, match=r"t\[0\].*offset 0"):
        read(serve(values(0, 3, length=length), end=3), 0, 3, patience=0.3)


@pytest.mark.parametrize(
    "log",
    [[values(0, 5), values(3, 4)], [values(0, 5), values(0, 5)], [values(4, 3), values(0, 9)]],
    ids=["overlapping", "twice", "backwards"],
)
def test_batches_out_of_order_are_never_read_twice(serve: Serve, log: list[bytes]):
    with pytest.raises(Unavailable, match=r"t\[0\].*follows one that ends at"):
        read(serve(*log, end=9), 0, 9, patience=0.3)


def test_a_wrong_checksum_is_asked_for_again_and_then_named(serve: Serve):
    spoiled = values(0, 3)[:-1] + b"\xff"
    broker = serve(end=3)
    broker.log = lambda _: spoiled if broker.fetches < 3 else values(0, 3)
    assert read(broker, 0, 3, patience=5)[0] == expected((0, 3))
    broker.log = lambda _: spoiled
    with pytest.raises(Unavailable, match=r"t\[0\].*offset 0 has a wrong checksum"):
        read(broker, 0, 3, patience=0.3)


def test_any_bytes_at_all_end_in_records_or_an_error_of_ours(serve: Serve):
    """Every byte of an answer turned, one after the other."""
    broker = serve(values(0, 2), marker(2, 7, record(0, b"", ABORT)), values(3, 2), end=5)
    broker.aborted = [(9, 4)]
    whole: list[bytes] = []
    broker.alter = lambda answer: whole.append(answer) or answer  # type: ignore[func-returns-value]
    assert read(broker, 0, 5)[0] == expected((0, 2), (3, 5))
    at = 4

    def turned(answer: bytes) -> bytes:
        return (
            answer[:at] + bytes([answer[at] ^ 0xFF]) + answer[at + 1 :] if at < len(answer) else b""
        )

    broker.alter = turned
    for at in range(4, len(whole[0])):  # noqa: B007  # `turned` reads it
        result = outcome(broker)
        assert isinstance(result, str) or result.items() <= expected((0, 2), (3, 5)).items()
        assert not isinstance(result, str) or "t[0]" in result


def outcome(broker: ByteBroker) -> dict[int, bytes | None] | str:
    try:
        records, broken, _ = read(broker, 0, 5, patience=0.0)
    except FrazilError as error:
        return str(error)
    return {i: value for i, value in records.items() if i not in broken}


# ── answers and requests ─────────────────────────────────────────────────────────────────────────


def test_the_answer_to_another_request_is_not_taken(serve: Serve):
    broker = serve(values(0, 3), end=3)
    broker.alter = lambda answer: struct.pack(">i", 0) + answer[4:]
    with pytest.raises(Unavailable, match="expected the answer to request"):
        read(broker, 0, 3, patience=0.3)


@pytest.mark.parametrize(("topic", "number"), [("u", 0), ("t", 1), ("tt", 0)])
def test_records_of_another_partition_are_not_taken(serve: Serve, topic: str, number: int):
    broker = serve(values(0, 3), end=3)
    broker.topic, broker.number = topic, number
    with pytest.raises(
        Unavailable, match=rf"expected records of t\[0\], found {topic}\[{number}\]"
    ):
        read(broker, 0, 3, patience=0.3)


def test_two_readers_on_one_thread_do_not_get_each_others_answers(serve: Serve):
    """The first one has asked for more before the second one begins."""
    broker = serve(end=6)
    broker.log = lambda offset: values(offset // 3 * 3, 3)
    first = fetch(broker.kafka, Range(HERE, 0, 6), patience=2)
    assert list(next(first).open().values) == [b"v0", b"v1", b"v2"]
    assert read(broker, 0, 3)[0] == expected((0, 3))
    assert [value for chunk in first for value in chunk.open().values] == [b"v3", b"v4", b"v5"]
    assert threading.active_count() < 50


def test_a_broker_that_does_not_know_the_request_for_leader_epochs_is_left_to_the_client(
    serve: Serve,
):
    """It hangs up; the client, which knows what the broker can do, reads on."""
    broker = serve(values(0, 3), end=3)
    assert epoch_ends(broker.kafka, {HERE: 0}, {HERE: 1}, patience=10) == {HERE: 1}


@pytest.mark.parametrize("client", [False, True])
def test_a_schema_id_in_a_header_is_seen_without_asking_for_headers(serve: Serve, client: bool):
    """Keys and headers of all records are made only if one may name its schema there."""
    plain = [(b"traceparent", b"00-1"), (b"__value_schemx_id", b"1"), (b"__value", None)]
    named = [(b"source", None), (b"__value_schema_id", b"\1")]

    def headers(*records: bytes) -> list[object] | None:
        broker = serve(batch(0, records), end=len(records))
        at = Range(HERE, 0, len(records))
        [chunk] = fetch(broker.kafka, at, patience=5, client=client, envelope=True)
        assert len(chunk.open().values) == len(records)
        assert chunk.open().headers is None
        opened = chunk.open(schema_ids=True).headers
        whole = chunk.open(envelope=True).headers
        assert whole is not None
        assert opened is None or opened.equals(whole)
        return None if opened is None else opened.to_pylist()

    assert client or headers(record(0, b"a", headers=plain), record(1, b"b")) is None
    pairs = headers(record(0, b"a", headers=plain), record(1, b"b", headers=named))
    assert pairs is not None
    assert pairs[1] == [
        {"key": "source", "value": None},
        {"key": "__value_schema_id", "value": b"\1"},
    ]
