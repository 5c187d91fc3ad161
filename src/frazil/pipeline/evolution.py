"""What must change in a table so that records fit it, said and not done. Runs everywhere; pure.

In: a table's columns and the records' columns. Out: `Changes`, which Iceberg can make without
touching a file that is there: add, widen, make optional, rename; or the sentence why that is
impossible. Nothing is ever dropped, narrowed or parsed.

What fits needs no change, and what fits is what `frazil.pipeline.projection` says. Columns have
the names of the table or of the records; `aliases` say which of them are the same (newest path →
names it had). A path is Iceberg's: `s.a`, `l.element.a`, `m.value.a`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from frazil.arrow.cast import by_place, default_of, project
from frazil.config.model import RESERVED
from frazil.errors import SchemaMismatch
from frazil.pipeline.projection import _is_list, castable

#: Characters of a new column's name: as many as catalogs take.
MAX_NAME = 255
#: newest path → the name, or names, that the column had
Aliases = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class SchemaChanges:
    """Paths are made of the names that the table has now."""

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
    """What a table with columns `target` needs so that records with `columns` fit.

    `beside` are the metadata columns, which no record has; `identifier` the paths of the table's
    identifier fields, which stay required: a record without a value there is a misfit. `partitions`
    are the names of its partition fields, which no new column may have.
    """
    found = _Comparison(target, aliases or {}, beside, identifier, partitions, format_version)
    found.struct(columns, [each for each in target if each.name not in beside], "", "")
    return SchemaChanges(
        tuple(found.add),
        tuple(found.widen),
        tuple(found.relax),
        tuple(found.rename),
        tuple(found.impossible),
    )


def merged(one: pa.Schema, other: pa.Schema, aliases: Aliases | None = None) -> pa.Schema:
    """The columns, as a table has them, into which records of both fit.

    The same fields whatever is merged first; their order is that of who came first.
    """
    try:
        fields = _union(one, other, aliases or {}, "")
        said = twins(fields)
    except _Unlike as error:
        said = str(error)
    if said:
        raise SchemaMismatch(f"cannot merge the columns of records: {said}")
    return pa.schema(fields)


def renamed(rows: pa.Table, target: pa.Schema, aliases: Aliases | None = None) -> pa.Table:
    """`rows` of an older writer under the names that the table has now."""
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
    """What config, writer and table say about former names, as one."""
    found: dict[str, tuple[str, ...]] = {}
    for each in aliases:
        for path in each:
            known = found.get(path, ())
            found[path] = (*known, *(name for name in _olds(each, path) if name not in known))
    return found


def twins(fields: Iterable[pa.Field]) -> str:
    """Says which columns Spark, and most engines, do not tell apart; empty where all are well."""
    return _clash((path for field in fields for path in _paths(field, "")), {})


def unmakeable(columns: pa.Schema, beside: Collection[str]) -> str:
    """Says why no new table can have these columns; empty where one can. `beside` are the names of
    its metadata columns."""
    ours = {name.lower() for name in beside}
    if clash := [name for name in columns.names if name.lower() in ours]:
        return (
            f"the records have a column {clash[0]!r}, which is also the name of a metadata column"
        )
    if taken := RESERVED & set(columns.names):
        return f"the records have a column {min(taken)!r}, a name that Iceberg keeps for itself"
    return twins(columns)


class _Unlike(Exception):
    """A sentence: no column of a table can be like this."""


def _tabled(field: pa.Field, path: str, format_version: int = 3) -> pa.Field:
    """A column of records as an Iceberg table has it."""
    kind = field.type
    if pa.types.is_struct(kind) and kind.num_fields:
        inside = [_tabled(each, f"{path}.{each.name}", format_version) for each in kind]
        return field.with_type(pa.struct(inside))
    if _is_list(kind):
        return field.with_type(_list(_tabled(kind.value_field, f"{path}.element", format_version)))
    if pa.types.is_map(kind):
        key = _tabled(kind.key_field, f"{path}.key", format_version)
        return field.with_type(_map(key, _tabled(kind.item_field, f"{path}.value", format_version)))
    there = next((each for each in _LEAVES if castable(kind, each)), None)
    if pa.types.is_decimal(kind) and kind.precision <= 38:
        there = pa.decimal128(kind.precision, kind.scale)
    elif pa.types.is_fixed_size_binary(kind) or kind == pa.uuid():
        there = kind
    if there is None:
        raise _Unlike(
            f"column {path!r} is {kind} in the records, a type that Iceberg does not have"
        )
    if format_version < 3 and pa.types.is_timestamp(there) and there.unit == "ns":
        raise _Unlike(f"column {path!r} is {kind} in the records, which needs format_version = 3")
    return field.with_type(there)


#: Narrowest first. Decimals, fixed and uuid have sizes of their own.
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
    """One walk through both, and what it found on the way."""

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
        self, given: Iterable[pa.Field], there: Sequence[pa.Field], path: str, newest: str
    ) -> None:
        """`path` has the table's names, `newest` those that aliases are told by."""
        missing = {each.name: each for each in there}
        new = []
        for field, like, name in _paired(given, there, self._aliases, newest):
            if like is None:
                new.append(field)
                continue
            del missing[like.name]
            here = _join(path, like.name)
            if like.name != name:
                self._taken.pop(here.lower(), None)
                if self._enters(path, name):
                    self.rename.append((here, name))
            self._value(field, like, here, _join(newest, name))
        for field in new:
            self._added(path, field)
        for name, field in missing.items():
            if not field.nullable and default_of(field) is None:
                self._relax(_join(path, name), missing=True)

    def _value(self, given: pa.Field, there: pa.Field, path: str, newest: str) -> None:
        if given.nullable and not there.nullable:
            self._relax(path, missing=False)
        kind, held = given.type, there.type
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
        here = _join(path, field.name)
        if self._enters(path, field.name) and (column := self._tabled(field, here)):
            if said := _clash(list(_paths(column, path))[1:], self._taken):
                self.impossible.append(said)
            else:  # what is there already has no value in it
                self.add.append((path, column.with_nullable(True)))

    def _tabled(self, field: pa.Field, path: str) -> pa.Field | None:
        try:
            return _tabled(field, path, self._format_version)
        except _Unlike as error:
            self.impossible.append(str(error))
            return None

    def _enters(self, parent: str, name: str) -> bool:
        """May the table have a column of this name?"""
        if not parent and name in self._beside:
            said = f"column {name!r} is also the name of a metadata column"
        elif not parent and name in RESERVED:
            said = f"column {name!r} has a name that Iceberg keeps for itself"
        elif _join(parent, name) in self._partitions:
            said = f"column {_join(parent, name)!r} has the name of a partition field of the table"
        else:
            said = _clash([_join(parent, name)], self._taken)
        if said:
            self.impossible.append(said)
        return not said

    def _relax(self, path: str, missing: bool) -> None:
        if any(each == path or each.startswith(f"{path}.") for each in self._identifier):
            if missing:
                self.impossible.append(
                    f"column {path!r} is an identifier field of the table and not in the records"
                )
        else:
            self.relax.append(path)

    def _differ(self, path: str, there: pa.DataType, given: pa.DataType) -> None:
        self.impossible.append(f"column {path!r} is {there} in the table, {given} in the records")


