"""Texts of JSON: where they end, what their escapes stand for, and base64. Runs on executors."""

from __future__ import annotations

from frazil.native.compiler import compiled
from frazil.native.memory import load1, load8, store1, trailing_zeros
from frazil.native.programs import DOUBT

_QUOTE, _BACKSLASH, _SMALL_U, _EQUALS = b'"\\u='
_EACH = 0x0101_0101_0101_0101
_HIGH_BITS = -0x7F7F7F7F7F7F7F80


@compiled
def _more_bytes(at: int, end: int) -> int:
    """The bytes of a character beyond ASCII, as Python decodes it; 0: it is no UTF-8."""
    first = load1(at)
    if first < 0xC2 or first > 0xF4:
        return 0
    size = 2 + (first >= 0xE0) + (first >= 0xF0)
    if end - at < size:
        return 0
    second = load1(at + 1)
    low = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
    high = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
    if second < low or second > high:
        return 0
    for i in range(2, size):
        if load1(at + i) & 0xC0 != 0x80:
            return 0
    return size


@compiled
def half_byte(byte: int) -> int:
    """The number that a hexadecimal digit is; -1: it is none."""
    letter = byte | 32
    if 48 <= byte <= 57:
        return byte - 48
    return letter - 87 if 97 <= letter <= 102 else -1


@compiled
def _unit(at: int, end: int) -> int:
    """The number of `\\u` and four hexadecimal digits; -1: they are none."""
    if end - at < 6 or load1(at) != _BACKSLASH or load1(at + 1) != _SMALL_U:
        return -1
    unit = 0
    for i in range(2, 6):
        half = half_byte(load1(at + i))
        if half < 0:
            return -1
        unit = unit << 4 | half
    return unit


@compiled
def _escape_size(at: int, end: int) -> int:
    """The bytes of an escape; 0: it is none, or half of a pair."""
    if end - at < 2:
        return 0
    byte = load1(at + 1)
    if byte == _SMALL_U:
        unit = _unit(at, end)
        if unit < 0 or unit & 0xFC00 == 0xDC00:
            return 0
        if unit & 0xFC00 != 0xD800:
            return 6
        return 12 if _unit(at + 6, end) & -0x400 == 0xDC00 else 0
    # " / \ b f n r t
    known = byte == 34 or byte == 47 or byte == 92 or byte == 98
    return 2 * (known or byte == 102 or byte == 110 or byte == 114 or byte == 116)


@compiled
def text_end(at: int, end: int) -> tuple[int, int]:
    """The address of the quote behind a text, or `DOUBT`; and whether the text has escapes."""
    escaped = 0
    while at < end:
        word = load8(at)
        quotes, slashes = word ^ _EACH * _QUOTE, word ^ _EACH * _BACKSLASH
        # The lowest of these bits is that of the first byte that is `"`, `\`, a control character,
        # or beyond ASCII.
        special = (
            (quotes - _EACH) & ~quotes
            | (slashes - _EACH) & ~slashes
            | (word - _EACH * 32) & ~word
            | word
        ) & _HIGH_BITS
        if special == 0:
            at += 8
            continue
        at += trailing_zeros(special) >> 3
        if at >= end:
            break
        byte = load1(at)
        if byte == _QUOTE:
            return at, escaped
        size = 0
        if byte == _BACKSLASH:
            size = _escape_size(at, end)
            escaped = 1
        elif byte >= 0x80:
            size = _more_bytes(at, end)
        if size == 0:
            break
        at += size
    return DOUBT, 0


@compiled
def _store_character(code: int, target: int) -> int:
    """Stores a character as UTF-8; returns the address behind it."""
    if code < 0x80:
        store1(target, code)
        return target + 1
    if code < 0x800:
        store1(target, 0xC0 | code >> 6)
        store1(target + 1, 0x80 | code & 0x3F)
        return target + 2
    if code < 0x10000:
        store1(target, 0xE0 | code >> 12)
        store1(target + 1, 0x80 | code >> 6 & 0x3F)
        store1(target + 2, 0x80 | code & 0x3F)
        return target + 3
    store1(target, 0xF0 | code >> 18)
    store1(target + 1, 0x80 | code >> 12 & 0x3F)
    store1(target + 2, 0x80 | code >> 6 & 0x3F)
    store1(target + 3, 0x80 | code & 0x3F)
    return target + 4


@compiled
def _escaped_byte(byte: int) -> int:
    if byte == 98:
        return 8
    if byte == 102:
        return 12
    if byte == 110:
        return 10
    if byte == 114:
        return 13
    return 9 if byte == 116 else byte


@compiled
def unescape(at: int, end: int, target: int) -> int:
    """Stores a text that `text_end` has seen without its escapes; returns its size, which is never
    more than that of the text with them."""
    start = target
    while at < end:
        byte = load1(at)
        if byte != _BACKSLASH:
            store1(target, byte)
            at, target = at + 1, target + 1
            continue
        byte = load1(at + 1)
        if byte != _SMALL_U:
            store1(target, _escaped_byte(byte))
            at, target = at + 2, target + 1
            continue
        code = _unit(at, end)
        at += 6
        if code & 0xFC00 == 0xD800:
            code = 0x10000 + ((code & 0x3FF) << 10) + (_unit(at, end) & 0x3FF)
            at += 6
        target = _store_character(code, target)
    return target - start


@compiled
def base64_size(at: int, end: int) -> int:
    """The number of bytes that base64 stands for; -1: it has no whole groups of four."""
    size = end - at
    if size % 4:
        return -1
    padding = 0
    while padding < 2 and padding < size and load1(end - 1 - padding) == _EQUALS:
        padding += 1
    return size // 4 * 3 - padding


@compiled
def _six_bits(byte: int) -> int:
    if 65 <= byte <= 90:
        return byte - 65
    if 97 <= byte <= 122:
        return byte - 71
    if 48 <= byte <= 57:
        return byte + 4
    return 62 if byte == 43 else 63 if byte == 47 else -1  # + and /


@compiled
def unbase64(at: int, end: int, target: int) -> bool:
    """Stores the bytes that base64 stands for; False: it is none, or has bits that say nothing."""
    left = base64_size(at, end)
    while at < end:
        group = 0
        for i in range(4):
            bits = _six_bits(load1(at + i)) if i <= left else 0
            if bits < 0:
                return False
            group = group << 6 | bits
        if left < 3 and group & ((1 << (24 - 8 * left)) - 1):
            return False
        for i in range(min(left, 3)):
            store1(target + i, group >> (16 - 8 * i) & 0xFF)
        at, target, left = at + 4, target + 3, left - 3
    return True
