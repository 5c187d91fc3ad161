"""The config that `frazil init` proposes, each setting with the reason for it.

In: samples of topics, settings of Kafka, registry and catalog. Out: the text of a TOML file, which
is a checked config, and the variables that its secrets are in. Pure: asks no server.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import tomli_w

from frazil.config.checks import check_catalog
from frazil.config.model import catalog_only, from_document
from frazil.config.settings import REFERENCE, SECRET
from frazil.errors import ConfigError, passwords_in
from frazil.ops.topic_sample import TopicSample

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

#: key, value, why
Line = tuple[str, Any, str]


@dataclass(frozen=True)
class Wishes:
    """What was chosen; empty: a proposal is made."""

    kafka: Mapping[str, str]
    registry: Mapping[str, str]
    catalog: Mapping[str, str]
    sink: str
    #: one for each topic
    tables: Sequence[str]
    dead_letters: str = ""


@dataclass
class ConfigProposal:
    JSON: ClassVar = "file sink proposals variables"

    sink: str
    text: str
    proposals: list[dict[str, Any]]
    #: variables that must be set, because a secret is never in the file
    variables: list[str] = field(default_factory=list)
    file: str = ""

    def lines(self) -> Iterator[str]:
        if not self.file:
            yield self.text
            return
        yield f"{self.file} written:"
        for proposal in self.proposals:
            yield f"  [{proposal['section']}] {proposal['key']}: {proposal['reason']}"
        yield "next:"
        for variable in self.variables:
            yield f"  export {variable}=…"
        for command in ("check", "plan", "run"):
            yield f"  frazil {command} {self.file}"


def new_config(samples: Sequence[TopicSample], wishes: Wishes) -> ConfigProposal:
    formats = {(sample.format, sample.debezium) for sample in samples}
    if len(formats) > 1:
        kinds = ", ".join(f"{sample.topic}: {sample.format}" for sample in samples)
        raise ConfigError(
            f"cannot read these topics with one sink: their records are of several formats: "
            f"{kinds}",
            hint="make a config for each format",
        )
    if any(sample.times != samples[0].times for sample in samples):
        # A declared column is one of every table.
        samples = [replace(sample, times={}) for sample in samples]
    variables: list[str] = []
    first = samples[0]
    sections: list[tuple[str, list[Line]]] = [
        ("[sink]", _sink(samples, wishes)),
        ("[kafka]", _passed("kafka", wishes.kafka, variables)),
        ("[decode]", _decode(first)),
    ]
    if wishes.registry and first.format == "confluent-avro":
        passed = _passed("registry", wishes.registry, variables)
        sections.append(("[decode.registry]", passed))
    sections.append(("[catalog]", _passed("catalog", wishes.catalog, variables)))
    for sample, table in zip(samples, wishes.tables, strict=True):
        sections.append(("[[table]]", _table(sample, table)))
    for sample, table in zip(samples, wishes.tables, strict=True):
        if len(samples) > 1 or sample.debezium:
            sections.append(("[[route]]", _route(sample, table, len(samples) > 1)))
    namespace = wishes.tables[0].rpartition(".")[0]
    dead_letters = wishes.dead_letters or f"{namespace}.dead_letters"
    why = "records that cannot be read or written go there, and do not stop the stream"
    sections.append(("[dead_letters]", [("table", dead_letters, why)]))
    text = _text(sections)
    check_catalog(from_document(tomllib.loads(text)))  # what is proposed is a config
    proposals = [
        {"section": title.strip("[]"), "key": key, "value": value, "reason": why}
        for title, lines in sections
        for key, value, why in lines
        if why
    ]
    return ConfigProposal(wishes.sink, text, proposals, variables)


def check_options(catalog: Mapping[str, str], registry: Mapping[str, str]) -> None:
    """Raises for settings that no config may have, before a server is asked."""
    _passed("registry", registry, [])
    properties = {key: value for key, value, _ in _passed("catalog", catalog, [])}
    check_catalog(catalog_only("a.b", properties))


def _text(sections: Sequence[tuple[str, Sequence[Line]]]) -> str:
    blocks = ["# Made by `frazil init`; every key: docs/reference/config.md"]
    for title, lines in sections:
        block = [title]
        for key, value, why in lines:
            block += [f"# {why}"] if why else []
            name = tomli_w.dumps({key: ""}).strip().removesuffix('""')
            block.append(f"{name}{_inline(value)}")
        blocks.append("\n".join(block))
    return "\n\n".join(blocks) + "\n"


def _inline(value: Any) -> str:
    """A value on one line: strings of JSON are strings of TOML."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(k, ensure_ascii=False)} = {_inline(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    return json.dumps(value, ensure_ascii=False)


