"""Column types from Kafka Connect's schema beside a JSON payload. Runs on executors.

    {"schema": {…, "fields": [{"field": "after", "type": "struct", "fields": [
        {"field": "born", "type": "int32", "name": "io.debezium.time.Date"}, …]}, …]},
     "payload": {…, "after": {"born": 18628, …}}}

In: the schema, the row's members, each with its text, and the columns of the table. Out: the kinds
of the columns, for a table that has to be created; and the same members, those of a named type
rewritten as JSON that the table's column can read (`"2021-01-01"`). Only top-level columns are
rewritten.

A column that holds the value as it was sent keeps it: a table that is there does not change. A
value that does not match its type is left as it is, and the table's column decides.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from decimal import Context, Decimal
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pyarrow as pa

from frazil.arrow.avro_types import MAX_DEPTH
from frazil.formats.json_inference import Kind, SeenValues

_EPOCH = datetime(1970, 1, 1)
_EXACT = Context(prec=400)
#: The longest text of a decimal: PostgreSQL's numeric has up to 147,455 digits.
_LONGEST = 200_000

Members = dict[str, tuple[Any, str]]


class NamedColumn(NamedTuple):
    """What the schema says of a column. `write` makes of a value's text one that a column of a type
    for which `fits` is true can read; None: the table lacks the column."""

    kind: Kind
    write: Callable[[str], str] | None = None
    fits: Callable[[pa.DataType | None], bool] = lambda _: False


Named = Mapping[str, NamedColumn]


@lru_cache(maxsize=256)
def named(schema: str, side: str) -> Named:
    """The columns of the struct `side` of an envelope whose type the schema says."""
    try:
        fields = _fields(json.loads(schema))
    except (ValueError, RecursionError):
        return {}
    row = next((field for field in fields if field.get("field") == side), {})
    columns = {field["field"]: _column(field) for field in _fields(row) if _is_named(field)}
    return {name: column for name, column in columns.items() if column is not None}


def _fields(schema: Any) -> list[dict[str, Any]]:
    fields = schema.get("fields") if isinstance(schema, dict) else None
    return (
        [field for field in fields if isinstance(field, dict)] if isinstance(fields, list) else []
    )


def _is_named(field: dict[str, Any]) -> bool:
    """JSON can escape half of a surrogate pair, which is not valid text."""
    name = field.get("field")
    return isinstance(name, str) and not any("\ud800" <= char <= "\udfff" for char in name)


def rewritten(row: Members, columns: Named, table: Mapping[str, pa.Field]) -> Members:
    """The members of a row, as columns of the table can read them."""
    changed = {}
    for name, column in columns.items():
        if column.write is not None and row.get(name, (None,))[0] is not None:
            value, text = row[name]
            changed[name] = value, _text(column, column.write, text, table.get(name))
    return row | changed


def _text(
    column: NamedColumn, write: Callable[[str], str], text: str, like: pa.Field | None
) -> str:
    kind = None if like is None or pa.types.is_null(like.type) else like.type
    if not column.fits(kind):
        return text
    try:
        return write(text)
    except (ValueError, ArithmeticError, TypeError, KeyError):  # also raised for base64 and dates
        return text


def variable_scale(unscaled: bytes, scale: int) -> str:
    """The digits of Debezium's VariableScaleDecimal, all of them."""
    if len(unscaled) * 3 + abs(scale) > _LONGEST:
        raise ValueError(f"expected a decimal of at most {_LONGEST} digits, found more")
    number = int.from_bytes(unscaled, "big", signed=True)
    # Python refuses to write whole numbers of more than 4,300 digits.
    digits = str(abs(number)) if len(unscaled) < 1000 else format(Decimal(abs(number)), "f")
    if scale > 0:
        digits = digits.rjust(scale + 1, "0")
        digits = f"{digits[:-scale]}.{digits[-scale:]}"
    elif number:
        digits += "0" * -scale
    return f"-{digits}" if number < 0 else digits


# ── the types of a schema ────────────────────────────────────────────────────────────────────────


def _column(schema: Mapping[str, Any]) -> NamedColumn | None:
    kind, name = str(schema.get("type")), str(schema.get("name"))
    if (kind, name) == ("bytes", _DECIMAL):
        return _decimal(schema)
    if (kind, name) in _NAMED:
        return _NAMED[kind, name]
    plain = _kind(schema)
    return None if plain is None else NamedColumn(plain)


