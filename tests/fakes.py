"""A table in memory with the rules of the real one, for tests of the committer: the part of
`iceberg.table.Table` that `TableCommitter` calls.

`tests/spark/test_table_contract.py` runs one suite on this and on Iceberg, so it cannot drift.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from frazil.errors import CommitStateUnknown, Conflict, Unavailable
from frazil.iceberg.table import Snapshot


class FakeTable:
    def __init__(self, name: str = "db.t", uuid: str = "uuid-1") -> None:
        self.name = name
        self.uuid = uuid
        self.snapshots: dict[int, Snapshot] = {}
        self.manifests: dict[int, list[str]] = {}  # what each snapshot added
        #: all that ever were; and whether earlier metadata files still tell of them
        self.every: dict[int, Snapshot] = {}
        self.metadata_kept = False
        #: a compaction has rewritten every manifest
        self.rewritten = False
        self.refs: dict[str, int] = {}
        self.deleted: list[str] = []
        self.properties: dict[str, str] = {}
        #: what the next appends do: "lost" applies and fails, "dropped" fails, "race" lets another
        #: writer in first; empty: works
        self.faults: list[str] = []
        self.race: Callable[[], None] = lambda: None
        self._ids = itertools.count(100)

    def refresh(self) -> None: ...

    def history(self, branch: str) -> Iterator[Snapshot]:
        at = self.refs.get(branch)
        while at is not None and at in self.snapshots:
            yield self.snapshots[at]
            at = self.snapshots[at].parent

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        at: int | None = snapshot_id if self.metadata_kept else None
        while at in self.every:
            yield self.every[at]
            at = self.every[at].parent

    def carries(self, branch: str, snapshot_id: int) -> bool:
        kept, self.metadata_kept = self.metadata_kept, True
        behind = [snapshot.id for snapshot in self.expired(self.refs[branch])]
        listed = [
            snapshot.id for snapshot in self.expired(snapshot_id) if self.manifests[snapshot.id]
        ]
        self.metadata_kept = kept
        return not listed or (listed[0] in behind and not self.rewritten)

    def tagged(self, tag: str) -> Snapshot | None:
        return self.snapshots.get(self.refs[tag]) if tag in self.refs else None

    def tag(self, tag: str, snapshot_id: int, was: int | None) -> None:
        if self.refs.get(tag) != was:
            raise Conflict(f"cannot move {tag}: expected it at {was}")
        self.refs[tag] = snapshot_id

    def set_property(self, key: str, value: str) -> None:
        self.properties = {**self.properties, key: value}

    def untag(self, tag: str) -> None:
        self.refs.pop(tag, None)

    def delete(self, path: str) -> None:
        self.deleted.append(path)

    def lacking(self, manifests: Sequence[str]) -> list[str]:
        return [path for path in manifests if path in self.deleted]

    def append(
        self,
        manifests: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
        tag: str = "",
    ) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "dropped":
            raise Unavailable("cannot commit: 503")
        if fault == "race":
            self.race()
        if refusal := check(self.history(branch)):
            leftovers.append(f"/snap-refused-{next(self._ids)}.avro")
            raise CommitStateUnknown(f"cannot commit: ValidationException: {refusal}")
        self.add(manifests, summary, branch)
        if fault == "lost":
            raise CommitStateUnknown("cannot commit: CommitStateUnknownException")

    def add(
        self, manifests: Sequence[str], summary: Mapping[str, str], branch: str = "main"
    ) -> Snapshot:
        """Any writer's append, ours or foreign."""
        number = next(self._ids)
        snapshot = Snapshot(
            id=number,
            parent=self.refs.get(branch),
            sequence=number - 99,  # never falls
            timestamp_ms=number,
            operation="append",
            summary=dict(summary),
            manifest_list=f"/snap-{number}.avro",
        )
        self.snapshots[number] = self.every[number] = snapshot
        self.manifests[number] = list(manifests)
        self.refs[branch] = number
        return snapshot

    def count(self) -> int:
        return len(self.snapshots)

    def expire(self, keep: int = 1) -> None:
        """Remove all but the newest `keep` snapshots of main, and what tags hold."""
        held = {number for ref, number in self.refs.items() if ref != "main"}
        recent = [snapshot.id for snapshot in self.history("main")][:keep]
        for number in list(self.snapshots):
            if number not in held and number not in recent:
                del self.snapshots[number]

    def live(self, branch: str = "main") -> list[str]:
        """All manifests a reader of the branch sees, oldest first."""
        per_snapshot = [self.manifests[s.id] for s in self.history(branch)]
        return [manifest for added in reversed(per_snapshot) for manifest in added]


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
