"""JSON objects → the columns that a table needs for them. Runs everywhere; pure.

In: the columns that each record needs, as a *kind*. Out: columns. A record has one vote for every
column that it needs, and votes are added up, so the columns depend neither on the order of the
records nor on their division into chunks and tasks:

    record ─▶ kind ─▶ votes ─┐
    record ─▶ kind ─▶ votes ─┴─▶ sum ─▶ columns of the new or changed table

Where records disagree (a number and a text, `id` and `ID`) the majority decides. Records of the
minority do not fit the table; they are rejected one by one, without effect on the others.

A kind is a word, a dict of kinds (object), a list of one kind (array), or None (null: no column
needed). Words: `whole`, `large` (a whole number that a double cannot hold exactly), `fraction`,
`float` (a fraction that must not turn whole numbers into doubles), `boolean`, `string`; and, if a
schema beside the record says the type, `date`, `moment`, `utc`, `uuid`, `bytes`, `exact:P:S` (a
decimal) or `SeenValues` (the kind of a map's values). For an existing column the kind contains only
the change: `long`, `double` or `decimal:P` (a wider type), `=name` (the type of column `name`,
which is to be renamed), `SeenValues`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa

from frazil.errors import SchemaMismatch

Kind = Any
#: {"kinds": {word: votes}, "fields": {name: [votes, sum of positions, Votes]}, "inside": Votes}
Votes = dict[str, Any]


#: JSON's `-0`: the whole number 0, or negative zero in a double. Compared by identity, since other
#: Decimals have a fraction or an exponent and are not whole numbers.
MINUS_ZERO = Decimal("-0")


@dataclass(frozen=True, slots=True)
class SeenValues:
    """The kind of the values of a map."""

    kind: Kind


# ── one record ───────────────────────────────────────────────────────────────────────────────────


def kind_of(value: Any) -> Kind:
    """The kind of a parsed value. Raises `SchemaMismatch` if the items of an array differ in kind,
    or a number fits no column."""
    if type(value) is dict:
        for name in value:
            name.encode()  # raises for half of a surrogate pair
        return {name: kind_of(member) for name, member in value.items()}
    if type(value) is list:
        kind = None
        for item in value:
            kind = common_kind(kind, kind_of(item), "[]")
        return [kind]
    if value is None or type(value) is bool:
        return None if value is None else "boolean"
    # A value that its own kind of column would reject must not create that column.
    if type(value) is str:
        value.encode()
        return "string"
    if type(value) is Decimal and value is not MINUS_ZERO:
        if math.isinf(float(value)):
            raise SchemaMismatch("cannot infer a type: found a number beyond a double")
        return "fraction"
    if not -(2**63) <= value < 2**63:
        raise SchemaMismatch("cannot infer a type: found a whole number beyond a long")
    return "whole" if int(float(value)) == value else "large"


def undivided(kind: dict[str, Kind], paths: Iterable[str]) -> dict[str, Kind]:
    """The kind with `float` for `fraction` at these paths: there one fraction does not turn all
    numbers into doubles, and the majority decides."""
    for path in paths:
        name, _, inside = path.partition(".")
        if inside and type(kind.get(name)) is dict:
            kind = {**kind, name: undivided(kind[name], [inside])}
        elif kind.get(path) == "fraction":
            kind = {**kind, path: "float"}
    return kind


def holder(kind: Kind, name: str, path: str = "") -> str:
    """Path of the first field that contains a field `name` (at the top: `name`); empty: none."""
    if isinstance(kind, SeenValues):
        return holder(kind.kind, name, path)
    if type(kind) is list:
        return holder(kind[0], name, path)
    if type(kind) is not dict:
        return ""
    if name in kind:
        return path or name
    below = (holder(inside, name, f"{path}.{key}".lstrip(".")) for key, inside in kind.items())
    return next(filter(None, below), "")


def kinds_of(kind: Kind) -> Kind:
    """The kind without fields that were only null; None if nothing is left."""
    if type(kind) is dict:
        fields = {name: kinds_of(inner) for name, inner in kind.items()}
        return {name: inner for name, inner in fields.items() if inner is not None} or None
    if type(kind) is list:
        inside = kinds_of(kind[0])
        return None if inside is None and kind[0] is not None else [inside]
    return kind


def common_kind(one: Kind, other: Kind, path: str) -> Kind:
    """The kind that covers both; raises `SchemaMismatch` if there is none."""
    if one is None or other is None or one == other:
        return other if one is None else one
    if type(one) is dict and type(other) is dict:
        return {
            name: common_kind(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))
            for name in {**one, **other}
        }
    if type(one) is list and type(other) is list:
        return [common_kind(one[0], other[0], path)]
    if isinstance(one, SeenValues) and isinstance(other, SeenValues):
        return SeenValues(common_kind(one.kind, other.kind, path))
    words = [one, other] if type(one) is str and type(other) is str else []
    if {*words} in ({"whole", "fraction"}, {"whole", "large"}):
        return "fraction" if "fraction" in words else "large"
    if words and all(word.startswith("decimal:") for word in words):
        return max(words, key=_precision)
    types = [_word(kind) for kind in (one, other)]
    raise SchemaMismatch(
        f"cannot infer field {path}: expected one type, found {types[0]} and {types[1]}",
        hint="give the table a schema",
    )


def _word(kind: Kind) -> str:
    if type(kind) is str:
        return {"whole": "number", "large": "number", "fraction": "number"}.get(kind, kind)
    return "array" if type(kind) is list else "object"


def _precision(word: str) -> int:
    return int(word.partition(":")[2])


def arrow(kind: Kind, path: str) -> pa.DataType:
    """The type of a new column."""
    if type(kind) is list:
        return pa.large_list(pa.field("element", arrow(kind[0], path)))
    if type(kind) is dict:
        if not kind:
            raise SchemaMismatch(
                f"cannot infer field {path}: expected fields, found only empty objects",
                hint="give the table a schema",
            )
        return pa.struct([(name, arrow(inner, f"{path}.{name}")) for name, inner in kind.items()])
    if isinstance(kind, SeenValues):
        return pa.map_(pa.large_string(), pa.field("value", arrow(kind.kind, path)))
    if type(kind) is str and kind.startswith("exact:"):
        return pa.decimal128(*map(int, kind.split(":")[1:]))
    words = {
        "whole": pa.int64(),
        "large": pa.int64(),
        "fraction": pa.float64(),
        "float": pa.float64(),
        "boolean": pa.bool_(),
        "date": pa.date32(),
        "uuid": pa.uuid(),
        "bytes": pa.large_binary(),
        "moment": pa.timestamp("us"),
        "utc": pa.timestamp("us", "UTC"),
    }
    return words.get(kind, pa.large_string())  # only nulls: text, as in Spark


# ── many records ─────────────────────────────────────────────────────────────────────────────────


def vote(votes: Votes, kind: Kind) -> None:
    """Adds one record's vote for its columns, nested ones included."""
    if kind is None:
        return
    word = kind
    if type(kind) is dict:
        word = "object"
        fields = votes.setdefault("fields", {})
        for position, (name, inner) in enumerate(kind.items()):
            field = fields.setdefault(name, [0, 0, {}])
            field[0] += 1
            field[1] += position
            vote(field[2], inner)
    elif type(kind) is list:
        word = "array"
        vote(votes.setdefault("inside", {}), kind[0])
    elif isinstance(kind, SeenValues):
        word = "map"
        vote(votes.setdefault("inside", {}), kind.kind)
    kinds = votes.setdefault("kinds", {})
    kinds[word] = kinds.get(word, 0) + 1


