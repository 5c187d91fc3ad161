"""Avro datums of one writer schema → columns, or the reason for rejection. Runs on executors.

In: the schema as JSON text, and bytes without a container. Out: an Arrow table with the columns of
`WriterSchema.columns`, and a reason for each datum left out.

Two readers produce the same table; neither lets a datum's result depend on its neighbours:

- *the block*: all datums are joined into one Avro container block that polars reads at once. Bare
  datums have no delimiters, so one extra byte would silently shift all following datums. Therefore
  each datum is followed by an 8-byte tag unique to its row (and by the Confluent header of the
  next datum, checked at no extra cost). One wrong tag discards the whole block.
- *one by one*: the strict readers of `frazil.arrow.avro_types`, for schemas that polars cannot read
  and for failed blocks, after they were split down to a few rows around the bad one.

A schema that no Iceberg table can hold raises `UnsupportedSchema`.
"""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from frazil.arrow.avro_types import (
    ColumnBuilder,
    Datum,
    UnreadableDatum,
    UnsupportedSchema,
    record_type,
)
from frazil.arrow.avro_unions import Longs, branches_valid, optional

BLOCK_ROWS = 65_536
SPLIT = 16
ONE_BY_ONE = 128  # a failed block this small is not split again

# The multiplier is odd, so all tags differ, and secret, so no datum can forge another row's tag.
_ODD = int.from_bytes(os.urandom(8), "little") | 1
_TAG_VALUES = np.arange(1, BLOCK_ROWS + 1, dtype=np.uint64) * np.uint64(_ODD)
_TAGS = [tag.tobytes() for tag in _TAG_VALUES.astype("<u8")]
_SEAL = os.urandom(3)  # pads the 5-byte header to 8 bytes: polars reads doubles fastest
_SYNC = b"frazil----frazil"
_NONE = np.empty(0, np.int64)


