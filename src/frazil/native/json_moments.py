"""Dates, times, timestamps and UUIDs in JSON's text → what their columns store. Runs on executors.

Only the usual forms: `2001-02-03`, `04:05:06.789`, `2001-02-03T04:05:06.789+01:00`. Others are
doubtful, whether they are wrong or rare.
"""

from __future__ import annotations

from frazil.native.compiler import compiled
from frazil.native.json_text import half_byte
from frazil.native.memory import load1, store1

#: Instead of a number: another reader decides.
NONE = -(1 << 62)

_DASH, _POINT, _COMMA, _COLON, _BLANK, _PLUS, _T, _Z = b"-.,: +tz"
_DAY_TEXT = 10  # characters
_UUID_TEXT = 36


@compiled
def _two(at: int) -> int:
    """A number of two digits; -1: it is none."""
    tens, ones = load1(at) - 48, load1(at + 1) - 48
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else -1


@compiled
def day(at: int, end: int) -> int:
    """Days since 1970, of the Gregorian calendar."""
    if end - at < _DAY_TEXT or load1(at + 4) != _DASH or load1(at + 7) != _DASH:
        return NONE
    century, years, month, of_month = _two(at), _two(at + 2), _two(at + 5), _two(at + 8)
    year = century * 100 + years
    if century < 0 or years < 0 or year == 0 or month < 1 or month > 12:
        return NONE
    most = 30 + ((month + (month >> 3)) & 1)
    if month == 2:
        most = 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    if of_month < 1 or of_month > most:
        return NONE
    # Of years that begin in March, so that the leap day is the last one.
    year -= month <= 2
    before = (153 * (month + 9 - 12 * (month > 2)) + 2) // 5
    return year * 365 + year // 4 - year // 100 + year // 400 + before + of_month - 719469


@compiled
def _fraction(at: int, end: int, digits: int) -> tuple[int, int]:
    """The address behind a fraction of a second, and its value in units of so many digits."""
    ticks = 0
    first = at
    while at < end and at - first < 10:
        digit = load1(at) - 48
        if digit < 0 or digit > 9:
            break
        if at - first < digits:
            ticks = ticks * 10 + digit
        elif digit:
            return at, NONE  # nothing is cut off
        at += 1
    size = at - first
    if size == 0 or size > 9:
        return at, NONE
    while size < digits:
        ticks *= 10
        size += 1
    return at, ticks


@compiled
def _clock(at: int, end: int, digits: int) -> tuple[int, int]:
    """The address behind a time of day, and its value in units of so many digits of a second."""
    if end - at < 5 or load1(at + 2) != _COLON:
        return at, NONE
    hour, minute, second, ticks = _two(at), _two(at + 3), 0, 0
    at += 5
    if end - at >= 3 and load1(at) == _COLON:
        second = _two(at + 1)
        at += 3
        if at < end and (load1(at) == _POINT or load1(at) == _COMMA):
            at, ticks = _fraction(at + 1, end, digits)
    if hour < 0 or hour > 23 or minute < 0 or minute > 59 or second < 0 or second > 59:
        return at, NONE
    seconds = (hour * 60 + minute) * 60 + second
    for _ in range(digits):
        seconds *= 10
    return at, seconds + ticks if ticks >= 0 else NONE


@compiled
def time_of_day(at: int, end: int, digits: int) -> int:
    behind, ticks = _clock(at, end, digits)
    return ticks if behind == end else NONE


@compiled
def _zone(at: int, end: int) -> int:
    """The seconds by which a zone is ahead of UTC."""
    sign, size = load1(at), end - at
    if size == 1 and sign | 32 == _Z:
        return 0
    if sign not in (_PLUS, _DASH) or size not in (3, 5, 6):
        return NONE
    if size == 6 and load1(at + 3) != _COLON:
        return NONE
    hours = _two(at + 1)
    minutes = 0 if size == 3 else _two(end - 2)
    if hours < 0 or hours > 23 or minutes < 0 or minutes > 59:
        return NONE
    seconds = (hours * 60 + minutes) * 60
    return seconds if sign == _PLUS else -seconds


@compiled
def moment(at: int, end: int, digits: int, zoned: int) -> int:
    """A timestamp in units of so many digits of a second since 1970."""
    days = day(at, end)
    at += _DAY_TEXT
    if days == NONE or at >= end or (load1(at) != _BLANK and load1(at) | 32 != _T):
        return NONE
    at, ticks = _clock(at + 1, end, digits)
    if ticks == NONE or (at < end) != (zoned != 0):
        return NONE
    shift = _zone(at, end) if at < end else 0
    if shift == NONE or (digits == 9 and (days < -106_000 or days > 106_000)):
        return NONE  # nanoseconds have 64 bits
    seconds = days * 86_400 - shift
    for _ in range(digits):
        seconds *= 10
    return seconds + ticks


@compiled
def store_uuid(at: int, end: int, target: int) -> bool:
    """Stores 16 bytes; False: it is no UUID in its usual form."""
    if end - at != _UUID_TEXT:
        return False
    for i in range(16):
        if i in (4, 6, 8, 10):
            if load1(at) != _DASH:
                return False
            at += 1
        high, low = half_byte(load1(at)), half_byte(load1(at + 1))
        if high < 0 or low < 0:
            return False
        store1(target + i, high << 4 | low)
        at += 2
    return True
