"""Computes the schema changes that a table needs so that records fit it. Runs everywhere; pure.

In: a table's columns and the records' columns. Out: `SchemaChanges`, which Iceberg can make without
rewriting a data file: add, widen, make optional, rename; or the reason why they are impossible.
Nothing is ever dropped, narrowed or parsed.

Records that fit by `frazil.pipeline.projection` need no change. `aliases` map columns of the table
and of the records to each other: newest path → former names. Paths are Iceberg's: `s.a`,
`l.element.a`, `m.value.a`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from frazil.arrow.cast import by_place, default_of, project
from frazil.config.sections import RESERVED
from frazil.errors import SchemaMismatch

#: Longest name of a new column, in characters: the limit of common catalogs.
MAX_NAME = 255
#: newest path → former name or names of the column
Aliases = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class SchemaChanges:
    """Changes of a table's schema. Paths use the table's current names."""

    add: tuple[tuple[str, pa.Field], ...] = ()  # path of the struct ("": the table), column
    widen: tuple[tuple[str, pa.DataType], ...] = ()
    relax: tuple[str, ...] = ()  # required columns that become optional
    rename: tuple[tuple[str, str], ...] = ()  # path, new name
    impossible: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.widen or self.relax or self.rename or self.impossible)


def changes(
    target: pa.Schema,
    columns: pa.Schema,
    aliases: Aliases | None = None,
    *,
    beside: Collection[str] = (),
    identifier: Collection[str] = (),
    partitions: Collection[str] = (),
    format_version: int = 3,
) -> SchemaChanges:
    """The changes that a table with columns `target` needs so that records with `columns` fit.

    `beside`: names of the metadata columns, which records do not have. `identifier`: paths of the
    table's identifier fields, which stay required; a record without a value there is a misfit.
    `partitions`: names of its partition fields, which no new column may have.
    """
    comparison = _Comparison(target, aliases or {}, beside, identifier, partitions, format_version)
    comparison.struct(columns, [field for field in target if field.name not in beside], "", "")
    return SchemaChanges(
        tuple(comparison.add),
        tuple(comparison.widen),
        tuple(comparison.relax),
        tuple(comparison.rename),
        tuple(comparison.impossible),
    )


def merged(one: pa.Schema, other: pa.Schema, aliases: Aliases | None = None) -> pa.Schema:
    """The columns of a table into which records of both schemas fit.

    The set of fields does not depend on the order of merging; the order of the fields does.
    """
    try:
        fields = _union(one, other, aliases or {}, "")
        reason = twins(fields)
    except _Unlike as error:
        reason = str(error)
    if reason:
        raise SchemaMismatch(f"cannot merge the columns of records: {reason}")
    return pa.schema(fields)


def renamed(rows: pa.Table, target: pa.Schema, aliases: Aliases | None = None) -> pa.Table:
    """`rows` of an older writer schema under the table's current names."""
    if not aliases:
        return rows
    fields = _renamed(rows.schema, target, aliases, "")
    if fields == list(rows.schema):
        return rows
    columns = [
        column
        if column.type == field.type
        else project(column, field.with_nullable(True), by_place)
        for column, field in zip(rows.columns, fields, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, rows.schema.metadata))


def together(*aliases: Aliases) -> dict[str, tuple[str, ...]]:
    """The former names from config, writer schema and table, merged."""
    names: dict[str, tuple[str, ...]] = {}
    for source in aliases:
        for path in source:
            known = names.get(path, ())
            names[path] = (*known, *(name for name in _olds(source, path) if name not in known))
    return names


def twins(fields: Iterable[pa.Field]) -> str:
    """The reason why columns cannot coexist, such as names that differ only in case, which Spark
    and most engines cannot distinguish; empty: they can."""
    return _clash((path for field in fields for path in _paths(field, "")), {})


def unmakeable(columns: pa.Schema, beside: Collection[str]) -> str:
    """The reason why no new table can have these columns; empty: it can. `beside`: names of its
    metadata columns."""
    ours = {name.lower() for name in beside}
    if clash := [name for name in columns.names if name.lower() in ours]:
        return (
            f"the records have a column {clash[0]!r}, which is also the name of a metadata column"
        )
    if taken := RESERVED & set(columns.names):
        return f"the records have a column {min(taken)!r}, a name that Iceberg keeps for itself"
    return twins(columns)


