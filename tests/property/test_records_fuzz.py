"""Kafka's batches by compiled code: what comes out is what a reader in plain Python finds."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from frazil.arrow.avro_datum import Datum, UnreadableDatum
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.kafka.record_batch import HEADERS, RawRecords, RecordBatches, RecordBatchHeader

SCHEMA = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "flag", "type": "boolean"},
    ],
}
PARSED = fastavro.parse_schema(SCHEMA)
HEADER = b"\0" + struct.pack(">I", 7)
DECODER = Decoder(RecordFormat("confluent-avro", json.dumps(SCHEMA)))


def varint(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def record(
    delta: int, value: bytes | None, *, time: int = 0, key: bytes | None = None, headers: int = 0
) -> bytes:
    extra = varint(headers) + (sized(b"trace") + sized(b"x")) * headers
    body = b"\0" + varint(time) + varint(delta) + sized(key) + sized(value) + extra
    return varint(len(body)) + body


def datum(dice: random.Random, number: int) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(
        out,
        PARSED,
        {
            "id": number,
            "name": "n" * dice.randrange(200),
            "amount": dice.random(),
            "note": dice.choice([None, "gift"]),
            "tags": ["t"] * dice.randrange(3),
            "flag": dice.random() < 0.5,
        },
    )
    return HEADER + out.getvalue()


def batches(
    dice: random.Random, values: list[bytes | None], **how: object
) -> list[RecordBatchHeader]:
    """`values` in batches of random sizes, as a broker would have stored them."""
    produced, offset, at = [], 1000, 0
    while at < len(values):
        part = values[at : at + dice.randrange(1, 40)]
        raw = b"".join(
            record(i, value, time=dice.randrange(100), **how)  # type: ignore[arg-type]
            for i, value in enumerate(part)
        )
        produced.append(
            RecordBatchHeader(offset, len(part) - 1, len(part), 1_700_000_000_000, None, raw)
        )
        offset += len(part) + dice.randrange(3)
        at += len(part)
    return produced


def one_by_one(given: list[RecordBatchHeader], start: int, end: int) -> RawRecords:
    """The records as a reader in plain Python finds them; a batch that breaks a rule has none."""
    rows: list[tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = []
    for batch in given:
        with contextlib.suppress(UnreadableDatum):
            rows += [row for row in records_of(batch) if start <= row[0] < end]
    columns = list(zip(*rows, strict=True)) or [()] * 5
    return RawRecords(
        list(columns[2]),
        np.array(columns[0], np.int64),
        np.array(columns[1], np.int64),
        pa.array(columns[3], pa.large_binary()),
        pa.array(columns[4], HEADERS),
    )


def records_of(batch: RecordBatchHeader) -> list[Any]:
    rows, last = [], -1
    reader = Datum(bytes(batch.records), 0)

    def part() -> bytes | None:
        size = reader.long()
        return None if size < 0 else reader.take(size)

    for _ in range(batch.count):
        size = reader.long()
        end = reader.place + size
        reader.take(1)
        time, delta = reader.long(), reader.long()
        key, value = part(), part()
        names = [
            (reader.take(reader.long()).decode(errors="replace"), part())
            for _ in range(reader.long())
        ]
        if reader.place != end or not last < delta <= batch.last_delta:
            raise UnreadableDatum(f"offset delta {delta} behind {last}")
        last = delta
        stamp = batch.first_ms + time if batch.append_ms is None else batch.append_ms
        stamp = max(-(2**63), min(2**63 - 1, stamp))
        rows.append((batch.base_offset + delta, stamp, value, key, names))
    if reader.place != len(reader.data):
        raise UnreadableDatum("bytes behind the records")
    return rows


def agree(given: list[RecordBatchHeader], start: int = 0, end: int = 2**62) -> None:
    """Is it what one by one gives, and the same rows from slices and from bytes?"""
    values, offsets, stamps, keys, headers = one_by_one(given, start, end)
    for envelope in (False, True):
        opened = RecordBatches(given, start, end).open(envelope)
        assert list(opened.values) == values
        assert np.array_equal(opened.offsets, offsets)
        assert np.array_equal(opened.stamps, stamps)
        assert opened.keys == (keys if envelope else None)
        assert opened.headers == (headers if envelope else None)
    slices = RecordBatches(given, start, end).open().values
    (decoded, rejected), (others, refused) = DECODER.decode(slices), DECODER.decode(values)
    assert rejected == refused
    assert [chunk.rows for chunk in decoded] == [chunk.rows for chunk in others]


@pytest.mark.parametrize(
    "key", [None, b"", b"k", b"k" * 90], ids=["null", "empty", "short", "long"]
)
def test_good_batches_are_read(key: bytes | None):
    dice = random.Random(1)
    agree(batches(dice, [datum(dice, i) for i in range(500)], key=key))


def test_each_row_has_its_own_key():
    dice = random.Random(9)
    keys = [b"%d" % i * dice.randrange(9) for i in range(60)]
    raw = b"".join(record(i, datum(dice, i), key=key) for i, key in enumerate(keys))
    given = [RecordBatchHeader(0, 59, 60, 0, None, raw)]
    agree(given, 7, 41)
    opened = RecordBatches(given, 7, 41).open(envelope=True)
    assert opened.keys == pa.array(keys[7:41], pa.large_binary())


def test_only_the_wanted_offsets_come_out():
    dice = random.Random(2)
    given = batches(dice, [datum(dice, i) for i in range(200)])
    agree(given, 1030, 1111)
    offsets = RecordBatches(given, 1030, 1111).open().offsets
    assert offsets.min() >= 1030
    assert offsets.max() < 1111


def test_a_clock_of_the_broker_counts_for_the_whole_batch():
    dice = random.Random(3)
    raw = b"".join(record(i, datum(dice, i), time=i) for i in range(5))
    given = [
        RecordBatchHeader(0, 4, 5, 1_000, 9_999, raw),
        RecordBatchHeader(5, 4, 5, 1_000, None, raw),
    ]
    agree(given)
    assert RecordBatches(given, 0, 99).open()[2].tolist() == [9_999] * 5 + [
        1000,
        1001,
        1002,
        1003,
        1004,
    ]


def test_holes_of_compaction_are_no_trouble():
    dice = random.Random(4)
    raw = b"".join(record(delta, datum(dice, delta)) for delta in (2, 3, 7, 40))
    agree(
        [RecordBatchHeader(100, 50, 4, 0, None, raw), RecordBatchHeader(160, 50, 4, 0, None, raw)]
    )


def any_record(dice: random.Random, delta: int) -> bytes:
    def some(*more: bytes | None) -> bytes | None:
        return dice.choice([b"", b"k", b"\xff\xfe", "grün".encode(), b"long " * 40, *more])

    pairs = [(some() or b"", some(None)) for _ in range(dice.choice([0, 0, 1, 3]))]
    extra = varint(len(pairs)) + b"".join(sized(name) + sized(value) for name, value in pairs)
    time = dice.choice([0, 7, -7, 2**40])
    body = b"\0" + varint(time) + varint(delta) + sized(some(None)) + sized(some(None)) + extra
    return varint(len(body)) + body


def test_records_with_headers_and_nulls_are_what_was_sent():
    dice = random.Random(5)
    for _ in range(200):
        count = dice.randrange(1, 30)
        raw = [any_record(dice, i) for i in range(count)]
        cut = dice.randrange(count)
        given = [
            RecordBatchHeader(0, count, cut, 50, None, b"".join(raw[:cut])),
            RecordBatchHeader(100, count, count - cut, 50, 60, b"".join(raw[cut:])),
        ]
        agree(given, dice.choice([0, 3]), dice.choice([2**62, 110]))


def test_bytes_that_are_no_batch_are_unread_alike():
    """The offsets are full, so a batch that cannot be read has a row without a value for each."""
    dice = random.Random(11)
    unread = 0
    for _ in range(2000):
        count = dice.randrange(1, 6)
        raw = b"".join(any_record(dice, i) for i in range(count))
        if dice.randrange(3):
            raw = mutilated(dice, raw, [b"\0\x80\xff" * 9])
        good = record(0, b"good", key=b"k", headers=1)
        given = [
            RecordBatchHeader(0, 0, 1, 0, None, good),
            RecordBatchHeader(1, count - 1, count, 0, None, raw),
            RecordBatchHeader(9, 0, 1, 0, None, good),
        ]
        records = RecordBatches(given, 0, 99)
        opened = records.open(envelope=True)
        expected = one_by_one(given, 0, 99)
        assert (list(opened.offsets[:1]), list(opened.offsets[-1:])) == ([0], [9])
        assert len(opened.offsets) == count + 2
        if records.broken:
            unread += 1
            assert len(expected.offsets) == 2
            assert list(records.broken) == list(range(1, count + 1))
            assert list(opened.values) == [b"good", *[None] * count, b"good"]
            assert opened.stamps.tolist() == [0, *[-1] * count, 0]
            assert opened.headers is not None
            assert opened.headers.to_pylist()[1:-1] == [[]] * count
        else:
            assert list(opened.values) == expected.values
            assert opened.headers == expected.headers
    assert 500 < unread < 1500


def test_no_mutilated_datum_ever_shifts_a_neighbour():
    """H9: one byte too many, too few, or other; the broker stores whatever it is given."""
    dice = random.Random(6)
    rejected = 0
    for _ in range(600):
        values: list[bytes | None] = [datum(dice, i) for i in range(dice.randrange(2, 120))]
        good = list(values)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(values))
            values[at] = mutilated(dice, values[at] or b"", values)
        opened = RecordBatches(batches(dice, values), 0, 2**62).open()
        assert list(opened.values) == values
        decoded, bad = DECODER.decode(opened.values)
        rejected += len(bad)
        [expected], _ = DECODER.decode(good)
        rows = {}
        for group in decoded:
            index = range(len(values)) if group.index is None else group.index.tolist()
            rows |= zip(index, group.rows.to_pylist(), strict=True)
        assert {*rows, *(record.index for record in bad)} == set(range(len(values)))
        for i, row in enumerate(expected.rows.to_pylist()):
            assert values[i] != good[i] or rows[i] == row
    assert rejected > 500


def mutilated(dice: random.Random, value: bytes, others: list[bytes | None]) -> bytes:
    way = dice.randrange(7)
    spot = dice.randrange(max(1, len(value)))
    if way == 0:
        return value + bytes([dice.randrange(256)])
    if way == 1:
        return value[:-1]
    if way == 2:
        return value[:spot] + bytes([dice.randrange(256)]) + value[spot + 1 :]
    if way == 3:
        return value[:spot] + (others[dice.randrange(len(others))] or b"")
    if way == 4:  # a whole record of Kafka's, hidden behind a datum
        return value + record(dice.randrange(5), value)
    if way == 5:  # the same, so that the lengths fit
        return value[:-1] + record(1, value)[: dice.randrange(1, 60)]
    return value[:5] + varint(dice.randrange(2**40)) + value[6:]


@pytest.mark.parametrize("extra", [b"\0", b"\0\0", b"\0" + b"x" * 40])
def test_the_last_record_of_a_block_may_be_no_longer_than_its_datum(extra: bytes):
    """It has no neighbour that a shift would show in."""
    dice = random.Random(8)
    values: list[bytes | None] = [datum(dice, i) for i in range(20)]
    values[-1] = (values[-1] or b"") + extra
    given = [
        RecordBatchHeader(0, 19, 20, 0, None, b"".join(record(i, v) for i, v in enumerate(values)))
    ]
    _, rejected = DECODER.decode(RecordBatches(given, 0, 99).open()[0])
    assert [rejection.index for rejection in rejected] == [19]


@pytest.mark.parametrize("index", [2, -1, 63, 64])
def test_a_branch_that_no_union_has_is_seen_in_kafkas_batches(index: int):
    dice = random.Random(6)
    values: list[bytes | None] = [datum(dice, i) for i in range(50)]
    plain = io.BytesIO()
    fastavro.schemaless_writer(
        plain,
        PARSED,
        {"id": 7, "name": "", "amount": 0.5, "note": "gift", "tags": [], "flag": True},
    )
    good = HEADER + plain.getvalue()
    at = good.index(b"\x02\x08gift")
    for i, number in ((31, 1), (31, index)):
        values[i] = good[:at] + varint(number) + good[at + 1 :]
        agree(batches(random.Random(6), values))
    _, [rejected] = DECODER.decode(values)
    assert rejected.index == 31
    assert rejected.reason == f"cannot read note: expected branch 0 or 1 of a union, found {index}"


def test_nothing_but_invisible_offsets_is_nothing():
    values, offsets, stamps, keys, headers = RecordBatches([], 5, 9).open(envelope=True)
    assert list(values) == []
    assert len(offsets) == len(stamps) == 0
    assert keys == pa.array([], pa.large_binary())
    assert headers == pa.array([], HEADERS)
