"""Files that killed runs left behind, in tables of Iceberg: found where they lie, none else."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.commit.protocol import TableCommitter
from frazil.errors import ConfigError, IdentityMismatch
from frazil.iceberg.java import JavaCatalog
from frazil.offsets import Cut
from frazil.ops.orphans import orphans, remove
from tests.oracle import Lake


def parquet(folder: Path, sink: str) -> Path:
    """A file as a run of the sink before the newest would have named it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"frazil-{sink}-1-0-{uuid4()}.parquet"
    pq.write_table(pa.table({"id": pa.array([1, 2], pa.int64())}), path)
    return path


def names(leftovers: list[tuple[Any, str]]) -> set[str]:
    return {path.rsplit("/", 1)[-1] for _, path in leftovers}


def test_tables_that_share_a_folder_keep_their_files_and_dead_ones_are_found_there(
    spark: Any, lake: Lake, name: str, tmp_path: Path
):
    shared = tmp_path / "shared"
    config = lake.config(name, name, "none:1", table={"name": f"db.{name}"})
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
    for table in (config.index_table, f"db.{name}", f"db.{name}_b"):
        properties = f"'write.data.path' = '{shared}'" if table != config.index_table else ""
        spark.sql(
            f"CREATE TABLE lake.{table} (id BIGINT) USING iceberg"
            + (f" TBLPROPERTIES ({properties})" if properties else "")
        )
    catalog = JavaCatalog(spark, "lake")
    live = [parquet(shared / part, name) for part in ("a", "b")]
    for table, path in zip((f"db.{name}", f"db.{name}_b"), live, strict=True):
        spark.sql(f"CALL lake.system.add_files('{table}', '`parquet`.`{path.parent}`')")
    index = catalog.load(config.index_table)
    assert index is not None
    known = {table: catalog.load(table).uuid for table in (f"db.{name}", f"db.{name}_b")}  # type: ignore[union-attr]
    for epoch in (1, 2):
        target = TableCommitter(index, "main", name, epoch, time)
        target.claim(lambda _: Cut())
    entry = replace(target._empty(target.head().entry), tables=known)
    target.commit([], entry)
    dead = parquet(shared / "a", name)
    assert names(orphans(config, spark)) == {dead.name}
    assert orphans(config, spark, older_than=3600) == []
    spark.sql(f"ALTER TABLE lake.db.{name} SET TBLPROPERTIES ('gc.enabled' = 'false')")
    leftovers = orphans(config, spark)
    with pytest.raises(ConfigError, match=r"gc\.enabled"):
        remove(leftovers)
    assert dead.exists()
    spark.sql(f"ALTER TABLE lake.db.{name} UNSET TBLPROPERTIES ('gc.enabled')")
    remove(orphans(config, spark))
    assert not dead.exists()
    assert all(path.exists() for path in live)
    # A table that is gone may have been renamed: then its files live on in the shared folder.
    spark.sql(f"ALTER TABLE lake.db.{name}_b RENAME TO db.{name}_c")
    with pytest.raises(IdentityMismatch, match=f"table db.{name}_b does not exist"):
        orphans(config, spark)
    assert all(path.exists() for path in live)
