"""Random schemas and values: both ways of reading agree with what was written. Then, mutilation:
whatever is done to some datums, the others stay exact and every index is accounted for once."""

from __future__ import annotations

import copy
import datetime as dt
import io
import itertools
import json
import math
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frazil.arrow.avro import WriterSchema
from frazil.arrow.avro_types import UnsupportedSchema
from frazil.arrow.byte_slices import ByteSlices
from frazil.arrow.column_program import table_of
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.formats.json_reader import JsonShape
from tests.json_ways import one_by_one

# A schema, and a strategy for pairs: what fastavro is given, and what the column must hold.
Kind = tuple[Any, st.SearchStrategy[tuple[Any, Any]]]
_names = (f"N{i}" for i in itertools.count())
_EPOCH = dt.datetime(1970, 1, 1)


def same(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    return values.map(lambda value: (value, value))


def logical(kind: str, meaning: str, /, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": meaning, **more}


def moments(millis: bool, utc: bool) -> st.SearchStrategy[tuple[Any, Any]]:
    def moment(micros: int) -> tuple[Any, Any]:
        micros = micros // 1000 * 1000 if millis else micros
        it = _EPOCH + dt.timedelta(microseconds=micros)
        return (micros // 1000 if millis else micros), it.replace(
            tzinfo=dt.timezone.utc if utc else None
        )

    return st.integers(-(10**16), 10**16).map(moment)


def decimals(precision: int, scale: int) -> st.SearchStrategy[tuple[Any, Any]]:
    most = 10**precision - 1
    return same(st.integers(-most, most).map(lambda i: Decimal((i < 0, digits(i), -scale))))


def digits(number: int) -> tuple[int, ...]:
    return tuple(map(int, str(abs(number))))


@st.composite
def fixed(draw: st.DrawFn) -> Kind:
    size = draw(st.integers(1, 20))
    return (
        {"type": "fixed", "name": next(_names), "size": size},
        same(st.binary(min_size=size, max_size=size)),
    )


@st.composite
def enums(draw: st.DrawFn) -> Kind:
    symbols = [f"S{i}" for i in range(draw(st.integers(1, 5)))]
    schema = {"type": "enum", "name": next(_names), "symbols": symbols}
    return schema, same(st.sampled_from(symbols))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN: list[Callable[[], Kind]] = [
    lambda: ("boolean", same(st.booleans())),
    lambda: ("int", same(st.integers(-(2**31), 2**31 - 1))),
    lambda: ("long", same(st.integers(-(2**63), 2**63 - 1))),
    lambda: ("float", same(st.floats(width=32, allow_nan=False))),
    lambda: ("double", same(st.floats(allow_nan=False))),
    lambda: ("string", same(TEXT)),
    lambda: ("bytes", same(st.binary(max_size=20))),
    lambda: (logical("int", "date"), same(st.dates())),
    lambda: (
        logical("int", "time-millis"),
        same(st.times().map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000))),
    ),
    lambda: (logical("long", "time-micros"), same(st.times())),
    lambda: (logical("long", "timestamp-millis"), moments(True, True)),
    lambda: (logical("long", "timestamp-micros"), moments(False, True)),
    lambda: (logical("long", "local-timestamp-millis"), moments(True, False)),
    lambda: (logical("long", "local-timestamp-micros"), moments(False, False)),
    lambda: (logical("bytes", "decimal", precision=38, scale=5), decimals(38, 5)),
    lambda: (logical("bytes", "decimal", precision=64, scale=9), decimals(38, 9)),
    lambda: (logical("bytes", "decimal", precision=3, scale=3), decimals(3, 3)),
    lambda: (logical("fixed", "decimal", name=next(_names), size=8, precision=18), decimals(18, 0)),
]


