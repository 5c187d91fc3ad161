"""Kafka's batches read as Avro: what comes out at once is what comes out one by one, or nothing."""

from __future__ import annotations

import io
import json
import random
import struct

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from frazil.formats.decoder import Decoder, RecordFormat
from frazil.kafka.record_batch import HEADERS, RecordBatches, RecordBatchHeader

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


def agree(given: list[RecordBatchHeader], start: int = 0, end: int = 2**62) -> bool:
    """Was it read at once? And if so, is it what one by one gives?"""
    records = RecordBatches(given, start, end)
    values, offsets, stamps, keys, headers = RecordBatches(given, start, end)._one_by_one(
        envelope=True
    )
    for envelope in (False, True):
        opened = RecordBatches(given, start, end).open(envelope)
        assert opened.values == values
        assert np.array_equal(opened.offsets, offsets)
        assert np.array_equal(opened.stamps, stamps)
        assert opened.keys == (keys if envelope else None)
        assert opened.headers == (headers if envelope else None)
    framed = DECODER.framed(records)
    if framed is None:
        return False
    decoded, rejected = DECODER.decode(values)
    assert not rejected, "a bad record was let through"
    assert framed.decoded.rows.equals(decoded[0].rows)
    assert np.array_equal(framed.offsets, offsets)
    assert np.array_equal(framed.stamps, stamps)
    assert (
        pa.nulls(len(values), pa.large_binary()) if framed.keys is None else framed.keys
    ) == keys
    return True


@pytest.mark.parametrize(
    "key", [None, b"", b"k", b"k" * 90], ids=["null", "empty", "short", "long"]
)
def test_good_batches_are_read_at_once(key: bytes | None):
    dice = random.Random(1)
    assert agree(batches(dice, [datum(dice, i) for i in range(500)], key=key))


def test_each_row_that_is_read_at_once_has_its_own_key():
    dice = random.Random(9)
    keys = [b"%d" % i * dice.randrange(9) for i in range(60)]
    raw = b"".join(record(i, datum(dice, i), key=key) for i, key in enumerate(keys))
    given = [RecordBatchHeader(0, 59, 60, 0, None, raw)]
    assert agree(given, 7, 41)
    framed = DECODER.framed(RecordBatches(given, 7, 41))
    assert framed is not None
    assert framed.keys == pa.array(keys[7:41], pa.large_binary())


def test_only_the_wanted_offsets_come_out():
    dice = random.Random(2)
    given = batches(dice, [datum(dice, i) for i in range(200)])
    assert agree(given, 1030, 1111)
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
    assert agree(given)
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
    assert agree(
        [RecordBatchHeader(100, 50, 4, 0, None, raw), RecordBatchHeader(160, 50, 4, 0, None, raw)]
    )


@pytest.mark.parametrize("how", [{"headers": 1}, {"headers": 3}])
def test_headers_and_nulls_are_read_one_by_one(how: dict[str, int]):
    dice = random.Random(5)
    assert not agree(batches(dice, [datum(dice, i) for i in range(50)], **how))
    mixed = [datum(dice, i) if i % 7 else None for i in range(50)]
    assert RecordBatches(batches(dice, mixed), 0, 2**62).open().values == mixed


def test_no_mutilated_datum_ever_shifts_a_neighbour():
    """H9: one byte too many, too few, or other; the broker stores whatever it is given."""
    dice = random.Random(6)
    at_once = 0
    for _ in range(600):
        values: list[bytes | None] = [datum(dice, i) for i in range(dice.randrange(2, 120))]
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(values))
            values[at] = mutilated(dice, values[at] or b"", values)
        given = batches(dice, values)
        framed = DECODER.framed(RecordBatches(given, 0, 2**62))
        if framed is None:
            continue
        at_once += 1  # only where every mutation still is a good datum
        decoded, rejected = DECODER.decode(values)
        assert not rejected
        assert framed.decoded.rows.equals(decoded[0].rows)
    assert at_once < 300


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
    assert DECODER.framed(RecordBatches(given, 0, 99)) is None
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
        given = batches(random.Random(6), values)
        assert agree(given) is (number == 1)
    _, [rejected] = DECODER.decode(values)
    assert rejected.index == 31
    assert rejected.reason == f"cannot read note: expected branch 0 or 1 of a union, found {index}"


def test_nothing_but_invisible_offsets_is_nothing():
    values, offsets, stamps, keys, headers = RecordBatches([], 5, 9).open(envelope=True)
    assert values == []
    assert len(offsets) == len(stamps) == 0
    assert keys == pa.array([], pa.large_binary())
    assert headers == pa.array([], HEADERS)
