"""The tables that implement `iceberg.table`: nothing runs, `make check` type-checks it."""

from __future__ import annotations

from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.iceberg.table import ReadableTable, Table, TableScan
from tests.simulation import catalog


def tables(java: JavaTable, simulated: catalog.Table) -> tuple[Table, Table]:
    return java, simulated


def readable(java: JavaTable, static: ReadOnlyTable) -> tuple[ReadableTable, ReadableTable]:
    return java, static


def scanned(static: ReadOnlyTable) -> TableScan:
    return static
