"""`cast(… as type)` of a `select`: every value exactly, or `CastMismatch`. Runs on executors; pure.

In: an Arrow array and the type that the config names. Out: an array of that type. A cast never
makes a null of a value, never rounds and never cuts off. Text is read by the rules for text in
JSON (`frazil.formats.json_values`). Between doubles and decimals the shortest decimal text of the
double is its value, so a cast there and back returns the same number.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.cast import project
from frazil.config.column_types import EPOCH_UNITS, ColumnType
from frazil.formats.declared_columns import arrow_type
from frazil.formats.json_values import DAY, NotThisShape, converter, to_decimal, to_float
from frazil.pipeline.evolution import castable

_WHOLE = re.compile(r"[+-]?\d{1,20}", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,400}(\.\d{1,400})?([eE][+-]?\d{1,4})?", re.ASCII)


class CastMismatch(ValueError):
    """A type that is never cast so, or a value that the type cannot hold."""


def strict_cast(array: pa.Array, kind: ColumnType) -> pa.Array:
    """The array in the type. Raises `CastMismatch`."""
    array, target = as_plain(array), arrow_type(kind)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), target)
    if array.type == target:
        return array
    if castable(array.type, target):
        return project(array, pa.field("", target))
    convert = _conversion(array.type, target, kind)
    if convert is None:
        raise CastMismatch(f"{array.type} is not cast to {kind}")
    try:
        made = convert(array)
    except (pa.ArrowException, NotThisShape, ValueError, OverflowError):
        # without the value: it may be one that a mask hides
        raise CastMismatch(f"the value is no {kind}") from None
    if made.null_count != array.null_count:
        raise CastMismatch(f"the value is no {kind}")
    return made


def as_plain(array: pa.Array) -> pa.Array:
    """Text and bytes in one of Arrow's several types."""
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        return as_plain(array.dictionary_decode())
    if types.is_string(kind) or types.is_string_view(kind):
        return array.cast(pa.large_string())
    if types.is_binary(kind) or types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    return array


def by_distinct(array: pa.Array, convert: Callable[[Any], Any], kind: pa.DataType) -> pa.Array:
    """A function of Python values, called once for each distinct value."""
    storage = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    coded = storage.dictionary_encode()
    plain = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    values = pa.array([convert(value) for value in coded.dictionary.to_pylist()], plain)
    if isinstance(kind, pa.BaseExtensionType):
        values = pa.ExtensionArray.from_storage(kind, values)
    return values.take(coded.indices)


Conversion = Callable[[pa.Array], pa.Array]


def _conversion(given: pa.DataType, target: pa.DataType, kind: ColumnType) -> Conversion | None:
    """How values of one type become values of the other; None: never."""
    types = pa.types
    if types.is_large_string(given):
        return _of_text(target)
    if types.is_large_string(target):
        return _to_text(given)
    if types.is_integer(given):
        return _of_integer(target, kind)
    if types.is_floating(given):
        return _of_float(given, target)
    if types.is_decimal(given):
        if types.is_floating(target):
            return lambda array: by_distinct(array, lambda value: _as_double(value, target), target)
        plain = types.is_decimal(target) or types.is_integer(target)
        return (lambda array: pc.cast(array, target)) if plain else None
    if types.is_date32(given) and types.is_timestamp(target) and not target.tz:
        return lambda array: pc.cast(array, target)
    if (
        types.is_timestamp(given)
        and types.is_timestamp(target)
        and bool(given.tz) == bool(target.tz)
    ):
        return lambda array: pc.cast(array, target)
    binary = types.is_fixed_size_binary(given) and types.is_large_binary(target)
    return (lambda array: pc.cast(array, target)) if binary else None


def _to_text(given: pa.DataType) -> Conversion | None:
    types, text = pa.types, pa.large_string()
    if types.is_integer(given) or types.is_boolean(given) or types.is_date32(given):
        return lambda array: pc.cast(array, text)
    if types.is_large_binary(given):
        return lambda array: pc.cast(array, text)  # UTF-8, or it raises
    if types.is_fixed_size_binary(given):
        return lambda array: pc.cast(pc.cast(array, pa.large_binary()), text)
    if isinstance(given, pa.UuidType):
        return lambda array: by_distinct(array, lambda v: v and str(uuid.UUID(bytes=v)), text)
    if types.is_decimal(given):
        return lambda array: by_distinct(array, lambda v: None if v is None else f"{v:f}", text)
    return None