def _paired(
    given: Iterable[pa.Field], there: Iterable[pa.Field], aliases: Aliases, path: str
) -> Iterator[tuple[pa.Field, pa.Field | None, str]]:
    """Each field of one struct with its like in the other, and the newest name they go by."""
    given, theirs = list(given), {each.name: each for each in there}
    names = {each.name for each in given}
    free = [name for name in theirs if name not in names]
    for field in given:
        name = field.name
        if name in theirs:
            yield field, theirs[name], name
            continue
        # The other's newer name goes first: two writers that each call the other's name the old
        # one would else rename the column to and fro.
        newer = [each for each in free if name in _olds(aliases, _join(path, each))]
        older = [each for each in _olds(aliases, _join(path, name)) if each in free]
        if newer or older:
            like = (newer or older)[0]
            free.remove(like)
            yield field, theirs[like], like if newer else name
        else:
            yield field, None, name


def _union(
    one: Iterable[pa.Field], other: Iterable[pa.Field], aliases: Aliases, path: str
) -> list[pa.Field]:
    other = list(other)
    alone = {each.name for each in other}
    fields = []
    for field, like, name in _paired(one, other, aliases, path):
        here = _join(path, name)
        if like is None:
            fields.append(_tabled(field, here).with_nullable(True))
            continue
        alone.discard(like.name)
        fields.append(_both(field.with_name(name), like.with_name(name), aliases, here))
    rest = [each for each in other if each.name in alone]
    return fields + [_tabled(each, _join(path, each.name)).with_nullable(True) for each in rest]


