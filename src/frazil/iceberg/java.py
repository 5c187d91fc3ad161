"""Iceberg's Java API in Spark's JVM: catalogs. Plain Python values in and out.

The modules `iceberg.java*` are the only ones with Py4J: this one, `java_table` with `java_metadata`
and `java_files` (one table), `java_spark` (the parts of Spark that only Java exposes) and
`java_errors` (errors of Java translated into ours). They run on the driver.

The user's own `spark.sql.catalog.*` settings name the catalog, so every catalog and store that
Iceberg for Spark supports works here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from frazil import format_version
from frazil.errors import ConfigError, Conflict
from frazil.iceberg.java_errors import causes, translated
from frazil.iceberg.java_spark import active
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.iceberg.table import Snapshot


class _Names:
    """A Java package, class or static method, looked up once: each lookup is a call to the JVM, and
    a commit makes many."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        known = _Names(getattr(self._target, name))
        setattr(self, name, known)
        return known

    def __call__(self, *given: Any) -> Any:
        return self._target(*given)


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
        with translated(f"open catalog {name}"), active(spark):
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
        with translated(f"load table {table}"):
            identifier = self._iceberg.catalog.TableIdentifier.parse(table)
            if not self._catalog.tableExists(identifier):
                return None
            return JavaTable(self, table, self.open(table))

    def open(self, table: str) -> Any:
        """Java's own table object, loaded again."""
        identifier = self._iceberg.catalog.TableIdentifier.parse(table)
        self._catalog.invalidateTable(identifier)
        return self._catalog.loadTable(identifier)

    def open_readonly(self, table: str) -> ReadOnlyTable | None:
        """The table in the state of its current metadata file, for readers; None if it does not
        exist."""
        handle = self.load(table)
        return None if handle is None else handle.readonly

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
        with translated(f"create table {table}"):
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
                if "AlreadyExistsException" not in causes(error.java_exception)[0]:
                    raise
        existing = self.load(table)
        if existing is None:
            raise Conflict(
                f"cannot create table {table}: another client created and dropped it at the "
                "same time"
            )
        return existing

    def make_namespace(self, name: str) -> bool:
        """False if it existed before."""
        with translated(f"create namespace {name}"):
            return self._create_namespace(name.split("."))

    def drop_namespace(self, name: str) -> None:
        """Drops an empty namespace."""
        with translated(f"drop namespace {name}"):
            self._spark_catalog.dropNamespace(self._names(name.split(".")), False)

    def drop(self, table: str) -> None:
        """Drops a table with the files it references; a table that does not exist is no error."""
        with translated(f"drop table {table}"):
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
                    if "AlreadyExists" not in "".join(causes(error.java_exception)[0]):
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

    def to_dict(self, properties: Any) -> dict[str, str]:
        """A Java map as a dict, with one call to Java however many keys there are."""
        values = json.loads(self._iceberg.util.JsonUtil.mapper().writeValueAsString(properties))
        return {key: str(value) for key, value in values.items()}

    def to_snapshot(self, snapshot: Any) -> Snapshot:
        """A Java snapshot as a value, with one call to Java however many keys its summary has."""
        return Snapshot.of_json(json.loads(self._iceberg.SnapshotParser.toJson(snapshot)))
