"""Debezium change events → rows. Runs on executors, between routing and the fit to a table.

A change carries the operation (`op`), the row before and after it, and its position in the source
database. Each change becomes one row, deletes too: an append-only table keeps them all, an upsert
table uses the key of the deleted row (and a row's former key after a key change, `left`). The
columns are those of `after`, or of `before` for a delete, plus `_op`, `_source` and `_ts_ms` from
the envelope. A truncate, a change without its row, and what is no change are rejected with kind
`envelope`; a message, which has nothing to do with rows, and a tombstone are skipped by the caller.

Avro comes in decoded, so its envelopes are columns. JSON comes in before it is decoded, since the
table determines its columns, and goes out as JSON with every digit unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.cast import absent, project
from frazil.errors import SchemaMismatch
from frazil.formats.connect_schema import Members, Named, named, rewritten
from frazil.formats.decode_result import UndecodableRecord
from frazil.kafka.record_batch import Longs

#: Envelope fields that a row keeps, under the same name with an underscore prefix.
KEPT = ("op", "source", "ts_ms")
_SIDES = ("before", "after")
_A_DOCUMENT = (
    "{} is text; expected an object. MongoDB's connector sends documents as text: let its "
    "transformation ExtractNewDocumentState make rows of them, and leave the envelope out"
)
_TRUNCATED = (
    "cannot make a row of a change: the table was truncated (op t), and rows that were written "
    "before are still there. Delete them; a [[route]] on the field op can skip such records"
)
#: What Debezium sends beside changes, each to a topic of its own, with the fields that it has.
_BESIDE = {
    "transaction metadata": {"status", "id", "event_count", "data_collections"},
    "a schema change": {"databaseName", "ddl", "tableChanges"},
    "a notification": {"id", "type", "aggregate_type", "additional_data"},
}


def columns(schema: pa.Schema) -> pa.Schema:
    """The columns of rows unwrapped from envelopes of this schema."""
    sides = [_fields(schema, side) for side in ("after", "before")]
    op = schema.field("op") if "op" in schema.names else None
    texts = [s for s in _SIDES if s in schema.names and _is_text(schema.field(s).type)]
    if op is not None and texts and not any(sides):
        raise SchemaMismatch(f"cannot unwrap a change: {_A_DOCUMENT.format(texts[-1])}")
    if op is None or not any(sides) or not _is_text(op.type):
        raise SchemaMismatch(
            _no_change(schema.names),
            hint='leave envelope = "debezium" out of the [[route]] if its records are plain rows',
        )
    after, before = sides
    fields = [_either(after.get(name), before.get(name)) for name in {**after, **before}]
    kept = [schema.field(name).with_name(f"_{name}") for name in KEPT if name in schema.names]
    kept[0] = kept[0].with_type(pa.large_string()).with_nullable(False)
    if both := {field.name for field in fields} & {field.name for field in kept}:
        raise SchemaMismatch(
            f"cannot unwrap a change: the row has a column {min(both)!r}, which is also "
            "what the envelope's own is called"
        )
    return pa.schema(fields + kept)


def unwrap(rows: pa.Table) -> tuple[pa.Table, Longs | None, list[UndecodableRecord]]:
    """The rows in these envelopes, their positions (None: all), and the rejected envelopes."""
    target = columns(rows.schema)
    count = rows.num_rows
    op = _whole(rows, "op").cast(pa.large_string())
    present = {
        side: _whole(rows, side).is_valid().to_numpy(False)
        for side in ("after", "before")
        if _fields(rows.schema, side)
    }
    none = np.zeros(count, bool)
    deleted = _is(op, ["d"])
    good = np.where(deleted, present.get("before", none), present.get("after", none))
    good &= ~_is(op, ["t"]) & op.is_valid().to_numpy(False)
    rejected = [
        UndecodableRecord(i, "envelope", _why_not(op[i].as_py()))
        for i in np.flatnonzero(~good).tolist()
    ]
    index: Longs | None = np.flatnonzero(good) if rejected else None
    if index is not None:
        rows, deleted = rows.take(pa.array(index)), deleted[index]
    arrays = {f"_{name}": _whole(rows, name) for name in KEPT if name in rows.schema.names}
    after, before = (_children(rows, side) for side in ("after", "before"))
    for field in target:
        if field.name not in arrays:
            pair = after.get(field.name), before.get(field.name)
            arrays[field.name] = _picked(pair, field.with_nullable(True), deleted)
    arrays["_op"] = arrays["_op"].cast(pa.large_string())
    return pa.table([arrays[name] for name in target.names], schema=target), index, rejected


def messages(rows: pa.Table) -> Any:
    """A mask of the messages of the source's log (op m), which are no changes of rows."""
    if "op" not in rows.schema.names or not _is_text(rows.schema.field("op").type):
        return np.zeros(len(rows), bool)
    return _is(_whole(rows, "op"), ["m"])


