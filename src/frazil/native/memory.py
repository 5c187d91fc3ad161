"""Loads and stores at raw addresses, for compiled functions. Runs on executors.

An address is an int64. Numbers are little-endian and need no alignment. Indexing NumPy arrays in
numba adds work for negative indexes at each access; these are one machine instruction each.

Nothing here checks a bound: the caller has. To test that it has, the environment variable
`FRAZIL_NATIVE_CHECKED=1` compiles each access with a check against the buffers named to `watch`. An
access outside them is counted, reads 0 and stores nothing (`faults`). Test runs only: it is slow.

    @compiled
    def swapped(first: int, second: int) -> None:
        number = load8(first)
        store8(first, load8(second))
        store8(second, number)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from frazil.native.compiler import CHECKED, compiled

#: Bytes behind each buffer that is written by moves of 16 bytes, which may store beyond its end.
SLACK = 16

_BYTE = ir.IntType(8)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _loader(size: int) -> Callable[[int], int]:
    """Loads `size` bytes as an int64, unsigned below 8 bytes."""

    @intrinsic  # type: ignore[untyped-decorator]
    def load(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(8 * size)
            number = builder.load(_pointer(builder, arguments[0], kind), align=1)
            return number if size == 8 else builder.zext(number, ir.IntType(64))

        return types.int64(types.int64), generate

    return load  # type: ignore[no-any-return]


def _storer(size: int) -> Callable[[int, int], None]:
    """Stores the lowest `size` bytes of an int64."""

    @intrinsic  # type: ignore[untyped-decorator]
    def store(_: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(8 * size)
            number = arguments[1] if size == 8 else builder.trunc(arguments[1], kind)
            builder.store(number, _pointer(builder, arguments[0], kind), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return store  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def _move16(_: Any, target: Any, source: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(_BYTE, 16)
        vector = builder.load(_pointer(builder, arguments[1], kind), align=1)
        builder.store(vector, _pointer(builder, arguments[0], kind), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def double_bits(_: Any, number: Any) -> Any:
    """The bits of a double as an int64, to store it with `store8`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic  # type: ignore[untyped-decorator]
def single_bits(_: Any, bits: Any) -> Any:
    """The bits of the single-precision number nearest to a double, given by its bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.bitcast(arguments[0], ir.DoubleType())
        single = builder.bitcast(builder.fptrunc(number, ir.FloatType()), ir.IntType(32))
        return builder.zext(single, ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def product_high(_: Any, one: Any, other: Any) -> Any:
    """The higher 64 bits of the product of two unsigned numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(number, wide) for number in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.int64(types.int64, types.int64), generate


def _counter(name: str) -> Callable[[int], int]:
    """Counts zero bits before the first or behind the last one bit; 64 if there is none."""

    @intrinsic  # type: ignore[untyped-decorator]
    def count(_: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(arguments[0], ir.Constant(ir.IntType(1), 0))

        return types.int64(types.int64), generate

    return count  # type: ignore[no-any-return]


leading_zeros, trailing_zeros = _counter("ctlz"), _counter("cttz")


_watched = np.zeros((4096, 2), np.int64)
_faults = np.zeros(2, np.int64)
_WATCHED, _FAULTS = _watched.ctypes.data, _faults.ctypes.data


def watch(buffers: list[tuple[int, int]]) -> None:
    """In checked mode: the addresses and sizes of all buffers that may be accessed from now on."""
    _watched[:] = 0
    for place, (address, size) in enumerate(buffers):
        _watched[place] = address, address + size


def faults() -> tuple[int, int]:
    """In checked mode: the number of accesses outside all buffers, and the last such address."""
    return int(_faults[0]), int(_faults[1])


_load1, _load2, _load4, _load8 = map(_loader, (1, 2, 4, 8))
_store1, _store2, _store4, _store8 = map(_storer, (1, 2, 4, 8))


@compiled
def _inside(address: int, size: int) -> bool:
    place = _WATCHED
    while _load8(place + 8):
        if _load8(place) <= address and address + size <= _load8(place + 8):
            return True
        place += 16
    _store8(_FAULTS, _load8(_FAULTS) + 1)
    _store8(_FAULTS + 8, address)
    return False


def _checked_load(size: int, load: Callable[[int], int]) -> Callable[[int], int]:
    def checked(address: int) -> int:
        return load(address) if _inside(address, size) else 0

    return compiled(checked) if CHECKED else load


def _checked_store(size: int, store: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def checked(address: int, number: int) -> None:
        if _inside(address, size):
            store(address, number)

    return compiled(checked) if CHECKED else store


@compiled
def _checked_move(target: int, source: int) -> None:
    if _inside(source, 16) and _inside(target, 16):
        _move16(target, source)


load1, load2 = _checked_load(1, _load1), _checked_load(2, _load2)
load4, load8 = _checked_load(4, _load4), _checked_load(8, _load8)
store1, store2 = _checked_store(1, _store1), _checked_store(2, _store2)
store4, store8 = _checked_store(4, _store4), _checked_store(8, _store8)
move16: Callable[[int, int], None] = _checked_move if CHECKED else _move16
