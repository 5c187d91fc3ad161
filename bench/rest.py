"""A real REST catalog as a child process: Iceberg's own reference server, over JDBC on SQLite.

Comes in: a folder. Goes out: an address on loopback, once the server answers the protocol. The
tables lie in the folder as plain files. The child dies with its parent. Not for production use.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frazil.spark import jars
from frazil.testing.jars import rest_catalog_jars
from frazil.testing.kafka import QUICK_START, die_with_parent, free_ports


class RestCatalog:
    def __init__(self, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self.folder = folder
        self._classpath = jars.classpath(rest_catalog_jars(say))
        [self.port] = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> RestCatalog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, *, within: float = 60.0) -> None:
        """Start, or start again on the same data."""
        self.folder.mkdir(parents=True, exist_ok=True)
        database = f"{self.folder}/catalog.db?busy_timeout=10000&journal_mode=WAL"
        settings = {
            "CATALOG_CATALOG__IMPL": "org.apache.iceberg.jdbc.JdbcCatalog",
            "CATALOG_URI": f"jdbc:sqlite:{database}",
            "CATALOG_JDBC_SCHEMA__VERSION": "V1",
            "CATALOG_WAREHOUSE": f"file://{self.folder}/warehouse",
            "CATALOG_IO__IMPL": "org.apache.iceberg.hadoop.HadoopFileIO",
            "CATALOG_REST_PORT": str(self.port),
        }
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
        with open(self.folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    jars.java(),
                    *QUICK_START,
                    quiet,
                    "-cp",
                    self._classpath,
                    "org.apache.iceberg.rest.RESTCatalogServer",
                ],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"the REST catalog ended; see {self.folder / 'server.log'}")
            try:
                self.ask("config")
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit(f"the REST catalog does not answer at {self.uri}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.uri}/v1/{path}", timeout=30) as answer:
            return json.loads(answer.read())

    def table(self, name: str) -> tuple[str, dict[str, Any]]:
        """Where a table's metadata file is, and what it says: asked of the server itself."""
        namespace, _, table = name.rpartition(".")
        loaded = self.ask(f"namespaces/{namespace}/tables/{table}")
        return str(loaded["metadata-location"]).removeprefix("file:"), loaded["metadata"]

    def properties(self, uri: str = "") -> dict[str, str]:
        """For a catalog of Spark's; by another address, where something stands between."""
        return {"type": "rest", "uri": uri or self.uri, "rest-metrics-reporting-enabled": "false"}