def differences(columns: pa.Schema, target: pa.Schema) -> list[str]:
    messages = []
    fields = {wanted.name: wanted for wanted in target}
    for field in columns:
        if field.name not in fields:
            messages.append(f"column {field.name!r} ({field.type}) is not in the table")
            continue
        wanted = fields[field.name]
        if not castable(field.type, wanted.type):
            messages.append(
                f"column {field.name!r} is {wanted.type} in the table, {field.type} in the records"
            )
    names = set(columns.names)
    for wanted in target:
        if wanted.name not in names and not wanted.nullable and default_of(wanted) is None:
            messages.append(
                f"column {wanted.name!r} ({wanted.type}) is required by the table and not "
                "in the records"
            )
    return messages


def castable(given: pa.DataType, target: pa.DataType) -> bool:
    """Whether every value of type `given` fits type `target` unchanged (Iceberg's promotions)."""
    if pa.types.is_struct(given) and pa.types.is_struct(target):
        return not differences(pa.schema(list(given)), pa.schema(list(target)))
    if _is_list(given) and _is_list(target):
        return castable(given.value_type, target.value_type)
    if pa.types.is_map(given) and pa.types.is_map(target):
        return castable(given.key_type, target.key_type) and castable(
            given.item_type, target.item_type
        )
    if pa.types.is_decimal(given) and pa.types.is_decimal(target):
        return bool(given.scale == target.scale and given.precision <= target.precision)
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(target):
        # The zone affects display only, but a timestamp without one is another type.
        return given.unit == target.unit and bool(given.tz) == bool(target.tz)
    return _plain(given) == _plain(target) or (given, target) in _WIDENING


_NARROW = (pa.int8(), pa.int16())
_WIDENING = {
    (pa.int32(), pa.int64()),
    (pa.float32(), pa.float64()),
    *((small, large) for small in _NARROW for large in (pa.int32(), pa.int64())),
}


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if isinstance(kind, pa.BaseExtensionType):  # uuid
        return kind.storage_type
    return kind


class _Unlike(Exception):
    """The reason why a table cannot have a column of this type."""


def _tabled(field: pa.Field, path: str, format_version: int = 3) -> pa.Field:
    """A column of records with the type of an Iceberg column."""
    kind = field.type
    if pa.types.is_struct(kind) and kind.num_fields:
        inside = [_tabled(child, f"{path}.{child.name}", format_version) for child in kind]
        return field.with_type(pa.struct(inside))
    if _is_list(kind):
        return field.with_type(_list(_tabled(kind.value_field, f"{path}.element", format_version)))
    if pa.types.is_map(kind):
        key = _tabled(kind.key_field, f"{path}.key", format_version)
        return field.with_type(_map(key, _tabled(kind.item_field, f"{path}.value", format_version)))
    leaf = next((candidate for candidate in _LEAVES if castable(kind, candidate)), None)
    if pa.types.is_decimal(kind) and kind.precision <= 38:
        leaf = pa.decimal128(kind.precision, kind.scale)
    elif pa.types.is_fixed_size_binary(kind) or kind == pa.uuid():
        leaf = kind
    if leaf is None:
        raise _Unlike(
            f"column {path!r} is {kind} in the records, a type that Iceberg does not have"
        )
    if format_version < 3 and pa.types.is_timestamp(leaf) and leaf.unit == "ns":
        raise _Unlike(f"column {path!r} is {kind} in the records, which needs format_version = 3")
    return field.with_type(leaf)


