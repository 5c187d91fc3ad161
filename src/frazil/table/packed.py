"""The vectors of many ledger entries, read at once. Pure.

`ledger` writes for each entry what it knows of each partition: readable JSON where it is short,
packed bits where there are many partitions. Here texts of many entries go in, and columns of
numbers come out, without a Python object for each number. Numbers that are packed in as many bits
lie at the same places of their texts: one look into a matrix of bytes reads them all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frazil.core.offsets import Partition

#: Of 64 bits, or of 32 where they count partitions, entries or rows.
Numbers = NDArray[np.signedinteger[Any]]
_PACKED = "packed:"
_JSON = json.JSONDecoder()
#: Bytes of packed text that are read at once: enough to be fast, little enough to stay small.
_AT_ONCE = 1 << 22
_DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_VALUES = np.full(256, 255, np.uint8)
_VALUES[np.frombuffer(_DIGITS, np.uint8)] = np.arange(85)


class Names:
    """The partitions that entries name, numbered as they come."""

    def __init__(self) -> None:
        self._known: dict[Partition, int] = {}
        self._topics: dict[str, _Topic] = {}

    def topic(self, name: str) -> _Topic:
        found = self._topics.get(name)
        if found is None:
            found = self._topics[name] = _Topic(name, self._known)
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

    def numbered(self, numbers: Numbers) -> Numbers:
        """The same of partitions as they are called, for many at once."""
        found, which = np.unique(numbers, return_inverse=True)
        return np.array([self[str(each)] for each in found.tolist()], np.int64)[which]


class Vectors:
    """What many entries say of each partition; `columns` when all are there."""

    def __init__(self, names: Names) -> None:
        self._names = names
        #: readable ones, by how many columns they have: entry, partition, numbers
        self._plain: dict[int, tuple[list[int], list[int], list[int]]] = {}
        #: packed ones: of which entry and of which partitions each is, and how many columns it has
        self._entries: list[int] = []
        self._blocks: list[int] = []
        self._widths: list[int] = []
        self._columns: list[_Texts] = []
        #: topic and packed text → which partitions: most entries have the same
        self._known: dict[tuple[str, str], tuple[int, str]] = {}
        self._partitions = _Texts()

    @property
    def widths(self) -> set[int]:
        """How many numbers there are of a partition."""
        return {*self._plain, *self._widths}

    def add(self, entry: int, text: str) -> None:
        packed = text.startswith(_PACKED)
        said, end = _JSON.raw_decode(text, len(_PACKED) if packed else 0)
        if end != len(text):
            raise ValueError(text[end:])
        for name, rows in said.items():
            if packed:
                self._add(entry, (name, rows[0]), rows)
            elif rows:
                (width,) = set(map(len, rows.values()))
                entries, partitions, numbers = self._plain.setdefault(width, ([], [], []))
                entries.extend([entry] * len(rows))
                partitions.extend(map(self._names.topic(name).__getitem__, rows))
                numbers.extend(chain.from_iterable(rows.values()))

    def _add(self, entry: int, which: tuple[str, str], columns: Sequence[str]) -> None:
        known = self._known.get(which)
        if known is None:
            known = len(self._known), self._partitions.add(len(self._known), which[1])
            self._known[which] = known
        self._columns += [_Texts() for _ in range(len(columns) - 1 - len(self._columns))]
        for column, text in zip(self._columns, columns[1:], strict=False):
            if column.add(len(self._blocks), text) != known[1]:
                raise ValueError(f"expected {known[1]} numbers, found {text}")
        self._entries.append(entry)
        self._blocks.append(known[0])
        self._widths.append(len(columns) - 1)

    def columns(self, width: int) -> list[Numbers]:
        """Entry, partition, and `width` columns of numbers: 0 where there are fewer."""
        partitions = self._numbered()
        lengths = np.array([len(partitions[block]) for block in self._blocks], np.int64)
        found = [
            np.repeat(np.array(self._entries, np.int32), lengths),
            np.concatenate([*(partitions[b] for b in self._blocks), np.empty(0, np.int32)]),
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

    def _numbered(self) -> list[Numbers]:
        """The partitions' numbers, for each way in which they were packed."""
        lengths = np.array([int(count) for _, count in self._known.values()], np.int64)
        places = np.append(0, np.cumsum(lengths))
        found = np.zeros(places[-1], np.int64)
        self._partitions.put(found, places)
        found += np.arange(len(found)) - np.repeat(places[:-1], lengths)  # each is less its place
        topics = np.array([name for name, _ in self._known], object)
        for name in dict.fromkeys(topics.tolist()):
            mine = np.repeat(topics == name, lengths)
            found[mine] = self._names.topic(name).numbered(found[mine])
        return np.split(found.astype(np.int32), places[1:-1]) if len(lengths) else []

    def _unpacked(self, width: int, lengths: Numbers) -> list[Numbers]:
        places = np.append(0, np.cumsum(lengths))
        found = [np.zeros(places[-1], np.int64) for _ in range(width)]
        widths = np.array(self._widths)
        for i, (column, texts) in enumerate(zip(found, self._columns, strict=False)):
            texts.put(column, places)
            if i and (widths > i).all():  # each column is less the one before it
                column += found[i - 1]
            elif i:
                column += found[i - 1] * np.repeat(widths > i, lengths)
        return found


