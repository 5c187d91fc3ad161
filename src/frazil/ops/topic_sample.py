"""What is in a topic: the basis of a new config.

In: settings of Kafka and of the registry, and a topic. Out: a `TopicSample`: how its newest records
are encoded, their columns and keys, and what this was judged by. Kafka and the registry are read,
and nothing is written there. Runs on the driver, without Spark.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

from frazil.config.messages import nearest
from frazil.errors import ConfigError, FrazilError, Unavailable
from frazil.formats.declared_columns import declared_columns
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.formats.schema_registry import RegistryRefusal, SchemaRegistry
from frazil.kafka.connection import admin_client
from frazil.kafka.fetch import fetch
from frazil.kafka.planner import Planner
from frazil.offsets import Range

#: Records of each partition, partitions at most, seconds for an answer.
RECORDS, PARTITIONS, _PATIENCE = 100, 16, 5.0
_HEADED = 5  # a zero byte and a schema id
#: Columns that are likely to be the time of an event, the likeliest first.
_TIMES = ("event_time", "occurred_at", "created_at", "placed_at", "updated_at", "timestamp", "time")


#: Types that a text may be of, the most exact first.
_TIME_TYPES = ("timestamptz", "timestamp", "date")


@dataclass(frozen=True)
class TopicSample:
    topic: str
    partitions: int
    records: int = 0
    tombstones: int = 0
    keyed: int = 0
    compacted: bool = False
    #: of `[decode]`
    format: str = "json"
    #: why that one
    because: str = ""
    debezium: bool = False
    columns: pa.Schema = field(default_factory=lambda: pa.schema([]))
    #: columns of text in JSON that are times → the type that they can be declared with
    times: Mapping[str, str] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    key_format: str = ""
    headers: tuple[str, ...] = ()
    #: records without a timestamp of Kafka
    timeless: int = 0

    @property
    def event_time(self) -> str:
        """The column with the time of the event; empty: there is none."""
        times = [
            f.name
            for f in self.columns
            if pa.types.is_timestamp(f.type) or self.times.get(f.name, "").startswith("timestamp")
        ]
        ranked = sorted(times, key=lambda n: _TIMES.index(n) if n in _TIMES else len(_TIMES))
        return ranked[0] if ranked else ""


def topic_names(kafka: Mapping[str, str]) -> dict[str, int]:
    """Topic → number of partitions, without Kafka's own."""
    try:
        topics = admin_client(kafka).list_topics(timeout=_PATIENCE).topics
    except KafkaException as error:
        raise Unavailable(
            f"cannot list the topics: Kafka at {kafka.get('bootstrap.servers')} does not answer: "
            f"{error.args[0].str()}",
            hint="check --bootstrap-servers, and --kafka security.protocol=… if it has TLS or SASL",
        ) from None
    return {n: len(t.partitions) for n, t in sorted(topics.items()) if not n.startswith("__")}


def sample_topic(
    kafka: Mapping[str, str], topic: str, registry: Mapping[str, str], known: Mapping[str, int]
) -> TopicSample:
    """`known`: the topics that there are. Raises `ConfigError` where the records need what was not
    given."""
    if topic not in known:
        hint = nearest(topic, known).lstrip("; ") if known else "there are no topics"
        raise ConfigError(f"cannot read topic {topic}: it does not exist", hint=hint)
    values, keys, headers, timeless = _records(kafka, topic)
    present = [value for value in values if value is not None]
    shape = _Shape(topic, present, registry)
    key, key_format = shape.key([k for k, v in zip(keys, values, strict=True) if v is not None])
    return TopicSample(
        topic=topic,
        partitions=known[topic],
        records=len(values),
        tombstones=len(values) - len(present),
        keyed=sum(key is not None for key in keys),
        compacted=_compacted(kafka, topic),
        format=shape.format,
        because=shape.because,
        debezium=shape.debezium,
        columns=shape.columns,
        times=shape.times,
        key=key,
        key_format=key_format,
        headers=tuple(headers),
        timeless=timeless,
    )


