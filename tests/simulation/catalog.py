"""A catalog and a store in memory: Iceberg's rules as far as a commit can meet them.

`Server` holds the tables. A commit is a `Request`: it names what it builds on, and is applied only
if that is still so (compare-and-set), now or whenever it arrives. `Table` is a client's handle: an
`iceberg.table.Table`, as `java_table.JavaTable` is, with reads that may be stale, Iceberg's own
tries and its clean-up. What a snapshot holds is plain: files with their sequence numbers.
`tests/spark/test_table_contract` holds this table to the contract that Iceberg's own fulfils.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

from frazil.errors import CommitStateUnknown, Conflict, Expired, IdentityMismatch, Unavailable
from frazil.iceberg.table import Check, DataFile, LiveFile, ManifestEntry, Snapshot
from tests.simulation.world import World

#: How often Iceberg tries a commit again by itself. (Four times; fewer show the same.)
RETRIES = 2


class File:
    """Of data, or of keys or positions that are deleted."""

    __slots__ = ("content", "descriptor", "path", "rows", "size")

    def __init__(
        self, path: str, rows: tuple[Any, ...], content: str = "data", size: int = 10, of: str = ""
    ) -> None:
        self.path = path
        self.rows = rows
        self.content = content
        self.size = size
        more = ', "equality-ids": [1]' if content == "equality-deletes" else ""
        more += f', "referenced-data-file": "{of}"' if of else ""
        self.descriptor = (
            f'{{"spec-id": 0, "content": "{content}", "file-path": "{path}", "file-format": '
            f'"parquet", "partition": [], "file-size-in-bytes": {size}, '
            f'"record-count": {len(rows)}{more}}}'
        )


@dataclass(slots=True, eq=False)
class Held:
    """A snapshot, what it holds, and what it should."""

    snapshot: Snapshot
    #: each file with its sequence number
    files: tuple[tuple[File, int], ...]
    #: paths of its manifests
    manifests: frozenset[str]
    #: the oracle's
    model: Any = None

    @property
    def paths(self) -> set[str]:
        paths = {file.path for file, _ in self.files} | self.manifests
        paths.add(self.snapshot.manifest_list)
        return paths


@dataclass(slots=True, eq=False)
class Meta:
    """A table's metadata, one version of it."""

    uuid: str
    version: int
    snapshots: dict[int, Held]
    refs: dict[str, int]
    sequence: int
    properties: dict[str, str]
    #: of each manifest, the sequence number of the commit that brought it; of all versions
    manifests: dict[str, int]

    def history(self, branch: str) -> Iterator[Snapshot]:
        at = self.refs.get(branch)
        while at is not None:
            held = self.snapshots.get(at)
            if held is None:
                return
            yield held.snapshot
            at = held.snapshot.parent

    def head(self, branch: str) -> Held | None:
        at = self.refs.get(branch)
        return None if at is None else self.snapshots.get(at)

    def next(self) -> Meta:
        return Meta(
            self.uuid,
            self.version + 1,
            dict(self.snapshots),
            dict(self.refs),
            self.sequence,
            self.properties,
            self.manifests,
        )


class Lost(Exception):
    """A compare-and-set that failed: 409."""


@dataclass(slots=True, eq=False)
class Request:
    """What a client asks of the catalog. `expected`: where references must be."""

    table: str
    uuid: str
    expected: dict[str, int | None]
    change: Callable[[Meta], Held | None]
    action: str
    branch: str = ""
    #: the whole metadata must be this version; None: the references are enough
    version: int | None = None
    #: of a snapshot with a parent: its number must be the highest
    sequence: int | None = None