class _Texts:
    """Texts of packed numbers, those of one shape together."""

    def __init__(self) -> None:
        #: (bits, count, length) → which text, its lowest number and its digits
        self._alike: dict[tuple[str, str, int], tuple[list[int], list[int], list[str]]] = {}

    def add(self, which: int, text: str) -> str:
        """Says how many numbers there are."""
        low, bits, count, raw = text.split("/", 3)
        group = self._alike.get((bits, count, len(raw)))
        if group is None:
            group = self._alike[bits, count, len(raw)] = ([], [], [])
        group[0].append(which)
        group[1].append(int(low))
        group[2].append(raw)
        return count

    def put(self, column: Numbers, places: Numbers) -> None:
        """The numbers of each text at its place."""
        for (bits, count, length), (which, lows, raw) in self._alike.items():
            step = max(1, _AT_ONCE // (length + 8 * int(count) + 1))
            for i in range(0, len(which), step):
                some = slice(i, i + step)
                numbers = _unpacked(int(bits), int(count), raw[some])
                numbers += np.array(lows[some], np.int64)[:, None]
                _put(column, places[which[some]], numbers)


def _put(column: Numbers, at: Numbers, numbers: Numbers) -> None:
    """Each row of numbers at its own place; in one go where they lie side by side."""
    count = numbers.shape[1]
    if not count or not len(at):
        return
    if (np.diff(at) == count).all():
        column[at[0] : at[0] + numbers.size] = numbers.ravel()
    else:
        column[at[:, None] + np.arange(count)] = numbers


def _unpacked(bits: int, count: int, texts: Sequence[str]) -> NDArray[np.int64]:
    """The numbers of texts that are packed alike, one row each: see `ledger._pack`."""
    if not bits:
        return np.zeros((len(texts), count), np.int64)
    if bits > 64:
        raise ValueError(f"numbers of {bits} bits")
    raw = _bytes(texts)
    size = raw.shape[1] * 8
    # The first bit is a 1 that holds the others in their places.
    if not size - 8 < bits * count + 1 <= size or (raw[:, 0] >> (bits * count) % 8 != 1).any():
        raise ValueError(f"expected {count} numbers of {bits} bits, found {size} bits")
    room = np.zeros((len(texts), raw.shape[1] + 9), np.uint8)
    room[:, : raw.shape[1]] = raw
    first = size - bits * np.arange(count, 0, -1)
    byte, skip = first // 8, (first % 8).astype(np.uint64)
    # Eight bytes from any byte on, as one number.
    eights = np.ndarray((len(texts), raw.shape[1]), ">u8", room, strides=(room.shape[1], 1))
    found: NDArray[np.uint64] = eights[:, byte].astype(np.uint64) << skip
    if bits > 57:
        found |= room[:, byte + 8].astype(np.uint64) >> (np.uint64(8) - skip)
    found >>= np.uint64(64 - bits)
    return found.view(np.int64)


def _bytes(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Base85 of texts of one length, as `base64.b85decode` reads it."""
    joined = "".join(texts).encode("ascii")
    digits = _VALUES[np.frombuffer(joined, np.uint8)].reshape(len(texts), -1)
    if (digits == 255).any():
        raise ValueError("a letter that base85 does not have")
    missing = -digits.shape[1] % 5
    if missing:
        digits = np.pad(digits, ((0, 0), (0, missing)), constant_values=84)
    words = np.zeros((len(texts), digits.shape[1] // 5), np.uint64)
    for i in range(5):
        words *= np.uint64(85)
        words += digits[:, i::5]
    if (words > 0xFFFFFFFF).any():
        raise ValueError("more than four bytes can hold")
    return words.astype(">u4").view(np.uint8)[:, : words.shape[1] * 4 - missing]