def _records(
    kafka: Mapping[str, str], topic: str
) -> tuple[list[bytes | None], list[bytes | None], list[str], int]:
    """Values and keys of the newest records, names of headers, records without a timestamp."""
    planner = Planner(kafka, topics=(topic,), trusting=True)
    marks = planner.watermarks(planner.origin()[1])
    values: list[bytes | None] = []
    keys: list[bytes | None] = []
    headers: Counter[str] = Counter()
    timeless = 0
    for partition, end in islice(sorted(marks.end.items()), PARTITIONS):
        start = max(marks.low[partition], end - RECORDS)
        if start == end:
            continue
        wanted = Range(partition, start, end)
        for chunk in fetch(kafka, wanted, patience=_PATIENCE, envelope=True):
            records = chunk.open(envelope=True)
            values += records.values
            assert records.keys is not None
            keys += records.keys.to_pylist()
            timeless += int((records.stamps < 0).sum())
            for pairs in records.headers.to_pylist() if records.headers is not None else ():
                headers.update(pair["key"] for pair in pairs)
    return values, keys, [name for name, _ in headers.most_common(8)], timeless


def _compacted(kafka: Mapping[str, str], topic: str) -> bool:
    """Whether Kafka keeps the newest record of each key; False, too, if that may not be asked."""
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    try:
        answer = admin_client(kafka).describe_configs([resource], request_timeout=_PATIENCE)
        policy = answer[resource].result().get("cleanup.policy")
    except KafkaException:
        return False
    return "compact" in str(getattr(policy, "value", ""))


