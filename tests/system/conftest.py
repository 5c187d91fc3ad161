"""What several of these tests share: a REST catalog with an object store behind it, and one with a
proxy before it."""

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
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, RESTError

from frazil.testing.kafka import Broker, die_with_parent, free_ports
from tests.bench import faults, proxy, rest

KEY, SECRET = "frazil", "not-a-real-secret"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Catalog properties of a running server, with a table bucket and a plain one."""
    folder = tmp_path_factory.mktemp("weed")
    s3, rest, filer, master, volume, admin = free_ports(6)
    os.environ.update(TEST_S3_SECRET=SECRET, TEST_REST_CREDENTIAL=f"{KEY}:{SECRET}")
    server = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("weed")),
            "mini",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-webdav=false",
            "-tableBucket=lake",
            f"-s3.port={s3}",
            f"-s3.port.iceberg={rest}",
            "-s3.port.lance=0",
            f"-filer.port={filer}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-admin.port={admin}",
        ],
        env={**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET},
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
        preexec_fn=die_with_parent,
    )
    try:
        _await(f"http://127.0.0.1:{rest}/v1/config?warehouse=lake", server)
        _await_table_bucket(f"http://127.0.0.1:{rest}", server)
        files = pyarrow.fs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            region="us-east-1",
            endpoint_override=f"http://127.0.0.1:{s3}",
            allow_bucket_creation=True,
        )
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


def _await_table_bucket(uri: str, server: subprocess.Popen[bytes]) -> None:
    """The server makes it after it answers."""
    catalog = load_catalog(
        "lake", type="rest", uri=uri, warehouse="lake", credential=f"{KEY}:{SECRET}"
    )
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the server ended"
        try:
            catalog.list_namespaces()
            return
        except (NoSuchNamespaceError, RESTError):
            assert time.monotonic() < deadline, "the table bucket is missing"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def world(
    spark: Any, broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[faults.World]:
    """Iceberg's own REST catalog, and a proxy before it."""
    with (
        rest.RestCatalog(tmp_path_factory.mktemp("rest")) as server,
        proxy.Proxy(server.port) as between,
    ):
        yield faults.World(spark, server, between, broker.bootstrap)
