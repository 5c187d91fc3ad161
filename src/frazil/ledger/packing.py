"""Numbers of many partitions in little text, and many such texts read at once. Pure.

A ledger entry is readable JSON where it is short. Where it is not, its numbers stand in columns,
one number per partition, in the order in which a table property names the partitions (`ledger`).
Each is less the lowest of its column: how many bits that takes, deflated, and behind them the bits
themselves without the leading one.
Fates that nobody had and epochs that are the same take next to nothing, numbers that differ little
more than their bits.

    packed:<lowest of each column>:<bytes of bit lengths>:<base85 of both>

`pack` and `unpack` are for one entry. `PackedVectors` takes the texts of many entries and gives
columns, without a Python object for each number.
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

#: Of 64 bits, or of 32 where they count partitions, entries or rows.
Numbers = NDArray[np.signedinteger[Any]]
PACKED = "packed:"
_JSON = json.JSONDecoder()
_DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_VALUES = np.full(256, 255, np.uint8)
_VALUES[np.frombuffer(_DIGITS, np.uint8)] = np.arange(85)


def pack(columns: Sequence[Sequence[int] | Numbers] | Numbers) -> str:
    """Columns of one length, each number of at most 63 bits and a sign."""
    table = np.array(columns, np.int64).reshape(len(columns), -1)
    lows = table.min(axis=1) if table.size else np.zeros(len(columns), np.int64)
    # What does not fit into 63 bits wraps here, and wraps back in `unpack`.
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
    """The lowest number of each column, how many bytes their bit lengths take, and the digits."""
    mark, lows, size, digits = text.split(":", 3)
    if f"{mark}:" != PACKED:
        raise ValueError(f"expected packed numbers, found {text[:20]!r}")
    return tuple(map(int, lows.split(","))), int(size), digits


def _sizes(packed: bytes, count: int) -> bytes:
    inflate = zlib.decompressobj(wbits=-15)
    try:
        found = inflate.decompress(packed, count + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflate.eof or inflate.unused_data or len(found) != count:
        raise ValueError(f"expected {count} packed numbers, found {len(found)}")
    return found


def _numbers(sizes: Sequence[bytes], bits: Sequence[bytes]) -> NDArray[np.int64]:
    """All numbers of all texts, one behind the other."""
    size = np.frombuffer(b"".join(sizes), np.uint8).astype(np.int64)
    if len(size) and size.max() > 64:
        raise ValueError(f"a number of {size.max()} bits")
    width = np.maximum(size - 1, 0)
    counts = np.array([len(each) for each in sizes], np.int64)
    before = np.cumsum(width) - width
    firsts = np.cumsum(counts) - counts
    ends = np.append(before, width.sum())
    used = ends[firsts + counts] - ends[firsts]  # bits of each text
    room = np.array([len(each) for each in bits], np.int64)
    if ((used + 7) // 8 != room).any():
        raise ValueError("packed numbers that are cut off, or more than they say")
    at = before + np.repeat(8 * (np.cumsum(room) - room) - ends[firsts], counts)
    # Eight bytes from any byte on, as one number; and the ninth, where a number reaches so far.
    joined = np.frombuffer(b"".join(bits) + bytes(17), np.uint8)
    eights = np.ndarray(len(joined) - 8, ">u8", joined, strides=(1,))
    byte, skip = at >> 3, (at & 7).astype(np.uint64)
    found: NDArray[np.uint64] = eights[byte].astype(np.uint64) << skip
    found |= joined[byte + 8].astype(np.uint64) >> (np.uint64(8) - skip)
    shift = np.minimum(64 - width, 63).astype(np.uint64)
    found = np.where(width > 0, found >> shift, np.uint64(0))
    found |= np.where(size > 0, np.uint64(1) << width.astype(np.uint64), np.uint64(0))
    signed: NDArray[np.int64] = found.view(np.int64)  # more than 63 bits wrap back with the lowest
    return signed


def _bytes(texts: Sequence[str]) -> list[bytes]:
    """Base85 of many texts, as `base64.b85decode` reads each."""
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
    found, at = [], 0
    for text in texts:
        missing = -len(text) % 5
        size = (len(text) + missing) // 5 * 4
        found.append(raw[at : at + size - missing])
        at += size
    return found


class TopicNames:
    """The partitions that entries name, numbered as they come."""

    def __init__(self) -> None:
        self._known: dict[Partition, int] = {}
        self._topics: dict[str, _Topic] = {}
        self._blocks: dict[tuple[Partition, ...], Numbers] = {}

    def topic(self, name: str) -> _Topic:
        found = self._topics.get(name)
        if found is None:
            found = self._topics[name] = _Topic(name, self._known)
        return found

    def block(self, partitions: tuple[Partition, ...]) -> Numbers:
        """The numbers of partitions; most entries name the same."""
        found = self._blocks.get(partitions)
        if found is None:
            numbered = [self._known.setdefault(each, len(self._known)) for each in partitions]
            found = self._blocks[partitions] = np.array(numbered, np.int32)
        return found

    def ranks(self) -> tuple[tuple[Partition, ...], Numbers]:
        """The partitions sorted, and where each one's number stands among them."""
        ordered = sorted(self._known)
        ranks = np.empty(len(ordered), np.int32)
        ranks[[self._known[each] for each in ordered]] = np.arange(len(ordered))
        return tuple(ordered), ranks