@st.composite
def kinds(draw: st.DrawFn, depth: int = 3, bare: bool = False) -> Kind:
    """`bare` forbids a union at the top, as a branch of one must not be another."""
    shapes = ["plain"] * 4 + ["fixed", "enum"]
    shapes += (["record", "array", "map"] if depth else []) + ([] if bare else ["optional"] * 3)
    shapes += ["union"] if depth and not bare and draw(st.integers(0, 9)) == 0 else []
    shape = draw(st.sampled_from(shapes))
    if shape == "plain":
        return draw(st.sampled_from(PLAIN))()
    if shape == "fixed":
        return draw(fixed())
    if shape == "enum":
        return draw(enums())
    if shape == "record":
        return draw(records(depth - 1, 1))
    if shape == "array":
        schema, values = draw(kinds(depth=depth - 1))
        lists = st.lists(values, max_size=4)
        return {"type": "array", "items": schema}, lists.map(
            lambda pairs: ([written for written, _ in pairs], [read for _, read in pairs])
        )
    if shape == "map":
        schema, values = draw(kinds(depth=depth - 1))
        dicts = st.dictionaries(TEXT, values, max_size=3)
        return {"type": "map", "values": schema}, dicts.map(
            lambda items: (
                {key: written for key, (written, _) in items.items()},
                [(key, read) for key, (_, read) in items.items()],
            )
        )
    if shape == "union":
        integers = same(st.integers(-(2**31), 2**31 - 1))
        return ["long", "null", "string"], st.one_of(
            st.just((None, None)),
            integers.map(lambda pair: (pair[0], {"member0": pair[1], "member1": None})),
            same(TEXT).map(lambda pair: (pair[0], {"member0": None, "member1": pair[1]})),
        )
    schema, values = draw(kinds(depth=depth, bare=True))
    return draw(st.sampled_from([["null", schema], [schema, "null"]])), st.one_of(
        st.just((None, None)), values
    )


@st.composite
def records(draw: st.DrawFn, depth: int, least: int) -> Kind:
    fields = draw(st.lists(kinds(depth=depth), min_size=least, max_size=4))
    named = {f"f {i}": field for i, field in enumerate(fields)}
    inside = [{"name": name, "type": kind} for name, (kind, _) in named.items()]
    schema = {"type": "record", "name": next(_names), "fields": inside}
    values = st.fixed_dictionaries({name: values for name, (_, values) in named.items()})
    return schema, values.map(
        lambda row: (
            {name: written for name, (written, _) in row.items()},
            {name: read for name, (_, read) in row.items()},
        )
    )


def encode(schema: Any, value: Any) -> bytes:
    # Names as `f 0` are for us to bear; fastavro's own check of names is not what is tested.
    out = io.BytesIO()
    parsed = fastavro.parse_schema(json.loads(json.dumps(schema).replace("f ", "f_")))
    fastavro.schemaless_writer(out, parsed, renamed(value))
    return out.getvalue()


def renamed(value: Any) -> Any:
    if isinstance(value, dict):
        plain = all(isinstance(key, str) and key.startswith("f ") for key in value)
        return {
            (key.replace("f ", "f_") if plain else key): renamed(member)
            for key, member in value.items()
        }
    return [renamed(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_both_ways_of_reading_give_what_was_written(data: st.DataObject) -> None:
    schema, values = data.draw(records(3, 0))
    pairs = data.draw(st.lists(values, min_size=1, max_size=5))
    datums = [encode(schema, written) for written, _ in pairs]
    expected = [read for _, read in pairs]
    fast, slow = WriterSchema(json.dumps(schema)), WriterSchema(json.dumps(schema))
    assert slow._program is not None
    assert not len(slow._program.decode(ByteSlices.of(datums))[1]), "compiled code reads all of it"
    slow._program = None
    one, bad = fast.read(datums)
    other, worse = slow.read(datums)
    assert not bad
    assert not worse
    for table in (one, other):
        table.validate(full=True)
        assert table.schema.equals(fast.columns)
        assert table.to_pylist() == expected
    if schema["fields"]:
        assert one.equals(other)


FUZZED: Any = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": "string"},
        {"name": "n", "type": "int"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "color", "type": {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "more", "type": {"type": "map", "values": ["null", "long"]}},
        {"name": "hash", "type": {"type": "fixed", "name": "H", "size": 4}},
        {"name": "blob", "type": "bytes"},
        {
            "name": "inner",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "I",
                    "fields": [
                        {"name": "x", "type": "double"},
                        {"name": "l", "type": {"type": "array", "items": "int"}},
                    ],
                },
            ],
        },
    ],
}
PARSED = fastavro.parse_schema(FUZZED)
HUGE = [b"\x80\x80\x80\x80\x80\x20", b"\xff" * 9 + b"\x01", b"\xfe" * 9 + b"\x01", b"\xff\xff\x7f"]


