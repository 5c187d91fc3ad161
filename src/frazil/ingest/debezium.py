"""Debezium's changes → rows. Runs on executors, between rules and the tables' shapes.

A change says what was done (`op`), the row before and after it, and where in the source it
happened. Each becomes one row, deletes too: an append-only table keeps them all, an upsert table
takes the key of the deleted (and the key that a row had before it got another, `left`). Its columns
are those of `after`, or of `before` where the row was deleted; beside them `_op`, `_source` and
`_ts_ms`, as the envelope has them. What is no change of a row (a truncate, a message) or lacks the
row is rejected with kind `envelope`; tombstones are left to the caller.

Avro comes in decoded, so its envelopes are columns; JSON before it is decoded, since a table says
what columns its JSON has, and it goes out as JSON with every digit as it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.core.errors import Misfit
from frazil.ingest.decode import Rejected
from frazil.ingest.records import Longs

#: What a row keeps of its envelope, under the same name with an underscore before it.
KEPT = ("op", "source", "ts_ms")
_NO_ROW = {"t": "the table was truncated", "m": "it is a message, not a change of a row"}


def columns(schema: pa.Schema) -> pa.Schema:
    """The columns of the rows in envelopes of this schema."""
    sides = [_fields(schema, side) for side in ("after", "before")]
    op = schema.field("op") if "op" in schema.names else None
    if op is None or not any(sides) or not _is_text(op.type):
        raise Misfit(
            "cannot unwrap a change: expected op, before and after, found "
            + ", ".join(schema.names),
            hint='leave envelope = "debezium" out of the [[route]] if its records are plain rows',
        )
    after, before = sides
    fields = [_either(after.get(name), before.get(name)) for name in {**after, **before}]
    kept = [schema.field(name).with_name(f"_{name}") for name in KEPT if name in schema.names]
    kept[0] = kept[0].with_type(pa.large_string()).with_nullable(False)
    if both := {each.name for each in fields} & {each.name for each in kept}:
        raise Misfit(f"cannot unwrap a change: the row has a column {min(both)!r}, which is also "
                     "what the envelope's own is called")  # fmt: skip
    return pa.schema(fields + kept)


def unwrap(rows: pa.Table) -> tuple[pa.Table, Longs | None, list[Rejected]]:
    """The rows in these envelopes, their positions (None: all), and what is no row."""
    target = columns(rows.schema)
    count = rows.num_rows
    op = _whole(rows, "op").cast(pa.large_string())
    there = {
        side: _whole(rows, side).is_valid().to_numpy(False)
        for side in ("after", "before")
        if _fields(rows.schema, side)
    }
    none = np.zeros(count, bool)
    deleted = _is(op, ["d"])
    good = np.where(deleted, there.get("before", none), there.get("after", none))
    good &= ~_is(op, list(_NO_ROW)) & op.is_valid().to_numpy(False)
    rejected = [
        Rejected(i, "envelope", _why_not(op[i].as_py())) for i in np.flatnonzero(~good).tolist()
    ]
    index: Longs | None = np.flatnonzero(good) if rejected else None
    if index is not None:
        rows, deleted = rows.take(pa.array(index)), deleted[index]
    arrays = {f"_{name}": _whole(rows, name) for name in KEPT if name in rows.schema.names}
    after, before = (_children(rows, side) for side in ("after", "before"))
    for field in target:
        if field.name not in arrays:
            pair = after.get(field.name), before.get(field.name)
            arrays[field.name] = _picked(pair, field.type, deleted)
    arrays["_op"] = arrays["_op"].cast(pa.large_string())
    return pa.table([arrays[name] for name in target.names], schema=target), index, rejected


def left(rows: pa.Table, key: Sequence[str]) -> tuple[pa.Table, Longs]:
    """The keys that rows had before these changes and have no more, and whose they were.

    A change of a row's key: where `before` is told, and its key is not that of `after`.
    """
    after, before = (_children(rows, side) for side in ("after", "before"))
    moved = np.zeros(len(rows), bool)
    if not all(name in after and name in before for name in key):
        return rows.slice(0, 0).select([]), np.empty(0, np.int64)
    for name in key:
        same = pc.equal(after[name], before[name].cast(after[name].type))
        moved |= ~same.fill_null(False).to_numpy(False)
    for there in (_whole(rows, "after"), *(before[name] for name in key)):
        moved &= there.is_valid().to_numpy(False)
    index = np.flatnonzero(moved)
    keys = {name: before[name].take(pa.array(index)) for name in key}
    return pa.table(keys), index


def path_of(path: str) -> str:
    """Where in a change that is the column of its new row."""
    kept = path.partition(".")[0] in {f"_{name}" for name in KEPT}
    return path[1:] if kept else f"after.{path}"


def left_json(value: bytes | None, key: Sequence[str]) -> bytes | None:
    """The same of one change in JSON: the former key as an object, if it was another."""
    try:
        change = members((value or b"").decode())
        if "payload" in change and change.keys() <= {"schema", "payload"}:
            change = members(change["payload"][1])
        sides = [change.get(side, (None, "")) for side in ("before", "after")]
        if not all(isinstance(row, dict) for row, _ in sides):
            return None
        before, after = (members(text) for _, text in sides)
    except (ValueError, NoRow, RecursionError):
        return None
    if any(before.get(name, (None, ""))[0] is None for name in key):
        return None
    if all(before[name][0] == after.get(name, (None, ""))[0] for name in key):
        return None
    body = ",".join(f"{json.dumps(name)}:{before[name][1]}" for name in key)
    return f"{{{body}}}".encode()


def _why_not(op: Any) -> str:
    if op in _NO_ROW:
        return f"cannot make a row of a change: {_NO_ROW[op]} (op {op})"
    if not isinstance(op, str):
        return "cannot make a row of a change: it has no op"
    side = "before" if op == "d" else "after"
    return f"cannot make a row of a change: op is {op[:32]!a} and {side} is null"


def _picked(pair: tuple[Any, Any], kind: pa.DataType, deleted: Any) -> pa.Array:
    """From `before` where the row was deleted, from `after` otherwise."""
    if not deleted.any() and pair[0] is not None:
        return pair[0].cast(kind)
    count = len(deleted)
    sides = [pa.nulls(count, kind) if side is None else side.cast(kind) for side in pair]
    return pa.concat_arrays(sides).take(pa.array(np.arange(count) + deleted * count))


def _children(rows: pa.Table, side: str) -> dict[str, pa.Array]:
    fields = _fields(rows.schema, side)
    return dict(zip(fields, _whole(rows, side).flatten(), strict=True)) if fields else {}


def _fields(schema: pa.Schema, side: str) -> dict[str, pa.Field]:
    kind = schema.field(side).type if side in schema.names else pa.null()
    return {each.name: each for each in kind} if pa.types.is_struct(kind) else {}


def _whole(rows: pa.Table, name: str) -> pa.Array:
    return rows.column(name).combine_chunks()


def _is(op: pa.Array, ops: list[str]) -> Any:
    return pc.is_in(op, pa.array(ops, op.type)).to_numpy(False)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _either(one: pa.Field | None, other: pa.Field | None) -> pa.Field:
    """The column that holds both: they may differ in what can be null, and in nothing else."""
    if one is None:
        return _either(other, one)
    if other is None:
        return one.with_nullable(True)
    return pa.field(one.name, _both(one.type, other.type, one.name), one.nullable or other.nullable)


def _both(one: pa.DataType, other: pa.DataType, path: str) -> pa.DataType:
    if one.equals(other):
        return one
    structs = pa.types.is_struct(one) and pa.types.is_struct(other)
    if structs and [each.name for each in one] == [each.name for each in other]:
        return pa.struct([_either(*pair) for pair in zip(one, other, strict=True)])
    for is_list, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_list(one) and is_list(other):
            return make(_either(one.value_field, other.value_field))
    if pa.types.is_map(one) and pa.types.is_map(other):
        key = _either(one.key_field, other.key_field)
        return pa.map_(key, _either(one.item_field, other.item_field))
    raise Misfit(f"cannot unwrap a change: column {path!r} is {one} after and {other} before")


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────

#: It only says where a value ends: a float is made of any number of digits.
_JSON = json.JSONDecoder(parse_int=float, parse_constant=lambda name: _bad(name))


class NoRow(Exception):
    pass


def unwrap_json(
    values: Sequence[bytes | None],
) -> tuple[list[bytes | None], list[Rejected], set[int]]:
    """The same of JSON, with Kafka Connect's {"schema", "payload"} around it or without.

    As many values as come in: rows as JSON objects, None for tombstones and for what is rejected;
    and which of them were deleted.
    """
    rows: list[bytes | None] = [None] * len(values)
    rejected: list[Rejected] = []
    deleted: set[int] = set()
    for i, value in enumerate(values):
        try:
            rows[i], gone = (None, False) if value is None else _row(value.decode())
            deleted |= {i} if gone else set()
        except NoRow as error:
            rejected.append(Rejected(i, "envelope", str(error)))
        except RecursionError:
            rejected.append(Rejected(i, "limit", "cannot read JSON: it is nested too deep"))
        except ValueError as error:
            rejected.append(Rejected(i, "json", f"cannot read JSON: {error}"))
    return rows, rejected, deleted


def _row(text: str) -> tuple[bytes | None, bool]:
    """The row in a change, cut out of its text: so digits, escapes and order stay as they are; and
    whether it was deleted."""
    change = members(text)
    if "payload" in change and change.keys() <= {"schema", "payload"}:
        payload, text = change["payload"]
        if payload is None:
            return None, False
        change = members(text) if isinstance(payload, dict) else {}
    if "op" not in change or not change.keys() & {"before", "after"}:
        raise NoRow("cannot unwrap a change: expected an object with op, before and after")
    op = change["op"][0]
    side = "before" if op == "d" else "after"
    row, text = change.get(side, (None, ""))
    if not isinstance(op, str) or op in _NO_ROW or not isinstance(row, dict):
        raise NoRow(_why_not(op))
    kept = [name for name in KEPT if name in change]
    if both := row.keys() & {f"_{name}" for name in kept}:
        raise NoRow(f"cannot unwrap a change: the row has a field {min(both)!r}, which is also "
                     "what the envelope's own is called")  # fmt: skip
    more = ",".join(f'"_{name}":{change[name][1]}' for name in kept)
    return f"{text[:-1].rstrip()}{',' if row else ''}{more}}}".encode(), op == "d"


def members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object, each with its own text; of a name given twice, the last."""
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        _JSON.decode(text)  # says what is wrong, if it is no JSON at all
        raise NoRow("cannot unwrap a change: expected an object with op, before and after")
    at = _skip(text, at + 1)
    more = text[at : at + 1] != "}"
    while more:
        name, at = _JSON.raw_decode(text, at)
        at = _skip(text, at)
        if type(name) is not str or text[at : at + 1] != ":":
            raise json.JSONDecodeError("expected a name and a colon", text, at)
        start = _skip(text, at + 1)
        value, at = _JSON.raw_decode(text, start)
        members[name] = value, text[start:at]
        at = _skip(text, at)
        more = text[at : at + 1] == ","
        if more:
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "}":
            raise json.JSONDecodeError("expected a comma or the object's end", text, at)
    if _skip(text, at + 1) != len(text):
        raise json.JSONDecodeError("there is more behind the object", text, at + 1)
    return members


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n\r":
        at += 1
    return at


def _bad(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