def _of_text(target: pa.DataType) -> Conversion | None:
    types = pa.types
    if types.is_large_binary(target):
        return lambda array: pc.cast(array, target)
    convert: Callable[[Any], Any]
    if types.is_integer(target):
        whole = converter(pa.field("", target))
        convert = lambda text: whole(int(_matching(_WHOLE, text)))  # noqa: E731
    elif types.is_floating(target):
        convert = lambda text: to_float(Decimal(_matching(_NUMBER, text)), target)  # noqa: E731
    elif types.is_boolean(target):
        convert = {"true": True, "false": False}.__getitem__
    elif types.is_nested(target) or types.is_fixed_size_binary(target):
        return None
    else:  # decimals, dates, times, timestamps, UUIDs
        convert = converter(pa.field("", target))
    return lambda array: by_distinct(array, _but_null(convert), target)


def _but_null(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def converted(value: Any) -> Any:
        try:
            return None if value is None else convert(value)
        except KeyError:
            raise ValueError from None

    return converted


def _matching(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError
    return text


def _of_integer(target: pa.DataType, kind: ColumnType) -> Conversion | None:
    types = pa.types
    if types.is_integer(target) or types.is_floating(target):
        return lambda array: pc.cast(array, target)
    if types.is_decimal(target):
        widest = pa.decimal128(20, 0)
        return lambda array: pc.cast(pc.cast(pc.cast(array, pa.int64()), widest), target)
    if types.is_timestamp(target) and kind.epoch:
        digits = (6 if target.unit == "us" else 9) - EPOCH_UNITS[kind.epoch]
        return lambda array: _ticks(pc.cast(array, pa.int64()), digits).view(target)
    if types.is_time64(target) and kind.epoch:
        digits = 6 - EPOCH_UNITS[kind.epoch]
        return lambda array: _of_day(_ticks(pc.cast(array, pa.int64()), digits)).view(target)
    if types.is_date32(target) and kind.epoch:
        return lambda array: pc.cast(array, pa.int32()).view(target)
    return None


def _of_day(array: pa.Array) -> pa.Array:
    """Microseconds since midnight, all of them before the next."""
    bounds = pc.min_max(array)
    if array.null_count < len(array) and not (
        bounds["min"].as_py() >= 0 and bounds["max"].as_py() < DAY
    ):
        raise ValueError
    return array


def _ticks(array: pa.Array, digits: int) -> pa.Array:
    """Whole numbers times 10 to the power of `digits`, exactly."""
    factor = pa.scalar(10 ** abs(digits), pa.int64())
    if digits >= 0:
        return pc.multiply_checked(array, factor)
    made = pc.divide(array, factor)
    if not pc.all(pc.equal(pc.multiply(made, factor), array), min_count=0).as_py():
        raise ValueError
    return made


def _of_float(given: pa.DataType, target: pa.DataType) -> Conversion | None:
    types = pa.types
    if types.is_floating(target):  # narrower
        return _narrowed
    if types.is_integer(target):
        return lambda array: pc.cast(array, target)
    if types.is_decimal(target):
        shortest = _shortest_of_single if types.is_float32(given) else repr
        return lambda array: by_distinct(
            array, lambda v: None if v is None else to_decimal(shortest(v), target), target
        )
    return None


def _shortest_of_single(value: float) -> str:
    return str(pa.scalar(value, pa.float32()).cast(pa.string()).as_py())


def _narrowed(array: pa.Array) -> pa.Array:
    made = pc.cast(array, pa.float32(), safe=False)
    back = pc.cast(made, array.type)
    same = pc.or_(pc.equal(back, array), pc.is_nan(array))
    if not pc.all(same, min_count=0).as_py():
        raise ValueError
    return made


def _as_double(value: Decimal | None, target: pa.DataType) -> float | None:
    if value is None:
        return None
    number = to_float(value, target)
    text = _shortest_of_single(number) if pa.types.is_float32(target) else repr(number)
    if Decimal(text) != value:
        raise ValueError
    return number
