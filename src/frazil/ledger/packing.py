"""Packs numbers of many partitions into short text, and reads many such texts at once. Pure.

A short ledger entry is readable JSON. In a large one the numbers are columns, with one number per
partition, in the partition order of a table property (`ledger.entry`). The lowest number of each
column is subtracted. The bit lengths of the results are stored deflated, followed by the bits
without the leading one. Columns of equal numbers take almost no space, others little more than
their bits.

    packed:<lowest of each column>:<bytes of bit lengths>:<base85 of both>

`pack` and `unpack` handle one entry. `PackedVectors` takes the texts of many entries and returns
columns, without a Python object per number.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frazil.offsets import Partition

#: 64-bit numbers, or 32-bit indices of partitions, entries or rows.
Numbers = NDArray[np.signedinteger[Any]]
PACKED = "packed:"
_JSON = json.JSONDecoder()
_DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_VALUES = np.full(256, 255, np.uint8)
_VALUES[np.frombuffer(_DIGITS, np.uint8)] = np.arange(85)


def pack(columns: Sequence[Sequence[int] | Numbers] | Numbers) -> str:
    """Packs columns of equal length; numbers are signed 64-bit."""
    table = np.array(columns, np.int64).reshape(len(columns), -1)
    lows = table.min(axis=1) if table.size else np.zeros(len(columns), np.int64)
    # Differences beyond 63 bits wrap here, and wrap back in `unpack`.
    numbers = (table - lows[:, None]).astype(">u8")
    bits = np.unpackbits(numbers.reshape(-1, 1).view(np.uint8), axis=1)
    first = np.where(bits.any(axis=1), bits.argmax(axis=1), 64)  # the leading one
    sizes = (64 - first).astype(np.uint8).tobytes()
    behind = np.packbits(bits[np.arange(64) > first[:, None]]).tobytes()
    small = zlib.compressobj(9, wbits=-15)
    packed = small.compress(sizes) + small.flush()
    text = base64.b85encode(packed + behind).decode()
    return f"{PACKED}{','.join(map(str, lows.tolist()))}:{len(packed)}:{text}"


def unpack(text: str, count: int) -> NDArray[np.int64]:
    """The columns, each of `count` numbers."""
    lows, size, digits = _parts(text)
    raw = base64.b85decode(digits)
    numbers = _numbers([_sizes(raw[:size], len(lows) * count)], [raw[size:]])
    return numbers.reshape(len(lows), count) + np.array(lows, np.int64)[:, None]


def _parts(text: str) -> tuple[tuple[int, ...], int, str]:
    """The lowest number of each column, the bytes of the bit lengths, and the base85 digits."""
    mark, lows, size, digits = text.split(":", 3)
    if f"{mark}:" != PACKED:
        raise ValueError(f"expected packed numbers, found {text[:20]!r}")
    return tuple(map(int, lows.split(","))), int(size), digits


def _sizes(packed: bytes, count: int) -> bytes:
    inflate = zlib.decompressobj(wbits=-15)
    try:
        sizes = inflate.decompress(packed, count + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflate.eof or inflate.unused_data or len(sizes) != count:
        raise ValueError(f"expected {count} packed numbers, found {len(sizes)}")
    return sizes


def _numbers(sizes: Sequence[bytes], bits: Sequence[bytes]) -> NDArray[np.int64]:
    """All numbers of all texts, concatenated."""
    size = np.frombuffer(b"".join(sizes), np.uint8).astype(np.int64)
    if len(size) and size.max() > 64:
        raise ValueError(f"a number of {size.max()} bits")
    width = np.maximum(size - 1, 0)
    counts = np.array([len(part) for part in sizes], np.int64)
    before = np.cumsum(width) - width
    firsts = np.cumsum(counts) - counts
    ends = np.append(before, width.sum())
    used = ends[firsts + counts] - ends[firsts]  # bits of each text
    room = np.array([len(part) for part in bits], np.int64)
    if ((used + 7) // 8 != room).any():
        raise ValueError("packed numbers that are cut off, or more than they say")
    at = before + np.repeat(8 * (np.cumsum(room) - room) - ends[firsts], counts)
    # Eight bytes from any byte on as one number; a number may extend into the ninth.
    joined = np.frombuffer(b"".join(bits) + bytes(17), np.uint8)
    eights = np.ndarray(len(joined) - 8, ">u8", joined, strides=(1,))
    byte, skip = at >> 3, (at & 7).astype(np.uint64)
    numbers: NDArray[np.uint64] = eights[byte].astype(np.uint64) << skip
    numbers |= joined[byte + 8].astype(np.uint64) >> (np.uint64(8) - skip)
    shift = np.minimum(64 - width, 63).astype(np.uint64)
    numbers = np.where(width > 0, numbers >> shift, np.uint64(0))
    numbers |= np.where(size > 0, np.uint64(1) << width.astype(np.uint64), np.uint64(0))
    signed: NDArray[np.int64] = numbers.view(np.int64)  # beyond 63 bits: wraps back later
    return signed


def _bytes(texts: Sequence[str]) -> list[bytes]:
    """Decodes base85 of many texts, with the result of `base64.b85decode` on each."""
    padded = "".join([text + "~" * (-len(text) % 5) for text in texts]).encode("ascii")
    digits = _VALUES[np.frombuffer(padded, np.uint8)].reshape(-1, 5)
    if (digits == 255).any():
        raise ValueError("a letter that base85 does not have")
    words = np.zeros(len(digits), np.uint64)
    for i in range(5):
        words *= np.uint64(85)
        words += digits[:, i]
    if (words > 0xFFFFFFFF).any():
        raise ValueError("more than four bytes can hold")
    raw = words.astype(">u4").tobytes()
    decoded, at = [], 0
    for text in texts:
        missing = -len(text) % 5
        size = (len(text) + missing) // 5 * 4
        decoded.append(raw[at : at + size - missing])
        at += size
    return decoded


class TopicNames:
    """Numbers the partitions of entries in order of appearance."""

    def __init__(self) -> None:
        self._known: dict[Partition, int] = {}
        self._topics: dict[str, _Topic] = {}
        self._blocks: dict[tuple[Partition, ...], Numbers] = {}

    def topic(self, name: str) -> _Topic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = _Topic(name, self._known)
        return topic

    def block(self, partitions: tuple[Partition, ...]) -> Numbers:
        """The numbers of these partitions; cached, since most entries have the same ones."""
        block = self._blocks.get(partitions)
        if block is None:
            numbered = [
                self._known.setdefault(partition, len(self._known)) for partition in partitions
            ]
            block = self._blocks[partitions] = np.array(numbered, np.int32)
        return block

    def ranks(self) -> tuple[tuple[Partition, ...], Numbers]:
        """The sorted partitions, and number → rank."""
        ordered = sorted(self._known)
        ranks = np.empty(len(ordered), np.int32)
        ranks[[self._known[partition] for partition in ordered]] = np.arange(len(ordered))
        return tuple(ordered), ranks


class _Topic(dict[str, int]):
    """One topic: a partition's text in an entry → the partition's number."""

    def __init__(self, name: str, known: dict[Partition, int]) -> None:
        self._name, self._known = name, known

    def __missing__(self, text: str) -> int:
        where = Partition(self._name, int(text))
        self[text] = number = self._known.setdefault(where, len(self._known))
        return number


class PackedVectors:
    """Numbers per partition of many entries: `add` all of them, then read `columns`."""

    def __init__(self, names: TopicNames) -> None:
        self._names = names
        #: readable texts by number of columns: entries, partitions, numbers
        self._plain: dict[int, tuple[list[int], list[int], list[int]]] = {}
        #: packed texts: entry, partitions, base, lowest numbers
        self._packed: list[tuple[int, Numbers, Numbers | None, tuple[int, ...]]] = []
        self._texts: list[tuple[int, str]] = []

    @property
    def widths(self) -> set[int]:
        """The numbers of columns that occur."""
        return {*self._plain, *(len(lows) for *_, lows in self._packed)}

    def add(self, entry: int, text: str, block: Numbers | None, base: Numbers | None = None) -> int:
        """`block`: the partitions of a packed text. `base`: the offsets that its ranges are
        relative to. Returns the number of columns of a packed text; 0 for a readable one."""
        if text.startswith(PACKED):
            if block is None:
                raise ValueError("packed numbers of an entry that does not name its partitions")
            lows, size, digits = _parts(text)
            self._packed.append((entry, block, base, lows))
            self._texts.append((size, digits))
            return len(lows)
        topics, end = _JSON.raw_decode(text, 0)
        if end != len(text):
            raise ValueError(text[end:])
        for name, rows in topics.items():
            if rows:
                (width,) = set(map(len, rows.values()))
                entries, partitions, numbers = self._plain.setdefault(width, ([], [], []))
                entries.extend([entry] * len(rows))
                partitions.extend(map(self._names.topic(name).__getitem__, rows))
                numbers.extend(chain.from_iterable(rows.values()))
        return 0

    def columns(self, width: int) -> list[Numbers]:
        """Entry, partition, and `width` columns of numbers, padded with 0."""
        lengths = np.array([len(block) for _, block, _, _ in self._packed], np.int64)
        packed = [
            np.repeat(np.array([entry for entry, *_ in self._packed], np.int32), lengths),
            np.concatenate([*(block for _, block, _, _ in self._packed), np.empty(0, np.int32)]),
            *self._unpacked(width, lengths),
        ]
        plain = []
        for size, (entries, numbered, numbers) in self._plain.items():
            matrix = np.array(numbers, np.int64).reshape(len(entries), size).T
            none = np.zeros(len(entries), np.int64)
            whose = [np.array(values, np.int32) for values in (entries, numbered)]
            plain.append([*whose, *matrix, *[none] * (width - size)])
        if not plain:
            return packed
        return [np.concatenate(column) for column in zip(*plain, packed, strict=True)]

    def _unpacked(self, width: int, lengths: NDArray[np.int64]) -> list[Numbers]:
        places = (np.cumsum(lengths) - lengths).tolist()
        columns = [np.zeros(int(lengths.sum()), np.int64) for _ in range(width)]
        raw = _bytes([digits for _, digits in self._texts])
        sizes = [
            _sizes(data[:size], len(lows) * len(block))
            for data, (size, _), (_, block, _, lows) in zip(
                raw, self._texts, self._packed, strict=True
            )
        ]
        bits = [data[size:] for data, (size, _) in zip(raw, self._texts, strict=True)]
        numbers = _numbers(sizes, bits)
        at = 0
        for (_, block, base, lows), place in zip(self._packed, places, strict=True):
            matrix = numbers[at : at + len(lows) * len(block)].reshape(len(lows), len(block))
            matrix += np.array(lows, np.int64)[:, None]
            at += matrix.size
            if base is not None:  # begin and length
                matrix[0] += base
                matrix[1] += matrix[0]
            for column, values in zip(columns, matrix, strict=False):
                column[place : place + len(block)] = values
        return columns


@lru_cache(maxsize=64)
def based(text: str, count: int) -> NDArray[np.int64]:
    """`unpack`, cached for the many entries with the same base."""
    columns = unpack(text, count)
    columns.setflags(write=False)
    return columns