class _Shape:
    """How values are encoded, and the columns of their rows."""

    def __init__(self, topic: str, values: Sequence[bytes], registry: Mapping[str, str]) -> None:
        self._values = values
        self._registry = registry
        self.debezium = False
        self.columns = pa.schema([])
        self.times: dict[str, str] = {}
        #: some rows, as values of Python
        self._rows: Sequence[Mapping[str, Any]] = []
        objects = [document for document in map(_json_object, values) if document is not None]
        headed = sum(value[:1] == b"\0" and len(value) > _HEADED for value in values)
        if not values:
            self._assume(topic)
        elif headed * 2 > len(values):
            self._of_avro(headed)
        elif objects and len(objects) * 2 > len(values):
            self._of_json(objects)
        else:
            self.format = "raw"
            self.because = (
                f"of {len(values)} records none begins as Confluent's Avro does, and only "
                f"{len(objects)} are JSON objects: the value is one binary column"
            )
            self.columns = pa.schema([pa.field("value", pa.large_binary())])

    def _assume(self, topic: str) -> None:
        """Of a topic without records only the registry knows something."""
        if self._registry.get("url"):
            registry = SchemaRegistry(self._registry)
            if f"{topic}-value" in registry.subjects():
                number, writer = registry.latest(f"{topic}-value")
                self.format = "confluent-avro"
                self.because = f"the topic is empty; the registry has schema {number} for it"
                if not isinstance(writer, RegistryRefusal):
                    self._take(writer.columns)
                return
        self.format = "json"
        self.because = "the topic is empty: JSON is a guess"

    def _of_avro(self, headed: int) -> None:
        if not self._registry.get("url"):
            raise ConfigError(
                "cannot decode the records: they are framed as Confluent's Avro (a zero byte, "
                "then the id of a schema), and no registry is given",
                hint="add --registry http://…:8081",
            )
        self.format = "confluent-avro"
        ids = sorted({int.from_bytes(v[1:_HEADED], "big") for v in self._values if v[:1] == b"\0"})
        self.because = (
            f"{headed} of {len(self._values)} records are framed as Confluent's Avro, with schema "
            f"{', '.join(map(str, ids[:4]))}"
        )
        decoder = Decoder(RecordFormat("confluent-avro", registry=self._registry))
        chunks, rejected = decoder.decode(self._values[-RECORDS:])
        if not chunks:
            why = rejected[-1].reason if rejected else "there are none"
            raise ConfigError(f"cannot decode the records: {why}", hint="is it the right registry?")
        self._rows = chunks[-1].rows.to_pylist()
        self._take(chunks[-1].rows.schema)

    def _take(self, columns: pa.Schema) -> None:
        names = set(columns.names)
        self.debezium = {"op", "after", "before"} <= names
        if self.debezium and pa.types.is_struct(columns.field("after").type):
            self.columns = pa.schema(list(columns.field("after").type))
            self._rows = [row["after"] for row in self._rows if row["after"] is not None]
            self.because += ": the envelope of Debezium"
        else:
            self.columns = columns

    def _of_json(self, objects: Sequence[Mapping[str, Any]]) -> None:
        self.format = "json"
        self.because = f"{len(objects)} of {len(self._values)} records are JSON objects"
        self._rows = objects
        payloads = [_payload(document) for document in objects]
        changes = [
            p for p in payloads if p is not None and "op" in p and {"before", "after"} & {*p}
        ]
        self.debezium = len(changes) * 2 > len(objects)
        if self.debezium:
            self._rows = [row for p in changes if isinstance(row := p.get("after"), dict)]
            self.because += " in the envelope of Debezium"
        rows = [json.dumps(row).encode() for row in self._rows]
        self.columns = Decoder(RecordFormat("json")).columns(rows) if rows else pa.schema([])
        if not self.debezium:
            self.times = _times(self.columns, objects)

    # ── keys ─────────────────────────────────────────────────────────────────────────────────

    def key(self, keys: Sequence[bytes | None]) -> tuple[tuple[str, ...], str]:
        """The columns that Kafka's keys are of, and the keys' format; empty: nothing shows it.
        `keys`: those of records with a value, in their order."""
        given = [key for key in keys if key is not None]
        if not given or len(given) != len(keys):
            return (), ""
        names: Iterable[str] = ()
        if given[0][:1] == b"\0" and self._registry.get("url"):
            try:
                number = int.from_bytes(given[0][1:_HEADED], "big")
                writer = SchemaRegistry(self._registry).writer(number)
            except FrazilError:
                return (), ""
            names = () if isinstance(writer, RegistryRefusal) else writer.columns.names
            kind = "confluent-avro"
        elif (document := _json_object(given[0])) is not None:
            names, kind = _payload(document) or document, "json"
        else:
            names, kind = self._equal_column(given), "text"
        known = tuple(name for name in names if name in self.columns.names)
        return (known, kind) if known and len(known) == len(tuple(names)) else ((), "")

    def _equal_column(self, keys: Sequence[bytes]) -> tuple[str, ...]:
        """The column whose text is the key in every record; the keys of the last rows are last."""
        rows = self._rows[-min(len(self._rows), len(keys)) :]
        texts = [key.decode(errors="replace") for key in keys[-len(rows) :]] if rows else []
        for name in self.columns.names:
            pairs = zip(rows, texts, strict=True)
            if rows and all(str(row.get(name)) == text for row, text in pairs):
                return (name,)
        return ()


def _times(columns: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Columns of text of which every value is a time, as a declared column reads it."""
    times: dict[str, str] = {}
    for name in (
        f.name for f in columns if pa.types.is_large_string(f.type) or pa.types.is_string(f.type)
    ):
        values = [json.dumps({name: row[name]}).encode() for row in rows if row.get(name)]
        for kind in _TIME_TYPES if values and name.isidentifier() else ():
            declared = RecordFormat("json", declared=declared_columns({name: kind}))
            if not Decoder(declared).decode(values)[1]:
                times[name] = kind
                break
    return times


def _json_object(value: bytes) -> Mapping[str, Any] | None:
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _payload(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The payload beside Kafka Connect's schema, or the document itself."""
    if document.keys() <= {"schema", "payload"} and "payload" in document:
        payload = document["payload"]
        return payload if isinstance(payload, dict) else None
    return document
