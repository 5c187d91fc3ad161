"""Check of the schema registry, before a sink runs.

In: a config and the topics that exist. Out: findings. The registry is asked by its own client;
nothing is registered.
"""

from __future__ import annotations

from collections.abc import Iterable

from frazil.config.model import Config
from frazil.errors import ConfigError, Unavailable
from frazil.formats.schema_registry import SchemaRegistry
from frazil.ops.findings import CheckFinding

_URL = ("decode", "registry", "url")
#: Fewer tries than a stream has: a check answers in seconds.
_BOUNDS = {"timeout": "4", "max.retries": "1", "retries.wait.ms": "100"}


def registry_findings(config: Config, topics: Iterable[str]) -> list[CheckFinding]:
    """Reachable, lets us in, and has schemas of the topics' values."""
    given = config.decode.registry.resolved()
    url = given.get("url", "")
    try:
        registry = SchemaRegistry({**_BOUNDS, **given})
        subjects = set(registry.subjects())
    except (ConfigError, Unavailable) as error:
        return [CheckFinding.of("registry", error, _URL)]
    findings = [CheckFinding("registry", "ok", f"the registry answers at {registry.url}")]
    if config.decode.schema:
        return findings
    lacking = [f"{topic}-value" for topic in topics if f"{topic}-value" not in subjects]
    if lacking:
        findings.append(
            CheckFinding(
                "registry",
                "warning",
                f"{url} has no subject {', '.join(lacking[:4])}",
                "with another naming strategy that is fine: records name their schema by its id",
            )
        )
    return findings