def row(rng: random.Random, i: int) -> dict[str, Any]:
    return {
        "id": i,
        "name": "n" * rng.randrange(12),
        "n": rng.randrange(-(2**31), 2**31),
        "note": rng.choice([None, "", "note"]),
        "color": rng.choice("ABC"),
        "tags": ["t" * rng.randrange(5) for _ in range(rng.randrange(4))],
        "more": {f"k{k}": rng.choice([None, k]) for k in range(rng.randrange(3))},
        "hash": rng.randbytes(4),
        "blob": rng.randbytes(rng.randrange(9)),
        "inner": rng.choice([None, {"x": rng.random(), "l": [1] * rng.randrange(3)}]),
    }


def mutilated(rng: random.Random, datum: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(datum) + 1)
    return rng.choice(
        [
            lambda: datum + rng.randbytes(1),
            lambda: datum[:at] + rng.randbytes(rng.choice([1, 1, 2, 8])) + datum[at:],
            lambda: datum[:at],
            lambda: datum[at:],
            lambda: datum[:at] + bytes([rng.randrange(256)]) + datum[at + 1 :],
            lambda: datum[:at] + other[rng.randrange(len(other)) :],
            lambda: datum + other,
            lambda: datum[:at] + rng.choice(HUGE) + datum[at:],
            lambda: datum[:at] + rng.choice(HUGE) + datum[at + 1 :],
            lambda: rng.randbytes(rng.randrange(60)),
        ]
    )()


def judged(datum: bytes) -> tuple[str, Any]:
    """fastavro's word on a datum."""
    stream = io.BytesIO(datum)
    try:
        value: Any = fastavro.schemaless_reader(stream, PARSED, None)
    except IndexError:
        return "index", None
    except Exception:
        return "refused", None
    return ("read" if stream.tell() == len(datum) else "longer"), value


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """What we give, as fastavro gives it: of equal keys in a map the last."""
    return {**value, "more": dict(value["more"])}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return bool(one == other)


STRICTER = ("at most 10 bytes", "expected a symbol", "expected -2147483648 to 2147483647")


@pytest.mark.parametrize("headed", [False, True], ids=["avro", "confluent"])
@pytest.mark.parametrize("seed", range(12))
def test_mutilated_datums_never_harm_their_neighbours(seed: int, headed: bool) -> None:
    rng = random.Random(seed)
    rows = [row(rng, i) for i in range(600)]
    datums = []
    for record in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, PARSED, record)
        datums.append(out.getvalue())
    good = list(datums)
    harmed = set(rng.sample(range(600), rng.choice([1, 2, 5, 60, 300])))
    for i in harmed:
        datums[i] = mutilated(rng, good[i], good[rng.randrange(600)])
    head = b"\x00\x00\x00\x00\x07" if headed else b""
    decoder = Decoder(RecordFormat("confluent-avro" if headed else "avro", json.dumps(FUZZED)))
    decoded, rejected = decoder.decode([head + datum for datum in datums])

    decoded_rows: dict[int, Any] = {}
    for group in decoded:
        index = range(600) if group.index is None else group.index.tolist()
        group.rows.validate(full=True)
        for i, record in zip(index, group.rows.to_pylist(), strict=True):
            assert i not in decoded_rows
            decoded_rows[i] = record
    refused = {rejection.index: rejection for rejection in rejected}
    assert len(refused) == len(rejected)
    assert not refused.keys() & decoded_rows.keys()
    assert refused.keys() | decoded_rows.keys() == set(range(600))

    for i in range(600):
        if i not in harmed:
            assert plain(decoded_rows[i]) == rows[i]
            continue
        word, value = judged(datums[i])
        if i in decoded_rows:
            assert word == "read"
            assert alike(plain(decoded_rows[i]), value)
        else:
            assert word != "read" or any(phrase in refused[i].reason for phrase in STRICTER)
        # Alone it meets the same fate as among the others.
        alone, out = decoder.decode([head + datums[i]])
        assert [rejection.reason for rejection in out] == (
            [refused[i].reason] if i in refused else []
        )
        assert all(alike(chunk.rows.to_pylist()[0], decoded_rows[i]) for chunk in alone)


