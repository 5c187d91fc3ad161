"""`frazil init`: asks the broker and the registry what is there, and writes a config."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from frazil.cli.app import Unasked, app, command, progress
from frazil.config.settings import resolve
from frazil.errors import ConfigError
from frazil.render import Report

#: Catalog types that are asked for → the properties that each needs.
_CATALOGS = {
    "hadoop": ("warehouse",),
    "jdbc": ("uri", "warehouse"),
    "rest": ("uri", "warehouse"),
    "glue": ("warehouse",),
    "hive": ("uri", "warehouse"),
    "nessie": ("uri", "warehouse"),
}

Pairs = Annotated[
    list[str], typer.Option("--kafka", help="KEY=VALUE of \\[kafka], e.g. security.protocol=SSL.")
]


@command(app)
def init(
    bootstrap_servers: Annotated[str, typer.Option(help="Kafka: host:port, with commas.")] = "",
    topic: Annotated[list[str], typer.Option(help="Topic to read; may be repeated.")] = [],  # noqa: B006
    table: Annotated[
        list[str], typer.Option(help="NAMESPACE.TABLE, one for each topic, in their order.")
    ] = [],  # noqa: B006
    catalog: Annotated[
        list[str], typer.Option(help="KEY=VALUE of \\[catalog], e.g. type=rest.")
    ] = [],  # noqa: B006
    registry: Annotated[
        list[str], typer.Option(help="The registry's URL, or KEY=VALUE of \\[decode.registry].")
    ] = [],  # noqa: B006
    kafka: Pairs = [],  # noqa: B006
    sink: Annotated[str, typer.Option("--id", help="The sink's id; default: the topic.")] = "",
    output: Annotated[
        str, typer.Option("-o", "--output", help="File to write; - prints it. Default: ID.toml.")
    ] = "",
    yes: Unasked = False,
) -> Report:
    """Look at a topic and write a commented config for it; nothing is overwritten."""
    from frazil.ops import config_proposal
    from frazil.ops.topic_sample import sample_topic, topic_names

    asking = sys.stdin.isatty() and not yes
    # Errors of the options are reported before any server is asked.
    others, given = _pairs("--kafka", kafka), _pairs("--catalog", catalog)
    registered = _pairs("--registry", [r if _is_pair(r) else f"url={r}" for r in registry])
    if given or not asking:
        config_proposal.check_options(_catalog(given, asking=False), registered)
    if not bootstrap_servers:
        if not asking:
            raise ConfigError(
                "cannot ask the broker: expected --bootstrap-servers, found none",
                hint="frazil init --bootstrap-servers localhost:9092 --topic NAME …",
            )
        bootstrap_servers = _asked("Kafka's bootstrap.servers", "localhost:9092", asking)
    settings = {"bootstrap.servers": bootstrap_servers, **others}
    reading = _resolved(settings)
    known = topic_names(reading)
    topics = topic or _chosen(known, asking)
    try:
        samples = [sample_topic(reading, name, _resolved(registered), known) for name in topics]
    except ConfigError as error:
        if not asking or registered or "registry" not in error.hint:
            raise
        registered = {"url": _asked("the schema registry's URL", "http://localhost:8081", asking)}
        samples = [sample_topic(reading, name, registered, known) for name in topics]
    for sample in samples:
        progress.print(f"{sample.topic}: {sample.because}", highlight=False, soft_wrap=True)
    identity = sink or config_proposal.name_of(topics[0])
    names = [config_proposal.name_of(name) for name in topics]
    tables = table or [_asked("the table", f"streams.{name}", asking) for name in names]
    _check_count(tables, topics)
    wishes = config_proposal.Wishes(settings, registered, _catalog(given, asking), identity, tables)
    made = config_proposal.new_config(samples, wishes)
    if output != "-":
        made.file = output or f"{identity}.toml"
        config_proposal.write_new(Path(made.file), made.text)
    return made


def _check_count(tables: list[str], topics: list[str]) -> None:
    if len(tables) != len(topics):
        raise ConfigError(
            f"cannot name the tables: expected one for each of {len(topics)} topics, found "
            f"{len(tables)}",
            hint="--table NAMESPACE.TABLE, once for each --topic",
        )


def _asked(name: str, default: str, asking: bool) -> str:
    return str(typer.prompt(name, default=default, err=True)) if asking else default


def _chosen(known: Mapping[str, int], asking: bool) -> list[str]:
    """Topics by their names or numbers in a list."""
    names = list(known)
    if not asking or not names:
        fact = f"; there are {', '.join(names[:8])}" if names else "; the broker has none"
        raise ConfigError(
            f"cannot choose a topic: expected --topic{fact}", hint="frazil init --topic NAME …"
        )
    for number, name in enumerate(names, 1):
        progress.print(f"{number:>4}  {name} ({known[name]} partitions)", highlight=False)
    answer = _asked("topics, by name or number, with commas", names[0], asking)
    words = [word.strip() for word in answer.split(",") if word.strip()]
    return [
        names[int(w) - 1] if w.isdigit() and w not in known and 0 < int(w) <= len(names) else w
        for w in words
    ]


def _catalog(given: Mapping[str, str], asking: bool) -> dict[str, str]:
    settings = dict(given)
    if not settings and not asking:
        raise ConfigError(
            "cannot write a config: no catalog is given",
            hint="--catalog type=hadoop --catalog warehouse=/path; or type=rest, jdbc, glue, hive",
        )
    if "type" not in settings and "catalog-impl" not in settings:
        settings["type"] = _asked(f"the catalog's type ({', '.join(_CATALOGS)})", "hadoop", asking)
    kind = settings.get("type", "")
    for key in _CATALOGS.get(kind, ()) if asking else ():
        default = str(Path("lake").absolute()) if key == "warehouse" else ""
        if key not in settings:
            settings[key] = _asked(f"the catalog's {key}", default, asking)
    if kind == "jdbc":
        settings.setdefault("jdbc.schema-version", "V1")
    return settings


def _is_pair(text: str) -> bool:
    return "=" in text and not text.startswith(("http://", "https://"))


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    for text in texts:
        if not text.partition("=")[1] or not text.partition("=")[0].strip():
            raise ConfigError(f"cannot read {option} {text!r}: expected KEY=VALUE")
    return {key.strip(): value for key, _, value in (text.partition("=") for text in texts)}


def _resolved(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: resolve(key, value) for key, value in settings.items()}
