"""Check of one connection: VALIDATE CONNECTION.

In: the kind of a connection and its properties. Out: findings of a real attempt: Kafka's metadata,
the registry's subjects, a table that the catalog is asked for, the buckets of an object store.
Nothing is changed. Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, S3FileSystem

from frazil.config.model import Config, from_document
from frazil.config.settings import Settings
from frazil.errors import ConfigError
from frazil.ops.check import side_by_side
from frazil.ops.check_catalog import CatalogCheck
from frazil.ops.check_kafka import BrokerCheck
from frazil.ops.check_registry import registry_findings
from frazil.ops.findings import CheckFinding
from frazil.spark.open_table import Open, not_made_yet

#: Seconds for an answer; Spark, where the catalog needs it, takes some of them to start.
_LIMIT, _SPARK_LIMIT = 10.0, 90.0
#: A table that is asked for, to see whether the catalog answers.
_ABSENT = "frazil_validate.absent"

Findings = list[CheckFinding]


def connection_findings(
    kind: str, properties: Mapping[str, str], opener: Callable[[Config], Open]
) -> Findings:
    """`kind`: kafka, registry, catalog or aws; `properties`: with references to secrets."""
    try:
        config = _config(kind, properties)
        Settings(properties).resolved()
    except ConfigError as error:
        return [CheckFinding.of("secrets", error)]
    checks: dict[str, Callable[[], Findings]] = {
        "kafka": lambda: _kafka(config),
        "registry": lambda: registry_findings(config, ()),
        "catalog": lambda: _catalog(config, opener(config)),
        "aws": lambda: _object_store(properties),
    }
    limit = _SPARK_LIMIT if kind == "catalog" else _LIMIT
    return side_by_side({_AREAS[kind]: checks[kind]}, limit)[_AREAS[kind]]


_AREAS = {"kafka": "broker", "registry": "registry", "catalog": "catalog", "aws": "storage"}


def _config(kind: str, properties: Mapping[str, str]) -> Config:
    """A config with this connection, and stand-ins for the others."""
    document: dict[str, Any] = {
        "sink": {"id": "validate", "topics": ["none"]},
        "kafka": {"bootstrap.servers": "none"},
        "catalog": {"type": "hadoop", "warehouse": "none"},
        "decode": {"format": "raw"},
        "table": [{"name": _ABSENT}],
    }
    if kind == "registry":
        document["decode"] = {"registry": dict(properties)}
    elif kind != "aws":
        document[kind] = dict(properties)
    return from_document(document)


def _kafka(config: Config) -> Findings:
    check = BrokerCheck(config)
    check.connect()
    return check.findings


def _catalog(config: Config, opened: Open) -> Findings:
    if not_made_yet(config):
        return CatalogCheck(config, opened).run()
    opened(_ABSENT)
    kind = config.catalog.properties.get("type", "") or "catalog-impl"
    warehouse = config.catalog.properties.get("warehouse", "").removeprefix("file:")
    if kind == "hadoop" and "://" not in warehouse and not Path(warehouse).is_dir():
        says = f"there is no folder {warehouse}: the first table makes it"
        return [CheckFinding("catalog", "warning", says, setting=("catalog", "warehouse"))]
    return [CheckFinding("catalog", "ok", f"the {kind} catalog answers")]


def _object_store(properties: Mapping[str, str]) -> Findings:
    """Buckets are listed: who may not list them is known to the store all the same."""
    given = Settings(properties).resolved()
    names = {
        "access_key": "s3.access-key-id",
        "secret_key": "s3.secret-access-key",
        "session_token": "s3.session-token",
        "region": "client.region",
        "endpoint_override": "s3.endpoint",
        "role_arn": "client.assume-role.arn",
        "external_id": "client.assume-role.external-id",
    }
    options: dict[str, Any] = {name: given[key] for name, key in names.items() if key in given}
    where = given.get("s3.endpoint") or f"AWS in {given.get('client.region', 'no region')}"
    try:
        store = S3FileSystem(**options, connect_timeout=4, request_timeout=8)
        count = len(store.get_file_info(FileSelector("")))
    except (OSError, ValueError) as error:
        says = str(error)
        if "AccessDenied" in says or "ACCESS_DENIED" in says:
            says = f"{where} knows the credentials; they may not list buckets"
            return [CheckFinding("storage", "warning", says)]
        hint = "check keys, region and endpoint"
        return [CheckFinding("storage", "error", f"cannot use {where}: {says[:400]}", hint)]
    return [CheckFinding("storage", "ok", f"{where} answers; {count} buckets")]
