"""Checks of this machine, before a sink runs: files, ports, programs and secrets.

In: a config. Out: findings, each with its setting. Nothing is created, and no server but that of a
running sink is asked. Runs on the driver.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from frazil.config.messages import within
from frazil.config.model import Config
from frazil.config.monitoring_checks import check_webhook
from frazil.config.select import table_selection
from frazil.config.settings import resolve, resolve_reference
from frazil.config.units import address
from frazil.errors import ConfigError, FrazilError, passwords_in
from frazil.formats import schema_sample
from frazil.ops.findings import CheckFinding

#: Seconds in which a running sink answers.
_ANSWER = 1.0


def machine_findings(config: Config) -> list[CheckFinding]:
    """Secrets that are not there, and all that a start opens before it claims anything."""
    return [
        *_settings(config),
        *_schemas(config),
        *_salts(config),
        *_notify(config),
        *_files(config),
        *_port(config),
        *_packages(config),
    ]


def _settings(config: Config) -> Iterator[CheckFinding]:
    sections = {
        ("kafka",): config.kafka,
        ("decode", "registry"): config.decode.registry,
        ("catalog",): config.catalog.properties,
        ("spark",): config.spark,
    }
    for path, settings in sections.items():
        for key, value in settings.items():
            try:
                resolve(key, value)
            except ConfigError as error:
                yield CheckFinding.of("secrets", error, (*path, key))
            if passwords_in(value):
                says = f"[{'.'.join(path)}] {key} contains a password, which output masks"
                hint = f'make all of it a reference: {key} = "env:NAME"'
                yield CheckFinding("secrets", "warning", says, hint, (*path, key))


def _schemas(config: Config) -> Iterator[CheckFinding]:
    for key in ("schema", "key_schema"):
        if given := getattr(config.decode, key):
            try:
                schema_sample.text_of(given)
            except ConfigError as error:
                yield CheckFinding.of("config", error, ("decode", key))


def _salts(config: Config) -> Iterator[CheckFinding]:
    for number, table in enumerate(config.tables):
        selection = table_selection(table)
        for salt in sorted(selection.salts) if selection else ():
            path = ("table", str(number), "select")
            try:
                if not resolve("secret of select", salt):
                    raise ConfigError(f"cannot use table {table.name}: the salt {salt} is empty")
            except ConfigError as error:
                yield CheckFinding.of("secrets", error, path)


def _notify(config: Config) -> Iterator[CheckFinding]:
    notify = config.notify
    references: dict[tuple[str, ...], str] = {("webhook",): notify.webhook}
    references |= {("headers", name): value for name, value in notify.headers.items()}
    for path, value in references.items():
        try:
            resolved = resolve_reference(f"[notify] {' '.join(path)}", value) if value else ""
            if path == ("webhook",) and resolved:
                with within("notify"):
                    check_webhook(resolved)
        except ConfigError as error:
            yield CheckFinding.of("secrets", error, ("notify", *path))
    if notify.command and (says := missing_command(notify.command[0])):
        hint = "give its whole path, or a program that is in PATH, and allow its execution"
        yield CheckFinding("config", "error", says, hint, ("notify", "command"))


def missing_command(program: str) -> str:
    """Why the program of a notification cannot be started; empty: it can."""
    if shutil.which(program):
        return ""
    return f"cannot call [notify] command: {program} is no program that may be executed"


def _files(config: Config) -> Iterator[CheckFinding]:
    for path, file in (
        (("log", "file"), config.log.file),
        (("health", "file"), config.health.file),
    ):
        if not file:
            continue
        folder = Path(file).absolute().parent
        fact = ""
        if not folder.is_dir():
            fact = f"there is no folder {folder}"
        elif Path(file).is_dir():
            fact = "it is a folder"
        elif path[0] == "health" or not Path(file).exists():  # replaced as a whole
            fact = "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written to"
        elif not os.access(file, os.W_OK):
            fact = "it may not be written to"
        if fact:
            says = f"cannot write [{path[0]}] file {file}: {fact}"
            yield CheckFinding("config", "error", says, f"mkdir -p {folder}, or another file", path)


def _port(config: Config) -> Iterator[CheckFinding]:
    if not config.metrics.address:
        return
    setting = ("metrics", "address")
    host, port = address(config.metrics.address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            server.bind((host, port))
            server.listen(1)
    except (OSError, OverflowError) as error:
        if port and config.sink.id in _served(host, port):
            says = f"the sink runs, and serves its metrics at {config.metrics.address}"
            yield CheckFinding("config", "ok", says)
            return
        fact = getattr(error, "strerror", None) or error
        says = f"cannot serve metrics at {config.metrics.address}: {fact}"
        yield CheckFinding(
            "config", "error", says, "choose another port, or 0 for a free one", setting
        )


def _served(host: str, port: int) -> list[str]:
    """The sinks of a process of Frazil that listens there."""
    shown = f"[{host}]" if ":" in host else host.replace("0.0.0.0", "127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://{shown}:{port}/readyz", timeout=_ANSWER) as answer:
            body = answer.read(1_000_000)
    except urllib.error.HTTPError as error:
        body = error.read(1_000_000)
    except (OSError, ValueError):
        return []
    try:
        return [str(sink["sink"]) for sink in json.loads(body)["sinks"]]
    except (ValueError, KeyError, TypeError):
        return []


def _packages(config: Config) -> Iterator[CheckFinding]:
    if not config.metrics.otlp_endpoint:
        return
    try:
        missing = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None
    except ImportError:
        missing = True
    if missing:
        says = f"cannot send metrics to {config.metrics.otlp_endpoint}: a package is missing"
        error: FrazilError = ConfigError(says, hint="pip install 'frazil[otel]'")
        yield CheckFinding.of("config", error, ("metrics", "otlp_endpoint"))
