"""A number in JSON's text → its digits, and the double nearest to it. Runs on executors.

    -12.50e3  →  digits 1250, exponent 1, negative, with a fraction: exactly -1250 · 10¹

Up to 19 digits are exact; more are doubtful, as is a double below the normal ones or beyond all.
"""

from __future__ import annotations

import numpy as np

from frazil.native.compiler import compiled
from frazil.native.memory import double_bits, leading_zeros, load1, product_high
from frazil.native.programs import DOUBT

#: Forms of a number: bits that add up.
NEGATIVE, FRACTION = 1, 2

_ZERO, _MINUS, _PLUS, _POINT, _SMALL_E = b"0-+.e"
_MOST_DIGITS = 19
#: Powers of ten that a double holds exactly, and the largest whole numbers.
_MOST_EXACT = 22
_EXACT = np.array([10.0**i for i in range(_MOST_EXACT + 1)])
_WHOLE = 1 << 53
_HUGE = 10**18
#: Exponents of normal doubles with 19 digits.
_LEAST, _MOST = -325, 308


def _powers_of_five() -> list[int]:
    """5ⁿ for n of `_LEAST` … `_MOST`: the highest 128 bits in two words. Rounded down, but up where
    5⁻ⁿ has no more than 64 bits: there a product may have to be exact."""
    words = []
    for n in range(_LEAST, _MOST + 1):
        if n < 0:
            power = 5**-n
            size = power.bit_length()
            scaled = (1 << (127 + size * (1 if n >= -27 else 2))) // power + 1
        else:
            scaled = 5**n << 128
        bits = scaled >> (scaled.bit_length() - 128)
        words += [bits >> 64, bits & (1 << 64) - 1]
    return words


_FIVES = np.array(_powers_of_five(), np.uint64).astype(np.int64)


@compiled
def _digits(at: int, end: int, digits: int, used: int) -> tuple[int, int, int]:
    """Continues a row of digits; `used` counts those behind the leading zeros."""
    while at < end:
        digit = load1(at) - _ZERO
        if digit < 0 or digit > 9:
            break
        digits = digits * 10 + digit
        used += used != 0 or digit != 0  # `digits` may be 0 again: it has 64 bits
        at += 1
    return at, digits, used


@compiled
def _exponent(at: int, end: int) -> tuple[int, int]:
    """The address behind an exponent of up to 4 digits, and the exponent."""
    sign = load1(at) if at < end else 0
    if sign in (_MINUS, _PLUS):
        at += 1
    behind, exponent, _ = _digits(at, end, 0, 0)
    if behind == at or behind - at > 4:
        return DOUBT, 0
    return behind, -exponent if sign == _MINUS else exponent


@compiled
def number(at: int, end: int) -> tuple[int, int, int, int]:
    """The address behind a number, or `DOUBT`; its digits, exponent and form."""
    form = exponent = 0
    if load1(at) == _MINUS:
        form = NEGATIVE
        at += 1
    behind, digits, used = _digits(at, end, 0, 0)
    if behind == at or (behind - at > 1 and load1(at) == _ZERO):
        return DOUBT, 0, 0, 0
    at = behind
    if at < end and load1(at) == _POINT:
        behind, digits, used = _digits(at + 1, end, digits, used)
        exponent = at + 1 - behind
        if exponent == 0:
            return DOUBT, 0, 0, 0
        at = behind
        form |= FRACTION
    if at < end and load1(at) | 32 == _SMALL_E:
        at, more = _exponent(at + 1, end)
        exponent += more
        form |= FRACTION
    if used > _MOST_DIGITS or digits < 0:  # of more digits nothing is known
        return DOUBT, 0, 0, 0
    return at, digits, exponent, form


@compiled
def scaled(digits: int, shift: int) -> int:
    """The digits times 10ⁿ, below 10¹⁸; -1: doubtful, or not whole."""
    if shift < -18 or shift > 18:
        return -1
    while shift < 0:
        if digits % 10:
            return -1
        digits //= 10
        shift += 1
    while shift > 0:
        if digits >= _HUGE:
            return -1
        digits *= 10
        shift -= 1
    return digits if digits < _HUGE else -1


@compiled
def double(digits: int, exponent: int, negative: int) -> int:
    """The bits of the double nearest to a number; -1: doubtful."""
    sign = negative << 63
    if digits == 0:
        return sign
    if digits <= _WHOLE and -_MOST_EXACT <= exponent <= _MOST_EXACT:
        power = _EXACT[np.uint64(abs(exponent))]
        exact = float(digits) / power if exponent < 0 else float(digits) * power
        bits: int = double_bits(exact) | sign
        return bits
    if exponent < _LEAST or exponent > _MOST:
        return -1
    return _nearest(digits, exponent, sign)


@compiled
def _nearest(digits: int, exponent: int, sign: int) -> int:
    """After Lemire, "Number parsing at a gigabyte per second" (2021): the digits times 5ⁿ in 128
    bits are enough to round, but for cases that are doubtful here."""
    zeros = leading_zeros(digits)
    digits = np.int64(np.uint64(digits) << np.uint64(zeros))
    place = np.uint64(2 * (exponent - _LEAST))
    high = np.uint64(product_high(digits, _FIVES[place]))
    low = np.uint64(digits) * np.uint64(_FIVES[place])
    if high & np.uint64(0x1FF) == np.uint64(0x1FF):
        more = np.uint64(product_high(digits, _FIVES[place + np.uint64(1)]))
        low = low + more
        if more > low:
            high = high + np.uint64(1)
        if low == np.uint64(0xFFFF_FFFF_FFFF_FFFF):
            return -1
    upper = np.int64(high >> np.uint64(63))
    shift = np.uint64(upper + 9)
    mantissa = np.int64(high >> shift)
    # 2 to the power of: log₂(10) · exponent, of 63 bits
    power = ((217706 * exponent) >> 16) + 63 + upper - zeros + 1023
    if power <= 0:
        return -1
    near = low <= np.uint64(1) and -4 <= exponent <= 23 and mantissa & 3 == 1
    if near and np.uint64(mantissa) << shift == high:
        mantissa &= -2  # exactly between two doubles: to the even one
    mantissa = (mantissa + (mantissa & 1)) >> 1
    if mantissa >= _WHOLE:
        mantissa >>= 1
        power += 1
    if power >= 0x7FF:
        return -1
    bits: int = (mantissa & (_WHOLE // 2 - 1)) | power << 52 | sign
    return bits