class Server:
    def __init__(self, world: World) -> None:
        self.world = world
        self.tables: dict[str, Meta] = {}
        #: older versions, for those who read late
        self.past: dict[str, list[Meta]] = {}
        self.objects: dict[str, Any] = {}
        #: what was deleted: a commit may name a manifest that it does not read
        self.gone: dict[str, Any] = {}
        #: whatever was written, by its path
        self.files: dict[str, File] = {}
        self.flying: list[Request | tuple[str, Any]] = []
        self.oracle: Any = None
        #: of whole metadata, as catalogs on a database do
        self.strict = False
        #: so many earlier versions of a table's metadata can still be read
        self.kept = 100

    # ── tables ───────────────────────────────────────────────────────────────────────────────

    def create(self, name: str, properties: Mapping[str, str] = MappingProxyType({})) -> Meta:
        made = Meta(f"uuid-{name}-{self.world.number()}", 0, {}, {}, 0, dict(properties), {})
        self.tables[name] = made
        self.past[name] = [made]
        return made

    def apply(self, request: Request) -> None:
        meta = self.tables.get(request.table)
        if meta is None or meta.uuid != request.uuid:
            raise Lost
        if request.version is not None and request.version != meta.version:
            raise Lost
        if request.sequence is not None and request.sequence <= meta.sequence:
            raise Lost
        refs = meta.refs
        for name, wanted in request.expected.items():
            if refs.get(name) != wanted:
                raise Lost
        after = meta.next()
        held = request.change(after)
        self.world.say(f"applied to {request.table}: {request.action}")
        self.tables[request.table] = after
        self.past[request.table].append(after)
        if held is not None:
            self.oracle.added(request.table, meta, after, held, request.branch)
        elif after.refs != meta.refs:
            self.oracle.tagged(request.table, meta, after)
            self.oracle.moved(request.table, meta, after, request.branch)

    def arrive(self, number: int) -> None:
        """A request that its client gave up gets here."""
        late = self.flying.pop(number)
        if isinstance(late, tuple):
            self.world.say(f"arrives late: {late[0]}")
            self.objects.setdefault(late[0], late[1])
            return
        try:
            self.world.say(f"arrives late: {late.action} for {late.table}")
            self.apply(late)
        except Lost:
            self.world.say("  and comes to nothing")

    # ── objects ──────────────────────────────────────────────────────────────────────────────

    def delete(self, path: str) -> None:
        content = self.objects.pop(path, None)
        if content is not None:
            self.gone[path] = content
            self.world.say(f"deleted {path}")
            self.oracle.deleted(path, content)

    def manifest(self, path: str) -> tuple[File, ...]:
        files = self.objects.get(path, self.gone.get(path))
        if files is None:  # who moves a branch and expires may have taken it
            raise IdentityMismatch(f"cannot read {path}: it is gone")
        return files  # type: ignore[no-any-return]


def refusal(history: Iterator[Snapshot], since: int) -> str | None:
    newest = next(history, None)
    if newest is None or newest.id != since:
        return f"snapshot {since} is no longer the newest one"
    return None


