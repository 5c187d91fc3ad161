"""The audit of one sink, as `frazil audit` and AUDIT SINK make it."""

from __future__ import annotations

from collections.abc import Callable

from frazil.auditing import evidence
from frazil.auditing.evidence import AuditLimits, AuditResult
from frazil.cli.app import sink_opener
from frazil.config.model import Config
from frazil.monitoring.audit_event import notify_audit


def proof_of(
    config: Config,
    *,
    deep: bool = False,
    kafka: bool | None = None,
    limits: AuditLimits | None = None,
    spark: bool | None = None,
    say: Callable[[str], None],
) -> AuditResult:
    """The proof, and its event for `[notify]`."""
    proof = evidence.of_config(
        config,
        sink_opener(config, spark),
        deep=deep,
        ask=kafka,
        limits=limits or AuditLimits(),
        say=say,
    )
    if config.notify:
        tables = {f"{r.table} of {r.sink}": r.verdict for r in proof.reports}
        notify_audit(config, proof.verdict, tables, proof.proven)
    return proof
