"""How the JSON records of one table are read: the fields that make its columns. Runs on executors;
pure.

    table's columns ─┐                        ┌─▶ shape: the fields, with their types
    declared columns ├─▶ JsonSource ──────────┼─▶ fixed: columns that it has whatever records hold
    select           ┘                        └─▶ learned: a record's fields that are inferred

JSON has no writer schema, so the table's columns say what its fields are. A select turns fields
into columns: `JsonSource` turns it around. A field as it is has the type of its column, below a
cast the type of the cast, below a mask or a digest it is text; a declared field has its own type.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from frazil.config.select import Cast, Column, Expression, Item, KeyColumns, Selection, innermost
from frazil.formats import debezium
from frazil.formats.declared_columns import field_of_type
from frazil.formats.decoder import RecordFormat
from frazil.formats.json_columns import DECLARED
from frazil.formats.json_values import IGNORED
from frazil.pipeline.selection import field_at, static_type

#: A tree of fields: name → field, or the tree of an object's fields.
Tree = dict[str, Any]


@dataclass(frozen=True)
class JsonSource:
    """The reader of JSON for one table. `format` has the declared columns, `keys` those of keys."""

    format: RecordFormat
    selection: Selection | None = None
    keys: pa.Schema = dataclasses.field(default_factory=lambda: pa.schema([]))
    #: a change log: its `_op` is read as if it were declared
    log: bool = False
    #: of the table; of one that does not exist: `fixed`
    columns: pa.Schema = dataclasses.field(default_factory=lambda: pa.schema([]))

    def __bool__(self) -> bool:
        """Is anything but inferred from the records?"""
        return self.selection is not None or bool(len(self.format.declared))

    @property
    def inferring(self) -> bool:
        """Do fields that are not declared become columns?"""
        return self.format.undeclared == "infer"

    # ── columns of the table ─────────────────────────────────────────────────────────────────

    @cached_property
    def fixed(self) -> pa.Schema:
        """The columns whose types do not depend on the records."""
        declared, selection = self.format.declared, self.selection
        if selection is None:
            return declared
        fields: list[pa.Field] = []
        for item in selection.items:
            if isinstance(item, KeyColumns):
                keys = [key.with_nullable(True) for key in self.keys]  # a record may have none
                fields += [key.with_name(f"{item.prefix}{key.name}") for key in keys]
            elif not isinstance(item, Item):
                fields += [column for column in declared if selection.passes(column.name)]
            elif isinstance(item.of, Column):
                if field := field_at(declared, item.of.names):
                    fields.append(field.with_name(item.name))
            elif kind := static_type(item.of, declared, self.keys):
                fields.append(pa.field(item.name, kind, metadata={DECLARED: b"1"}))
        return pa.schema(fields)

    @cached_property
    def expected(self) -> pa.Schema:
        """The columns that the table must have."""
        return with_fixed(self.columns, self.fixed)

    @cached_property
    def judged(self) -> pa.Schema:
        """Columns of the table by which the fields of a record are judged: declared ones have their
        own type, and computed ones are left out."""
        fixed = {field.name: field for field in self.fixed}
        computed = self._computed
        fields = [
            _laid(field, fixed.get(field.name))
            for field in self.columns
            if field.name not in computed
        ]
        names = {field.name for field in fields} | computed
        return pa.schema([*fields, *(f for name, f in fixed.items() if name not in names)])

    @cached_property
    def _computed(self) -> set[str]:
        if self.selection is None:
            return set()
        names = {n for n, of in self.selection.named.items() if not isinstance(of, Column)}
        for item in self.selection.items:
            if isinstance(item, KeyColumns):
                names |= {f"{item.prefix}{key.name}" for key in self.keys}
        return names

    def learned(self, value: bytes) -> bytes:
        """A record as an object with the columns that are fields as they are. What is no object
        stays as it is: the reader rejects it."""
        selection = self.selection
        if selection is None:
            return value
        try:
            members = debezium.members(value.decode())
            texts = {
                name: text
                for name, (_, text) in members.items()
                if selection.passes(name) and name not in self._computed
            }
            for name, of in selection.named.items():
                if isinstance(of, Column) and (text := _inside(members, of.names)) is not None:
                    texts[name] = text
        except (ValueError, RecursionError, debezium.NotARow):
            return value
        return debezium.object_of(texts)

    def names(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of the record's top fields, under the names of their columns."""
        selection = self.selection
        if selection is None:
            return dict(fields)
        known = {name: known for name, known in fields.items() if selection.passes(name)}
        for name, of in selection.named.items():
            if isinstance(of, Column) and len(of.names) == 1 and of.names[0] in fields:
                known[name] = fields[of.names[0]]
        return known

    # ── fields of the records ────────────────────────────────────────────────────────────────

    @cached_property
    def shape(self) -> pa.Schema:
        """The fields from which the table's columns are made. A field whose column the table lacks
        has type null: a value in it does not fit, and is learned."""
        declared, selection = self.format.declared, self.selection
        tree: Tree = {}
        if selection is None:
            passed = [column for column in self.columns if self._known(column.name)]
            tree = {field.name: _laid(field, _named(declared, field.name)) for field in passed}
            return pa.schema(_fields(tree), declared.metadata)
        computed = self._computed
        for field in self.columns:
            name = field.name
            if self._known(name) and selection.passes(name) and name not in computed:
                tree[name] = _laid(field, _named(declared, name))
        present = {field.name: field for field in self.columns}
        later = []
        for name, of in selection.named.items():
            if not isinstance(of, Column):
                later.append(of)
                continue
            own = field_at(declared, of.names)
            field = present.get(name)
            kind = _laid(field, own) if field is not None else own
            _put(tree, of.names, kind or pa.field(name, pa.null()))
        for of in later:
            source = innermost(of)
            if isinstance(source, Column):
                field = field_at(declared, source.names) or _read_as(of)
                _put(tree, source.names, field)
        return pa.schema(_fields(tree), {IGNORED: self._ignored})

    def _known(self, name: str) -> bool:
        """Is a field at the top read?"""
        return self.inferring or name in self.format.declared.names or (self.log and name == "_op")

    @property
    def _ignored(self) -> bytes:
        """The fields at the top that are passed over."""
        star = self.selection.star if self.selection else None
        if self.format.undeclared == "reject":
            excluded = star.excluded if star else ()
            return json.dumps([*excluded, *self.format.declared.names]).encode()
        if star is None or not self.inferring:
            return b"*"
        return json.dumps(star.excluded).encode()


