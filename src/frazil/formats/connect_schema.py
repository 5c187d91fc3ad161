"""Kafka Connect's schema beside a JSON payload: what it says of a row's columns. Runs on executors.

    {"schema": {…, "fields": [{"field": "after", "type": "struct", "fields": [
        {"field": "born", "type": "int32", "name": "io.debezium.time.Date"}, …]}, …]},
     "payload": {…, "after": {"born": 18628, …}}}

In: the schema, and the row's members, each with its own text. Out: the same members, those of a
named type as JSON that a column of that type is read from (`"2021-01-01"`), and the kinds of these
columns, for a table that has to be made. Only columns at the top of the row are looked at.

A named type of which no column could hold every value is left as it is; so is a value that is not
what its type says: then the table's column decides.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from decimal import Context, Decimal
from typing import Any

_EPOCH = datetime(1970, 1, 1)
_EXACT = Context(prec=400)

Members = dict[str, tuple[Any, str]]
#: column → its kind (see `frazil.formats.json_inference`), and how its text is written anew
Named = Mapping[str, tuple[str, Callable[[str], str]]]


def named(schema: Any, side: str) -> Named:
    """The columns of named types in the struct `side` of an envelope."""
    found: dict[str, tuple[str, Callable[[str], str]]] = {}
    for column in _fields(next((each for each in _fields(schema) if each.get("field") == side), 0)):
        made = _MAKERS.get((str(column.get("type")), str(column.get("name"))))
        told = made(column) if made and isinstance(column.get("field"), str) else None
        if told is not None:
            found[column["field"]] = told
    return found


def _fields(schema: Any) -> list[dict[str, Any]]:
    found = schema.get("fields") if isinstance(schema, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def rewritten(row: Members, columns: Named) -> Members:
    """The members of a row, those of named types as text that says what they are."""
    return {
        name: (value, _text(columns[name][1], text) if name in columns else text)
        for name, (value, text) in row.items()
    }


def _text(write: Callable[[str], str], text: str) -> str:
    try:
        return write(text)
    except (ValueError, ArithmeticError):  # also of base64, and of dates
        return text


def _day(text: str) -> str:
    return json.dumps((_EPOCH + timedelta(days=int(text))).date().isoformat())


def _moment(a_second: int, zone: str) -> Callable[[str], str]:
    def write(text: str) -> str:
        moment = _EPOCH + timedelta(microseconds=int(text) * (1_000_000 // a_second))
        return json.dumps(moment.isoformat() + zone)

    return write


def _decimal(column: Mapping[str, Any]) -> tuple[str, Callable[[str], str]] | None:
    """Kafka Connect's: bytes in base64, the scale in the schema."""
    said = column.get("parameters")
    said = said if isinstance(said, dict) else {}
    try:
        scale = int(str(said.get("scale", "0")))
        precision = int(str(said.get("connect.decimal.precision", "38")))
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

    return f"exact:{precision}:{scale}", write


_DATE: Any = lambda _: ("date", _day)  # noqa: E731
_MAKERS: Mapping[tuple[str, str], Callable[..., tuple[str, Callable[[str], str]] | None]] = {
    ("int32", "io.debezium.time.Date"): _DATE,
    ("int32", "org.apache.kafka.connect.data.Date"): _DATE,
    ("int64", "io.debezium.time.Timestamp"): lambda _: ("moment", _moment(1000, "")),
    ("int64", "io.debezium.time.MicroTimestamp"): lambda _: ("moment", _moment(1_000_000, "")),
    ("int64", "org.apache.kafka.connect.data.Timestamp"): lambda _: ("utc", _moment(1000, "Z")),
    ("bytes", "org.apache.kafka.connect.data.Decimal"): _decimal,
}