JSON_SHAPE = pa.schema(
    [
        pa.field("a", pa.int64(), nullable=False),
        ("b", pa.large_string()),
        ("c", pa.float64()),
        ("d", pa.struct([("e", pa.bool_()), ("f", pa.large_list(pa.int32()))])),
    ]
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**66), 2**66), st.floats(), st.text(max_size=5)
)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "a": st.one_of(st.integers(), SCALARS),
        "b": st.one_of(TEXT, SCALARS),
        "c": st.one_of(st.floats(), SCALARS),
        "z": SCALARS,
        "d": st.one_of(
            SCALARS,
            st.fixed_dictionaries(
                {},
                optional={
                    "e": SCALARS,
                    "f": st.lists(st.one_of(SCALARS, st.integers(0, 9)), max_size=3),
                },
            ),
        ),
    },
)
GOOD = st.builds(
    lambda a, b, c: {"a": a, "b": b, "c": c},
    st.integers(-(2**63), 2**63 - 1),
    TEXT,
    st.floats(allow_nan=False, allow_infinity=False),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            GOOD.map(lambda document: json.dumps(document).encode()),
            st.one_of(GOOD, NEARLY).map(
                lambda document: json.dumps(document, ensure_ascii=False).encode(
                    errors="surrogatepass"
                )
            ),
            st.binary(max_size=6),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_json_is_read_alike_at_once_and_one_by_one(values: list[bytes]) -> None:
    fast, slow = JsonShape(JSON_SHAPE), one_by_one(JSON_SHAPE)
    (one, out), (other, refused) = fast.decode(values), slow.decode(values)
    assert out == refused
    assert len(one) == len(other)
    for chunk, other_chunk in zip(one, other, strict=True):
        assert chunk.rows.equals(other_chunk.rows)
        assert chunk.rows.schema.equals(JSON_SHAPE)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=24),
            st.integers(-(10**40), 10**40).map(lambda i: i.to_bytes(17, "big", signed=True)),
            st.builds(
                lambda i, power, sign: (sign * (10**power + i)).to_bytes(16, "big", signed=True),
                st.integers(-2, 2),
                st.sampled_from([30, 38]),
                st.sampled_from([-1, 1]),
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([30, 38, 39, 64]),
    st.integers(0, 30),
)
def test_each_value_of_a_large_decimal_is_judged_alike_by_both_ways(
    values: list[bytes], precision: int, scale: int
) -> None:
    most = min(precision, 38)
    kind = logical("bytes", "decimal", precision=precision, scale=scale)
    fields = [{"name": "d", "type": kind}]
    writer = WriterSchema(json.dumps({"type": "record", "name": "r", "fields": fields}))
    datums = [bytes([2 * len(value)]) + value for value in values]
    bad: list[tuple[int, str]] = []
    slow = writer._each(ByteSlices.of(datums), range(len(datums)), bad)
    numbers = [int.from_bytes(value, "big", signed=True) for value in values]
    assert [i for i, _ in bad] == [i for i, n in enumerate(numbers) if abs(n) >= 10**most]
    wanted = [Decimal((n < 0, digits(n), -scale)) for n in numbers if abs(n) < 10**most]
    assert slow.field("d").to_pylist() == wanted
    fast, worse = writer.read(datums)
    assert worse == bad
    assert fast["d"].to_pylist() == wanted


# ── branches of unions ───────────────────────────────────────────────────────────────────────────


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_compiled_code_reads_what_the_strict_reader_reads(data: st.DataObject) -> None:
    """Whatever a byte is changed to: a branch that is none is seen among other columns, inside
    records, arrays and maps."""
    schema, values = data.draw(records(2, 1))
    rows = data.draw(st.lists(values, min_size=1, max_size=6))
    datums = [encode(schema, written) for written, _ in rows]
    writer = WriterSchema(json.dumps(schema))
    chance = data.draw(st.randoms(use_true_random=False))
    for _ in range(10):
        harmed = list(datums)
        i = chance.randrange(len(harmed))
        if not harmed[i]:
            continue
        at = chance.randrange(len(harmed[i]))
        byte = chance.choice([0, 1, 2, 3, 4, 5, 6, 128, 130, 255, chance.randrange(256)])
        harmed[i] = harmed[i][:at] + bytes([byte]) + harmed[i][at + 1 :]
        bad: list[tuple[int, str]] = []
        slow = writer._each(ByteSlices.of(harmed), range(len(harmed)), bad)
        fast, worse = writer.read(harmed)
        assert worse == bad
        assert alike_with_nan(fast, table_of(slow, writer.columns))