def add(votes: Votes, more: Votes) -> None:
    """Adds `more` to `votes`. The sum does not depend on the order."""
    for word, count in more.get("kinds", {}).items():
        kinds = votes.setdefault("kinds", {})
        kinds[word] = kinds.get(word, 0) + count
    for name, (count, positions, inside) in more.get("fields", {}).items():
        field = votes.setdefault("fields", {}).setdefault(name, [0, 0, {}])
        field[0] += count
        field[1] += positions
        add(field[2], inside)
    if "inside" in more:
        add(votes.setdefault("inside", {}), more["inside"])


def columns(votes: Votes, base: pa.Schema | None = None, most: int = 0) -> pa.Schema:
    """The columns chosen by majority: those of the table, `base`, changed, then the new ones.

    New columns are ordered by their average position in the records. There are at most `most`
    columns, nested ones counted: of the new ones, those with most votes.
    """
    votes = json.loads(json.dumps(votes))
    while _without_twins(votes):
        pass
    if most:
        _without_more(votes, set(_names(base or ())), most)
    return pa.schema(_laid_over(base or pa.schema([]), kinds_of(_elected(votes)) or {}))


#: Of kinds with equal votes the first wins.
_ORDER = ("number", "boolean", "string", "array", "object", "float")


def _winner(votes: Votes) -> str:
    """The kind with most votes; whole, large and fraction count as numbers."""
    sums: dict[str, int] = {}
    for word, count in votes.get("kinds", {}).items():
        group = "decimal" if word.startswith("decimal:") else _word(word)
        sums[group] = sums.get(group, 0) + count
    order = {word: -at for at, word in enumerate(_ORDER)}
    return max(sums, key=lambda word: (sums[word], order.get(word, 1), word), default="")