def with_fixed(columns: Iterable[pa.Field], fixed: pa.Schema) -> pa.Schema:
    """Columns of a table, with the types that the config says of them, and the ones it lacks."""
    others = {field.name: field for field in fixed}
    fields = [_laid(field, others.pop(field.name, None), adding=True) for field in columns]
    return pa.schema([*fields, *others.values()])


def declared_as(column: pa.Field, declared: pa.Schema) -> pa.Field:
    """A column with the type that the field of its name is declared with."""
    return _laid(column, _named(declared, column.name))


def _named(columns: pa.Schema, name: str) -> pa.Field | None:
    return columns.field(name) if name in columns.names else None


def _laid(field: pa.Field, declared: pa.Field | None, adding: bool = False) -> pa.Field:
    """A column of the table with the declared type; objects keep their other fields, but where the
    declared one passes others over. `adding`: with declared fields that the table lacks."""
    if declared is None:
        return field
    metadata = {**(field.metadata or {}), **(declared.metadata or {})}
    if pa.types.is_struct(field.type) and pa.types.is_struct(declared.type):
        own = {child.name: child for child in declared.type}
        passing = IGNORED in (declared.metadata or {})
        inside = [
            _laid(child, own.pop(child.name, None), adding)
            for child in field.type
            if child.name in own or adding or not passing
        ]
        inside += own.values() if adding else ()
        return pa.field(field.name, pa.struct(inside), field.nullable, metadata)
    return pa.field(field.name, declared.type, field.nullable and declared.nullable, metadata)


def _put(tree: Tree, names: tuple[str, ...], field: pa.Field) -> None:
    """Enter a field. One that is there stays, unless it has no type."""
    first, *inside = names
    known = tree.get(first)
    if not inside:
        if known is None or (isinstance(known, pa.Field) and pa.types.is_null(known.type)):
            tree[first] = field.with_name(first)
        return
    if isinstance(known, pa.Field):
        return  # an object that is read whole
    _put(tree.setdefault(first, {}), tuple(inside), field)


def _fields(tree: Tree) -> list[pa.Field]:
    """The fields of a tree. Of an object of which only parts are selected the rest is passed
    over."""
    return [
        pa.field(name, pa.struct(_fields(node)), metadata={IGNORED: b"*"})
        if isinstance(node, dict)
        else node
        for name, node in tree.items()
    ]


def _read_as(of: Expression) -> pa.Field:
    """How a field is read that is not declared, below a cast, a mask or a digest."""
    while not isinstance(of, Column):
        inner = of.of  # type: ignore[union-attr]
        if isinstance(inner, Column):
            return (
                field_of_type("", of.kind)
                if isinstance(of, Cast)
                else pa.field("", pa.large_string())
            )
        of = inner
    return pa.field("", pa.null())


def _inside(members: Mapping[str, tuple[Any, str]], names: tuple[str, ...]) -> str | None:
    """The text of a field at a path; None: it is absent or null."""
    first, *inside = names
    value, text = members.get(first, (None, ""))
    if value is None:
        return None
    if not inside:
        return text
    with suppress(debezium.NotARow):
        return _inside(debezium.members(text), tuple(inside))
    return None