def alike_with_nan(one: pa.Table, other: pa.Table) -> bool:
    if one.equals(other):
        return True
    try:  # NaN is NaN here
        return repr(one.to_pylist()) == repr(other.to_pylist())
    except (OverflowError, ValueError):  # a day beyond Python's, beside a NaN: nobody can tell
        return one.schema.equals(other.schema)


# ── schemas that are none ────────────────────────────────────────────────────────────────────────

WHOLE = {
    "type": "record",
    "name": "R",
    "namespace": "a.b",
    "aliases": ["Old"],
    "fields": [
        {"name": "i", "type": "int", "aliases": ["j"], "default": 0},
        {"name": "s", "type": ["null", "string"], "default": None},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}},
        {"name": "f", "type": {"type": "fixed", "name": "F", "size": 4}},
        {"name": "d", "type": logical("bytes", "decimal", precision=10, scale=2)},
        {"name": "g", "type": logical("fixed", "decimal", name="G", size=9, precision=10, scale=2)},
        {"name": "t", "type": logical("long", "timestamp-micros")},
        {"name": "l", "type": {"type": "array", "items": "E"}},
        {"name": "m", "type": {"type": "map", "values": ["null", "F"]}},
        {
            "name": "r",
            "type": [
                "null",
                {"type": "record", "name": "Q", "fields": [{"name": "x", "type": "long"}]},
            ],
        },
        {"name": "u", "type": ["int", "string", "Q", "null"]},
        {"name": "w", "type": {"type": {"type": "string", "avro.java.string": "String"}}},
    ],
}
ODD = [
    None,
    5,
    True,
    -1,
    0,
    1.5,
    2**70,
    math.nan,
    "",
    "x",
    "null",
    "record",
    "\ud800",
    "..",
    "a.b",
    "Q",
    [],
    {},
    [[]],
    [None],
    ["null"],
    ["null", "null"],
    {"type": None},
    {"type": []},
    {"type": {}},
]
WORDS = [
    "type",
    "name",
    "fields",
    "items",
    "values",
    "size",
    "symbols",
    "namespace",
    "aliases",
    "logicalType",
    "precision",
    "scale",
    "\ud800",
]


def places(it: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = it.items() if isinstance(it, dict) else enumerate(it if isinstance(it, list) else ())
    return [path, *(place for key, below in inside for place in places(below, (*path, key)))]


def mutilated_schema(chance: random.Random) -> str:
    schema = json.loads(json.dumps(WHOLE))
    for _ in range(chance.randint(1, 3)):
        *way, last = chance.choice(places(schema)[1:])
        part = schema
        for step in way:
            part = part[step]
        how = chance.random()
        if how < 0.7:
            part[last] = copy.deepcopy(chance.choice(ODD))
        elif how < 0.8:
            del part[last]
        elif isinstance(part, dict):
            part[chance.choice(WORDS)] = part.pop(last)
        else:
            part.append(copy.deepcopy(part[last]))
    text = json.dumps(schema)
    at = chance.randint(0, len(text)) if chance.random() < 0.1 else len(text)
    return (
        text[:at] + chance.choice(['"', "{", "]", ",", "\ud800", ""]) * (at < len(text)) + text[at:]
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_read_or_unfit_whatever_it_says(seed: int) -> None:
    chance = random.Random(seed)
    fates = {"unfit": 0, "read": 0}
    for _ in range(1_000):
        text = mutilated_schema(chance)
        try:
            writer = WriterSchema(text)
        except UnsupportedSchema:
            fates["unfit"] += 1
            continue
        fates["read"] += 1
        for name in (*writer.columns.names, *writer.aliases):
            name.encode()
        rows, bad = writer.read([b"", chance.randbytes(30)])
        assert len(rows) + len(bad) == 2
    assert min(fates.values()) > 10


@pytest.mark.parametrize("fields", [None, 5, True, "x", {}, [5], [None], [[]]])
def test_fields_that_are_no_list_of_fields_are_unfit(fields: Any) -> None:
    with pytest.raises(UnsupportedSchema, match="expected a"):
        WriterSchema(json.dumps({"type": "record", "name": "r", "fields": fields}))