def sift(
    count: int,
    block: Callable[[int, int], pa.Table | None] | None,
    one_by_one: Callable[[int, int], pa.Table],
    tried: bool = False,
) -> list[pa.Table]:
    """Tables that cover `[0, count)` in order, read by `block` or, where it fails, `one_by_one`.

    A failed block is split, so one bad row costs a few more blocks and at most `ONE_BY_ONE` rows
    read the slow way. `tried`: `block(0, count)` already failed.
    """
    if block is None:
        return [one_by_one(0, count)] if count else []
    tables: list[pa.Table] = []
    tried = tried and count <= BLOCK_ROWS
    starts = range(0, count, BLOCK_ROWS)
    spans = [(start, min(start + BLOCK_ROWS, count), tried) for start in reversed(starts)]
    while spans:
        start, end, broken = spans.pop()
        table = None if broken else block(start, end)
        if table is None and end - start > ONE_BY_ONE:
            step = -(-(end - start) // SPLIT)
            pieces = range(start, end, step)
            spans.extend((at, min(at + step, end), False) for at in reversed(pieces))
        else:
            tables.append(one_by_one(start, end) if table is None else table)
    return tables


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
        self._fields = list(fields.items())
        self._read = record_type(fields).read
        self._optional = any(optional(avro_type.glued) for avro_type in fields.values())
        self.columns = pa.schema([avro_type.field(name) for name, avro_type in self._fields])
        #: path of a column (`s.a`, `l.element.a`, `m.value.a`) → its former names
        self.aliases: Mapping[str, tuple[str, ...]] = build.aliases
        self._glue: dict[bool, bytes] = {}
        if self._fields and all(avro_type.glued is not None for _, avro_type in self._fields):
            glue = {headed: self._preamble(headed) for headed in (False, True)}
            # Test once, with no rows, whether polars can read this schema.
            if open_block(glue[True], b"", 0) is not None:
                self._glue = glue

    def read(
        self, values: Sequence[bytes], header: bytes = b"", tried: bool = False
    ) -> tuple[pa.Table, list[tuple[int, str]]]:
        """The good rows in order, and the index and reason of each bad one.

        All values begin with `header`. `tried`: `block` already failed for all these values.
        """
        bad: list[tuple[int, str]] = []
        tables = sift(
            len(values),
            (lambda start, end: self.block(values[start:end], header)) if self._glue else None,
            lambda start, end: self._each(values, start, end, len(header), bad),
            tried,
        )
        if len(tables) == 1:
            return tables[0], bad
        return (pa.concat_tables(tables) if tables else self._table([])), bad

    def block(self, values: Sequence[bytes], header: bytes = b"") -> pa.Table | None:
        """All values at once, or None if anything is wrong. Verifies the headers too."""
        count = len(values)
        glue = self._glue.get(bool(header))
        if glue is None or not 0 < count <= BLOCK_ROWS:
            return None
        parts = [b""] * (2 * count)
        try:
            if header:
                # Each tag is followed by the next value's header, the last tag by `header`.
                if values[0][: len(header)] != header:
                    return None
                parts[::2] = values
                parts[0] = values[0][len(header) :]
                parts[1::2] = _sealed()[:count]
                parts.append(header)
            else:
                parts[::2] = values
                parts[1::2] = _TAGS[:count]
            payload = b"".join(parts)
        except TypeError:  # one of the values is null
            return None
        frame = open_block(glue, payload, count)
        if frame is None or frame.height != count:
            return None
        if not np.array_equal(_bits(frame.drop_in_place("tag")), _TAG_VALUES[:count]):
            return None
        if header:
            sealed = np.frombuffer(_SEAL + header, dtype="<u8")[0]
            if not (_bits(frame.drop_in_place("head")) == sealed).all():
                return None
        # A datum lies between its header (removed from the first one) and its tag.
        sizes = np.fromiter(map(len, values), np.int64, count) if self._optional else _NONE
        ends = np.cumsum(sizes + len(parts[1])) - len(parts[1]) - len(header)
        return self.table(frame, payload, ends - sizes + len(header), ends)

    def table(
        self, frame: pl.DataFrame, data: bytes, starts: Longs, ends: Longs
    ) -> pa.Table | None:
        """The columns of `glued`, as read by polars, converted to the types of the table; None if a
        column is invalid. `starts` and `ends`: position of each datum in `data`."""
        table = frame.to_arrow()
        if any(column.num_chunks != 1 for column in table.columns):
            return None
        raw = [column.chunk(0) for column in table.columns]
        if self._optional and not branches_valid(
            [avro_type.glued for _, avro_type in self._fields],
            raw,
            np.frombuffer(data, np.uint8),
            starts,
            ends,
        ):
            return None
        try:
            arrays = [
                avro_type.fitted(column)
                for (_, avro_type), column in zip(self._fields, raw, strict=True)
            ]
        except (
            UnreadableDatum,
            pa.ArrowInvalid,
        ):  # a value is out of range: the strict reader finds it
            return None
        return pa.Table.from_arrays(arrays, schema=self.columns)

    def _each(
        self,
        values: Sequence[bytes],
        start: int,
        end: int,
        skip: int,
        bad: list[tuple[int, str]],
    ) -> pa.Table:
        rows = []
        for at in range(start, end):
            datum = Datum(values[at], skip)
            try:
                row = self._read(datum)
                left = len(datum.data) - datum.place
                if left:
                    raise UnreadableDatum(f"expected the end of the datum, found {left} more bytes")
            except UnreadableDatum as error:
                bad.append((at, str(error)))  # not the error: its traceback holds all values
            else:
                rows.append(row)
        return self._table(rows)

    def _table(self, rows: list[dict[str, Any]]) -> pa.Table:
        if not self._fields:  # rows without columns: only a struct array keeps their number
            batch = pa.RecordBatch.from_struct_array(pa.array(rows, pa.struct([])))
            return pa.Table.from_batches([batch])
        arrays = [
            pa.array([row[name] for row in rows], avro_type.arrow)
            for name, avro_type in self._fields
        ]
        return pa.Table.from_arrays(arrays, schema=self.columns)

    def _preamble(self, headed: bool) -> bytes:
        return preamble([*self.glued, *(("tag", "double"), ("head", "double"))[: 1 + headed]])

    @property
    def glued(self) -> list[tuple[str, Any]]:
        """The fields of a datum in the schema for polars."""
        return [(f"f{i}", avro_type.glued) for i, (_, avro_type) in enumerate(self._fields)]

    @property
    def gluable(self) -> bool:
        return bool(self._glue)


def preamble(fields: Sequence[tuple[str, Any]]) -> bytes:
    """The beginning of an Avro container with records of `fields`."""
    named = [{"name": name, "type": kind} for name, kind in fields]
    schema = json.dumps(_numbered({"type": "record", "fields": named})).encode()
    pair = zigzag(len(b"avro.schema")) + b"avro.schema" + zigzag(len(schema)) + schema
    return b"Obj\x01" + zigzag(1) + pair + zigzag(0) + _SYNC


def open_block(glue: bytes, payload: bytes, count: int) -> pl.DataFrame | None:
    """A container of one block, read by polars; None if polars fails."""
    sizes = zigzag(count) + zigzag(len(payload))
    try:
        return pl.read_avro(io.BytesIO(b"".join((glue, sizes, payload, _SYNC))))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException:  # a panic in polars is a BaseException; use the strict reader
        return None


def _bits(doubles: pl.Series) -> np.ndarray[Any, Any]:
    return doubles.to_numpy().view("<u8")


@functools.cache
def _sealed() -> list[bytes]:
    return [tag + _SEAL for tag in _TAGS]


def zigzag(number: int) -> bytes:
    number <<= 1  # only counts and sizes: never negative
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _numbered(schema: Any) -> Any:
    """The schema with a unique name for each record and fixed, as Avro requires."""
    count = 0

    def walk(node: Any) -> Any:
        nonlocal count
        if isinstance(node, list):
            return [walk(branch) for branch in node]
        if not isinstance(node, dict):
            return node
        if node.get("type") in ("record", "fixed"):
            count += 1
            node = {"name": f"n{count}", **node}
        return {key: walk(value) for key, value in node.items()}

    return walk(schema)
