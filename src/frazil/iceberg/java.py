"""Iceberg's Java API in Spark's JVM: the only module with Py4J. Plain Python values in and out.

Also the few parts of Spark that only Java exposes: a query's operators, files of a checkpoint.

The user's own `spark.sql.catalog.*` settings name the catalog, so every catalog and store that
Iceberg for Spark supports works here. Java exceptions are translated into our errors (`_KINDS`); an
exception that is not in the map becomes `CommitStateUnknown`, which the committer handles by
reading back, never by guessing.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, SparkSession

from frazil import format_version
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Conflict,
    FrazilError,
    IdentityMismatch,
    Unavailable,
    Unwritable,
)
from frazil.iceberg.live_files import spellings
from frazil.iceberg.schema import SchemaUpdate, identifier_columns
from frazil.iceberg.static_table import COLUMNS_PROPERTY, ReadOnlyTable
from frazil.ledger import entry
from frazil.ledger.entry import PREFIX, Snapshot

#: Java exception (simple name, of the error or of a cause) → our error.
_KINDS: dict[str, type[FrazilError]] = {
    # certain: nothing was applied
    "CommitFailedException": Conflict,
    "AlreadyExistsException": Conflict,
    # raised only by our ancestry validator. Whether an earlier attempt of the same commit was
    # applied is decided by reading the ledger (H1).
    "ValidationException": CommitStateUnknown,
    "CommitStateUnknownException": CommitStateUnknown,
    # the catalog or store does not answer; in a commit the caller still reads back
    "ServiceUnavailableException": Unavailable,
    "ServiceFailureException": Unavailable,
    "RESTException": Unavailable,
    "UncheckedIOException": Unavailable,
    "RuntimeIOException": Unavailable,
    "UncheckedSQLException": Unavailable,
    "UncheckedInterruptedException": Unavailable,
    "SdkClientException": Unavailable,
    "S3Exception": Unavailable,
    "NoSuchTableException": IdentityMismatch,
    "NoSuchNamespaceException": IdentityMismatch,
    "NoSuchIcebergTableException": IdentityMismatch,
    "NotFoundException": IdentityMismatch,
    "NotAuthorizedException": ConfigError,
    "ForbiddenException": ConfigError,
    "BadRequestException": ConfigError,
    "IllegalArgumentException": ConfigError,
    "UnsupportedOperationException": ConfigError,
    "ClassNotFoundException": ConfigError,
    "CatalogNotFoundException": ConfigError,
}

#: Raised by Spark if a job failed, with the task's own message.
FAILED = (PySparkException, Py4JJavaError)
#: position of `added_snapshot_id` in Iceberg's manifest-file record (the spec's field order)
_SNAPSHOT_ID = 6
_LOOKING = 16  # staged files that are checked concurrently
_EVOLUTIONS = 5  # attempts to change a schema while other writers change it too
#: Names of manifests and manifest lists, Iceberg's and ours; no data file has such a name.
_LISTING = re.compile(r"/(snap-\d+-\d+-[0-9a-f-]{36}|[^/]+-m\d+)\.avro$")
_READERS = 8  # threads
_PLACEHOLDER = 2**62  # too large for an Integer, so Py4J makes it the Long that Java wants


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except Py4JJavaError as error:
        names, fact = _causes(error.java_exception)
        kind = next((_KINDS[name] for name in names if name in _KINDS), CommitStateUnknown)
        if "Status Code: 403" in fact or "Status Code: 401" in fact:  # of S3; a retry does not help
            raise ConfigError(
                f"cannot {doing}: {fact}", hint="check the credentials, and what the bucket allows"
            ) from None
        raise kind(f"cannot {doing}: {fact}") from None
    except PySparkException as error:
        name = type(error).__name__
        fact = str(error).strip().splitlines()[0] if str(error).strip() else name
        raise _KINDS.get(name, CommitStateUnknown)(f"cannot {doing}: {fact}") from None
    except (Py4JError, ConnectionError) as error:
        raise CommitStateUnknown(f"cannot {doing}: the JVM does not answer: {error}") from None


def _causes(exception: Any) -> tuple[list[str], str]:
    """The names of an exception and its causes, and the outermost and innermost message."""
    names, messages = [], []
    for _ in range(8):  # bounded: Java allows causes in a circle
        if exception is None:
            break
        names.append(exception.getClass().getSimpleName())
        message = (exception.getMessage() or "").strip().splitlines()
        messages.append(f"{names[-1]}: {message[0] if message else 'no message'}")
        exception = exception.getCause()
    inner = messages[-1].partition(": ")[2]
    return names, messages[0] if inner in messages[0] else f"{messages[0]} ({messages[-1]})"


class _Validator:
    """Calls `check` with the ancestry on every attempt of a commit, Iceberg's own retries
    included."""

    def __init__(self, check: Callable[[Iterator[Snapshot]], str | None], read: Any) -> None:
        self._check = check
        self._read = read
        self.refusal = ""

    def validate(self, base_snapshots: Any) -> bool:
        def history() -> Iterator[Snapshot]:
            iterator = base_snapshots.iterator()
            while iterator.hasNext():
                yield self._read(iterator.next())

        self.refusal = self._check(history()) or ""
        return not self.refusal

    def errorMessage(self) -> str:
        return self.refusal or "the ledger has moved"

    class Java:
        implements = ("org.apache.iceberg.SnapshotAncestryValidator",)


class _Deferred:
    """Collects the paths that Iceberg would delete after a failed commit, and deletes nothing.

    A commit that was applied, but whose response was lost, looks like a failure to Iceberg, and its
    clean-up would remove the manifest list of the live snapshot (H1).
    """

    def __init__(self) -> None:
        self.paths: list[str] = []

    def accept(self, path: str) -> None:
        self.paths.append(path)

    class Java:
        implements = ("java.util.function.Consumer",)


class _Tagging:
    """Table operations whose commits also point a tag at the snapshot that they add: snapshot and
    tag are in one metadata file, so neither can exist without the other.

    An exception of a commit passes through Python and reaches Iceberg without its class, so Iceberg
    neither retries nor cleans up. The error is kept in `trouble`, and the files that the attempt
    wrote are in `made`: the caller reads back, retries and removes them.
    """

    def __init__(self, table: JavaTable, branch: str, tag: str) -> None:
        self._table = table
        self._operations = table._table.operations()
        self._branch, self._tag = branch, tag
        self._metadata: Any = None
        self.trouble: Py4JError | None = None
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)

    def current(self) -> Any:  # called often: cached, to save calls to Java
        if self._metadata is None:
            self._metadata = self._operations.current()
        return self._metadata

    def refresh(self) -> Any:
        self._metadata = self._operations.refresh()
        return self._metadata

    def commit(self, base: Any, metadata: Any) -> None:
        self._metadata = None
        snapshot = metadata.snapshot(metadata.ref(self._branch).snapshotId())
        try:
            tagged = self._table.pointed(metadata, {self._tag: int(snapshot.snapshotId())})
            self._operations.commit(base, tagged)
        except Py4JError as error:
            self.trouble = error
            with suppress(Py4JError):
                self.made.append(str(snapshot.manifestListLocation()))
                for manifest in snapshot.allManifests(self._operations.io()):
                    if manifest.snapshotId() == snapshot.snapshotId():
                        self.made.append(str(manifest.path()))
            raise

    class Java:
        implements = ("org.apache.iceberg.TableOperations",)


class _Names:
    """A Java package, class or static method, looked up once: each lookup is a call to the JVM, and
    a commit makes many."""

    def __init__(self, target: Any) -> None:
        self._found = target

    def __getattr__(self, name: str) -> Any:
        known = _Names(getattr(self._found, name))
        setattr(self, name, known)
        return known

    def __call__(self, *given: Any) -> Any:
        return self._found(*given)


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Makes `spark` the active session of this thread: Spark looks up catalogs and registered data
    sources there, whichever session it is called through."""
    sessions: Any = SparkSession._get_j_spark_session_class(spark._jvm)
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


