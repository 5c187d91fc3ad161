"""The `CommitEvents` of a committer under test: each test says only what matters to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frazil.commit.commit_queue import CommitTrigger
from frazil.commit.committer import Located
from frazil.commit.protocol import TableCommitter
from frazil.ledger.staged_batch import StagedBatch


def _nothing(*_: Any) -> None: ...


@dataclass
class Events:
    table: Callable[[str], TableCommitter]
    index_manifests: Callable[[Sequence[Located]], list[str]] = lambda _: []
    recorded_tables: Callable[[], Mapping[str, str]] = field(default=dict)
    trigger: Callable[[str], CommitTrigger] = lambda _: CommitTrigger()
    step: Callable[..., None] = _nothing
    failed: Callable[..., None] = _nothing
    indexed: Callable[[Sequence[StagedBatch]], None] = _nothing
    committed: Callable[[Sequence[StagedBatch]], None] = _nothing
    maintain: Callable[[], float | None] = lambda: None