class Table:
    """A handle, as `java_table.JavaTable` is one."""

    format_version = 2
    schema = spec = sort_order = ""
    schema_id = 0
    schemas: Sequence[str] = ()
    io_properties: Mapping[str, str] = MappingProxyType({})

    def __init__(self, client: Client, name: str, meta: Meta, *, made: bool = False) -> None:
        self.name = name
        self.uuid = meta.uuid
        self.made = made
        self.location = f"/{name}"
        self.meta = meta
        self._client = client
        self._server = client.server
        self._world = client.server.world

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def refresh(self) -> None:
        self._client.read(f"load {self.name}")
        self._look()

    def _look(self) -> None:
        current = self._server.tables.get(self.name)
        if current is None:
            raise IdentityMismatch(f"cannot refresh table {self.name}: it is gone")
        if current.uuid != self.uuid:
            raise IdentityMismatch(
                f"cannot commit to table {self.name}: it was dropped and recreated"
            )
        stale = self._client.stale
        if stale and current.version > self.meta.version and self._world.chance() < stale:
            past = self._server.past[self.name]
            current = past[self._world.dice.randint(self.meta.version, current.version)]
            self._world.say(f"reads {self.name} as of version {current.version}")
        self.meta = current

    def history(self, branch: str) -> Iterator[Snapshot]:
        return self.meta.history(branch)

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        self._client.read(f"read earlier metadata of {self.name}")
        end = self.meta.version
        before = self._server.past[self.name][max(0, end - self._server.kept) : end]
        wanted: int | None = snapshot_id
        for meta in reversed(before):
            while wanted is not None and wanted in meta.snapshots:
                yield meta.snapshots[wanted].snapshot
                wanted = meta.snapshots[wanted].snapshot.parent

    def carries(self, branch: str, snapshot_id: int) -> bool:
        self._client.read(f"read the manifests of {self.name}")
        meta, head = self.meta, self.meta.head(branch)
        paths = meta.snapshots[snapshot_id].manifests
        newest = max((meta.manifests[path] for path in paths), default=0)
        wanted = {path for path in paths if meta.manifests[path] == newest}
        return not wanted or (head is not None and bool(wanted & head.manifests))

    def tagged(self, tag: str) -> Snapshot | None:
        held = self.meta.head(tag)
        return held.snapshot if held else None

    def tags(self) -> dict[str, int]:
        return {name: number for name, number in self.meta.refs.items() if "/" in name}

    @property
    def properties(self) -> dict[str, str]:
        return self.meta.properties

    @property
    def readonly(self) -> Any:
        self.refresh()
        head = self.meta.head("main")
        rows = [
            {
                "commit_id": row[0],
                "table_name": row[1],
                "partition": row[2],
                "start_offset": row[3],
                "end_offset": row[4],
            }
            for file, _ in (head.files if head else ())
            for row in file.rows
        ]
        table = SimpleNamespace(to_pylist=lambda: rows, num_rows=len(rows))
        return SimpleNamespace(rows=lambda *_: table, added=self._added)

    def _added(self, snapshot_id: int) -> list[DataFile]:
        """(Its files have no bounds here.)"""
        if snapshot_id not in self.meta.snapshots:
            raise Expired(f"cannot read snapshot {snapshot_id} of table {self.name}")
        held = self.meta.snapshots[snapshot_id]
        return [
            DataFile(file.path, len(file.rows), None, None)
            for file, sequence in held.files
            if file.content == "data" and sequence == held.snapshot.sequence
        ]

    def manifests(self, snapshot_id: int) -> set[str]:
        held = self.meta.snapshots[snapshot_id]
        return {*held.manifests, held.snapshot.manifest_list}

    def contents(
        self, branch: str, known: Mapping[str, list[ManifestEntry]], data: bool = False
    ) -> tuple[Snapshot | None, dict[str, list[ManifestEntry]]]:
        head = self.meta.head(branch)
        if head is None:
            return None, {}
        listed = [
            ManifestEntry(file.descriptor, sequence, everywhere=True)
            for file, sequence in head.files
            if not data or file.content == "data"
        ]
        return head.snapshot, {head.snapshot.manifest_list: listed}

    def staged(self, manifest: str) -> list[ManifestEntry]:
        files = self._server.manifest(manifest)
        return [ManifestEntry(file.descriptor, 0, everywhere=True) for file in files]

    def live(self) -> tuple[Snapshot | None, list[LiveFile]]:
        head = self.meta.head("main")
        if head is None:
            return None, []
        files = [
            LiveFile(file.path, len(file.rows), sequence, descriptor=file.descriptor)
            for file, sequence in head.files
        ]
        return head.snapshot, sorted(files, key=lambda file: file.sequence)

    def count(self) -> int:
        return len(self.meta.snapshots)

    def moment(self, number: int) -> int | None:
        snapshots = list(self.meta.snapshots.values())
        at = number if number >= 0 else len(snapshots) + number
        return snapshots[at].snapshot.timestamp_ms if 0 <= at < len(snapshots) else None

    # ── committing ───────────────────────────────────────────────────────────────────────────

    def append(
        self,
        manifests: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        check: Check,
        leftovers: list[str],
        tag: str = "",
    ) -> None:
        # (The tag is left to `set_tag`: a catalog that sets both at once has fewer ways to fail.)
        files: list[File] = []
        paths: list[str] = []
        for manifest in manifests:
            if manifest.startswith("{"):
                files.append(self._client.file(manifest))
            else:
                files += self._server.manifest(manifest)
                paths.append(manifest)
        if any(file.content != "data" for file in files):
            for path in paths:  # a row delta reads them, and writes manifests of its own
                if path not in self._server.objects:
                    raise IdentityMismatch(f"cannot read {path}: it is gone")
            paths = []
        self._commit((), files, paths, summary, branch, check, leftovers, "append")

    def replace(
        self,
        removed: Sequence[str],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        since: int,
        leftovers: list[str],
    ) -> None:
        self.refresh()
        if why := refusal(self.history(branch), since):
            raise Conflict(f"cannot rewrite files of table {self.name}: {why}")
        gone = {self._client.file(descriptor).path for descriptor in removed}
        new = [self._client.file(descriptor) for descriptor in added]
        self._commit(
            gone,
            new,
            (),
            summary,
            branch,
            lambda history: refusal(history, since),
            leftovers,
            "replace",
        )

    def rewrite(
        self,
        removed: Sequence[LiveFile],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        since: int,
        same: bool,
        check: Check,
        leftovers: list[str],
    ) -> None:
        gone = {file.path for file in removed}
        new = [self._client.file(descriptor) for descriptor in added]
        self._commit(gone, new, (), summary, "main", check, leftovers, "replace")

    def _commit(
        self,
        gone: Any,
        new: Sequence[File],
        paths: Sequence[str],
        summary: Mapping[str, str],
        branch: str,
        check: Check,
        leftovers: list[str],
        operation: str,
    ) -> None:
        """As Iceberg's: on each try the newest metadata, the validator, a manifest list of its own.
        What it would delete goes to `leftovers`, also the list of a try that was applied (H1)."""
        server, world = self._server, self._world
        number = world.number() + 1000
        if not paths and new:  # manifests that the commit writes
            paths = [f"/{self.name}/metadata/{number}-m0.avro"]
            server.objects[paths[0]] = ()
        made: list[str] = []
        for attempt in range(RETRIES + 1):
            try:
                self._client.read(f"refresh {self.name} to commit")
                self._look()
            except BaseException:
                leftovers += [*made, *paths] if made else ()
                raise
            base = self.meta
            refused = check(base.history(branch))
            if not refused and gone:
                head = base.head(branch)
                present = {file.path for file, _ in head.files} if head else set()
                refused = None if gone <= present else "files to remove are missing"
            if refused:
                world.say(f"refused: {refused}")
                leftovers += [*made, *paths]
                raise CommitStateUnknown(f"cannot commit: ValidationException: {refused}")
            listed = f"/{self.name}/metadata/snap-{number}-{attempt}.avro"
            server.objects[listed] = True
            made.append(listed)
            parent = base.refs.get(branch)

            def change(meta: Meta, parent: int | None = parent, listed: str = listed) -> Any:
                return add(
                    meta,
                    number,
                    parent,
                    branch,
                    gone,
                    new,
                    paths,
                    summary,
                    operation,
                    listed,
                    world.milliseconds,
                )

            request = Request(
                self.name,
                self.uuid,
                {branch: parent},
                change,
                f"snapshot {number}",
                branch,
                base.version if server.strict else None,
                base.sequence + 1 if parent is not None else None,
            )
            try:
                self._client.send(request)
            except Lost:
                continue
            except BaseException:
                leftovers += [*made, *paths]
                raise
            leftovers += made[:-1]
            self.meta = server.tables.get(self.name, self.meta)
            return
        leftovers += [*made, *paths]
        raise Conflict(f"cannot commit to table {self.name}: CommitFailedException")

    def tag(self, tag: str, snapshot_id: int, was: int | None) -> None:
        self.move({tag: snapshot_id}, expected={tag: was})

    def untag(self, tag: str) -> None:
        self.move({tag: None}, expected={})

    def fork(self, branch: str, snapshot_id: int) -> None:
        self.move({branch: snapshot_id}, expected={})

    def move(self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]) -> None:
        moved = ", ".join(refs)
        self._client.read(f"refresh {self.name} to move {moved}")
        self._look()
        base = self.meta
        for name, wanted in expected.items():
            if base.refs.get(name) != wanted:
                raise Conflict(f"cannot move {name}: expected it at {wanted}")
        if unknown := {*refs.values()} - {None, *base.snapshots}:
            raise CommitStateUnknown(f"cannot set {moved} to unknown snapshot: {unknown}")

        def change(meta: Meta) -> None:
            for name, snapshot_id in refs.items():
                meta.refs.pop(name, None)
                if snapshot_id is not None:
                    if snapshot_id not in meta.snapshots:
                        raise Lost
                    meta.refs[name] = snapshot_id

        request = Request(
            self.name,
            self.uuid,
            dict(expected),
            change,
            f"move {dict(refs)}",
            "",
            base.version if self._server.strict else None,
        )
        try:
            self._client.send(request)
        except Lost:
            raise Conflict(f"cannot move {moved} of table {self.name}") from None
        self._look()

    def set_property(self, key: str, value: str) -> None:
        self._set_properties(key, lambda properties: {**properties, key: value})

    def remove_property(self, key: str) -> None:
        self._set_properties(key, lambda kept: {k: v for k, v in kept.items() if k != key})

    def _set_properties(
        self, key: str, changed: Callable[[dict[str, str]], dict[str, str]]
    ) -> None:
        self._client.read(f"refresh {self.name} to set a property")

        def change(meta: Meta) -> None:
            meta.properties = changed(meta.properties)

        try:
            self._client.send(Request(self.name, self.uuid, {}, change, f"property {key}"))
        except Lost:
            raise Conflict(f"cannot set property {key} of table {self.name}") from None
        self._look()

    def branches(self) -> list[str]:
        return [ref for ref in self.meta.refs if not ref.startswith("frazil/")]

    def needed(self, paths: Sequence[str]) -> set[str]:
        return set()

    def expire(self, before_ms: int, keep: int, _: list[str]) -> None:
        """(Here the files go at once.)"""
        self._client.read(f"expire {self.name}")
        meta = self._server.tables[self.name]
        if meta.uuid == self.uuid:
            expire(self._server, self.name, keep, before_ms)
            self.meta = self._server.tables[self.name]

    def evolve(self, plan: object) -> None:
        self.refresh()

    def unpartitioned_spec(self) -> str:
        return self.spec

    # ── the store ────────────────────────────────────────────────────────────────────────────

    def metadata_path(self, name: str) -> str:
        return f"{self.location}/metadata/{name}"

    def write_manifest(self, path: str, files: Sequence[str]) -> str:
        content = tuple(self._client.file(descriptor) for descriptor in files)
        self._client.put(path, content, torn=())
        return path

    def lacking(self, manifests: Sequence[str]) -> list[str]:
        self._client.read(f"look for staged files of {self.name}")
        objects, gone = self._server.objects, []
        self._server.oracle.look(manifests)
        for path in manifests:
            listed = self._server.objects.get(path)
            gone += [path] if listed is None else [f.path for f in listed if f.path not in objects]
        return gone

    def store(self, path: str, content: bytes, overwrite: bool = False) -> None:
        self._client.put(path, content, torn=content[: len(content) // 2])

    def fetch(self, path: str) -> bytes:
        self._client.read(f"fetch {path}")
        if path not in self._server.objects:
            raise IdentityMismatch(f"cannot read {path}: it is gone")
        return self._server.objects[path]  # type: ignore[no-any-return]

    def listing(self, prefix: str, before_ms: int | None = None) -> list[str]:
        self._client.read(f"list {prefix}")
        return sorted(path for path in self._server.objects if path.startswith(prefix))

    def delete(self, path: str) -> None:
        self._client.read(f"delete {path}")
        self._server.delete(path)

    def remove(self, paths: Sequence[str]) -> None:
        self._client.read(f"remove {len(paths)} objects")
        for path in paths:
            self._server.delete(path)


def add(
    meta: Meta,
    number: int,
    parent: int | None,
    branch: str,
    gone: Any,
    new: Sequence[File],
    paths: Sequence[str],
    summary: Mapping[str, str],
    operation: str,
    listed: str,
    now: int,
) -> Held | None:
    """A snapshot on a branch. One that is there already is not made again: the branch is set to it,
    wherever it was meanwhile (H2)."""
    if number in meta.snapshots:
        meta.refs[branch] = number
        return None
    meta.sequence += 1
    sequence = meta.sequence
    before = meta.snapshots.get(parent) if parent is not None else None
    files = before.files if before else ()
    manifests = before.manifests if before else frozenset()
    if gone:
        files = tuple(pair for pair in files if pair[0].path not in gone)
    if new:
        files = (*files, *((file, sequence) for file in new))
        # (A rewrite lists what it keeps anew; who only takes files away may leave no trace.)
        manifests = frozenset(paths) if gone else manifests.union(paths)
        meta.manifests.update((path, sequence) for path in paths)
    full_summary = dict(summary)
    if any(file.content == "equality-deletes" for file in new):
        full_summary["added-equality-delete-files"] = "1"
    full_summary["total-data-files"] = str(len(files))
    if not any(file.content != "data" for file, _ in files):
        full_summary["total-delete-files"] = "0"
    snapshot = Snapshot(number, parent, sequence, now, operation, full_summary, listed)
    held = Held(snapshot, files, manifests)
    meta.snapshots[number] = held
    meta.refs[branch] = number
    return held


def expire(server: Server, name: str, keep: int, before_ms: float = float("inf")) -> None:
    """All but the newest `keep` of each branch, and what a tag names; their files go, too."""
    meta = server.tables[name]
    kept: set[int] = set()
    for ref, number in meta.refs.items():
        if ref.startswith("frazil/"):
            kept.add(number)
            continue
        for n, snapshot in enumerate(meta.history(ref)):
            if n < keep or snapshot.timestamp_ms >= before_ms:
                kept.add(snapshot.id)
    gone = [held for number, held in meta.snapshots.items() if number not in kept]
    if not gone:
        return
    after = meta.next()
    for held in gone:
        del after.snapshots[held.snapshot.id]
    server.world.say(f"expires {name}: {', '.join(str(held.snapshot.id) for held in gone)}")
    server.tables[name] = after
    server.past[name].append(after)
    needed: set[str] = set()
    for held in after.snapshots.values():
        needed |= held.paths
    for held in gone:
        for path in held.paths - needed:
            server.objects.pop(path, None)


class Client:
    """How one run reaches the servers: every call is a point, and may fail."""

    def __init__(self, server: Server) -> None:
        self.server = server
        #: chances, by the kind of fault
        self.faults: dict[str, float] = {}
        self.stale = 0.0

    def file(self, descriptor: str) -> File:
        """What a descriptor tells; whether the file is still there is another matter."""
        return self.server.files[descriptor.split('"file-path": "', 1)[1].split('"', 1)[0]]

    def written(self, file: File) -> File:
        self.server.objects[file.path] = self.server.files[file.path] = file
        return file

    def fails(self, kind: str) -> bool:
        rate = self.faults.get(kind)
        return rate is not None and self.server.world.chance() < rate

    def read(self, action: str) -> None:
        self.server.world.point(action)
        if self.fails("read"):
            self.server.world.say(f"fails: {action}")
            raise Unavailable(f"cannot {action}: 503")

    def put(self, path: str, content: Any, torn: Any) -> None:
        """An object that is not there yet."""
        world, objects = self.server.world, self.server.objects
        try:
            world.point(f"put {path}")
        except BaseException:
            if self.faults and world.chance() < 0.5:
                objects[path] = torn
            raise
        if self.faults:
            if self.fails("torn"):
                objects[path] = torn
                world.say(f"torn: {path}")
                raise Unavailable(f"cannot write {path}: connection reset")
            if self.fails("unstored"):
                raise Unavailable(f"cannot write {path}: 503")
            if self.fails("stored late"):
                self.server.flying.append((path, content))
                raise Unavailable(f"cannot write {path}: timeout")
            if self.fails("stored"):
                objects[path] = content
                raise Unavailable(f"cannot write {path}: the answer was lost")
        objects[path] = content
        world.say(f"stored {path}")
        world.point(f"stored {path}")

    def send(self, request: Request) -> None:
        """A request to change a table. Raises `Lost` for 409, or what a client makes of trouble."""
        server, world = self.server, self.server.world
        try:
            world.point(f"send {request.action}")
        except BaseException:
            if self.faults.get("late"):  # died while it was on its way
                server.flying.append(request)
            raise
        if self.faults:
            if self.fails("down"):
                world.say(f"503, nothing applied: {request.action}")
                raise Unavailable("cannot commit: 503")
            if self.fails("conflict"):
                raise Lost
            if self.fails("late"):
                world.say(f"timeout, still on its way: {request.action}")
                server.flying.append(request)
                raise CommitStateUnknown("cannot commit: CommitStateUnknownException")
            if self.fails("lost"):
                server.apply(request)
                how = world.dice.randrange(3)
                world.say(f"the answer is lost ({('unknown', '5xx', 'posted again')[how]})")
                if how == 2:
                    raise Lost  # the client posts again by itself, and that is a conflict
                raise (CommitStateUnknown if how else Unavailable)(
                    "cannot commit: the answer was lost"
                )
        server.apply(request)
        world.point(f"answer to {request.action}")
