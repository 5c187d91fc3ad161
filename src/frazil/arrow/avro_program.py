"""Avro types → the program by which `frazil.native.avro` reads datums. Runs on executors.

In: the type of a record. Out, of each chunk: the rows of the datums that are read by compiled code,
in order, and the numbers of the doubtful ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from frazil.arrow.avro_types import AvroType
from frazil.arrow.column_program import ColumnNode, ColumnProgram, fields_below
from frazil.native import avro as native
from frazil.native.columns import Longs
from frazil.native.memory import SLACK


class AvroProgram(ColumnProgram):
    """Reads the datums of one writer schema."""

    def __init__(self, top: AvroType) -> None:
        types = list(_flat(top))
        stack = native.FRAME_WORDS * (len(types) + 1)
        super().__init__(_node(top.field(""), top), native.decode, stack)
        for node, avro_type in zip(self._nodes, types, strict=True):
            if node.kind == native.ENUM:
                node.words[native.TABLE // 8] = self._keep(self._symbols(avro_type.symbols))
            elif node.kind == native.UNION:
                node.words[native.TABLE // 8] = self._keep(_members(node))

    def _symbols(self, symbols: Sequence[str]) -> Longs:
        """Address and size of each symbol."""
        texts = [symbol.encode() for symbol in symbols]
        joined = np.frombuffer(b"".join([*texts, bytes(SLACK)]), np.uint8)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        starts = self._keep(joined) + np.cumsum(sizes) - sizes
        return np.ascontiguousarray(np.stack([starts, sizes], axis=1))


def is_readable(top: AvroType) -> bool:
    """Does compiled code know all its types?"""
    return all(avro_type.kind is not None for avro_type in _flat(top))


def _flat(avro_type: AvroType) -> Iterator[AvroType]:
    yield avro_type
    for below in avro_type.inside:
        yield from _flat(below)


def _node(column: pa.Field, avro_type: AvroType) -> ColumnNode:
    kind = avro_type.kind
    assert kind is not None
    below = zip(fields_below(column.type), avro_type.inside, strict=True)
    children = [_node(*pair) for pair in below]
    # A fixed of many bytes takes no space where it is null.
    stored = pa.large_binary() if kind == native.BYTES else None
    return ColumnNode(column, kind, avro_type.words, children, stored, column.nullable)


def _members(union: ColumnNode) -> Longs:
    """The address of the node of each branch, 0 for null."""
    members = [int(member.words.ctypes.data) for member in union.children]
    null = int(union.words[native.NULL_BRANCH // 8])
    return np.array(members if null < 0 else [*members[:null], 0, *members[null:]], np.int64)