def left(
    rows: pa.Table, key: Sequence[str], read: Callable[[pa.Array, pa.Field], pa.Array]
) -> tuple[pa.Table, Longs]:
    """Former keys of rows whose key these changes replaced, and the positions of those changes.

    A change replaces the key if it has a `before` whose key differs from that of `after`. `read`
    gives the values of a field in the type in which the table compares keys.
    """
    after, before = (_children(rows, side) for side in ("after", "before"))
    moved = np.zeros(len(rows), bool)
    fields = _fields(rows.schema, "before")
    if not all(name in after and name in before for name in key):
        return rows.slice(0, 0).select([]), np.empty(0, np.int64)
    for name in key:
        one, other = (read(side[name], fields[name]) for side in (after, before))
        same = pc.equal(one, other.cast(one.type))
        moved |= ~same.fill_null(False).to_numpy(False)
    for column in (_whole(rows, "after"), *(before[name] for name in key)):
        moved &= column.is_valid().to_numpy(False)
    index = np.flatnonzero(moved)
    arrays = [before[name].take(pa.array(index)) for name in key]
    schema = pa.schema([fields[name].with_nullable(True) for name in key])
    return pa.Table.from_arrays(arrays, schema=schema), index


def aliases(envelope_aliases: Mapping[str, Any]) -> dict[str, Any]:
    """Former names of a row's columns, from the aliases in the envelope's schema."""
    sides = ("before.", "after.")
    return {
        path.partition(".")[2]: olds
        for path, olds in envelope_aliases.items()
        if path.startswith(sides)
    }


def path_of(path: str) -> str:
    """The path in a change event of a column of its new row."""
    kept = path.partition(".")[0] in {f"_{name}" for name in KEPT}
    return path[1:] if kept else f"after.{path}"


def keys_json(
    value: bytes | None, key: Sequence[str], table: Mapping[str, pa.Field]
) -> tuple[bytes, bytes] | None:
    """The keys before and after one JSON change, as objects that the `table` can read; None if
    `before` has no key or the same text. The caller compares them in the table's types: 1.0 and
    1.00 are equal as decimals, and two integers beyond 2^53 may be equal as floats."""
    try:
        change, schema = _change((value or b"").decode())
        if not change or not all(isinstance(change.get(s, (0,))[0], dict) for s in _SIDES):
            return None
        before, after = (
            rewritten(members(change[side][1]), named(schema, side), table) for side in _SIDES
        )
    except (ValueError, NotARow, RecursionError):
        return None
    if any(row.get(name, (None, ""))[0] is None for name in key for row in (before, after)):
        return None
    if all(before[name][1] == after[name][1] for name in key):
        return None
    one, other = (
        ",".join(f"{json.dumps(name)}:{row[name][1]}" for name in key) for row in (before, after)
    )
    return f"{{{one}}}".encode(), f"{{{other}}}".encode()


def _no_change(names: Collection[str]) -> str:
    """Why a record with these fields is no change."""
    kind = next((kind for kind, fields in _BESIDE.items() if fields <= {*names}), "")
    if kind or {*names} == {"ts_ms"}:
        return (
            f"cannot unwrap a change: it is {kind or 'a heartbeat'}, which comes in a topic of its "
            "own. Put a [[route]] with its topic and skip = true before this one"
        )
    actual = ", ".join(map(ascii, sorted(names)))[:200] or "nothing"
    return f"cannot unwrap a change: expected op, before and after, found {actual}"


def _why_not(op: Any, row: Any = None) -> str:
    if op == "t":
        return _TRUNCATED
    if not isinstance(op, str):
        return "cannot make a row of a change: it has no op"
    side = "before" if op == "d" else "after"
    if isinstance(row, str):
        return f"cannot make a row of a change: {_A_DOCUMENT.format(side)}"
    return f"cannot make a row of a change: op is {op[:32]!a} and {side} is null"


def _picked(pair: tuple[Any, Any], field: pa.Field, deleted: Any) -> pa.Array:
    """The column from `before` for deletes, from `after` otherwise."""
    if not deleted.any() and pair[0] is not None:
        return project(pair[0], field)
    count = len(deleted)
    sides = [absent(count, field) if side is None else project(side, field) for side in pair]
    return pa.concat_arrays(sides).take(pa.array(np.arange(count) + deleted * count))


def _children(rows: pa.Table, side: str) -> dict[str, pa.Array]:
    fields = _fields(rows.schema, side)
    return dict(zip(fields, _whole(rows, side).flatten(), strict=True)) if fields else {}


def _fields(schema: pa.Schema, side: str) -> dict[str, pa.Field]:
    kind = schema.field(side).type if side in schema.names else pa.null()
    return {field.name: field for field in kind} if pa.types.is_struct(kind) else {}


def _whole(rows: pa.Table, name: str) -> pa.Array:
    return rows.column(name).combine_chunks()


