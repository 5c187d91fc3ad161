"""The bytes of one Avro datum, read number by number. Runs on executors; pure.

The strict reader of `arrow.avro_types` reads records with it, and so does what reads Iceberg's
manifests: `frazil status` and `frazil audit` need no compiled code.
"""

from __future__ import annotations


class UnreadableDatum(Exception):
    """A datum that does not follow its schema."""

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"cannot read {'.'.join(reversed(self.path)) or 'the datum'}: {self.fact}"


class Datum:
    """Bytes and a read position. Longs have at most 10 bytes."""

    __slots__ = ("data", "place")

    def __init__(self, data: bytes, place: int) -> None:
        self.data = data
        self.place = place

    def long(self) -> int:
        value = shift = 0
        while True:
            if self.place >= len(self.data):
                raise UnreadableDatum("the datum ends within a number")
            byte = self.data[self.place]
            self.place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise UnreadableDatum("expected a number of at most 10 bytes, found more")
        value &= 0xFFFF_FFFF_FFFF_FFFF
        return (value >> 1) ^ -(value & 1)

    def take(self, size: int) -> bytes:
        end = self.place + size
        if size < 0 or end > len(self.data):
            left = len(self.data) - self.place
            raise UnreadableDatum(f"the datum ends too early; expected {size} bytes, found {left}")
        taken = self.data[self.place : end]
        self.place = end
        return taken
