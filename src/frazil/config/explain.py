"""A config in words: `frazil config explain`.

In: a checked config. Out: the path that the data takes, every setting in effect, and what stands
for an empty one. Secrets are masked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from frazil.config.model import Config
from frazil.config.settings import SECRET, Settings
from frazil.errors import without_passwords


class Explanation(dict[str, Any]):
    """The values of `frazil config explain --json`."""

    def lines(self) -> Iterator[str]:
        yield f"path: {self['path']}\nreason: {self['reason']}"
        for section, values in self["settings"].items():
            yield f"\n[{section}]"
            lines = {key: f"{key} = {json.dumps(value)}" for key, value in values.items()}
            width = min(48, max(map(len, lines.values()), default=0))
            for key, text in lines.items():
                implied = self["in_effect"].get(section, {}).get(key, "")
                origin = self["origins"][section][key]
                yield f"{text:<{width}}  # {origin}{f': {implied}' if implied else ''}"


def explain(
    config: Config,
    locations: Mapping[str, str],
    own: Mapping[str, Mapping[str, tuple[str, str]]] | None = None,
) -> Explanation:
    """`locations`: where each setting of the config comes from; `own`: section → settings that
    Frazil gives to the libraries below, with value and origin."""
    path, reason = path_taken(config)
    effective = settings(config)
    origins = {
        section: {
            key: locations.get(f"{section.replace(' ', '.')}.{key}", "default") for key in values
        }
        for section, values in effective.items()
    }
    for section, settings_of_frazil in (own or {}).items():
        for key, (value, origin) in settings_of_frazil.items():
            effective[section][key], origins[section][key] = value, origin
    return Explanation(
        path=path, reason=reason, settings=effective, origins=origins, in_effect=in_effect(config)
    )


def path_taken(config: Config) -> tuple[str, str]:
    """The data path, in the words of `frazil config explain`, and the reason for it."""
    name = ", ".join(table.name for table in config.tables)
    source = f"Kafka ({', '.join(config.sink.topics) or config.sink.topic_pattern})"
    if not config.transform:
        return (
            f"{source} → fetch, decode and write in Spark's Python workers → {name}",
            "there is no [transform]: Spark gets offset ranges, and no record enters its JVM",
        )
    query = "sql" if config.transform.sql else f"python {config.transform.python}"
    key = ", ".join(config.tables[0].upsert_key)
    shuffled = f", output mode {config.transform.output_mode} → shuffle by {key}" if key else ""
    return (
        f"{source} → fetch and decode in Python workers → rows in Spark: [transform] {query}"
        f"{shuffled} → {'upsert' if key else 'write'} in Python workers → {name}",
        "there is a [transform]: Spark's query needs rows in Spark",
    )


def settings(config: Config) -> dict[str, dict[str, Any]]:
    """Every setting in effect, section by section; secrets are masked."""
    shown: dict[str, dict[str, Any]] = {}
    names = ("sink", "kafka", "decode", "transform", "catalog", "spark", "completeness", "metrics")
    for name in (*names, "health", "log", "notify"):
        section: Any = getattr(config, name)
        values: dict[str, Any] = (
            dict(section) if isinstance(section, Settings) else dataclasses.asdict(section)
        )
        shown[name] = values
        if name == "catalog":
            values |= values.pop("properties")
        if registry := values.pop("registry", None):
            shown["decode.registry"] = dict(registry)
        if headers := values.pop("headers", None):
            shown["notify.headers"] = dict(headers)
    for number, table in enumerate(config.tables):
        shown[f"table {number}"] = dataclasses.asdict(table)
    for number, route in enumerate(config.routes):
        shown[f"route {number}"] = {**dataclasses.asdict(route), "python": str(route.python)}
    if config.dead_letters:
        shown["dead_letters"] = dataclasses.asdict(config.dead_letters)
    return {
        section: {
            key: "***" if value and _is_secret(section, key) else _without_passwords(value)
            for key, value in values.items()
        }
        for section, values in shown.items()
    }


def in_effect(config: Config) -> dict[str, dict[str, str]]:
    """The effective values of settings that are left empty."""
    sink = {
        "index_table": config.index_table,
        "consumer_group": config.group,
        "staging_location": "stage, beside the files of the index",
        "checkpoint_location": "a temporary folder",
    }
    sections = {"sink": (config.sink, sink)}
    for number, table in enumerate(config.tables):
        values = {
            "snapshot_retention": "1d and at most 1500 snapshots if a sink made the table, "
            "else never",
            "properties": "new tables keep 50 old metadata files",
            "commit_interval": config.sink.commit_interval,
            "event_time": table.timestamp_column,
        }
        sections[f"table {number}"] = (table, values)  # type: ignore[assignment]
    return {
        section: {key: text for key, text in values.items() if not getattr(given, key)}
        for section, (given, values) in sections.items()
    }


def _without_passwords(value: Any) -> Any:
    return without_passwords(value) if isinstance(value, str) else value


def _is_secret(section: str, key: str) -> bool:
    if section == "notify.headers" or (section, key) == ("notify", "webhook"):
        return True
    return section in ("kafka", "decode.registry", "catalog", "spark") and bool(SECRET.search(key))