class JavaCatalog:
    def __init__(self, spark: SparkSession, name: str) -> None:
        self.name = name
        self._spark = spark
        self._jvm: Any = spark._jvm
        assert self._jvm is not None
        self._iceberg: Any = _Names(self._jvm.org.apache.iceberg)
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
        self._gateway = gateway
        with _translated(f"open catalog {name}"), active(spark):
            manager = spark._jsparkSession.sessionState().catalogManager()
            self._spark_catalog = manager.catalog(name)
            try:
                self._catalog = self._spark_catalog.icebergCatalog()
            except Py4JJavaError:
                raise
            except Py4JError:
                raise ConfigError(
                    f"cannot open catalog {name}: expected an Iceberg catalog, found "
                    f"{self._spark_catalog.getClass().getName()}",
                    hint=f"set spark.sql.catalog.{name} = org.apache.iceberg.spark.SparkCatalog",
                ) from None
            self._caches = self._catalog.getClass().getSimpleName() == "CachingCatalog"

    def changed(self, table: str) -> None:
        """Drops the table from the session's cache (`cache-enabled`, Iceberg's default): the
        session then sees this handle's commits, and does not look for removed files."""
        if self._caches:
            self._catalog.invalidateTable(self._iceberg.catalog.TableIdentifier.parse(table))

    def load(self, table: str) -> JavaTable | None:
        """The table as it is now; None if it does not exist."""
        with _translated(f"load table {table}"):
            identifier = self._iceberg.catalog.TableIdentifier.parse(table)
            if not self._catalog.tableExists(identifier):
                return None
            return JavaTable(self, table, self.open(table))

    def open(self, table: str) -> Any:
        """Java's own table object, loaded anew."""
        identifier = self._iceberg.catalog.TableIdentifier.parse(table)
        self._catalog.invalidateTable(identifier)
        return self._catalog.loadTable(identifier)

    def look(self, table: str) -> ReadOnlyTable | None:
        """The table in the state of its current metadata file, for readers; None if it does not
        exist."""
        handle = self.load(table)
        return None if handle is None else handle.plain

    def create(
        self,
        table: str,
        schema: str,
        spec: str,
        *,
        properties: Mapping[str, str],
        location: str = "",
        sort_order: str = "",
    ) -> JavaTable:
        """Creates namespace and table. If another writer creates it at the same moment, returns
        that table."""
        with _translated(f"create table {table}"):
            identifier = self._iceberg.catalog.TableIdentifier.parse(table)
            self._create_namespace(table.split(".")[:-1])
            java_schema = self._iceberg.SchemaParser.fromJson(schema)
            java_spec = self._iceberg.PartitionSpecParser.fromJson(java_schema, spec)
            builder = self._catalog.buildTable(identifier, java_schema)
            builder = builder.withPartitionSpec(java_spec)
            if sort_order:
                order = self._iceberg.SortOrderParser.fromJson(java_schema, sort_order)
                builder = builder.withSortOrder(order)
            for key, value in {**properties, format_version.KEY: format_version.TABLE}.items():
                builder = builder.withProperty(key, value)
            if location:
                builder = builder.withLocation(location)
            try:
                return JavaTable(self, table, builder.create(), made=True)
            except Py4JJavaError as error:
                if "AlreadyExistsException" not in _causes(error.java_exception)[0]:
                    raise
        existing = self.load(table)
        if existing is None:
            raise Conflict(f"cannot create table {table}: it came and went at the same moment")
        return existing

    def make_namespace(self, name: str) -> bool:
        """False if it existed before."""
        with _translated(f"create namespace {name}"):
            return self._create_namespace(name.split("."))

    def drop_namespace(self, name: str) -> None:
        """Drops an empty namespace."""
        with _translated(f"drop namespace {name}"):
            self._spark_catalog.dropNamespace(self._names(name.split(".")), False)

    def drop(self, table: str) -> None:
        """Drops a table with the files it references; a table that does not exist is no error."""
        with _translated(f"drop table {table}"):
            self._catalog.dropTable(self._iceberg.catalog.TableIdentifier.parse(table), True)

    def _create_namespace(self, parts: Sequence[str]) -> bool:
        made = False
        for depth in range(1, len(parts) + 1):
            names = self._names(parts[:depth])
            made = not self._spark_catalog.namespaceExists(names)
            if made:
                try:
                    self._spark_catalog.createNamespace(names, {})
                except Py4JJavaError as error:
                    if "AlreadyExists" not in "".join(_causes(error.java_exception)[0]):
                        raise
                    made = False
                except PySparkException as error:
                    if "ALREADY_EXISTS" not in str(error):
                        raise
                    made = False
        return made

    def _names(self, parts: Sequence[str]) -> Any:
        names = self._gateway.new_array(self._jvm.java.lang.String, len(parts))
        for i, part in enumerate(parts):
            names[i] = part
        return names

    def plain(self, properties: Any) -> dict[str, str]:
        """A Java map as a dict, with one call to Java however many keys there are."""
        values = json.loads(self._iceberg.util.JsonUtil.mapper().writeValueAsString(properties))
        return {key: str(value) for key, value in values.items()}

    def read(self, snapshot: Any) -> Snapshot:
        """A Java snapshot as a value, with one call to Java however many keys its summary has."""
        values = json.loads(self._iceberg.SnapshotParser.toJson(snapshot))
        summary = dict(values.get("summary", {}))
        return Snapshot(
            id=values["snapshot-id"],
            parent=values.get("parent-snapshot-id"),
            sequence=values.get("sequence-number", 0),
            timestamp_ms=values["timestamp-ms"],
            operation=summary.pop("operation", ""),
            summary=summary,
            manifest_list=values.get("manifest-list", ""),
        )