#: Iceberg's primitive types, narrowest first. Decimal, fixed and uuid are handled separately.
_LEAVES = (
    pa.bool_(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.large_string(),
    pa.large_binary(),
    pa.date32(),
    pa.time64("us"),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
    pa.timestamp("ns"),
    pa.timestamp("ns", "UTC"),
)


class _Comparison:
    """One walk through both schemas, and the changes found."""

    def __init__(
        self,
        target: pa.Schema,
        aliases: Aliases,
        beside: Collection[str],
        identifier: Collection[str],
        partitions: Collection[str],
        format_version: int,
    ) -> None:
        self._aliases = aliases
        self._beside = beside
        self._identifier = identifier
        self._partitions = partitions
        self._format_version = format_version
        self._taken = {path.lower(): path for field in target for path in _paths(field, "")}
        self.add: list[tuple[str, pa.Field]] = []
        self.widen: list[tuple[str, pa.DataType]] = []
        self.relax: list[str] = []
        self.rename: list[tuple[str, str]] = []
        self.impossible: list[str] = []

    def struct(
        self, given: Iterable[pa.Field], target: Sequence[pa.Field], path: str, newest: str
    ) -> None:
        """Compare two structs. `path` uses the table's names, `newest` the names in the aliases."""
        missing = {column.name: column for column in target}
        new = []
        for field, like, name in _paired(given, target, self._aliases, newest):
            if like is None:
                new.append(field)
                continue
            del missing[like.name]
            field_path = _join(path, like.name)
            if like.name != name:
                self._taken.pop(field_path.lower(), None)
                if self._enters(path, name):
                    self.rename.append((field_path, name))
            self._value(field, like, field_path, _join(newest, name))
        for field in new:
            self._added(path, field)
        for name, field in missing.items():
            if not field.nullable and default_of(field) is None:
                self._relax(_join(path, name), missing=True)

    def _value(self, given: pa.Field, target: pa.Field, path: str, newest: str) -> None:
        if given.nullable and not target.nullable:
            self._relax(path, missing=False)
        kind, held = given.type, target.type
        if pa.types.is_struct(kind) and pa.types.is_struct(held):
            self.struct(kind, list(held), path, newest)
        elif _is_list(kind) and _is_list(held):
            inside = f"{path}.element", f"{newest}.element"
            self._value(kind.value_field, held.value_field, *inside)
        elif pa.types.is_map(kind) and pa.types.is_map(held):
            if not castable(kind.key_type, held.key_type):  # Iceberg never changes a map's keys
                self._differ(f"{path}.key", held.key_type, kind.key_type)
            self._value(kind.item_field, held.item_field, f"{path}.value", f"{newest}.value")
        elif not castable(kind, held):
            if not castable(held, kind):
                self._differ(path, held, kind)
            elif wider := self._tabled(given, path):
                self.widen.append((path, wider.type))

    def _added(self, path: str, field: pa.Field) -> None:
        field_path = _join(path, field.name)
        if self._enters(path, field.name) and (column := self._tabled(field, field_path)):
            if reason := _clash(list(_paths(column, path))[1:], self._taken):
                self.impossible.append(reason)
            else:  # optional: existing rows have no value in it
                self.add.append((path, column.with_nullable(True)))

    def _tabled(self, field: pa.Field, path: str) -> pa.Field | None:
        try:
            return _tabled(field, path, self._format_version)
        except _Unlike as error:
            self.impossible.append(str(error))
            return None

    def _enters(self, parent: str, name: str) -> bool:
        """Whether the table may have a column of this name; if not, the reason is recorded."""
        if not parent and name in self._beside:
            reason = f"column {name!r} is also the name of a metadata column"
        elif not parent and name in RESERVED:
            reason = f"column {name!r} has a name that Iceberg keeps for itself"
        elif _join(parent, name) in self._partitions:
            reason = (
                f"column {_join(parent, name)!r} has the name of a partition field of the table"
            )
        else:
            reason = _clash([_join(parent, name)], self._taken)
        if reason:
            self.impossible.append(reason)
        return not reason

    def _relax(self, path: str, missing: bool) -> None:
        if any(
            identifier == path or identifier.startswith(f"{path}.")
            for identifier in self._identifier
        ):
            if missing:
                self.impossible.append(
                    f"column {path!r} is an identifier field of the table and not in the records"
                )
        else:
            self.relax.append(path)

    def _differ(self, path: str, held: pa.DataType, given: pa.DataType) -> None:
        self.impossible.append(f"column {path!r} is {held} in the table, {given} in the records")


def _paired(
    given: Iterable[pa.Field], target: Iterable[pa.Field], aliases: Aliases, path: str
) -> Iterator[tuple[pa.Field, pa.Field | None, str]]:
    """Each field of one struct, its counterpart in the other (or None), and their newest name."""
    given, by_name = list(given), {column.name: column for column in target}
    names = {column.name for column in given}
    free = [name for name in by_name if name not in names]
    for field in given:
        name = field.name
        if name in by_name:
            yield field, by_name[name], name
            continue
        # The other's newer name goes first: two writers that each list the other's name as the
        # former one would otherwise rename the column back and forth.
        newer = [candidate for candidate in free if name in _olds(aliases, _join(path, candidate))]
        older = [candidate for candidate in _olds(aliases, _join(path, name)) if candidate in free]
        if newer or older:
            like = (newer or older)[0]
            free.remove(like)
            yield field, by_name[like], like if newer else name
        else:
            yield field, None, name


def _union(
    one: Iterable[pa.Field], other: Iterable[pa.Field], aliases: Aliases, path: str
) -> list[pa.Field]:
    other = list(other)
    alone = {column.name for column in other}
    fields = []
    for field, like, name in _paired(one, other, aliases, path):
        field_path = _join(path, name)
        if like is None:
            fields.append(_tabled(field, field_path).with_nullable(True))
            continue
        alone.discard(like.name)
        fields.append(_both(field.with_name(name), like.with_name(name), aliases, field_path))
    rest = [column for column in other if column.name in alone]
    return fields + [
        _tabled(column, _join(path, column.name)).with_nullable(True) for column in rest
    ]


def _both(one: pa.Field, other: pa.Field, aliases: Aliases, path: str) -> pa.Field:
    left, right = one.type, other.type
    kind: pa.DataType
    if pa.types.is_struct(left) and pa.types.is_struct(right):
        kind = pa.struct(_union(left, right, aliases, path))
    elif _is_list(left) and _is_list(right):
        kind = _list(_both(left.value_field, right.value_field, aliases, f"{path}.element"))
    elif pa.types.is_map(left) and pa.types.is_map(right):
        key = _both(left.key_field, right.key_field, aliases, f"{path}.key")
        kind = _map(key, _both(left.item_field, right.item_field, aliases, f"{path}.value"))
    else:
        left, right = _tabled(one, path).type, _tabled(other, path).type
        if castable(left, right) and left != pa.uuid():  # uuid casts to fixed[16], but is kept
            kind = right
        elif castable(right, left):
            kind = left
        else:
            raise _Unlike(f"column {path!r} is {left} in some, {right} in others")
    return pa.field(one.name, kind, one.nullable or other.nullable)


def _renamed(
    given: Iterable[pa.Field], target: Iterable[pa.Field], aliases: Aliases, path: str
) -> list[pa.Field]:
    fields = []
    for field, like, name in _paired(given, target, aliases, path):
        if like is not None:
            kind = _retyped(field.type, like.type, aliases, _join(path, name))
            field = field.with_type(kind).with_name(name)
        fields.append(field)
    return fields


def _retyped(given: pa.DataType, target: pa.DataType, aliases: Aliases, path: str) -> pa.DataType:
    def inside(one: pa.Field, other: pa.Field, word: str) -> pa.Field:
        return one.with_type(_retyped(one.type, other.type, aliases, f"{path}.{word}"))

    if pa.types.is_struct(given) and pa.types.is_struct(target):
        return pa.struct(_renamed(given, target, aliases, path))
    if _is_list(given) and _is_list(target):
        element = inside(given.value_field, target.value_field, "element")
        return pa.list_(element) if pa.types.is_list(given) else pa.large_list(element)
    if pa.types.is_map(given) and pa.types.is_map(target):
        return pa.map_(given.key_field, inside(given.item_field, target.item_field, "value"))
    return given


def _paths(field: pa.Field, parent: str) -> Iterator[str]:
    """The paths of a column and of all columns nested in it."""
    path, kind = _join(parent, field.name), field.type
    yield path
    inside: list[Any] = []
    if pa.types.is_struct(kind):
        inside = list(kind)
    elif _is_list(kind):
        inside = [kind.value_field.with_name("element")]
    elif pa.types.is_map(kind):
        inside = [kind.key_field.with_name("key"), kind.item_field.with_name("value")]
    for child in inside:
        yield from _paths(child, path)


def _clash(paths: Iterable[str], taken: dict[str, str]) -> str:
    """Add `paths` to `taken` up to the first that is invalid or taken. Returns the reason, or an
    empty string."""
    for path in paths:
        if not path or path.endswith("."):
            return f"column {path!r} has no name"
        if (size := len(path.rpartition(".")[2])) > MAX_NAME:
            return f"column {path[:64]!r}… has a name of {size} characters, and {MAX_NAME} are most"
        other = taken.get(path.lower())
        if other is not None:
            return (
                f"columns {other!r} and {path!r} differ only in case"
                if other != path
                else f"two columns are called {path!r}"
            )
        taken[path.lower()] = path
    return ""


def _olds(aliases: Aliases, path: str) -> tuple[str, ...]:
    """Former names of a column; of a nested column, the last part of each."""
    olds = aliases.get(path, ())
    olds = (olds,) if isinstance(olds, str) else olds
    return tuple(name.rpartition(".")[2] for name in olds) if "." in path else tuple(olds)


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _list(element: pa.Field) -> pa.DataType:
    return pa.large_list(element.with_name("element"))


def _map(key: pa.Field, value: pa.Field) -> pa.DataType:
    return pa.map_(key.with_name("key").with_nullable(False), value.with_name("value"))
