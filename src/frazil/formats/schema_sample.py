"""The first records of a stream, read to learn its columns. Runs on the driver."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import ConfigError, SchemaMismatch, Undecodable
from frazil.formats.declared_columns import declared_columns, marked, schema_file_columns
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.kafka.fetch import fetch
from frazil.offsets import Range

#: per partition
RECORDS = 200


def format_of(config: Config) -> RecordFormat:
    decode = config.decode
    text, declared = text_of(decode.schema), pa.schema([])
    if decode.format == "json":
        if text:
            declared = schema_file_columns(decode.schema, text)
        else:
            declared = declared_columns(decode.columns)
        text = ""
    return RecordFormat(
        decode.format,
        text,
        decode.registry.resolved(),
        decode.unavailable_value,
        marked(declared, decode.undeclared),
        decode.undeclared,
    )


def key_format_of(config: Config) -> RecordFormat | None:
    """The format of record keys; None: text."""
    decode = config.decode
    kind = decode.key_format or ("avro" if decode.key_schema else "")
    if not kind:
        known = decode.format == "confluent-avro" and not decode.schema
        kind = decode.format if known or decode.format == "json" else "text"
    if kind == "text":
        return None
    format = RecordFormat(kind, text_of(decode.key_schema), decode.registry.resolved())
    if kind == "json":
        # Fields of a key that are not declared are passed over: a key has what its table needs.
        return replace(format, declared=marked(declared_columns(decode.key_columns), "drop"))
    with suppress(SchemaMismatch):  # a single value: its keys are rejected where they are read
        return replace(format, declared=schema_columns(format)) if decode.key_schema else format
    return format


def columns(
    config: Config, kafka: Mapping[str, str], format: RecordFormat, ranges: Sequence[Range]
) -> pa.Schema | None:
    """The columns of the first records in `ranges`; None if there are no records."""
    values = [value for wanted in ranges for value in _first_values(config, kafka, wanted)]
    if not values and not (ranges and format.kind == "raw"):
        return None
    schema = Decoder(format).columns(values)
    if not len(schema):
        _, rejected = Decoder(format, pa.schema([])).decode(values[:1])
        why = f"; of the first: {rejected[0].reason}" if rejected else ""
        raise Undecodable(
            f"cannot name the columns of {', '.join(map(str, ranges[:4]))}: none of "
            f"the first {len(values)} records can be read{why}"
        )
    return schema


def schema_columns(format: RecordFormat) -> pa.Schema:
    """The columns of a configured schema, without reading a record."""
    return Decoder(format).columns([])


def _first_values(config: Config, kafka: Mapping[str, str], wanted: Range) -> list[bytes]:
    patience, client = (
        duration(config.sink.unavailable_timeout),
        config.sink.kafka_client == "librdkafka",
    )
    chunks = fetch(kafka, wanted, patience=patience, client=client)
    values = (value for chunk in chunks for value in chunk.open().values if value is not None)
    return list(itertools.islice(values, RECORDS))


def text_of(path: str) -> str:
    """A schema file's text; empty for an empty path."""
    try:
        return Path(path).read_text() if path else ""
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8 or path
        fact = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read schema {path!r} of [decode]: {fact}") from None
