"""Avro datums of one writer schema → columns, or the reason for rejection. Runs on executors.

In: the schema as JSON text, and bytes without a container. Out: an Arrow table with the columns of
`WriterSchema.columns`, and a reason for each datum left out.

Two readers: compiled code (`frazil.native.avro`) reads datums and leaves out doubtful ones; the
strict readers of `frazil.arrow.avro_types` read those one by one, and are the only ones that
reject. So no datum's result depends on its neighbours.

A schema that no Iceberg table can hold raises `UnsupportedSchema`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from frazil.arrow.avro_datum import Datum, UnreadableDatum
from frazil.arrow.avro_program import AvroProgram, is_readable
from frazil.arrow.avro_types import ColumnBuilder, UnsupportedSchema, record_type
from frazil.arrow.byte_slices import ByteSlices
from frazil.arrow.column_program import in_order, table_of


class WriterSchema:
    """A writer schema, compiled to read its datums."""

    def __init__(self, text: str, references: Sequence[str] = ()) -> None:
        """`references`: schemas whose named types `text` uses, dependencies first."""
        build = ColumnBuilder()
        try:
            for reference in references:
                build.type(json.loads(reference), "", 0)
            build.aliases.clear()  # aliases of a reference are recorded where it is used
            schema = json.loads(text)
            if not (isinstance(schema, dict) and schema.get("type") in ("record", "error")):
                schema = {
                    "type": "record",
                    "name": "frazil.Value",
                    "fields": [{"name": "value", "type": schema}],
                }
            fields = build.fields(schema, "", 0)
        except (ValueError, RecursionError) as error:
            raise UnsupportedSchema(f"cannot parse the schema: {error}") from None
        top = record_type(fields)
        self._read = top.read
        self.columns = pa.schema([avro_type.field(name) for name, avro_type in fields.items()])
        #: path of a column (`s.a`, `l.element.a`, `m.value.a`) → its former names
        self.aliases: Mapping[str, tuple[str, ...]] = build.aliases
        self._program = AvroProgram(top) if is_readable(top) else None

    def read(self, values: Sequence[bytes | None]) -> tuple[pa.Table, list[tuple[int, str]]]:
        """The good rows in order, and the index and reason of each bad one. No value is null."""
        slices = ByteSlices.of(values)
        bad: list[tuple[int, str]] = []
        if self._program is None:
            return table_of(self._each(slices, range(len(slices)), bad), self.columns), bad
        rows, doubtful = self._program.decode(slices)
        if len(doubtful):
            others = self._each(slices, doubtful.tolist(), bad)
            rows = in_order(rows, others, doubtful, [i for i, _ in bad])
        return table_of(rows, self.columns), bad

    def _each(
        self, values: ByteSlices, places: Iterable[int], bad: list[tuple[int, str]]
    ) -> pa.StructArray:
        """The datums at some places, read one by one by the strict reader."""
        rows: list[dict[str, Any]] = []
        for at in places:
            datum = Datum(values[at] or b"", 0)
            try:
                row = self._read(datum)
                left = len(datum.data) - datum.place
                if left:
                    raise UnreadableDatum(f"expected the end of the datum, found {left} more bytes")
            except UnreadableDatum as error:
                bad.append((at, str(error)))  # not the error: its traceback holds all values
            else:
                rows.append(row)
        if not len(self.columns):  # only a struct array keeps the number of its rows
            return pa.array(rows, pa.struct([]))
        arrays = [
            pa.array([row[column.name] for row in rows], column.type) for column in self.columns
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(self.columns))
