"""Iceberg's Java API in Spark's JVM: the only room with Py4J. Plain Python values in and out.

(And the little that Spark itself tells only in Java: a query's operators, files of a checkpoint.)

The user's own `spark.sql.catalog.*` settings name the catalog, so every catalog and store that
Iceberg for Spark supports works here. What Java throws leaves this room as one of our errors
(`_KINDS`); what is not in the map leaves it as `CommitStateUnknown`, which the committer answers
by reading back, never by guessing.
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

#: Java exception (simple name, of the error or of a cause) → what it means for the operator.
_KINDS: dict[str, type[FrazilError]] = {
    # certain: nothing was applied
    "CommitFailedException": Conflict,
    "AlreadyExistsException": Conflict,
    # ours alone: the ancestry validator said no. Whether an earlier try of the same commit was
    # applied is for the reader of the ledger to say (H1).
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

#: What Spark raises where a job failed, with the task's own words in it.
FAILED = (PySparkException, Py4JJavaError)
#: position of `added_snapshot_id` in Iceberg's manifest-file record (the spec's field order)
_SNAPSHOT_ID = 6
_LOOKING = 16  # staged files that are looked for at the same time
_EVOLUTIONS = 5  # tries to change a schema while others change it too
#: How manifests and lists of them are called, by Iceberg and by us; no data file is.
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
        if "Status Code: 403" in fact or "Status Code: 401" in fact:  # of S3; waiting does not help
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
    """Asks `check` about the ancestry on every try of a commit, Iceberg's own retries included."""

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
    """Takes what Iceberg would delete after a failed commit, and deletes nothing.

    A commit that was applied, and whose answer was lost, looks like a failure to Iceberg, and its
    clean-up would remove the manifest list of the live snapshot (H1).
    """

    def __init__(self) -> None:
        self.paths: list[str] = []

    def accept(self, path: str) -> None:
        self.paths.append(path)

    class Java:
        implements = ("java.util.function.Consumer",)


