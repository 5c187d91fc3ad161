"""Column types from Kafka Connect's schema beside a JSON payload. Runs on executors.

    {"schema": {…, "fields": [{"field": "after", "type": "struct", "fields": [
        {"field": "born", "type": "int32", "name": "io.debezium.time.Date"}, …]}, …]},
     "payload": {…, "after": {"born": 18628, …}}}

In: the schema, and the row's members, each with its text. Out: the same members, those of a named
type rewritten as JSON that a column of that type can read (`"2021-01-01"`), and the kinds of these
columns, for a table that has to be created. Only top-level columns are converted.

A named type with values that no column can hold is left unchanged, and so is a value that does not
match its type: the table's column then decides.
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
#: column → its kind (see `frazil.formats.json_inference`), and the function that rewrites its text
Named = Mapping[str, tuple[str, Callable[[str], str]]]


def named(schema: Any, side: str) -> Named:
    """The columns with a named type in the struct `side` of an envelope."""
    columns: dict[str, tuple[str, Callable[[str], str]]] = {}
    for column in _fields(
        next((field for field in _fields(schema) if field.get("field") == side), 0)
    ):
        made = _MAKERS.get((str(column.get("type")), str(column.get("name"))))
        conversion = made(column) if made and isinstance(column.get("field"), str) else None
        if conversion is not None:
            columns[column["field"]] = conversion
    return columns


def _fields(schema: Any) -> list[dict[str, Any]]:
    fields = schema.get("fields") if isinstance(schema, dict) else None
    return (
        [field for field in fields if isinstance(field, dict)] if isinstance(fields, list) else []
    )


def rewritten(row: Members, columns: Named) -> Members:
    """The members of a row; values with a named type are rewritten."""
    return {
        name: (value, _text(columns[name][1], text) if name in columns else text)
        for name, (value, text) in row.items()
    }


def _text(write: Callable[[str], str], text: str) -> str:
    try:
        return write(text)
    except (ValueError, ArithmeticError):  # also raised for base64 and dates
        return text


def _day(text: str) -> str:
    return json.dumps((_EPOCH + timedelta(days=int(text))).date().isoformat())


def _moment(a_second: int, zone: str) -> Callable[[str], str]:
    def write(text: str) -> str:
        moment = _EPOCH + timedelta(microseconds=int(text) * (1_000_000 // a_second))
        return json.dumps(moment.isoformat() + zone)

    return write


def _decimal(column: Mapping[str, Any]) -> tuple[str, Callable[[str], str]] | None:
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