def _both(one: pa.Field, other: pa.Field, aliases: Aliases, path: str) -> pa.Field:
    here, there = one.type, other.type
    kind: pa.DataType
    if pa.types.is_struct(here) and pa.types.is_struct(there):
        kind = pa.struct(_union(here, there, aliases, path))
    elif _is_list(here) and _is_list(there):
        kind = _list(_both(here.value_field, there.value_field, aliases, f"{path}.element"))
    elif pa.types.is_map(here) and pa.types.is_map(there):
        key = _both(here.key_field, there.key_field, aliases, f"{path}.key")
        kind = _map(key, _both(here.item_field, there.item_field, aliases, f"{path}.value"))
    else:
        here, there = _tabled(one, path).type, _tabled(other, path).type
        if castable(here, there) and here != pa.uuid():  # which is also a fixed[16], and says more
            kind = there
        elif castable(there, here):
            kind = here
        else:
            raise _Unlike(f"column {path!r} is {here} in some, {there} in others")
    return pa.field(one.name, kind, one.nullable or other.nullable)


def _renamed(
    given: Iterable[pa.Field], there: Iterable[pa.Field], aliases: Aliases, path: str
) -> list[pa.Field]:
    fields = []
    for field, like, name in _paired(given, there, aliases, path):
        if like is not None:
            kind = _retyped(field.type, like.type, aliases, _join(path, name))
            field = field.with_type(kind).with_name(name)
        fields.append(field)
    return fields


def _retyped(given: pa.DataType, there: pa.DataType, aliases: Aliases, path: str) -> pa.DataType:
    def inside(one: pa.Field, other: pa.Field, word: str) -> pa.Field:
        return one.with_type(_retyped(one.type, other.type, aliases, f"{path}.{word}"))

    if pa.types.is_struct(given) and pa.types.is_struct(there):
        return pa.struct(_renamed(given, there, aliases, path))
    if _is_list(given) and _is_list(there):
        element = inside(given.value_field, there.value_field, "element")
        return pa.list_(element) if pa.types.is_list(given) else pa.large_list(element)
    if pa.types.is_map(given) and pa.types.is_map(there):
        return pa.map_(given.key_field, inside(given.item_field, there.item_field, "value"))
    return given


def _paths(field: pa.Field, parent: str) -> Iterator[str]:
    """Of a column and of all that is in it."""
    path, kind = _join(parent, field.name), field.type
    yield path
    inside: list[Any] = []
    if pa.types.is_struct(kind):
        inside = list(kind)
    elif _is_list(kind):
        inside = [kind.value_field.with_name("element")]
    elif pa.types.is_map(kind):
        inside = [kind.key_field.with_name("key"), kind.item_field.with_name("value")]
    for each in inside:
        yield from _paths(each, path)


def _clash(paths: Iterable[str], taken: dict[str, str]) -> str:
    """Adds `paths` to those that are taken, up to the first that is."""
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
    """Former names; one that is told with its whole path counts by its last part."""
    olds = aliases.get(path, ())
    olds = (olds,) if isinstance(olds, str) else olds
    return tuple(each.rpartition(".")[2] for each in olds) if "." in path else tuple(olds)


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _list(element: pa.Field) -> pa.DataType:
    return pa.large_list(element.with_name("element"))


def _map(key: pa.Field, value: pa.Field) -> pa.DataType:
    return pa.map_(key.with_name("key").with_nullable(False), value.with_name("value"))
