"""One JSON value → a Python value for a column. Runs on executors; pure.

In: the bytes of a record, and the column's Arrow field. Out: a value that `pa.array` accepts for
the column's type, exactly the one in the JSON: nothing is rounded, guessed or cut off. Otherwise
`NotThisShape` names the field, `NestedTooDeep` the limit, and `ValueError` says why it is no JSON.

This is the reference for JSON: the fast reader in `frazil.formats.json_reader` must agree with it.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Context, Decimal, DecimalException
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.arrow.avro_types import MAX_DEPTH
from frazil.config.column_types import EPOCH_UNITS
from frazil.errors import SchemaMismatch
from frazil.formats.json_inference import MINUS_ZERO

Convert = Callable[[Any], Any]
#: Metadata of a column: the unit in which a number is a timestamp; and of a struct, or of a schema
#: for the columns at the top: a list in JSON of the fields that are passed over, or `*` for all
#: that it does not have.
EPOCH, IGNORED = b"frazil.epoch", b"frazil.ignored"


class NotThisShape(Exception):
    def __init__(self, expected: str, actual: str, *path: str) -> None:
        super().__init__(expected, actual)
        self.expected, self.found = expected, actual
        self.path = list(path)  # innermost first

    def __str__(self) -> str:
        name = f"field {'.'.join(reversed(self.path))}" if self.path else "the value"
        return f"cannot fit {name}: expected {self.expected}, found {self.found}"


def parse_json(value: bytes) -> Any:
    # Floats are parsed as Decimal, so that decimal columns get every digit.
    try:
        parsed = json.loads(
            value.decode(),
            parse_constant=_no_constant,
            parse_float=Decimal,
            parse_int=_whole if _MINUS.search(value) else None,
        )
    except DecimalException:
        raise ValueError("a number's exponent is beyond all bounds") from None
    # With at most MAX_DEPTH brackets, strings included, the value cannot be too deep.
    if type(parsed) in (dict, list) and value.count(b"{") + value.count(b"[") > MAX_DEPTH:
        _check_depth(parsed)
    return parsed


_MINUS = re.compile(rb"-0(?![0-9.eE])")


def _whole(text: str) -> int | Decimal:
    return MINUS_ZERO if text == "-0" else int(text)


class NestedTooDeep(Exception):
    def __str__(self) -> str:
        return f"cannot read JSON: it is nested too deep; expected at most {MAX_DEPTH} levels"


def _check_depth(parsed: Any) -> None:
    """Bounds the depth, so that later code may recurse over the value."""
    level = [parsed]
    for _ in range(MAX_DEPTH):
        level = [
            inside
            for node in level
            for inside in (node.values() if type(node) is dict else node)
            if type(inside) in (dict, list)
        ]
        if not level:
            return
    raise NestedTooDeep


def no_json(value: bytes, error: ValueError) -> str:
    """The error, and the first bytes of the value, to help recognise another format."""
    return f"cannot read JSON: the value is not JSON: {error}; it begins with {value[:24]!r}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def json_type(value: Any) -> str:
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        Decimal: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def converter(target: pa.Field) -> Convert:
    """A function from a value of `parse_json` to a value for `pa.array`, for one field."""
    # Not by the field itself: to Arrow, maps of UUIDs with required and with optional values are
    # equal.
    return _compiled(pa.schema([target]).serialize().to_pybytes())


@functools.lru_cache(maxsize=10_000)
def _compiled(serialized: bytes) -> Convert:
    target = pa.ipc.read_schema(pa.py_buffer(serialized)).field(0)
    inner = _of_type(target)
    if target.nullable:
        return lambda value: None if value is None else inner(value)
    return inner


def _of_type(target: pa.Field) -> Convert:
    kind, types = target.type, pa.types
    if types.is_struct(kind):
        return _of_struct(kind, ignored_fields(target.metadata))
    if types.is_list(kind) or types.is_large_list(kind):
        item = converter(kind.value_field)
        return lambda value: [item(element) for element in _must(value, list, "array")]
    if types.is_map(kind):
        key, item = converter(kind.key_field), converter(kind.item_field)
        return lambda value: [
            (key(name), item(element)) for name, element in _must(value, dict, "object").items()
        ]
    if types.is_boolean(kind):
        return lambda value: _must(value, bool, "boolean")
    if types.is_int32(kind) or types.is_int64(kind):
        most = 2 ** (kind.bit_width - 1)

        def whole(value: Any) -> int:
            if value is MINUS_ZERO:
                return 0
            if type(value) is not int:
                raise NotThisShape(
                    str(kind),
                    json_type(value)
                    + (" with a fraction or exponent" if type(value) is Decimal else ""),
                )
            if not -most <= value < most:
                raise NotThisShape(str(kind), "a number out of its range")
            return value

        return whole
    if types.is_float32(kind) or types.is_float64(kind):
        return lambda value: to_float(value, kind)
    if types.is_string(kind) or types.is_large_string(kind):
        return _text
    if types.is_decimal(kind):
        return lambda value: to_decimal(value, kind)
    unit = (target.metadata or {}).get(EPOCH, b"").decode()
    if types.is_date32(kind):
        return _days if unit else _date
    if types.is_timestamp(kind) and kind.unit in ("us", "ns"):
        if unit:
            digits = EPOCH_UNITS[unit]
            return lambda value: _since_1970(value, kind, digits)
        return lambda value: _timestamp(value, kind)
    if types.is_time64(kind):
        if unit:
            return lambda value: _since_midnight(value, kind, EPOCH_UNITS[unit])
        return lambda value: _time(value, kind)
    if isinstance(kind, pa.UuidType):
        return _uuid
    if types.is_null(kind):
        return lambda value: _must(value, type(None), "nothing")
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        size = kind.byte_width if types.is_fixed_size_binary(kind) else None
        return lambda value: _bytes(value, size)
    raise SchemaMismatch(
        f"cannot fit JSON into column {target.name}: expected a type that JSON can fill, "
        f"found {target.type}"
    )


def ignored_fields(metadata: Any) -> frozenset[str] | None:
    """The names of fields that are passed over; None: all that the struct does not have."""
    names = (metadata or {}).get(IGNORED, b"[]")
    return None if names == b"*" else frozenset(json.loads(names))


def _of_struct(kind: pa.StructType, ignored: frozenset[str] | None) -> Convert:
    fields = [(child.name, converter(child), child.nullable) for child in kind]
    names = {name for name, _, _ in fields}

    def convert(value: Any) -> dict[str, Any]:
        _must(value, dict, "object")
        unread = () if ignored is None else value.keys() - names - ignored
        for name in value if unread else ():
            if name in unread and value[name] is not None:  # null is the same as absent
                raise NotThisShape("no such field", json_type(value[name]), name)
        row = {}
        name = ""
        try:
            for name, part, nullable in fields:
                if name not in value and not nullable:
                    raise NotThisShape("a value", "nothing")
                row[name] = part(value.get(name))
        except NotThisShape as error:
            error.path.append(name)
            raise
        return row

    return convert


def _must(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise NotThisShape(name, json_type(value))
    return value


def _text(value: Any) -> str:
    text: str = _must(value, str, "string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotThisShape("text", "half of a surrogate pair") from None
    return text


def to_float(value: Any, kind: pa.DataType) -> float:
    if type(value) not in (int, Decimal):
        raise NotThisShape(str(kind), json_type(value))
    try:
        number = float(value)
        if pa.types.is_float32(kind):
            with np.errstate(over="ignore"):
                number = float(np.float32(number))
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise NotThisShape(str(kind), "a number out of its range")
    return number


_DECIMAL = re.compile(r"[+-]?\d{1,80}(\.\d{1,80})?([eE][+-]?\d{1,3})?", re.ASCII)
_EXACT = Context(prec=400)


def to_decimal(value: Any, kind: pa.Decimal128Type) -> Decimal:
    if type(value) is str and _DECIMAL.fullmatch(value):
        value = Decimal(value)
    if type(value) not in (int, Decimal):
        actual = "text that is none" if type(value) is str else json_type(value)
        raise NotThisShape(str(kind), actual)
    # Exact or rejected: digits are never rounded away.
    try:
        exact = Decimal(value).quantize(Decimal(1).scaleb(-kind.scale), context=_EXACT)
    except DecimalException:
        exact = None
    bound = 10 ** (kind.precision - kind.scale)
    if exact is None or exact != value or exact.copy_abs() >= bound:
        raise NotThisShape(str(kind), "a number that does not fit")
    return exact


#: Microseconds of a day.
DAY = 86_400_000_000
_CLOCK = r"(\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?"
_TIME = re.compile(_CLOCK, re.ASCII)
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_STAMP = re.compile(_DATE.pattern + "[Tt ]" + _CLOCK + r"([Zz]|[+-]\d\d(?::?\d\d)?)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _matched(pattern: re.Pattern[str], value: Any, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(_must(value, str, expected))
    if not match:
        raise NotThisShape(expected, "other text")
    return match


def _date(value: Any) -> int:
    year, month, day = map(int, _matched(_DATE, value, "a date as 2001-02-03").groups())
    try:
        return date(year, month, day).toordinal() - _EPOCH.toordinal()
    except ValueError as error:
        raise NotThisShape("a date", str(error)) from None


def _ticks(hour: str, minute: str, second: str | None, fraction: str | None, unit: str) -> int:
    """The time of day in `unit`s."""
    digits = 6 if unit == "us" else 9
    text = (fraction or "").ljust(digits, "0")
    if int(hour) > 23 or int(minute) > 59 or int(second or 0) > 59:
        raise NotThisShape("a time of day", f"{hour}:{minute}:{second or '00'}")
    if text[digits:].strip("0"):
        raise NotThisShape(f"at most {digits} digits of a second", f"{len(text)}")
    seconds = (int(hour) * 60 + int(minute)) * 60 + int(second or 0)
    return int(seconds * 10**digits + int(text[:digits]))


def _time(value: Any, kind: pa.Time64Type) -> int:
    hour, minute, second, fraction = _matched(_TIME, value, "a time as 12:34:56").groups()
    return _ticks(hour, minute, second, fraction, kind.unit)


def _timestamp(value: Any, kind: pa.TimestampType) -> int:
    expected = "a timestamp as 2001-02-03T04:05:06" + ("Z" if kind.tz else "")
    *_, hour, minute, second, fraction, zone = _matched(_STAMP, value, expected).groups()
    if bool(zone) != bool(kind.tz):
        # A conversion between local time and an instant would need a guess at the zone.
        raise NotThisShape(expected, f"one with{'' if zone else 'out'} a zone")
    day = _date(value[:10])
    shift = 0
    if zone and zone not in "Zz":
        hours, minutes = int(zone[1:3]), int(zone[3:].lstrip(":") or 0)
        if hours > 23 or minutes > 59:
            raise NotThisShape("a zone", zone)
        shift = (hours * 60 + minutes) * (-60 if zone[0] == "-" else 60)
    a_second = 1_000_000 if kind.unit == "us" else 1_000_000_000
    ticks = _ticks(hour, minute, second, fraction, kind.unit)
    moment = (day * 86_400 - shift) * a_second + ticks
    if not -(2**63) <= moment < 2**63:
        raise NotThisShape(str(kind), "a moment out of its range")
    return moment


def _since_1970(value: Any, kind: pa.TimestampType, digits: int) -> int:
    """A number of seconds, or of parts of them, as `digits` says; or a timestamp as text."""
    if type(value) is str:
        return _timestamp(value, kind)
    if type(value) not in (int, Decimal):
        raise NotThisShape("a number since 1970, or a timestamp", json_type(value))
    moment = _scaled(value, (6 if kind.unit == "us" else 9) - digits)
    if moment != int(moment) or not -(2**63) <= moment < 2**63:
        raise NotThisShape(str(kind), "a moment out of its range")
    return int(moment)


def _since_midnight(value: Any, kind: pa.Time64Type, digits: int) -> int:
    """As `_since_1970`, for a time of day."""
    if type(value) is str:
        return _time(value, kind)
    if type(value) not in (int, Decimal):
        raise NotThisShape("a number since midnight, or a time", json_type(value))
    ticks = _scaled(value, 6 - digits)
    if ticks != int(ticks) or not 0 <= ticks < DAY:
        raise NotThisShape("a time of day in microseconds", "a number that is none")
    return int(ticks)


def _scaled(value: int | Decimal, digits: int) -> Decimal:
    return to_decimal(value, pa.decimal128(38, max(0, digits))).scaleb(digits, context=_EXACT)


def _days(value: Any) -> int:
    """Days since 1970, or a date as text."""
    if type(value) is str:
        return _date(value)
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise NotThisShape("a number of days since 1970, or a date", json_type(value))
    return value


def _bytes(value: Any, size: int | None) -> bytes:
    try:
        data = base64.b64decode(_must(value, str, "base64 text"), validate=True)
    except (binascii.Error, ValueError):
        raise NotThisShape("base64 text", "other text") from None
    if size is not None and len(data) != size:
        raise NotThisShape(f"{size} bytes", f"{len(data)}")
    return data


def _uuid(value: Any) -> bytes:
    try:
        return uuid.UUID(_must(value, str, "a UUID")).bytes
    except ValueError:
        raise NotThisShape("a UUID", "other text") from None