class _property(property):
    """A property that is read from Java; a table that is gone raises one of our errors."""

    def __get__(self, table: Any, kind: Any = None) -> Any:
        if table is None:
            return self
        with _translated(f"read table {table.name}"):
            return super().__get__(table, kind)


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of a table's newest snapshot."""

    path: str
    rows: int
    #: data sequence number: the commit that added its rows
    sequence: int
    #: number of delete files that apply to it
    deletes: int
    #: Iceberg's JSON
    descriptor: str


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """A data or delete file that a manifest lists."""

    #: Iceberg's JSON
    descriptor: str
    #: data sequence number: the commit that added it
    sequence: int
    #: its spec has no partitions; its deletes apply to all partitions
    everywhere: bool


class JavaTable:
    """One Iceberg table: the operations that the committer, the audit and the sink need."""

    def __init__(self, catalog: JavaCatalog, name: str, table: Any, *, made: bool = False) -> None:
        self.name = name
        self.made = made  # created by us, just now: no one else has written to it before
        self._catalog = catalog
        self._iceberg = catalog._iceberg
        self._table = table
        self.uuid: str = table.uuid().toString()
        format_version.check_table(name, table.properties().get(format_version.KEY))
        #: properties that ledger entries refer to
        self._kept: dict[str, str] = {}

    def refresh(self) -> None:
        with _translated(f"refresh table {self.name}"):
            try:
                self._table.refresh()
                uuid = self._table.uuid().toString()
            except Py4JJavaError as error:
                names, fact = _causes(error.java_exception)
                if "NullPointerException" in names:
                    # A handle that found its table missing does not notice that it exists again.
                    self._table = self._catalog.open(self.name)
                    uuid = self._table.uuid().toString()
                elif "UUID does not match" in fact:  # Iceberg's own check
                    uuid = fact.rpartition("=")[2]
                else:
                    raise
        if uuid != self.uuid:
            raise IdentityMismatch(
                f"cannot go on with table {self.name}: it was dropped and made again; "
                f"expected uuid {self.uuid}, found {uuid}"
            )

    @_property
    def location(self) -> str:
        return str(self._table.location()).rstrip("/")

    @_property
    def schema(self) -> str:
        return str(self._iceberg.SchemaParser.toJson(self._table.schema()))

    @_property
    def schema_id(self) -> int:
        return int(self._table.schema().schemaId())

    @_property
    def schemas(self) -> list[str]:
        """All schemas that the table still has, oldest first."""
        schemas = self._table.schemas()
        return [str(self._iceberg.SchemaParser.toJson(schemas[i])) for i in sorted(schemas)]

    @_property
    def spec(self) -> str:
        return str(self._iceberg.PartitionSpecParser.toJson(self._table.spec()))

    def unpartitioned_spec(self) -> str:
        """A spec of the table without partitions, under which deletes apply to all of its rows. A
        table without one gets it, in one commit that leaves its current spec as it is."""
        with _translated(f"give table {self.name} a spec without partitions"):
            for _ in range(2):
                for spec in self._table.specs().values():
                    if not spec.fields().size():
                        return str(self._iceberg.PartitionSpecParser.toJson(spec))
                fields = json.loads(self.spec)["fields"]
                transaction = self._table.newTransaction()
                change = transaction.updateSpec()
                for field in fields:
                    change.removeField(field["name"])
                change.commit()
                change = transaction.updateSpec()
                for field in fields:
                    change.addField(field["name"], self._term(field))
                change.commit()
                transaction.commitTransaction()
                self._table.refresh()
        raise Conflict(f"cannot give table {self.name} a spec without partitions")

    def _term(self, field: Mapping[str, Any]) -> Any:
        """A partition field's transform of its column, as an expression."""
        terms = self._iceberg.expressions.Expressions
        column = self._table.schema().findColumnName(field["source-id"])
        name, _, width = str(field["transform"]).rstrip("]").partition("[")
        if name in ("bucket", "truncate"):
            return getattr(terms, name)(column, int(width))
        return terms.ref(column) if name == "identity" else getattr(terms, name)(column)

    @_property
    def sort_order(self) -> str:
        """Empty if there is none."""
        order = self._table.sortOrder()
        return "" if order.isUnsorted() else str(self._iceberg.SortOrderParser.toJson(order))

    @_property
    def properties(self) -> dict[str, str]:
        return self._catalog.plain(self._table.properties())

    @_property
    def format_version(self) -> int:
        return int(self._iceberg.TableUtil.formatVersion(self._table))

    @_property
    def metadata_file(self) -> str:
        return str(self._table.operations().current().metadataFileLocation())

    def metadata_path(self, name: str) -> str:
        """The location of a metadata file of that name (`write.metadata.path`)."""
        with _translated(f"read table {self.name}"):
            return str(self._table.operations().metadataFileLocation(name))

    @property
    def plain(self) -> ReadOnlyTable:
        """The table in the state of its current metadata file."""
        self.refresh()
        return ReadOnlyTable(self.name, self.metadata_file, self.io_properties)

    @property
    def io_properties(self) -> dict[str, str]:
        """Properties for the executors' file IO. They may hold credentials: never log them."""
        try:
            return self._catalog.plain(self._table.io().properties())
        except Py4JError:  # a FileIO need not have properties
            return {}

    def history(self, branch: str) -> Iterator[Snapshot]:
        """The branch's ancestry, newest first, up to the oldest snapshot that is not expired."""
        with _translated(f"read the history of table {self.name}"):
            snapshot = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            while snapshot is not None:
                yield self._read(snapshot)
                parent = snapshot.parentId()
                snapshot = None if parent is None else self._table.snapshot(parent)

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        """An expired snapshot and its ancestors, as far as earlier metadata files contain them.

        The newest file that has a snapshot also has those of its ancestors that were not expired by
        then.
        """
        with _translated(f"read earlier metadata of table {self.name}"):
            parse, io = self._iceberg.TableMetadataParser.read, self._table.io()
            files = [
                str(previous.file())
                for previous in self._table.operations().current().previousFiles()
            ]
            wanted: int | None = snapshot_id
            while wanted is not None and files:
                try:
                    metadata = parse(io, files.pop())
                except Py4JJavaError as error:
                    if "NotFoundException" in _causes(error.java_exception)[0]:
                        return  # removed, and so are all older ones
                    raise
                while wanted is not None and (snapshot := metadata.snapshot(wanted)) is not None:
                    yield self._read(snapshot, metadata)
                    parent = snapshot.parentId()
                    wanted = None if parent is None else int(parent)

    def carries(self, branch: str, snapshot_id: int) -> bool:
        """Does the branch list the newest manifest of a snapshot? Then the commit that wrote the
        manifest, or the part of it that the snapshot had, is in the branch."""
        with _translated(f"read the manifests of table {self.name}"):
            io = self._table.io()
            manifests = list(self._table.snapshot(snapshot_id).allManifests(io))
            newest = max((int(manifest.sequenceNumber()) for manifest in manifests), default=0)
            wanted = {
                str(manifest.path())
                for manifest in manifests
                if int(manifest.sequenceNumber()) == newest
            }
            head = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            listed = {str(manifest.path()) for manifest in head.allManifests(io)}
            return not wanted or bool(wanted & listed)

    def tagged(self, tag: str) -> Snapshot | None:
        with _translated(f"read tag {tag} of table {self.name}"):
            reference = self._table.refs().get(tag)
            if reference is None:
                return None
            snapshot = self._table.snapshot(reference.snapshotId())
            return None if snapshot is None else self._read(snapshot)

    def _read(self, snapshot: Any, metadata: Any = None) -> Snapshot:
        """A snapshot, with the properties that its ledger entry refers to. Property names contain
        the digest of the text: a property is never read twice."""
        parsed = self._catalog.read(snapshot)
        wanted = entry.referred(parsed.summary)
        if not self._kept.keys() >= set(wanted):
            properties = self._table.properties() if metadata is None else metadata.properties()
            self._kept |= entry.split(self._catalog.plain(properties))[1]
        return replace(parsed, summary=entry.joined(parsed.summary, self._kept))

    def _keep(self, summary: Mapping[str, str]) -> dict[str, str]:
        """The summary to commit. Properties that its entry refers to are set before the snapshot
        exists; those that no snapshot refers to any more, of this epoch and of epochs that it has
        fenced, are removed."""
        lean, kept = entry.split(summary)
        stored = entry.split(self.properties)[1] if kept else {}
        missing = {key: text for key, text in kept.items() if stored.get(key) != text}
        if missing:
            sink, epoch = summary[f"{PREFIX}sink"], int(summary[f"{PREFIX}epoch"])
            summaries = [
                self._catalog.read(snapshot).summary for snapshot in self._table.snapshots()
            ]
            update = self._table.updateProperties()
            for key in entry.forgotten(stored, summaries, sink, epoch):
                if key not in kept:
                    update.remove(key)
            for key, text in missing.items():
                update.set(key, text)
            update.commit()
        return lean

    def write_manifest(self, path: str, files: Sequence[str]) -> str:
        """Writes files (as Iceberg's JSON), all data or all deletes, into one manifest at `path`;
        returns its encoded description."""
        with _translated(f"write manifest {path}"):
            specs = self._table.specs()
            out = self._table.io().newOutputFile(path)
            first = json.loads(files[0])
            manifests = self._iceberg.ManifestFiles
            make = manifests.write if first["content"] == "data" else manifests.writeDeleteManifest
            writer = make(self.format_version, specs.get(first["spec-id"]), out, None)
            try:
                parse = self._iceberg.ContentFileParser.fromJson
                try:
                    nodes = self._mapper.readTree("[" + ",".join(files) + "]").elements()
                    parsed = [parse(node, specs) for node in nodes]
                except FAILED:
                    self._name_unlisted(
                        files, lambda text: parse(self._mapper.readTree(text), specs)
                    )
                    raise
                for file in parsed:
                    writer.add(file)
            finally:
                writer.close()
            # Iceberg's encoding requires a snapshot id, which a staged manifest does not have. The
            # placeholder is reset to null before the commit, so that Iceberg assigns the id.
            manifest = writer.toManifestFile().copy()
            manifest.put(_SNAPSHOT_ID, _PLACEHOLDER)
            return base64.b64encode(self._iceberg.ManifestFiles.encode(manifest)).decode()

    def _name_unlisted(self, files: Sequence[str], parse: Callable[[str], Any]) -> None:
        """Raises `Unwritable` for the first file that Iceberg does not take into a manifest. No
        store is involved, so a retry would not help."""
        for text in files:
            try:
                parse(text)
            except FAILED as error:
                fact = str(error).strip().splitlines()[0]
                if isinstance(error, Py4JJavaError):
                    _, fact = _causes(error.java_exception)
                names = self.properties.get(COLUMNS_PROPERTY, "_topic,_topic_partition,_offset")
                rows = identifier_columns(text, self.schema, names.split(",")[:3])
                raise Unwritable(
                    f"cannot list a file of table {self.name}: {fact}; {rows}",
                    hint="nothing of the batch was staged; report the message",
                ) from None

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
        """Commits one snapshot with all of `manifests`, or nothing: an append, or a row delta if
        some of them hold deletes. An item may also be a data file, as Iceberg's JSON: with few
        files it is faster to have the commit write their manifest. A staged manifest that the
        commit merges into another is no longer needed, and is added to `leftovers`.

        `check` gets the ancestry that the commit would build on, on every attempt, and returns None
        or the reason to refuse. Paths that Iceberg wants to delete are added to `leftovers`
        instead. The same commit points `tag` at the snapshot, unless it is the table's first.
        """
        with _translated(f"commit to table {self.name}"):
            summary = self._keep(summary)
            table, operations = self._table, None
            if tag and self.count():  # some catalogs refuse tags in a table without snapshots
                operations = _Tagging(self, branch, tag)
                table = self._iceberg.BaseTable(operations, self.name)
            files = [text for text in manifests if text.startswith("{")]
            staged = [
                self._iceberg.ManifestFiles.decode(base64.b64decode(text))
                for text in manifests
                if not text.startswith("{")
            ]
            update: Any
            if any(str(manifest.content().name()) == "DELETES" for manifest in staged):
                update = table.newRowDelta()
                for file in files:
                    update.addRows(self._data_file(file))
                for manifest in staged:
                    self._add_each(update, manifest)
            else:
                # `newAppend` merges manifests when there are many, by the table's properties.
                # Otherwise every batch would leave a manifest for every reader to open.
                update = table.newAppend() if staged else table.newFastAppend()
                for file in files:
                    update.appendFile(self._data_file(file))
                for manifest in staged:
                    manifest.put(_SNAPSHOT_ID, None)
                    update.appendManifest(manifest)
            try:
                self._commit(update, summary, branch, check, leftovers)
            except Py4JError:
                if operations is None or operations.trouble is None:
                    raise
                leftovers.extend(operations.made)
                raise operations.trouble from None

    def _commit(
        self,
        update: Any,
        summary: Mapping[str, str],
        branch: str,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
    ) -> None:
        deferred = _Deferred()
        for key, value in summary.items():
            update.set(key, value)
        if branch != "main":
            update.toBranch(branch)
        update.validateWith(_Validator(check, self._read))
        update.deleteWith(deferred)
        try:
            update.commit()
        finally:
            leftovers.extend(deferred.paths)
            self._catalog.changed(self.name)

    def _add_each(self, update: Any, manifest: Any) -> None:
        """Adds the files of a staged manifest one by one: a row delta takes no manifests."""
        deletes = str(manifest.content().name()) == "DELETES"
        manifests = self._iceberg.ManifestFiles
        read = manifests.readDeleteManifest if deletes else manifests.read
        reader = read(manifest, self._table.io(), self._table.specs())
        try:
            entries = reader.iterator()
            while entries.hasNext():
                file = entries.next().copy()
                if deletes:
                    update.addDeletes(file)
                else:
                    update.addRows(file)
        finally:
            reader.close()

    def live(self) -> tuple[Snapshot | None, list[LiveFile]]:
        """The current snapshot of main, and its data files, those with the oldest rows first."""
        with _translated(f"list the files of table {self.name}"):
            snapshot = self._table.currentSnapshot()
            if snapshot is None:
                return None, []
            specs = dict(self._table.specs())
            (spec,) = specs.values() if len(specs) == 1 else (None,)
            newest = self._catalog.read(snapshot)
            hidden = newest.summary.get("total-delete-files") != "0"
            tasks = self._table.newScan().useSnapshot(newest.id).planFiles()
            files = []
            try:  # few calls to Java: they are costly, and made per file
                iterator = tasks.iterator()
                while iterator.hasNext():
                    task = iterator.next()
                    file = task.file()
                    text = self._described(file, specs[file.specId()] if spec is None else spec)
                    values = json.loads(text)
                    deletes = int(task.deletes().size()) if hidden else 0
                    sequence = int(file.dataSequenceNumber() or 0)
                    files.append(
                        LiveFile(
                            values["file-path"], values["record-count"], sequence, deletes, text
                        )
                    )
            finally:
                tasks.close()
            return newest, sorted(files, key=lambda file: file.sequence)

    def _data_file(self, descriptor: str) -> Any:
        node = self._mapper.readTree(descriptor)
        return self._iceberg.ContentFileParser.fromJson(node, self._table.specs())

    @cached_property
    def _mapper(self) -> Any:
        """Iceberg's JSON mapper, which here also accepts NaN and Infinity: a float may be a
        partition value."""
        mapper = self._iceberg.util.JsonUtil.mapper().copy()
        name = str(mapper.getClass().getName())  # shaded: prefixed with Iceberg's package
        name = name.replace(".databind.ObjectMapper", ".core.JsonParser$Feature")
        features = mapper.getClass().getClassLoader().loadClass(name)
        value_of = self._catalog._jvm.java.lang.Enum.valueOf
        return mapper.configure(value_of(features, "ALLOW_NON_NUMERIC_NUMBERS"), True)

    def _described(self, file: Any, spec: Any) -> str:
        """Iceberg's JSON of a file. Iceberg quotes NaN and Infinity, and cannot parse them so."""
        text = str(self._iceberg.ContentFileParser.toJson(file, spec))
        if not any(word in text for word in ('"NaN"', 'Infinity"')):
            return text
        values = json.loads(text)
        types = [str(column.type()) for column in spec.partitionType().fields()]
        values["partition"] = [
            float(value) if kind in ("float", "double") and value is not None else value
            for kind, value in zip(types, values["partition"], strict=True)
        ]
        return json.dumps(values)

    def rewrite(
        self,
        removed: Sequence[LiveFile],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        since: int,
        same: bool,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
    ) -> None:
        """Commits one snapshot of main that replaces the files `removed` by `added` (Iceberg's
        JSON).

        `since` is the snapshot that was read: later changes by other writers to the removed files
        are a conflict, later additions are none. `same`: the rows are the same ones. `check` and
        `leftovers` as for `append`.
        """
        with _translated(f"rewrite files of table {self.name}"):
            update: Any
            if same:
                update = self._table.newRewrite()
            else:  # the validation makes it fail, too, if a file is gone already
                update = self._table.newOverwrite().validateNoConflictingDeletes()
            update.validateFromSnapshot(since)
            for file in removed:
                update.deleteFile(self._data_file(file.descriptor))
            for descriptor in added:
                update.addFile(self._data_file(descriptor))
            self._commit(update, summary, "main", check, leftovers)

    def manifests(self, snapshot_id: int) -> set[str]:
        """The paths of a snapshot's manifests and of its manifest list."""
        with _translated(f"read the manifests of table {self.name}"):
            snapshot = self._table.snapshot(snapshot_id)
            paths = {str(manifest.path()) for manifest in snapshot.allManifests(self._table.io())}
            return {*paths, str(snapshot.manifestListLocation())}

    def moment(self, number: int) -> int | None:
        """Timestamp of the n-th snapshot (milliseconds; -1 is the newest); None if there is
        none."""
        with _translated(f"read the snapshots of table {self.name}"):
            snapshots = self._table.operations().current().snapshots()
            at = number if number >= 0 else int(snapshots.size()) + number
            exists = 0 <= at < int(snapshots.size())
            return int(snapshots.get(at).timestampMillis()) if exists else None

    def count(self) -> int:
        """The number of snapshots."""
        with _translated(f"read the snapshots of table {self.name}"):
            return int(self._table.operations().current().snapshots().size())

    def expire(self, before_ms: int, keep: int, unneeded: list[str]) -> None:
        """Expires the snapshots before a moment, except the last `keep` of each branch and those
        that a tag or branch names. Paths that Iceberg wants to delete are added to `unneeded`
        instead."""
        deferred = _Deferred()
        with _translated(f"expire snapshots of table {self.name}"):
            update = self._table.expireSnapshots().expireOlderThan(before_ms).retainLast(keep)
            update.deleteWith(deferred)
            try:
                update.commit()
            finally:
                unneeded.extend(deferred.paths)
                self._catalog.changed(self.name)
            self._table.refresh()

    def needed(self, paths: Sequence[str]) -> set[str]:
        """Those of `paths` that a snapshot of the table references, in any spelling: manifest
        lists, manifests and files."""
        with _translated(f"read the manifests of table {self.name}"):
            self._table.refresh()
            io, specs = self._table.io(), self._table.specs()
            sets: Any = self._iceberg.relocated.com.google.common.collect.Sets
            named = {name: path for path in paths for name in spellings(path)}
            asked, needed, manifests = (sets.newHashSet(items) for items in (list(named), [], []))
            # Paths stay in the JVM: they may be many. Threads, because reads wait for the store.
            with ThreadPoolExecutor(_READERS, "frazil-needed") as pool:
                snapshots = list(self._table.snapshots())
                for listed in pool.map(lambda snapshot: snapshot.allManifests(io), snapshots):
                    manifests.addAll(listed)
                for snapshot in snapshots:
                    needed.add(snapshot.manifestListLocation())
                for manifest in manifests:
                    needed.add(manifest.path())
                if not all(map(_LISTING.search, paths)):  # otherwise no manifest names any of them
                    for listed in pool.map(lambda m: self._named(m, io, specs, asked), manifests):
                        needed.addAll(listed)
            needed.retainAll(asked)
            return {named[str(name)] for name in needed}

    def _named(self, manifest: Any, io: Any, specs: Any, asked: Any) -> Any:
        """Those of the paths `asked` that a manifest names, as a Java set."""
        sets: Any = self._iceberg.relocated.com.google.common.collect.Sets
        files = self._iceberg.ManifestFiles.readPaths(manifest, io, specs)
        try:
            held = sets.newHashSet(files.iterator())
        finally:
            files.close()
        held.retainAll(asked)
        return held

    def branches(self) -> list[str]:
        with _translated(f"read the branches of table {self.name}"):
            refs = self._table.refs()
            return [str(name) for name in refs if refs[name].isBranch()]

    def tag(self, tag: str, snapshot_id: int, was: int | None) -> None:
        """Points `tag` at a snapshot, in a commit of its own; a Conflict if it is not where it
        `was`. Expiry never removes it."""
        self.move({tag: snapshot_id}, expected={tag: was})

    def untag(self, tag: str) -> None:
        with _translated(f"remove tag {tag} of table {self.name}"):
            if self._table.refs().get(tag) is not None:
                self._table.manageSnapshots().removeTag(tag).commit()

    def set_property(self, key: str, value: str) -> None:
        with _translated(f"set property {key} of table {self.name}"):
            self._table.updateProperties().set(key, value).commit()

    def remove_property(self, key: str) -> None:
        with _translated(f"remove property {key} of table {self.name}"):
            self._table.updateProperties().remove(key).commit()

    def tags(self) -> dict[str, int]:
        """Tag → snapshot id."""
        with _translated(f"read the tags of table {self.name}"):
            refs = self._table.refs()
            return {str(n): int(refs[n].snapshotId()) for n in refs if refs[n].isTag()}

    def fork(self, branch: str, snapshot_id: int) -> None:
        """Creates a branch at a snapshot, or moves an existing one there."""
        with _translated(f"fork branch {branch} of table {self.name}"):
            update = self._table.manageSnapshots()
            if self._table.refs().get(branch) is None:
                update.createBranch(branch, snapshot_id)
            else:
                update.replaceBranch(branch, snapshot_id)
            update.commit()

    def move(self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]) -> None:
        """Points branches and tags at other snapshots, or removes them, all in one commit; a
        Conflict if those in `expected` are elsewhere. A reference that does not exist yet becomes a
        tag.

        Iceberg's own updates of references are retried on any state they find. This one is not.
        """
        with _translated(f"move {', '.join(refs)} of table {self.name}"):
            operations = self._table.operations()
            base = operations.refresh()
            for name, wanted in expected.items():
                ref = base.ref(name)
                current = None if ref is None else int(ref.snapshotId())
                if current != wanted:
                    raise Conflict(
                        f"cannot move {name} of table {self.name}: expected it at snapshot "
                        f"{wanted}, found {current}"
                    )
            operations.commit(base, self.pointed(base, refs))
            self._catalog.changed(self.name)
            self._table.refresh()

    def pointed(self, metadata: Any, refs: Mapping[str, int | None]) -> Any:
        """Java's metadata with branches and tags at other snapshots, or removed."""
        references = self._iceberg.SnapshotRef
        update = self._iceberg.TableMetadata.buildFrom(metadata)
        for name, snapshot_id in refs.items():
            ref = metadata.ref(name)
            if snapshot_id is None:
                if ref is not None and ref.isBranch():
                    # A REST catalog checks where a reference is only if it is set, not if it is
                    # removed. Setting it first, to the same snapshot, guards the removal.
                    keep = (ref.minSnapshotsToKeep() or 0) + 1
                    kept = references.builderFrom(ref).minSnapshotsToKeep(keep)
                    update.setRef(name, kept.build())
                update.removeRef(name)
            elif ref is None:
                made = references.tagBuilder(snapshot_id).maxRefAgeMs(2**63 - 1).build()
                update.setRef(name, made)
            else:
                update.setRef(name, references.builderFrom(ref, snapshot_id).build())
        return update.build()

    def evolve(self, plan: Callable[[str], SchemaUpdate]) -> None:
        """Applies the change that `plan` returns for the current schema, in one commit.

        If another writer was first, or the response was lost, `plan` is called again: it no longer
        returns changes that have been made.
        """
        tries = _EVOLUTIONS
        while True:
            self.refresh()
            update = plan(self.schema)
            if not update:
                return
            tries -= 1
            try:
                with _translated(f"change the schema of table {self.name}"):
                    self._change(update)
                return
            # ConfigError, too: Spark shares the table, and may have refreshed it in between.
            except (Conflict, CommitStateUnknown, ConfigError):
                if not tries:
                    raise

    def _change(self, update: SchemaUpdate) -> None:
        def parsed(schema: str) -> Any:
            return self._iceberg.SchemaParser.fromJson(schema).columns().get(0).type()

        change = self._table.updateSchema()
        for path, name in update.rename:
            change.renameColumn(path, name)
        for path in update.relax:
            change.makeColumnOptional(path)
        for path, kind in update.widen:
            change.updateColumn(path, parsed(kind))
        for path, name, kind in update.add:
            change.addColumn(path or None, name, parsed(kind))
        if update.rename and update.identifier:  # Iceberg loses identifier fields inside a struct
            change.setIdentifierFields(list(update.identifier))
        change.commit()
        self._catalog.changed(self.name)

    # The table's own storage, for staged batches beside the data.

    def store(self, path: str, content: bytes) -> None:
        """Writes a new object. Never overwrites one: names contain a fresh id."""
        with _translated(f"write {path}"):
            out = self._table.io().newOutputFile(path).create()
            try:
                out.write(bytearray(content))
            finally:
                out.close()

    def fetch(self, path: str) -> bytes:
        with _translated(f"read {path}"):
            stream = self._table.io().newInputFile(path).newStream()
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def listing(self, prefix: str, before_ms: int | None = None) -> list[str]:
        """The paths under a prefix; with `before_ms`, only those created before that moment."""
        with _translated(f"list {prefix}"):
            try:
                paths, files = [], self._table.io().listPrefix(prefix).iterator()
                while files.hasNext():
                    file = files.next()
                    if before_ms is None or file.createdAtMillis() < before_ms:
                        paths.append(str(file.location()))
                return sorted(paths)
            except Py4JJavaError as error:
                if "FileNotFoundException" in _causes(error.java_exception)[0]:
                    return []
                raise

    def remove(self, paths: Sequence[str]) -> None:
        """Removes many objects at once, if the store can; objects that it refuses to remove
        stay."""
        with _translated(f"remove {len(paths)} files of table {self.name}"):
            if paths:
                io = self._table.io()
                self._iceberg.CatalogUtil.deleteFiles(io, list(paths), "unneeded", True)

    def delete(self, path: str) -> None:
        """Removes an object; one that is gone already is no error."""
        with _translated(f"delete {path}"):
            try:
                self._table.io().deleteFile(path)
            except Py4JJavaError as error:
                names = _causes(error.java_exception)[0]
                if not {"NotFoundException", "FileNotFoundException"} & set(names):
                    raise

    # For compaction: deletes beside the data, and a commit that replaces both.

    def delete_folder(self, path: str) -> None:
        """Removes everything below a path, known to the table or not."""
        with _translated(f"delete {path}"):
            try:
                self._table.io().deletePrefix(path.rstrip("/") + "/")
            except Py4JJavaError as error:
                if "FileNotFoundException" not in _causes(error.java_exception)[0]:
                    raise

    def contents(
        self, branch: str, known: Mapping[str, list[ManifestEntry]], data: bool = False
    ) -> tuple[Snapshot | None, dict[str, list[ManifestEntry]]]:
        """The newest snapshot of a branch, and the entries of its manifests by path; `data`: of
        data manifests only. Manifests never change: those in `known` are not read again."""
        with _translated(f"list the files of table {self.name}"):
            snapshot = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            if snapshot is None:
                return None, {}
            entries = {}
            io = self._table.io()
            for manifest in snapshot.dataManifests(io) if data else snapshot.allManifests(io):
                path = str(manifest.path())
                entries[path] = known[path] if path in known else self._listed(manifest)
            return self._catalog.read(snapshot), entries

    def staged(self, manifest: str) -> list[ManifestEntry]:
        """The data files of a manifest written by `write_manifest`."""
        with _translated(f"list staged files of table {self.name}"):
            decoded = self._iceberg.ManifestFiles.decode(base64.b64decode(manifest))
            return self._listed(decoded) if str(decoded.content().name()) == "DATA" else []

    def lacking(self, manifests: Sequence[str]) -> list[str]:
        """Paths that the store no longer has, of manifests written by `write_manifest` and of the
        files that they list: data and deletes."""
        with _translated(f"look for staged files of table {self.name}"):
            io, specs = self._table.io(), self._table.specs()
            decoded = [self._iceberg.ManifestFiles.decode(base64.b64decode(m)) for m in manifests]
            gone = self._gone(io, [str(manifest.path()) for manifest in decoded])
            paths: list[str] = []
            for manifest in decoded:
                if str(manifest.path()) not in gone:
                    files = self._iceberg.ManifestFiles.readPaths(manifest, io, specs)
                    try:
                        paths += [str(path) for path in files.iterator()]
                    finally:
                        files.close()
            return gone + self._gone(io, paths)

    def _gone(self, io: Any, paths: Sequence[str]) -> list[str]:
        def exists(path: str) -> bool:
            with _translated(f"look for {path}"):
                return bool(io.newInputFile(path).exists())

        if not paths:
            return []
        with ThreadPoolExecutor(min(_LOOKING, len(paths)), "frazil-staged") as pool:
            present = list(pool.map(exists, paths))
        return [path for path, is_there in zip(paths, present, strict=True) if not is_there]

    def _listed(self, manifest: Any) -> list[ManifestEntry]:
        specs, files = self._table.specs(), self._iceberg.ManifestFiles
        spec = specs.get(manifest.partitionSpecId())
        everywhere = bool(spec.isUnpartitioned())
        data = str(manifest.content().name()) == "DATA"
        read = files.read if data else files.readDeleteManifest
        reader = read(manifest, self._table.io(), specs)
        entries = []
        try:
            iterator = reader.iterator()
            while iterator.hasNext():
                file = iterator.next()
                text = self._described(file, spec)
                entries.append(ManifestEntry(text, int(file.dataSequenceNumber() or 0), everywhere))
        finally:
            reader.close()
        return entries

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
        """Commits one snapshot that replaces the files `removed` by `added`, data and deletes (as
        Iceberg's JSON), with the same rows; on top of the snapshot `since`, or not at all.

        New data files get the sequence number of this commit. Iceberg drops deletes that are older
        than all data files it keeps, and ignores new ones that claim an older number (H6); here no
        commit lies in between whose deletes could be missed.
        """

        def check(history: Iterator[Snapshot]) -> str | None:
            newest = next(history, None)
            if newest is None or newest.id != since:
                return f"snapshot {since} is not the newest one any more"
            return None

        self.refresh()
        if refusal := check(self.history(branch)):  # Iceberg's own message is longer
            raise Conflict(f"cannot rewrite files of table {self.name}: {refusal}")
        with _translated(f"rewrite files of table {self.name}"):
            update = self._table.newRewrite().validateFromSnapshot(since)
            for descriptor in removed:
                update.deleteFile(self._data_file(descriptor))
            for descriptor in added:
                update.addFile(self._data_file(descriptor))
            self._commit(update, summary, branch, check, leftovers)