def _is(op: pa.Array, ops: list[str]) -> Any:
    return pc.is_in(op, pa.array(ops, op.type)).to_numpy(False)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _either(one: pa.Field | None, other: pa.Field | None) -> pa.Field:
    """The column that holds both: they may differ only in nullability."""
    if one is None:
        return _either(other, one)
    if other is None:
        return one.with_nullable(True)
    both = one.with_type(_both(one.type, other.type, one.name))
    return both.with_nullable(one.nullable or other.nullable)


def _both(one: pa.DataType, other: pa.DataType, path: str) -> pa.DataType:
    if one.equals(other):
        return one
    structs = pa.types.is_struct(one) and pa.types.is_struct(other)
    if structs and [field.name for field in one] == [field.name for field in other]:
        return pa.struct([_either(*pair) for pair in zip(one, other, strict=True)])
    for is_list, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_list(one) and is_list(other):
            return make(_either(one.value_field, other.value_field))
    if pa.types.is_map(one) and pa.types.is_map(other):
        key = _either(one.key_field, other.key_field)
        return pa.map_(key, _either(one.item_field, other.item_field))
    raise SchemaMismatch(
        f"cannot unwrap a change: column {path!r} is {one} after and {other} before"
    )


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────

#: Used only for the end and the kind of a value: parsed as floats, different numbers can be equal.
#: Numbers are compared and written by their text.
_JSON = json.JSONDecoder(parse_int=float, parse_constant=lambda name: _bad(name))


class NotARow(Exception):
    pass


class UnwrappedChanges(NamedTuple):
    """As many rows as values: JSON objects, None for tombstones, messages and rejected values."""

    rows: list[bytes | None]
    rejected: list[UndecodableRecord]
    deleted: set[int]
    #: of each row: its columns whose type Kafka Connect's schema says
    named: list[Named]


def unwrap_json(values: Sequence[bytes | None]) -> UnwrappedChanges:
    """As `unwrap`, for JSON, with or without Kafka Connect's {"schema", "payload"} wrapper."""
    changes = UnwrappedChanges([None] * len(values), [], set(), [{}] * len(values))
    for i, value in enumerate(values):
        try:
            change, schema = ({}, "") if value is None else _change(value.decode())
            if not change:
                continue
            row, side = _row(change)
        except NotARow as error:
            changes.rejected.append(UndecodableRecord(i, "envelope", str(error)))
        except RecursionError:
            changes.rejected.append(
                UndecodableRecord(i, "limit", "cannot read JSON: it is nested too deep")
            )
        except ValueError as error:
            changes.rejected.append(UndecodableRecord(i, "json", f"cannot read JSON: {error}"))
        else:
            changes.rows[i] = row
            if change["op"][0] == "d":
                changes.deleted.add(i)
            if schema:
                changes.named[i] = named(schema, side)
    return changes


def written(row: bytes, columns: Named, table: Mapping[str, pa.Field]) -> bytes:
    """A row whose values the `table` can read."""
    texts = rewritten(members(row.decode()), columns, table)
    return object_of({name: text for name, (_, text) in texts.items()})


def _change(text: str) -> tuple[Members, str]:
    """The members of an envelope, and the text of the schema beside it; no members: it is a
    tombstone or a message."""
    change, schema = members(text), ""
    if "payload" in change and change.keys() <= {"schema", "payload"}:
        payload, text = change["payload"]
        schema = change.get("schema", (None, ""))[1]
        if payload is None:
            return {}, ""
        change = members(text) if isinstance(payload, dict) else {}
    if change.get("op", (None,))[0] == "m":
        return {}, ""
    if "op" not in change or not change.keys() & {*_SIDES}:
        raise NotARow(_no_change(change))
    return change, schema


def _row(change: Members) -> tuple[bytes, str]:
    """The row of a change, cut from its text so that digits, escapes and order stay unchanged, and
    the side that it is from."""
    op = change["op"][0]
    side = "before" if op == "d" else "after"
    row, text = change.get(side, (None, ""))
    if not isinstance(op, str) or op == "t" or not isinstance(row, dict):
        raise NotARow(_why_not(op, row))
    kept = [name for name in KEPT if name in change]
    if both := row.keys() & {f"_{name}" for name in kept}:
        raise NotARow(
            f"cannot unwrap a change: the row has a field {min(both)!r}, which is also "
            "what the envelope's own is called"
        )
    more = ",".join(f'"_{name}":{change[name][1]}' for name in kept)
    return f"{text[:-1].rstrip()}{',' if row else ''}{more}}}".encode(), side


def object_of(texts: Mapping[str, str]) -> bytes:
    """A JSON object whose members have these texts. Half of a surrogate pair becomes bytes that
    are no UTF-8, which a reader rejects."""
    body = ",".join(f"{json.dumps(name)}:{text}" for name, text in texts.items())
    return f"{{{body}}}".encode(errors="surrogatepass")


def members(text: str) -> Members:
    """The members of a JSON object, each with its text; the last one of a duplicate name."""
    members: Members = {}
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        _JSON.decode(text)  # raises the exact error if it is not JSON
        raise NotARow("cannot unwrap a change: expected an object with op, before and after")
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
