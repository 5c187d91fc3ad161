"""Values of records as slices of one buffer. Runs on executors.

The bytes of many records stand in one buffer; each value is a start and a size in it. Compiled
readers (`frazil.native`) take the addresses, other code takes the values as a sequence of bytes,
made one by one where they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa

from frazil.native.columns import Bytes, Longs, gather, new_bytes
from frazil.native.memory import SLACK

#: The size of a null value.
NULL = -1


def joined(parts: Sequence[bytes | memoryview]) -> Bytes:
    """The bytes of some parts in one buffer, and `SLACK` bytes behind them."""
    data = new_bytes(sum(map(len, parts)) + SLACK)
    view, at = data.data, 0
    for part in parts:
        view[at : at + len(part)] = part
        at += len(part)
    return data


class ByteSlices(Sequence["bytes | None"]):
    """Immutable. At least `SLACK` bytes can be read behind the end of every slice."""

    __slots__ = ("data", "sizes", "starts")

    def __init__(self, data: Bytes, starts: Longs, sizes: Longs) -> None:
        """`data` has `SLACK` bytes behind the last slice; `sizes` has `NULL` for null values."""
        self.data = data
        self.starts = starts
        self.sizes = sizes

    @classmethod
    def of(cls, values: Sequence[bytes | None]) -> ByteSlices:
        """Copies the values into one buffer."""
        if isinstance(values, ByteSlices):
            return values
        sizes = np.fromiter((NULL if v is None else len(v) for v in values), np.int64, len(values))
        room = np.maximum(sizes, 0)
        data = b"".join([*(value or b"" for value in values), bytes(SLACK)])
        return cls(np.frombuffer(data, np.uint8), np.cumsum(room) - room, sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, at: int) -> bytes | None: ...
    @overload
    def __getitem__(self, at: slice) -> ByteSlices: ...
    def __getitem__(self, at: int | slice) -> bytes | ByteSlices | None:
        if isinstance(at, slice):
            return ByteSlices(self.data, self.starts[at], self.sizes[at])
        start, size = int(self.starts[at]), int(self.sizes[at])
        return None if size < 0 else self.data[start : start + size].tobytes()

    def __iter__(self) -> Iterator[bytes | None]:
        data = memoryview(self.data.data)
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            yield None if size < 0 else bytes(data[start : start + size])

    def take(self, index: Longs) -> ByteSlices:
        return ByteSlices(self.data, self.starts[index], self.sizes[index])

    def without(self, size: int) -> ByteSlices:
        """Without the first bytes of each value, all of which have so many or are null."""
        return ByteSlices(self.data, self.starts + size, self.sizes - size)

    @property
    def nulls(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return self.sizes < 0

    @property
    def address(self) -> int:
        """Of the buffer, as long as this object exists; slices begin at `address + starts[i]`."""
        return int(self.data.ctypes.data)

    def to_arrow(self) -> pa.Array:
        """As large_binary; null values are null."""
        count = len(self)
        nulls = self.nulls
        none = None
        if nulls.any():
            if nulls.all():
                return pa.nulls(count, pa.large_binary())
            none = pa.py_buffer(np.packbits(~nulls, bitorder="little"))
        starts, sizes = map(np.ascontiguousarray, (self.starts, self.sizes))
        offsets = pa.allocate_buffer(8 * count + 8)
        data = pa.allocate_buffer(int(np.maximum(sizes, 0).sum()) + SLACK)
        places = starts.ctypes.data, sizes.ctypes.data, count, offsets.address, data.address
        gather(self.address, *places)
        return pa.Array.from_buffers(pa.large_binary(), count, [none, offsets, data])

    def __reduce__(self) -> tuple[Any, ...]:
        return ByteSlices.of, (list(self),)  # not all of the buffer