@dataclass(frozen=True, slots=True)
class PlanOperator:
    """One operator of a query's analyzed plan."""

    name: str
    #: number of its streaming inputs
    streams: int
    #: of a streaming source: its name, class and options
    source: str = ""
    table: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets


def operators(frame: DataFrame) -> list[PlanOperator]:
    """The streaming operators of a query, sources included."""
    steps: list[PlanOperator] = []

    def visit(node: Any) -> None:
        if not node.isStreaming():
            return
        name = node.getClass().getSimpleName()
        inputs = node.children()
        below = [inputs.apply(i) for i in range(inputs.size())]
        if name == "StreamingRelationV2":
            table = node.table().getClass().getName()
            options = {str(k): str(v) for k, v in dict(node.extraOptions()).items()}
            steps.append(PlanOperator(name, 0, str(node.sourceName()).lower(), table, options))
        elif name == "StreamingRelation":
            steps.append(PlanOperator(name, 0, str(node.sourceName())))
        else:
            steps.append(PlanOperator(name, sum(bool(child.isStreaming()) for child in below)))
        for child in below:
            visit(child)

    with _translated("look at the query"):
        visit(frame._jdf.queryExecution().analyzed())
    return steps


def refuse_what_cannot_append(frame: DataFrame) -> None:
    """Runs Spark's own check of a streaming query, which Spark itself runs only at its start."""
    jvm: Any = frame.sparkSession._jvm
    try:
        jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(
            frame._jdf.queryExecution().analyzed(),
            jvm.org.apache.spark.sql.streaming.OutputMode.Append(),
        )
    except PySparkException as error:
        fact = str(error).strip().splitlines()[0].rstrip(";")
        raise ConfigError(
            f"cannot stream this query into a table: {fact}",
            hint="a table takes rows once and for all: aggregations need withWatermark",
        ) from None


class HadoopFolder:
    """A folder on any file system that Spark supports, for checkpoints."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path.rstrip("/")
        self._path: Any = spark._jvm.org.apache.hadoop.fs.Path  # type: ignore[union-attr]
        with _translated(f"open {path}"):
            configuration = spark._jsparkSession.sessionState().newHadoopConf()
            self._files = self._path(path).getFileSystem(configuration)

    def names(self, folder: str) -> list[str]:
        with _translated(f"list {self.path}/{folder}"):
            where = self._path(f"{self.path}/{folder}")
            if not self._files.exists(where):
                return []
            return [status.getPath().getName() for status in self._files.listStatus(where)]

    def read(self, name: str) -> str | None:
        """The text of a small file; None if there is no such file."""
        with _translated(f"read {self.path}/{name}"):
            where = self._path(f"{self.path}/{name}")
            if not self._files.exists(where):
                return None
            stream = self._files.open(where)
            try:
                return bytes(stream.readAllBytes()).decode()
            finally:
                stream.close()

    def write(self, name: str, text: str) -> None:
        with _translated(f"write {self.path}/{name}"):
            stream = self._files.create(self._path(f"{self.path}/{name}"), False)
            try:
                stream.write(bytearray(text.encode()))
            finally:
                stream.close()