def _sink(samples: Sequence[TopicSample], wishes: Wishes) -> list[Line]:
    names = [sample.topic for sample in samples]
    return [
        ("id", wishes.sink, "names the sink in the tables' ledgers: never change it"),
        ("topics", names, ""),
        (
            "starting_offsets",
            "earliest",
            "only for the first start; afterwards the tables know the position",
        ),
        ("commit_interval", "1m", "rows are visible after at most this long"),
    ]


def _decode(sample: TopicSample) -> list[Line]:
    lines: list[Line] = [("format", sample.format, sample.because)]
    default = sample.format if sample.format in ("json", "confluent-avro") else "text"
    if sample.key_format and sample.key_format != default:
        why = f"the records' keys are {sample.key_format}"
        lines.append(("key_format", sample.key_format, why))
    if sample.times:
        names = ", ".join(sample.times)
        why = f"every value of {names} in the sample is a time; one that is none is rejected"
        lines.append(("columns", dict(sample.times), why))
    return lines


def _table(sample: TopicSample, table: str) -> list[Line]:
    lines: list[Line] = [("name", table, "")]
    changing = sample.debezium or sample.tombstones or sample.compacted
    if sample.key and changing:
        reason = (
            "the records are changes of a database"
            if sample.debezium
            else "the topic has records without a value, which delete"
            if sample.tombstones
            else "the topic is compacted: only the newest record of a key counts"
        )
        lines.append(("mode", "upsert", f"{reason}; append would keep every record as a row"))
        lines.append(("key", list(sample.key), "the columns that Kafka's keys are of"))
        return lines
    reason = "every record is a row"
    if changing:
        reason += "; upsert needs keys that are columns of the value, and the sample shows none"
    elif sample.key:
        reason += f"; for the newest row of each {', '.join(sample.key)}: upsert, and key"
    lines.append(("mode", "append", reason))
    if sample.event_time and not sample.debezium:
        why = "when it happened; it decides which hours are complete"
        lines.append(("event_time", sample.event_time, why))
        why = "a day of events is a partition"
        lines.append(("partition_by", [f"day({sample.event_time})"], why))
    elif not sample.timeless:
        why = "a day of Kafka's timestamps is a partition; no column of the records is a timestamp"
        lines.append(("partition_by", ["day(_timestamp)"], why))
    return lines


def _route(sample: TopicSample, table: str, several: bool) -> list[Line]:
    lines: list[Line] = [("topics", [sample.topic], "")] if several else []
    lines.append(("to", [table], ""))
    if sample.debezium:
        why = "rows are the change's before and after, and not the envelope"
        lines.append(("envelope", "debezium", why))
    return lines


def _passed(section: str, settings: Mapping[str, str], variables: list[str]) -> list[Line]:
    """Settings that pass through; a secret becomes a reference to a variable."""
    lines: list[Line] = []
    for key, value in settings.items():
        if passwords_in(value):
            variable = variable_of(section, key)
            raise ConfigError(
                f"cannot write [{section}] {key}: it contains a password; expected "
                f"{key}=env:NAME, found {value}",
                hint=f"export {variable}=…, and {key}=env:{variable}",
            )
        if SECRET.search(key) and not REFERENCE.match(value):
            variable = variable_of(section, key)
            variables.append(variable)
            lines.append((key, f"env:{variable}", "a secret is never in the file"))
        else:
            if value.startswith("env:"):
                variables.append(value.removeprefix("env:"))
            lines.append((key, value, ""))
    return lines


def variable_of(section: str, key: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", f"{section}_{key}".upper())


def name_of(topic: str) -> str:
    """A topic's name as that of a sink or table."""
    name = re.sub(r"[^a-z0-9_]+", "_", topic.lower()).strip("_")
    return name or "events"


def write_new(path: Path, text: str) -> None:
    """Raises where there is a file already."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"cannot write {path}: it exists already", hint="give another file: -o NAME.toml"
        ) from None
    except (OSError, ValueError) as error:
        fact = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot write {path}: {fact}") from None