def _kind(schema: Any, depth: int = 2) -> Kind:
    """The kind of a value that is not rewritten; None: records decide. `depth`: of its level in the
    record, whose row is the first."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    word = schema.get("type")
    if word == "array":
        inside = _kind(schema.get("items"), depth + 1)
        return None if inside is None else [inside]
    if word == "map":
        keys = schema.get("keys")
        inside = _kind(schema.get("values"), depth + 1)
        text = isinstance(keys, dict) and keys.get("type") == "string"
        return SeenValues(inside) if text and inside is not None else None
    if word == "struct":
        fields = _fields(schema)
        kinds = {str(field.get("field")): _kind(field, depth + 1) for field in fields}
        whole = all(map(_is_named, fields)) and None not in kinds.values()
        return kinds if kinds and whole else None
    return _WORDS.get(str(word))


_WORDS = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), "whole"),
    **dict.fromkeys(("float", "double"), "fraction"),
    "boolean": "boolean",
    "string": "string",
    "bytes": "bytes",
}


def _decimal(column: Mapping[str, Any]) -> NamedColumn | None:
    """Kafka Connect's decimal: unscaled bytes in base64, the scale in the schema."""
    parameters = column.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    try:
        scale = int(str(parameters.get("scale", "0")))
        precision = int(str(parameters.get("connect.decimal.precision", "38")))
    except ValueError:
        return None
    if not 0 <= scale <= 38:
        return None
    precision = precision if 0 < precision <= 38 and scale <= precision else 38

    def write(text: str) -> str:
        value = json.loads(text, parse_int=Decimal, parse_float=Decimal)
        if not isinstance(value, str):  # the converter's decimal.format is NUMERIC
            return text
        unscaled = int.from_bytes(base64.b64decode(value, validate=True), "big", signed=True)
        return format(Decimal(unscaled).scaleb(-scale, _EXACT), "f")

    return NamedColumn(f"exact:{precision}:{scale}", write, _new_or(pa.types.is_decimal))


# ── the texts of named types ─────────────────────────────────────────────────────────────────────


def _new_or(is_kind: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType | None], bool]:
    return lambda kind: kind is None or is_kind(kind)


def _only(is_kind: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType | None], bool]:
    return lambda kind: kind is not None and is_kind(kind)


def _is_local(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind)) and not kind.tz


def _is_instant(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind)) and bool(kind.tz)


def _is_digits(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_large_string(kind) or types.is_string(kind) or types.is_decimal(kind))


def _day(text: str) -> str:
    return json.dumps((_EPOCH + timedelta(days=int(text))).date().isoformat())


def _moment(text: str, digits: int, zone: str = "") -> str:
    seconds, fraction = divmod(int(text), 10**digits)
    moment = (_EPOCH + timedelta(seconds=seconds)).isoformat()
    return f'"{moment}.{fraction:0{digits}}{zone}"'


def _clock(text: str, digits: int) -> str:
    """Also 24:00:00, which no column takes."""
    seconds, fraction = divmod(int(text), 10**digits)
    hours, minutes = divmod(seconds // 60, 60)
    return f'"{hours:02}:{minutes:02}:{seconds % 60:02}.{fraction:0{digits}}"'


def _variable(text: str) -> str:
    value = json.loads(text)
    if type(value["scale"]) is not int:
        raise ValueError("expected a scale")
    unscaled = base64.b64decode(value["value"], validate=True)
    return f'"{variable_scale(unscaled, value["scale"])}"'


_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_DATE = NamedColumn("date", _day, _new_or(pa.types.is_date32))
_TIME = _only(pa.types.is_time64)
_NAMED: Mapping[tuple[str, str], NamedColumn] = {
    ("int32", "io.debezium.time.Date"): _DATE,
    ("int32", "org.apache.kafka.connect.data.Date"): _DATE,
    ("int64", "io.debezium.time.Timestamp"): NamedColumn(
        "moment", partial(_moment, digits=3), _new_or(_is_local)
    ),
    ("int64", "io.debezium.time.MicroTimestamp"): NamedColumn(
        "moment", partial(_moment, digits=6), _new_or(_is_local)
    ),
    ("int64", "io.debezium.time.NanoTimestamp"): NamedColumn(
        "whole", partial(_moment, digits=9), _only(_is_local)
    ),
    ("int64", "org.apache.kafka.connect.data.Timestamp"): NamedColumn(
        "utc", partial(_moment, digits=3, zone="Z"), _new_or(_is_instant)
    ),
    ("string", "io.debezium.time.ZonedTimestamp"): NamedColumn("utc"),
    # Spark reads no table with a column of type time, and databases have times beyond 24 hours.
    ("int32", "io.debezium.time.Time"): NamedColumn("whole", partial(_clock, digits=3), _TIME),
    ("int32", "org.apache.kafka.connect.data.Time"): NamedColumn(
        "whole", partial(_clock, digits=3), _TIME
    ),
    ("int64", "io.debezium.time.MicroTime"): NamedColumn("whole", partial(_clock, digits=6), _TIME),
    ("int64", "io.debezium.time.NanoTime"): NamedColumn("whole", partial(_clock, digits=9), _TIME),
    ("string", "io.debezium.data.Uuid"): NamedColumn("uuid"),
    ("struct", "io.debezium.data.VariableScaleDecimal"): NamedColumn(
        "string", _variable, _new_or(_is_digits)
    ),
}
