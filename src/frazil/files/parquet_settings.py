"""How the Parquet files of a table are written: options, row groups, bloom filters. Pure.

In: a table's properties under Iceberg's names, its schema and the paths of its columns. Out:
options for pyarrow. Raises `ConfigError` for a property that cannot be followed. Runs on executors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import BooleanType

from frazil.config.sections import CODECS
from frazil.errors import ConfigError
from frazil.files.encodings import CHOICES, PROPERTY

#: Prefix of Iceberg's names of Parquet's options.
PARQUET = "write.parquet."
#: Size of one row group before it is encoded: Arrow's bytes, and rows.
ROW_GROUP_BYTES = 64 * 1024**2
ROW_GROUP_ROWS = 512 * 1024
#: The most that a row group's column takes in the footer.
FOOTER_BYTES = 16 * 1024


class ParquetSettings:
    """`ids`: path of a column in Parquet → its field id; `target`: size of a file, at most
    `ceiling`."""

    def __init__(
        self,
        name: str,
        schema: Schema,
        ids: Mapping[str, int],
        properties: Mapping[str, str],
        *,
        compression: str,
        target: int,
        ceiling: int,
    ) -> None:
        self._name, self._schema, self._ids = name, schema, ids
        self._properties = properties
        self.target = target
        self._encoding(compression)
        self._filters(ceiling)

    def _encoding(self, compression: str) -> None:
        """Parquet's options under Iceberg's names; unknown names are ignored."""
        codec = self._properties.get(f"{PARQUET}compression-codec", compression).lower()
        codec = {"uncompressed": "none"}.get(codec, codec)
        if codec not in CODECS:
            raise refused(self._name, f"its compression codec {codec!r} is unknown")
        level = self._number("compression-level", -(2**31))
        if codec == "none" or not pa.Codec.supports_compression_level(codec):
            level = None
        elif level is not None:
            low = pa.Codec.minimum_compression_level(codec)
            high = pa.Codec.maximum_compression_level(codec)
            if not low <= level <= high:
                raise refused(
                    self._name,
                    f"expected a compression level of {codec} from {low} to {high}, found {level}",
                )
        encodings = self._properties.get(PROPERTY, CHOICES[0])
        if encodings not in CHOICES:
            raise refused(
                self._name, f"expected {PROPERTY} {' or '.join(CHOICES)}, found {encodings!r}"
            )
        self.compatible = encodings == "compatible"
        group = self._number("row-group-size-bytes")
        self.group_bytes = min(group or ROW_GROUP_BYTES, self.target)
        self.group_rows = sys.maxsize if group else ROW_GROUP_ROWS
        # With pages smaller than their headers, `CEILING` could not be guaranteed.
        page, lines = self._number("page-size-bytes"), self._number("page-row-limit")
        self.options = {
            "compression": codec,
            "compression_level": level,
            "data_page_size": page and max(page, 1024),
            "max_rows_per_page": lines and max(lines, 100),
            "dictionary_pagesize_limit": self._number("dict-size-bytes"),
            "store_schema": False,
            "version": "2.6",
        }

    def _number(self, key: str, least: int = 1) -> int | None:
        text = self._properties.get(PARQUET + key)
        if not text:
            return None
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise refused(self._name, f"expected a number as {PARQUET}{key}, found {text!r}")
        return value

    def _filters(self, ceiling: int) -> None:
        """Bloom filters: Parquet's path → distinct values (0: as many as rows), their maximum,
        rate."""
        enabled, rates = (f"{PARQUET}bloom-filter-{word}.column." for word in ("enabled", "fpp"))
        paths = {number: path for path, number in self._ids.items()}
        size = self._number("bloom-filter-max-bytes") or 1024**2
        self._blooms: dict[str, tuple[int, int, float]] = {}
        for key, value in self._properties.items():
            name = key.removeprefix(enabled)
            if name == key or value.lower() != "true" or name not in self._schema.column_names:
                continue
            number = self._schema.find_field(name).field_id
            if number not in paths or is_boolean(self._schema, number):
                continue
            text = self._properties.get(rates + name, "0.01")
            try:
                rate = float(text)
            except ValueError:
                rate = 0.0
            if not 0 < rate < 1:
                raise refused(self._name, f"expected a rate as {rates}{name}, found {text!r}")
            # A filter's bits are a power of two; this many values fill it to that rate.
            most = 2 ** int(math.log2(8 * size)) * -math.log(1 - rate**0.125) / 8
            exact = self._number(f"bloom-filter-ndv.column.{name}") or 0
            self._blooms[paths[number]] = (exact, max(1, int(most)), rate)
        tail = len(self._ids) * FOOTER_BYTES + len(self._blooms) * size
        self.tail = min(tail, ceiling // 4)  # per row group, written at the end of the file

    def blooms(self, rows: int) -> dict[str, dict[str, float]] | None:
        return {
            path: {"ndv": min(exact or rows, most), "fpp": rate}
            for path, (exact, most, rate) in self._blooms.items()
        } or None


def is_boolean(schema: Schema, number: int) -> bool:
    return isinstance(schema.find_type(number), BooleanType)


def refused(table: str, fact: str) -> ConfigError:
    return ConfigError(f"cannot write table {table}: {fact}")
