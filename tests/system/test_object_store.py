"""A REST catalog and an S3 bucket, both real servers (SeaweedFS; not Iceberg's own code)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from frazil.core.config import from_document
from frazil.core.errors import ConfigError
from frazil.sink import Sink
from frazil.surface import orders
from frazil.surface.broker import Broker, die_with_parent, free_ports
from frazil.surface.proof import of_table

KEY, SECRET = "frazil", "not-a-real-secret"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Catalog properties of a running server, with a table bucket and a plain one."""
    folder = tmp_path_factory.mktemp("weed")
    s3, rest, filer, master, volume, admin = free_ports(6)
    os.environ.update(TEST_S3_SECRET=SECRET, TEST_REST_CREDENTIAL=f"{KEY}:{SECRET}")
    server = subprocess.Popen(
        [str(Path(sys.executable).with_name("weed")), "mini", f"-dir={folder}", "-ip=127.0.0.1",
         "-ip.bind=127.0.0.1", "-master.telemetry=false", "-webdav=false", "-tableBucket=lake",
         f"-s3.port={s3}", f"-s3.port.iceberg={rest}", "-s3.port.lance=0", f"-filer.port={filer}",
         f"-master.port={master}", f"-volume.port={volume}", f"-admin.port={admin}"],
        env={**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET},
        stdout=(folder / "log").open("wb"), stderr=subprocess.STDOUT, preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        _await(f"http://127.0.0.1:{rest}/v1/config?warehouse=lake", server)
        files = pyarrow.fs.S3FileSystem(
            access_key=KEY, secret_key=SECRET, region="us-east-1",
            endpoint_override=f"http://127.0.0.1:{s3}", allow_bucket_creation=True,
        )  # fmt: skip
        files.create_dir("stage")
        yield {
            "type": "rest",
            "uri": f"http://127.0.0.1:{rest}",
            "warehouse": "lake",
            "credential": "env:TEST_REST_CREDENTIAL",
            "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
            "s3.endpoint": f"http://127.0.0.1:{s3}",
            "s3.access-key-id": KEY,
            "s3.secret-access-key": "env:TEST_S3_SECRET",
            "s3.path-style-access": "true",
            "client.region": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def _await(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


def _sink(
    spark: Any, broker: Broker, store: dict[str, str], name: str, folder: Path, **sink: Any
) -> Sink:
    (folder / "order.avsc").write_text(orders.SCHEMA)
    config = from_document(
        {
            "sink": {"id": name, "topics": [name], "index": f"db.{name}_index", "trigger": "50ms",
                     "max_records_per_trigger": 4_000, "patience": "30s", **sink},
            "kafka": {"bootstrap.servers": broker.bootstrap},
            "decode": {"schema": str(folder / "order.avsc")},
            "catalog": {"name": "s3lake", **store},
            "table": [{"name": f"db.{name}", "partition_by": ["day(placed_at)"]}],
        }
    )  # fmt: skip
    spark.conf.set("spark.sql.catalog.s3lake", "org.apache.iceberg.spark.SparkCatalog")
    for key, value in config.catalog.properties.resolved().items():
        spark.conf.set(f"spark.sql.catalog.s3lake.{key}", value)
    return Sink(config)


def test_a_topic_goes_to_s3_through_a_rest_catalog_and_two_lives(
    spark: Any, broker: Broker, store: dict[str, str], name: str, tmp_path: Path
):
    orders.create_topic(broker.bootstrap, name, 2)
    source = orders.Orders()
    for life in (1, 2):
        orders.produce(broker.bootstrap, name, 2, rows=9_000, orders=source)
        sink = _sink(spark, broker, store, name, tmp_path, stage="s3://stage/frazil")
        sink.start(spark)
        try:
            assert sink.wait_until(sink.ends(), 90), sink.committer.progress
        finally:
            sink.stop()
        assert sink.epoch == life
    found = spark.sql(
        f"SELECT count(*), count(DISTINCT order_id), max(order_id) FROM s3lake.db.{name}"
    ).first()
    assert tuple(found) == (18_000, 18_000, 18_000)
    table = sink.catalog.load(f"db.{name}")
    assert table is not None
    assert table.location.startswith("s3://lake/")
    report, stream = of_table(sink.catalog.look, f"db.{name}", "main").reports
    assert stream.verdict == "proven"
    assert report.verdict == "proven"
    assert report.written == 18_000
    assert table.listing(f"s3://stage/frazil/{name}/") == [], "what is committed is cleaned up"


def test_a_bucket_that_refuses_the_stage_is_named_at_once(
    spark: Any, broker: Broker, store: dict[str, str], name: str, tmp_path: Path
):
    """A table bucket takes Iceberg's files only; waiting would not help."""
    orders.create_topic(broker.bootstrap, name, 1)
    orders.produce(broker.bootstrap, name, 1, rows=100)
    sink = _sink(spark, broker, store, name, tmp_path)
    sink.start(spark)
    try:
        with pytest.raises(ConfigError, match=r"cannot write s3://lake/.*403"):
            sink.wait_until(sink.ends(), 60)
    finally:
        sink.stop()
