"""The recipes in `deploy/`, and the commands that the guides tell an operator to type."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import typer.main
import yaml

from frazil import errors
from frazil.cli.commands import app
from frazil.cli.examples import EXAMPLES
from frazil.config.model import Config, from_document, tomllib
from frazil.errors import kinds

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = [
    (path.name, document["kind"], document)
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
#: Exit codes after which a restart of the sink does not help.
FINAL = {ending.exit_code for ending in kinds().values()} - {
    errors.FrazilError.exit_code,
    errors.Retryable.exit_code,
    errors.NotProven.exit_code,  # no run ends so
}


def containers(document: Any) -> list[dict[str, Any]]:
    """The containers of a manifest, at whatever depth."""
    if isinstance(document, list):
        return [container for item in document for container in containers(item)]
    if not isinstance(document, dict):
        return []
    nested = [container for item in document.values() for container in containers(item)]
    return [*document.get("containers", ()), *nested]


def problem_of(words: list[str]) -> str:
    """What is wrong with a frazil command line; empty: nothing. Values are not looked at."""
    command: click.Command = typer.main.get_command(app)
    while hasattr(command, "commands"):  # click's group, or typer's own copy of it
        if not words or words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    options = {
        name: parameter
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    options |= {"--help": None}
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    given = 0
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            given += 1
            continue
        name, equals, _ = word.partition("=")
        if name not in options:
            return f"{command.name} has no option {name}"
        parameter = options[name]
        if parameter is not None and not getattr(parameter, "is_flag", False) and not equals:
            next(rest, None)
    lacking = [
        p.opts[0]
        for p in options.values()
        if p is not None
        and p.required
        and p.param_type_name == "option"
        and not set(p.opts) & set(words)
    ]
    if lacking and "--help" not in words and given:
        return f"{command.name} needs {lacking[0]}"
    many = any(parameter.nargs == -1 for parameter in arguments)
    if given > len(arguments) and not many:
        return f"{command.name} takes {len(arguments)} arguments, found {given}"
    return ""


def commands_of(text: str) -> list[str]:
    """The frazil commands of a page, without what the shell makes of their output."""
    shown = re.findall(r"^\$ (frazil .*)$", text, re.M) + re.findall(r"`(frazil [a-z][^`]*)`", text)
    unquoted = r"""(?=(?:[^'"]|'[^']*'|"[^"]*")*$)"""
    return [
        part.strip()
        for line in shown
        for part in re.split(rf"(?:&&|;|[|>](?=\s)|#){unquoted}", line)
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("run a.toml --json", ""),
        ("offsets seek a.toml --to t:0:1", ""),
        ("dlq list a.toml", ""),
        ("offset seek", "no command offset"),
        ("status a.toml --loud", "status has no option --loud"),
        ("rewind a.toml --dry-run", "rewind needs --to"),
        ("status a.toml b.toml", "status takes 1 arguments, found 2"),
    ],
)
def test_command_lines_are_checked(line: str, problem: str):
    assert problem_of(shlex.split(line)) == problem


@pytest.mark.parametrize(
    "page", [p.relative_to(ROOT).as_posix() for p in (ROOT / "docs" / "guide").glob("*.md")]
)
def test_every_command_of_a_guide_exists(page: str):
    wrong = []
    for line in commands_of((ROOT / page).read_text()):
        if line.startswith("frazil ") and "…" not in line:
            words = [word for word in shlex.split(line)[1:] if word not in ("…", "...")]
            if problem := problem_of(words):
                wrong.append((line, problem))
    assert wrong == []


@pytest.mark.parametrize(("path", "rest"), EXAMPLES.items())
def test_every_example_of_a_help_is_a_command(path: str, rest: str):
    assert problem_of(shlex.split(f"{path} {rest}")) == ""


def test_the_runbook_has_every_error_that_an_operator_must_act_on():
    text = (ROOT / "docs" / "guide" / "runbook.md").read_text()
    unknown_cause = {"Fatal", "NotProven", "AccountingError", "Overlap", "Unwritable"}
    final = {n for n, kind in kinds().items() if issubclass(kind, errors.Fatal)} - unknown_cause
    assert {name for name in final if name not in text} == set()


# ── container ────────────────────────────────────────────────────────────────────────────────────


def test_hadolint_finds_nothing_in_the_containerfile():
    hadolint = Path(sys.executable).with_name("hadolint")
    lint = subprocess.run(
        [hadolint, DEPLOY / "container" / "Containerfile"], capture_output=True, text=True
    )
    assert (lint.returncode, lint.stdout) == (0, "")


def test_the_container_gets_the_versions_that_are_tested():
    def pins(path: Path) -> set[str]:
        return set(re.findall(r"^[\w.\[\]-]+==\S+", path.read_text(), re.M))

    runtime = pins(DEPLOY / "container" / "requirements.lock")
    assert {pin.split("==")[0] for pin in runtime} >= {"pyspark", "pyarrow", "numba", "hatchling"}
    assert runtime <= pins(ROOT / "requirements.lock")


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("file", "kind", "document"), MANIFESTS)
def test_manifests_are_valid(file: str, kind: str, document: dict[str, Any]):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_manifest_with_an_unknown_field_is_refused():
    wrong = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "datas": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_configs_in_manifests_are_configs():
    texts = [
        text
        for _, kind, document in MANIFESTS
        if kind == "ConfigMap"
        for name, text in document["data"].items()
        if name.endswith(".toml")
    ]
    assert [type(from_document(tomllib.loads(text))) for text in texts] == [Config]


def test_containers_run_commands_that_exist():
    lines = [
        container["args"] for _, _, document in MANIFESTS for container in containers(document)
    ]
    assert [line[0] for line in lines] == ["audit", "run"]
    assert [problem_of(line) for line in lines] == ["", ""]


def test_a_pod_has_time_to_commit_before_it_is_killed():
    [pod] = [
        document["spec"]["template"]["spec"]
        for _, kind, document in MANIFESTS
        if kind == "Deployment"
    ]
    assert pod["terminationGracePeriodSeconds"] > 60  # `Run.stop` waits so long for the commits


# ── systemd ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="a machine without systemd")
def test_systemd_takes_the_unit(tmp_path: Path):
    """With a program and a user that there are."""
    text = (DEPLOY / "systemd" / "frazil@.service").read_text()
    assert text.count("/opt/frazil/bin/frazil") == 1
    unit = tmp_path / "frazil@.service"

    def verified(content: str) -> tuple[int, str]:
        unit.write_text(content)
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "frazil@orders.service")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return ran.returncode, ran.stdout + ran.stderr

    valid = text.replace("/opt/frazil/bin/frazil", sys.executable)
    valid = re.sub(r"^(User|Group)=.*$", r"\1=root", valid, flags=re.M)
    assert verified(valid) == (0, "")
    code, warnings = verified(valid.replace(sys.executable, "/no/such"))
    assert (code, "not executable" in warnings) == (1, True), "else nothing is verified"


def test_the_systemd_unit_restarts_where_a_restart_helps():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "frazil@.service")
    service = unit["Service"]
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == FINAL
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > 60
    assert problem_of(shlex.split(service["ExecStart"])[1:]) == ""