def _elected(votes: Votes) -> Kind:
    winner = _winner(votes)
    if winner == "object":
        fields = sorted(votes["fields"].items(), key=lambda item: (item[1][1] / item[1][0], item))
        return {name: _elected(inside) for name, (_, _, inside) in fields}
    if winner in ("array", "map"):
        inside = _elected(votes["inside"])
        return [inside] if winner == "array" else SeenValues(inside)
    words = votes.get("kinds", {})
    if winner == "number":
        # A double would change large whole numbers: if they are the majority, fractions lose.
        fractions = words.get("fraction", 0)
        return "fraction" if fractions > words.get("large", 0) else "whole"
    if winner == "decimal":
        return max((word for word in words if word.startswith("decimal:")), key=_precision)
    return winner or None


def _without_twins(votes: Votes) -> bool:
    """Of columns that Spark cannot distinguish, removes all but the one with most votes. Returns
    whether there were any. `a.b` is also the path of `b` inside `a`."""
    by_path: dict[str, list[tuple[int, tuple[str, ...], dict[str, Any]]]] = {}
    for path, *column in _named(votes, "", ()):
        by_path.setdefault(path.lower(), []).append(tuple(column))  # type: ignore[arg-type]
    for path in sorted(by_path):
        if len(by_path[path]) > 1:
            ranked = sorted(by_path[path], key=lambda column: (-column[0], column[1]))
            for _, names, fields in ranked[1:]:
                fields.pop(names[-1], None)
            return True
    return False


def _without_more(votes: Votes, known: set[tuple[str, ...]], most: int) -> None:
    """Removes new columns beyond `most`. A nested column never has more votes than its parent."""
    new = {
        names: (count, fields)
        for _, count, names, fields in _named(votes, "", ())
        if names not in known
    }
    ranked = sorted(new, key=lambda names: (-new[names][0], names))
    for names in ranked[max(0, most - len(known)) :]:
        new[names][1].pop(names[-1], None)


def count(columns: Iterable[pa.Field]) -> int:
    """The number of columns, nested ones counted."""
    return sum(1 for _ in _names(columns))


def _names(fields: Iterable[pa.Field], parent: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each column as a tuple of names, nested columns included."""
    for field in fields:
        names, kind = (*parent, field.name), field.type
        yield names
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
            kind = kind.item_type if pa.types.is_map(kind) else kind.value_type
        if pa.types.is_struct(kind):
            yield from _names(kind, names)


def _named(
    votes: Votes, path: str, names: tuple[str, ...]
) -> Iterator[tuple[str, int, tuple[str, ...], dict[str, Any]]]:
    """Of all columns: path, votes, names, and the dict to remove them from."""
    if (winner := _winner(votes)) == "object":
        for name, (count, _, inside) in votes["fields"].items():
            child_path, child_names = f"{path}.{name}" if path else name, (*names, name)
            yield child_path, count, child_names, votes["fields"]
            for step in {"array": ("element",), "map": ("key", "value")}.get(_winner(inside), ()):
                yield f"{child_path}.{step}", count, child_names, votes["fields"]
            yield from _named(inside, child_path, child_names)
    elif winner in ("array", "map"):
        step = "element" if winner == "array" else "value"
        yield from _named(votes["inside"], f"{path}.{step}", names)


def _laid_over(base: Iterable[pa.Field], kinds: dict[str, Kind]) -> list[pa.Field]:
    existing = {field.name: field for field in base}
    renamed = {kind[1:] for kind in kinds.values() if type(kind) is str and kind[:1] == "="}
    fields = [
        _changed(field, kinds.get(name)) for name, field in existing.items() if name not in renamed
    ]
    for name, kind in kinds.items():
        if type(kind) is str and kind[:1] == "=":
            fields.append(existing[kind[1:]].with_name(name))
        elif name not in existing:
            fields.append(pa.field(name, arrow(kind, name)))
    return fields


def _changed(field: pa.Field, kind: Kind) -> pa.Field:
    held = field.type
    if kind is None:
        return field
    if type(kind) is dict:
        return field.with_type(pa.struct(_laid_over(held, kind)))
    if type(kind) is list:
        element = _changed(held.value_field, kind[0])
        large = pa.types.is_large_list(held)
        return field.with_type(pa.large_list(element) if large else pa.list_(element))
    if isinstance(kind, SeenValues):
        return field.with_type(pa.map_(held.key_field, _changed(held.item_field, kind.kind)))
    if kind.startswith("decimal:"):
        return field.with_type(pa.decimal128(_precision(kind), held.scale))
    return field.with_type({"long": pa.int64(), "double": pa.float64()}[kind])