class _Tagging:
    """A table's operations, whose commits also point a tag at the snapshot that they add: snapshot
    and tag are in one metadata file, and one cannot be there without the other.

    What a commit throws goes through Python and comes out of Iceberg without its class, so Iceberg
    neither tries it again nor cleans up after it. The error is kept in `trouble`, and what the try
    made is told as `made`: the caller reads back, tries again and sweeps.
    """

    def __init__(self, table: JavaTable, branch: str, tag: str) -> None:
        self._table = table
        self._operations = table._table.operations()
        self._branch, self._tag = branch, tag
        self._metadata: Any = None
        self.trouble: Py4JError | None = None
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)  # everything else is the table's own affair

    def current(self) -> Any:  # asked again and again: not each time of Java
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
    """A package, class or static method of Java's, looked up once: each look is a call of its own,
    and a commit makes many."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        known = _Names(getattr(self._found, name))
        setattr(self, name, known)
        return known

    def __call__(self, *given: Any) -> Any:
        return self._found(*given)


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """With `spark` as the active session of this thread, which is where Spark looks up catalogs and
    registered data sources, whichever session it is asked through."""
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
        """A session that has it cached (`cache-enabled`, Iceberg's default) loads it again: to see
        what was committed by this handle, and not to look for files that are gone."""
        if self._caches:
            self._catalog.invalidateTable(self._iceberg.catalog.TableIdentifier.parse(table))

    def load(self, table: str) -> JavaTable | None:
        """The table as it is now; None where it does not exist."""
        with _translated(f"load table {table}"):
            identifier = self._iceberg.catalog.TableIdentifier.parse(table)
            if not self._catalog.tableExists(identifier):
                return None
            return JavaTable(self, table, self.open(table))

    def open(self, table: str) -> Any:
        """Java's own table."""
        identifier = self._iceberg.catalog.TableIdentifier.parse(table)
        self._catalog.invalidateTable(identifier)
        return self._catalog.loadTable(identifier)

    def look(self, table: str) -> ReadOnlyTable | None:
        """The table as its metadata file says it is now, for those who only read."""
        found = self.load(table)
        return None if found is None else found.plain

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
        """Create namespace and table; whoever else creates it at the same moment, one table is."""
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
            for key, value in properties.items():
                builder = builder.withProperty(key, value)
            if location:
                builder = builder.withLocation(location)
            try:
                return JavaTable(self, table, builder.create(), made=True)
            except Py4JJavaError as error:
                if "AlreadyExistsException" not in _causes(error.java_exception)[0]:
                    raise
        there = self.load(table)
        if there is None:
            raise Conflict(f"cannot create table {table}: it came and went at the same moment")
        return there

    def make_namespace(self, name: str) -> bool:
        """False where it was there before."""
        with _translated(f"create namespace {name}"):
            return self._create_namespace(name.split("."))

    def drop_namespace(self, name: str) -> None:
        """One that is empty."""
        with _translated(f"drop namespace {name}"):
            self._spark_catalog.dropNamespace(self._names(name.split(".")), False)

    def drop(self, table: str) -> None:
        """With the files it knows; one that is gone already is no error."""
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
        """One call to Java, however many keys there are."""
        found = json.loads(self._iceberg.util.JsonUtil.mapper().writeValueAsString(properties))
        return {key: str(value) for key, value in found.items()}

    def read(self, snapshot: Any) -> Snapshot:
        """One call to Java for one snapshot, however many keys its summary has."""
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
    """Something a table knows; or one of our errors, where it is gone and that has been seen."""

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
    #: which commit brought its rows
    sequence: int
    #: files that hide some of them
    deletes: int
    #: Iceberg's JSON
    descriptor: str


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """A file that a manifest lists, of data or of deletes."""

    #: Iceberg's JSON
    descriptor: str
    #: data sequence number: with which commit it came
    sequence: int
    #: its spec has no partitions; deletes of such a file count everywhere
    everywhere: bool


class JavaTable:
    """One Iceberg table: what the committer, the audit and the sink need of it."""

    def __init__(self, catalog: JavaCatalog, name: str, table: Any, *, made: bool = False) -> None:
        self.name = name
        self.made = made  # by us, just now: nobody has written to it before
        self._catalog = catalog
        self._iceberg = catalog._iceberg
        self._table = table
        self.uuid: str = table.uuid().toString()
        #: properties that ledger entries refer to
        self._kept: dict[str, str] = {}

    def refresh(self) -> None:
        with _translated(f"refresh table {self.name}"):
            try:
                self._table.refresh()
                found = self._table.uuid().toString()
            except Py4JJavaError as error:
                names, found = _causes(error.java_exception)
                if "NullPointerException" in names:
                    # A handle that has seen its table gone does not see that it is back.
                    self._table = self._catalog.open(self.name)
                    found = self._table.uuid().toString()
                elif "UUID does not match" in found:  # Iceberg's own look at it
                    found = found.rpartition("=")[2]
                else:
                    raise
        if found != self.uuid:
            raise IdentityMismatch(
                f"cannot go on with table {self.name}: it was dropped and made again; "
                f"expected uuid {self.uuid}, found {found}"
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
        """All that the table still knows, oldest first."""
        schemas = self._table.schemas()
        return [str(self._iceberg.SchemaParser.toJson(schemas[i])) for i in sorted(schemas)]

    @_property
    def spec(self) -> str:
        return str(self._iceberg.PartitionSpecParser.toJson(self._table.spec()))

    def unpartitioned_spec(self) -> str:
        """A spec of the table without partitions, under which deletes reach all of its rows. One
        that has none gets it, in one commit in which its own spec stays what it is."""
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
        """Empty: none."""
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
        """Where a file of metadata of that name belongs (`write.metadata.path`)."""
        with _translated(f"read table {self.name}"):
            return str(self._table.operations().metadataFileLocation(name))

    @property
    def plain(self) -> ReadOnlyTable:
        """As its metadata file says it is now."""
        self.refresh()
        return ReadOnlyTable(self.name, self.metadata_file, self.io_properties)

    @property
    def io_properties(self) -> dict[str, str]:
        """What the executors' file IO needs. May hold credentials: never log it."""
        try:
            return self._catalog.plain(self._table.io().properties())
        except Py4JError:  # a FileIO need not have properties
            return {}

    def history(self, branch: str) -> Iterator[Snapshot]:
        """The branch's ancestry, newest first, as far as it is still there."""
        with _translated(f"read the history of table {self.name}"):
            snapshot = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            while snapshot is not None:
                yield self._read(snapshot)
                parent = snapshot.parentId()
                snapshot = None if parent is None else self._table.snapshot(parent)

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        """An expired snapshot and its ancestors, as far as earlier metadata files tell of them.

        The newest file that has a snapshot has what was not expired by then of its ancestors, too.
        """
        with _translated(f"read earlier metadata of table {self.name}"):
            parse, io = self._iceberg.TableMetadataParser.read, self._table.io()
            files = [
                str(each.file()) for each in self._table.operations().current().previousFiles()
            ]
            wanted: int | None = snapshot_id
            while wanted is not None and files:
                try:
                    metadata = parse(io, files.pop())
                except Py4JJavaError as error:
                    if "NotFoundException" in _causes(error.java_exception)[0]:
                        return  # older ones were removed before it
                    raise
                while wanted is not None and (found := metadata.snapshot(wanted)) is not None:
                    yield self._read(found, metadata)
                    parent = found.parentId()
                    wanted = None if parent is None else int(parent)

    def carries(self, branch: str, snapshot_id: int) -> bool:
        """Does the branch list the newest manifest of a snapshot? What wrote it, or what the
        snapshot had of it, is then behind the branch."""
        with _translated(f"read the manifests of table {self.name}"):
            io = self._table.io()
            theirs = list(self._table.snapshot(snapshot_id).allManifests(io))
            newest = max((int(each.sequenceNumber()) for each in theirs), default=0)
            wanted = {str(m.path()) for m in theirs if int(m.sequenceNumber()) == newest}
            head = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            listed = {str(each.path()) for each in head.allManifests(io)}
            return not wanted or bool(wanted & listed)

    def tagged(self, tag: str) -> Snapshot | None:
        with _translated(f"read tag {tag} of table {self.name}"):
            reference = self._table.refs().get(tag)
            if reference is None:
                return None
            snapshot = self._table.snapshot(reference.snapshotId())
            return None if snapshot is None else self._read(snapshot)

    def _read(self, snapshot: Any, metadata: Any = None) -> Snapshot:
        """With the properties that a ledger entry in it refers to. Their names have the digests of
        their texts: one that was read once is never read again."""
        found = self._catalog.read(snapshot)
        wanted = entry.referred(found.summary)
        if not self._kept.keys() >= set(wanted):
            there = self._table.properties() if metadata is None else metadata.properties()
            self._kept |= entry.split(self._catalog.plain(there))[1]
        return replace(found, summary=entry.joined(found.summary, self._kept))

    def _keep(self, summary: Mapping[str, str]) -> dict[str, str]:
        """What goes into the snapshot. What its entry refers to is there before it is; and what no
        snapshot refers to any more goes, of this life and those that it has fenced."""
        lean, kept = entry.split(summary)
        there = entry.split(self.properties)[1] if kept else {}
        missing = {key: text for key, text in kept.items() if there.get(key) != text}
        if missing:
            sink, epoch = summary[f"{PREFIX}sink"], int(summary[f"{PREFIX}epoch"])
            told = [self._catalog.read(each).summary for each in self._table.snapshots()]
            update = self._table.updateProperties()
            for key in entry.forgotten(there, told, sink, epoch):
                if key not in kept:
                    update.remove(key)
            for key, text in missing.items():
                update.set(key, text)
            update.commit()
        return lean

    def write_manifest(self, path: str, files: Sequence[str]) -> str:
        """Files (as Iceberg's JSON), all of data or all of deletes, into one manifest at `path`;
        its encoded description."""
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
            # Iceberg's encoding insists on a snapshot id, which a staged manifest has not: it goes
            # in as a placeholder and comes out as null again, so that the commit gives it its own.
            manifest = writer.toManifestFile().copy()
            manifest.put(_SNAPSHOT_ID, _PLACEHOLDER)
            return base64.b64encode(self._iceberg.ManifestFiles.encode(manifest)).decode()

    def _name_unlisted(self, files: Sequence[str], parse: Callable[[str], Any]) -> None:
        """Raises the first file that Iceberg does not take into a manifest. No store is asked for
        that, so to try again would not help."""
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
        """One snapshot with all of `manifests`, or nothing: an append, or a row delta where some of
        them hold deletes. A data file, as Iceberg's JSON, may stand for its manifest: where there
        are few, to have it written by the commit is quicker. A staged manifest may be merged into
        another one, and is not needed any more then: it is among `leftovers`.

        `check` sees the ancestry the commit would build on, on every try, and answers None or why
        not. Paths that Iceberg wants to delete are added to `leftovers` instead. The `tag` names
        the snapshot from the same commit on, unless it is the table's first.
        """
        with _translated(f"commit to table {self.name}"):
            summary = self._keep(summary)
            table, operations = self._table, None
            if tag and self.count():  # some catalogs know no tags of a table without snapshots
                operations = _Tagging(self, branch, tag)
                table = self._iceberg.BaseTable(operations, self.name)
            files = [each for each in manifests if each.startswith("{")]
            staged = [
                self._iceberg.ManifestFiles.decode(base64.b64decode(each))
                for each in manifests
                if not each.startswith("{")
            ]
            update: Any
            if any(str(each.content().name()) == "DELETES" for each in staged):
                update = table.newRowDelta()
                for file in files:
                    update.addRows(self._data_file(file))
                for manifest in staged:
                    self._add_each(update, manifest)
            else:
                # One that merges manifests when there are many of them, as the table's properties
                # say: else every batch would leave one, for every reader to open.
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
        """The files of a staged manifest: a row delta takes no manifests."""
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
            found = []
            try:  # each call to Java has its price, and there are as many of them as files
                iterator = tasks.iterator()
                while iterator.hasNext():
                    task = iterator.next()
                    file = task.file()
                    text = self._described(file, specs[file.specId()] if spec is None else spec)
                    values = json.loads(text)
                    deletes = int(task.deletes().size()) if hidden else 0
                    sequence = int(file.dataSequenceNumber() or 0)
                    found.append(
                        LiveFile(
                            values["file-path"], values["record-count"], sequence, deletes, text
                        )
                    )
            finally:
                tasks.close()
            return newest, sorted(found, key=lambda each: each.sequence)

    def _data_file(self, descriptor: str) -> Any:
        node = self._mapper.readTree(descriptor)
        return self._iceberg.ContentFileParser.fromJson(node, self._table.specs())

    @cached_property
    def _mapper(self) -> Any:
        """Iceberg's own, which also takes NaN and Infinity: a float may be a partition value."""
        mapper = self._iceberg.util.JsonUtil.mapper().copy()
        name = str(mapper.getClass().getName())  # shaded, with Iceberg's own name before it
        name = name.replace(".databind.ObjectMapper", ".core.JsonParser$Feature")
        features = mapper.getClass().getClassLoader().loadClass(name)
        value_of = self._catalog._jvm.java.lang.Enum.valueOf
        return mapper.configure(value_of(features, "ALLOW_NON_NUMERIC_NUMBERS"), True)

    def _described(self, file: Any, spec: Any) -> str:
        """Iceberg's JSON of a file. It has quotes around NaN and Infinity, and cannot read them."""
        text = str(self._iceberg.ContentFileParser.toJson(file, spec))
        if not any(word in text for word in ('"NaN"', 'Infinity"')):
            return text
        values = json.loads(text)
        types = [str(each.type()) for each in spec.partitionType().fields()]
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
        """One snapshot of main with the files `added` (Iceberg's JSON) for those `removed`.

        `since` is the snapshot that was read: what others did meanwhile to the files that go is a
        conflict, what they added is none. `same`: the rows are the same ones. `check` and
        `leftovers` as for `append`.
        """
        with _translated(f"rewrite files of table {self.name}"):
            update: Any
            if same:
                update = self._table.newRewrite()
            else:  # (that it also fails where a file is gone already is what this word is for)
                update = self._table.newOverwrite().validateNoConflictingDeletes()
            update.validateFromSnapshot(since)
            for file in removed:
                update.deleteFile(self._data_file(file.descriptor))
            for descriptor in added:
                update.addFile(self._data_file(descriptor))
            self._commit(update, summary, "main", check, leftovers)

    def manifests(self, snapshot_id: int) -> set[str]:
        """The paths of a snapshot's manifests and of their list."""
        with _translated(f"read the manifests of table {self.name}"):
            snapshot = self._table.snapshot(snapshot_id)
            found = {str(each.path()) for each in snapshot.allManifests(self._table.io())}
            return {*found, str(snapshot.manifestListLocation())}

    def moment(self, number: int) -> int | None:
        """When its n-th snapshot was made (milliseconds; -1 is the newest); None: there is none."""
        with _translated(f"read the snapshots of table {self.name}"):
            snapshots = self._table.operations().current().snapshots()
            at = number if number >= 0 else int(snapshots.size()) + number
            there = 0 <= at < int(snapshots.size())
            return int(snapshots.get(at).timestampMillis()) if there else None

    def count(self) -> int:
        """How many snapshots there are."""
        with _translated(f"read the snapshots of table {self.name}"):
            return int(self._table.operations().current().snapshots().size())

    def expire(self, before_ms: int, keep: int, unneeded: list[str]) -> None:
        """Forget the snapshots before a moment, except the last `keep` of each branch and what a
        tag or branch names. Paths that Iceberg wants to delete are added to `unneeded` instead."""
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
        """Those of `paths` that a snapshot of the table needs, under whatever name: lists,
        manifests and files."""
        with _translated(f"read the manifests of table {self.name}"):
            self._table.refresh()
            io, specs = self._table.io(), self._table.specs()
            sets: Any = self._iceberg.relocated.com.google.common.collect.Sets
            named = {name: path for path in paths for name in spellings(path)}
            asked, found, manifests = (sets.newHashSet(each) for each in (list(named), [], []))
            # What files name stays in the JVM: it may be much. Reading waits for the store.
            with ThreadPoolExecutor(_READERS, "frazil-needed") as pool:
                snapshots = list(self._table.snapshots())
                for each in pool.map(lambda snapshot: snapshot.allManifests(io), snapshots):
                    manifests.addAll(each)
                for snapshot in snapshots:
                    found.add(snapshot.manifestListLocation())
                for manifest in manifests:
                    found.add(manifest.path())
                if not all(map(_LISTING.search, paths)):  # else no manifest names any of them
                    for each in pool.map(lambda m: self._named(m, io, specs, asked), manifests):
                        found.addAll(each)
            found.retainAll(asked)
            return {named[str(each)] for each in found}

    def _named(self, manifest: Any, io: Any, specs: Any, asked: Any) -> Any:
        """Those of the paths `asked` that a manifest names, in Java."""
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
        """Point `tag` at a snapshot, in a commit of its own; a Conflict where it is not where it
        `was`. Expiry never takes it."""
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
        """Each with the snapshot it names."""
        with _translated(f"read the tags of table {self.name}"):
            refs = self._table.refs()
            return {str(n): int(refs[n].snapshotId()) for n in refs if refs[n].isTag()}

    def fork(self, branch: str, snapshot_id: int) -> None:
        """A branch that begins at a snapshot, whatever it was before."""
        with _translated(f"fork branch {branch} of table {self.name}"):
            update = self._table.manageSnapshots()
            if self._table.refs().get(branch) is None:
                update.createBranch(branch, snapshot_id)
            else:
                update.replaceBranch(branch, snapshot_id)
            update.commit()

    def move(self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]) -> None:
        """Point branches and tags at other snapshots, or remove them, all in one commit; a Conflict
        where those `expected` are not where they should be. Who is not there yet becomes a tag.

        Iceberg's own updates of references are tried again on whatever they find. This one is not.
        """
        with _translated(f"move {', '.join(refs)} of table {self.name}"):
            operations = self._table.operations()
            base = operations.refresh()
            for name, wanted in expected.items():
                ref = base.ref(name)
                there = None if ref is None else int(ref.snapshotId())
                if there != wanted:
                    raise Conflict(
                        f"cannot move {name} of table {self.name}: expected it at snapshot "
                        f"{wanted}, found {there}"
                    )
            operations.commit(base, self.pointed(base, refs))
            self._catalog.changed(self.name)
            self._table.refresh()

    def pointed(self, metadata: Any, refs: Mapping[str, int | None]) -> Any:
        """Java's metadata with branches and tags at other snapshots, or without them."""
        references = self._iceberg.SnapshotRef
        update = self._iceberg.TableMetadata.buildFrom(metadata)
        for name, snapshot_id in refs.items():
            ref = metadata.ref(name)
            if snapshot_id is None:
                if ref is not None and ref.isBranch():
                    # A REST catalog is told where a reference must be only if it is set, not if it
                    # is removed: set first, to where it is, it stands for the removal.
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
        """Change the schema as `plan` says of the one that is there, in one commit.

        Where another writer was first, or the answer was lost, `plan` is asked again: what has been
        done is then no change any more.
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
            # A ConfigError too: Spark shares the table, and may have refreshed it in between.
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
        if update.rename and update.identifier:  # Iceberg loses those inside a struct
            change.setIdentifierFields(list(update.identifier))
        change.commit()
        self._catalog.changed(self.name)

    # The table's own storage, for staged batches beside the data.

    def store(self, path: str, content: bytes) -> None:
        """Write a new object. Never over another: names carry a fresh id."""
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
        """What lies there; with `before_ms`, only what was made before that moment."""
        with _translated(f"list {prefix}"):
            try:
                found, files = [], self._table.io().listPrefix(prefix).iterator()
                while files.hasNext():
                    file = files.next()
                    if before_ms is None or file.createdAtMillis() < before_ms:
                        found.append(str(file.location()))
                return sorted(found)
            except Py4JJavaError as error:
                if "FileNotFoundException" in _causes(error.java_exception)[0]:
                    return []
                raise

    def remove(self, paths: Sequence[str]) -> None:
        """Remove many objects at once, as the store can; what it refuses stays."""
        with _translated(f"remove {len(paths)} files of table {self.name}"):
            if paths:
                io = self._table.io()
                self._iceberg.CatalogUtil.deleteFiles(io, list(paths), "unneeded", True)

    def delete(self, path: str) -> None:
        """Remove an object; one that is gone already is no error."""
        with _translated(f"delete {path}"):
            try:
                self._table.io().deleteFile(path)
            except Py4JJavaError as error:
                names = _causes(error.java_exception)[0]
                if not {"NotFoundException", "FileNotFoundException"} & set(names):
                    raise

    # What compaction needs: deletes beside the data, and a commit that replaces both.

    def delete_folder(self, path: str) -> None:
        """All that lies below it, known to the table or not."""
        with _translated(f"delete {path}"):
            try:
                self._table.io().deletePrefix(path.rstrip("/") + "/")
            except Py4JJavaError as error:
                if "FileNotFoundException" not in _causes(error.java_exception)[0]:
                    raise

    def contents(
        self, branch: str, known: Mapping[str, list[ManifestEntry]], data: bool = False
    ) -> tuple[Snapshot | None, dict[str, list[ManifestEntry]]]:
        """The newest snapshot of a branch, and what its manifests list; `data`: those of data
        alone. Manifests never change: those that are `known` are not read again."""
        with _translated(f"list the files of table {self.name}"):
            snapshot = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            if snapshot is None:
                return None, {}
            found = {}
            io = self._table.io()
            for manifest in snapshot.dataManifests(io) if data else snapshot.allManifests(io):
                path = str(manifest.path())
                found[path] = known[path] if path in known else self._listed(manifest)
            return self._catalog.read(snapshot), found

    def staged(self, manifest: str) -> list[ManifestEntry]:
        """The data files of a manifest that `write_manifest` has written."""
        with _translated(f"list staged files of table {self.name}"):
            decoded = self._iceberg.ManifestFiles.decode(base64.b64decode(manifest))
            return self._listed(decoded) if str(decoded.content().name()) == "DATA" else []

    def lacking(self, manifests: Sequence[str]) -> list[str]:
        """What the store no longer has of manifests that `write_manifest` has written, and of the
        files that they list: data and deletes."""
        with _translated(f"look for staged files of table {self.name}"):
            io, specs = self._table.io(), self._table.specs()
            decoded = [self._iceberg.ManifestFiles.decode(base64.b64decode(m)) for m in manifests]
            gone = self._gone(io, [str(each.path()) for each in decoded])
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
            found = list(pool.map(exists, paths))
        return [path for path, is_there in zip(paths, found, strict=True) if not is_there]

    def _listed(self, manifest: Any) -> list[ManifestEntry]:
        specs, files = self._table.specs(), self._iceberg.ManifestFiles
        spec = specs.get(manifest.partitionSpecId())
        everywhere = bool(spec.isUnpartitioned())
        data = str(manifest.content().name()) == "DATA"
        read = files.read if data else files.readDeleteManifest
        reader = read(manifest, self._table.io(), specs)
        found = []
        try:
            iterator = reader.iterator()
            while iterator.hasNext():
                file = iterator.next()
                text = self._described(file, spec)
                found.append(ManifestEntry(text, int(file.dataSequenceNumber() or 0), everywhere))
        finally:
            reader.close()
        return found

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
        """One snapshot with the files `added` for those `removed`, of data and of deletes (as
        Iceberg's JSON), that hold the same rows; made on the snapshot `since` or not at all.

        New data files get the sequence number of this very commit. Iceberg drops deletes that are
        older than all data files it keeps, and does not look at new ones that claim an older number
        (H6); here there is no commit in between whose deletes could be missed.
        """

        def check(history: Iterator[Snapshot]) -> str | None:
            newest = next(history, None)
            if newest is None or newest.id != since:
                return f"snapshot {since} is not the newest one any more"
            return None

        self.refresh()
        if refusal := check(self.history(branch)):  # Iceberg would say so at greater length
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
    """One step of a query, as Spark understood it."""

    name: str
    #: how many of its inputs are streams
    streams: int
    #: of a streaming source: its name and class, and the options it was given
    source: str = ""
    table: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets


def operators(frame: DataFrame) -> list[PlanOperator]:
    """The streaming part of a query, sources included."""
    found: list[PlanOperator] = []

    def visit(node: Any) -> None:
        if not node.isStreaming():
            return
        name = node.getClass().getSimpleName()
        inputs = node.children()
        below = [inputs.apply(i) for i in range(inputs.size())]
        if name == "StreamingRelationV2":
            table = node.table().getClass().getName()
            options = {str(k): str(v) for k, v in dict(node.extraOptions()).items()}
            found.append(PlanOperator(name, 0, str(node.sourceName()).lower(), table, options))
        elif name == "StreamingRelation":
            found.append(PlanOperator(name, 0, str(node.sourceName())))
        else:
            found.append(PlanOperator(name, sum(bool(each.isStreaming()) for each in below)))
        for each in below:
            visit(each)

    with _translated("look at the query"):
        visit(frame._jdf.queryExecution().analyzed())
    return found


def refuse_what_cannot_append(frame: DataFrame) -> None:
    """Spark's own check of a streaming query, which it would make only when it starts."""
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
    """A folder on any file system that Spark knows: where checkpoints are."""

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
        """A small text; None where there is no such file."""
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