class _Topic(dict[str, int]):
    """Of one topic: what stands for a partition in an entry's text → its number."""

    def __init__(self, name: str, known: dict[Partition, int]) -> None:
        self._name, self._known = name, known

    def __missing__(self, text: str) -> int:
        where = Partition(self._name, int(text))
        self[text] = found = self._known.setdefault(where, len(self._known))
        return found


class PackedVectors:
    """What many entries say of each partition; `columns` when all are there."""

    def __init__(self, names: TopicNames) -> None:
        self._names = names
        #: readable ones, by how many columns they have: entry, partition, numbers
        self._plain: dict[int, tuple[list[int], list[int], list[int]]] = {}
        #: packed ones: of which entry and partitions, from which numbers on, the lowest ones
        self._packed: list[tuple[int, Numbers, Numbers | None, tuple[int, ...]]] = []
        self._texts: list[tuple[int, str]] = []

    @property
    def widths(self) -> set[int]:
        """How many numbers there are of a partition."""
        return {*self._plain, *(len(lows) for *_, lows in self._packed)}

    def add(self, entry: int, text: str, block: Numbers | None, base: Numbers | None = None) -> int:
        """`block`: the partitions of a packed text. `base`: it has ranges, counted from there.
        How many columns a packed text has; 0 for a readable one."""
        if text.startswith(PACKED):
            if block is None:
                raise ValueError("packed numbers of an entry that does not name its partitions")
            lows, size, digits = _parts(text)
            self._packed.append((entry, block, base, lows))
            self._texts.append((size, digits))
            return len(lows)
        said, end = _JSON.raw_decode(text, 0)
        if end != len(text):
            raise ValueError(text[end:])
        for name, rows in said.items():
            if rows:
                (width,) = set(map(len, rows.values()))
                entries, partitions, numbers = self._plain.setdefault(width, ([], [], []))
                entries.extend([entry] * len(rows))
                partitions.extend(map(self._names.topic(name).__getitem__, rows))
                numbers.extend(chain.from_iterable(rows.values()))
        return 0

    def columns(self, width: int) -> list[Numbers]:
        """Entry, partition, and `width` columns of numbers: 0 where there are fewer."""
        lengths = np.array([len(block) for _, block, _, _ in self._packed], np.int64)
        found = [
            np.repeat(np.array([entry for entry, *_ in self._packed], np.int32), lengths),
            np.concatenate([*(block for _, block, _, _ in self._packed), np.empty(0, np.int32)]),
            *self._unpacked(width, lengths),
        ]
        plain = []
        for size, (entries, numbered, numbers) in self._plain.items():
            matrix = np.array(numbers, np.int64).reshape(len(entries), size).T
            none = np.zeros(len(entries), np.int64)
            whose = [np.array(each, np.int32) for each in (entries, numbered)]
            plain.append([*whose, *matrix, *[none] * (width - size)])
        if not plain:
            return found
        return [np.concatenate(each) for each in zip(*plain, found, strict=True)]

    def _unpacked(self, width: int, lengths: NDArray[np.int64]) -> list[Numbers]:
        places = (np.cumsum(lengths) - lengths).tolist()
        found = [np.zeros(int(lengths.sum()), np.int64) for _ in range(width)]
        raw = _bytes([digits for _, digits in self._texts])
        sizes = [
            _sizes(each[:size], len(lows) * len(block))
            for each, (size, _), (_, block, _, lows) in zip(
                raw, self._texts, self._packed, strict=True
            )
        ]
        bits = [each[size:] for each, (size, _) in zip(raw, self._texts, strict=True)]
        numbers = _numbers(sizes, bits)
        at = 0
        for (_, block, base, lows), place in zip(self._packed, places, strict=True):
            mine = numbers[at : at + len(lows) * len(block)].reshape(len(lows), len(block))
            mine += np.array(lows, np.int64)[:, None]
            at += mine.size
            if base is not None:  # a beginning, and a length
                mine[0] += base
                mine[1] += mine[0]
            for column, values in zip(found, mine, strict=False):
                column[place : place + len(block)] = values
        return found


@lru_cache(maxsize=64)
def based(text: str, count: int) -> NDArray[np.int64]:
    """The columns, kept for the many entries that refer to them."""
    found = unpack(text, count)
    found.setflags(write=False)
    return found
