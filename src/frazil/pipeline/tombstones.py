"""Decodes the keys of tombstones into a table's key columns. Runs on executors.

A record without a value deletes the row of its key. In: Kafka keys as bytes. Out: rows of the key
columns, in the order of the input, and an `UndecodableRecord` for each key that cannot be read or
lacks a key column.

    confluent-avro, avro    a record with a field for each key column
    json                    an object with a member for each, alone or as Kafka Connect's payload;
                            or, with one key column, its value
    text                    with one key column: its text, or a number's digits
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from frazil.errors import SchemaMismatch
from frazil.formats import debezium
from frazil.formats.decode_result import UndecodableRecord
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.kafka.record_batch import Longs
from frazil.pipeline.projection import fitted


class UnreadableKey(Exception):
    pass


class KeyDecoder:
    def __init__(self, format: RecordFormat | None, columns: pa.Schema) -> None:
        """`format`: None for text. `columns`: the table's key columns."""
        self._format = format
        self._columns = columns
        avro = format is not None and format.kind != "json"
        self._decoder = Decoder(format if avro and format else RecordFormat("json"), columns)

    def read(self, keys: Sequence[bytes | None]) -> tuple[pa.Table, Longs, list[UndecodableRecord]]:
        """The rows, their positions, and the keys that cannot be read."""
        values: list[bytes | None] = [None] * len(keys)
        bad: dict[int, UndecodableRecord] = {}
        for i, key in enumerate(keys):
            try:
                values[i] = self._value(key)
            except (UnreadableKey, ValueError, RecursionError) as error:
                bad[i] = UndecodableRecord(i, "key", f"cannot read the key: {error}")
        at = np.array([i for i in range(len(keys)) if i not in bad], np.int64)
        decoded, rejected = self._decoder.decode([values[i] for i in at.tolist()])
        parts, where = [self._columns.empty_table()], [np.empty(0, np.int64)]
        for group in decoded:
            index = at if group.index is None else at[group.index]
            lacking = [name for name in self._columns.names if name not in group.rows.schema.names]
            if lacking:
                reason = f"cannot read the key: it has no field {lacking[0]!r}"
                bad |= {
                    i: UndecodableRecord(i, "key", reason, group.schema_id) for i in index.tolist()
                }
                continue
            rows = group.rows.select(self._columns.names)
            for part, span in _fitting(rows, self._columns, index, bad):
                parts.append(part)
                where.append(span)
        for record in rejected:
            i = int(at[record.index])
            bad[i] = UndecodableRecord(
                i, "key", f"cannot read the key: {record.reason}", record.schema_id
            )
        index = np.concatenate(where)
        rows = pa.concat_tables(parts).take(pa.array(np.argsort(index)))
        return rows, np.sort(index), [bad[i] for i in sorted(bad)]

    def _value(self, key: bytes | None) -> bytes:
        if key is None:
            raise UnreadableKey(
                "a record without a value has none, so the row to delete is unknown"
            )
        if self._format is not None and self._format.kind != "json":
            return key
        text = key.decode()
        only = self._columns.field(0)
        if self._format is None:
            if len(self._columns) > 1:
                raise UnreadableKey(
                    f"it is text, and the table has {len(self._columns)} key columns"
                )
            plain = pa.types.is_large_string(only.type) or pa.types.is_string(only.type)
            return _object({only.name: json.dumps(text) if plain else text})
        if not text.lstrip().startswith("{"):
            if len(self._columns) > 1:
                raise UnreadableKey(f"expected an object with {', '.join(self._columns.names)}")
            return _object({only.name: text})
        members = debezium.members(text)
        if "payload" in members and members.keys() <= {"schema", "payload"}:
            payload, text = members["payload"]
            if not isinstance(payload, dict):
                return _object({only.name: text})
            members = debezium.members(text)
        return _object({n: members[n][1] for n in self._columns.names if n in members})


def _fitting(
    rows: pa.Table, columns: pa.Schema, index: Longs, bad: dict[int, UndecodableRecord]
) -> Iterator[tuple[pa.Table, Longs]]:
    """Rows in the table's types: all together if they fit, otherwise one by one. Rows that do not
    fit are added to `bad`."""
    try:
        yield fitted(rows, columns, "the key"), index
    except SchemaMismatch as error:
        if len(rows) == 1:
            i = int(index[0])
            bad[i] = UndecodableRecord(i, "key", error.message)
            return
        for n in range(len(rows)):
            yield from _fitting(rows.slice(n, 1), columns, index[n : n + 1], bad)


def _object(members: dict[str, str]) -> bytes:
    body = ",".join(f"{json.dumps(name)}:{text}" for name, text in members.items())
    return f"{{{body}}}".encode()
