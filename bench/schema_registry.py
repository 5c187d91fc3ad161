"""A real schema registry as a child process: Apicurio, by its Confluent-compatible interface.

Comes in: a folder. Goes out: an address on loopback that Flink's, Kafka Connect's and Confluent's
clients use, once it answers. Schemas are kept in memory. The child dies with its parent.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frazil.spark import jars
from frazil.testing.kafka import die_with_parent, free_ports

VERSION = "2.6.13.Final"
APICURIO = (f"io.apicurio:apicurio-registry-app:{VERSION}:all@tar.gz",)


class SchemaRegistry:
    def __init__(self, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        (archive,) = (
            path
            for path in jars.fetch(APICURIO, transitive=False, say=say)
            if path.name.endswith(".tar.gz")
        )
        folder.mkdir(parents=True)
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        [self._port] = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/apis/ccompat/v7"

    @property
    def apicurio(self) -> str:
        """Apicurio's own interface: its converter for Kafka Connect asks there."""
        return f"http://127.0.0.1:{self._port}/apis/registry/v2"

    def __enter__(self) -> SchemaRegistry:
        (runner,) = self._folder.glob("**/*-runner.jar")
        with open(self._folder / "registry.log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    jars.java(),
                    "-Xmx256m",
                    "-XX:+UseSerialGC",
                    "-Dquarkus.http.host=127.0.0.1",
                    f"-Dquarkus.http.port={self._port}",
                    "-jar",
                    str(runner),
                ],
                cwd=self._folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                self._ask("subjects")
                return self
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise SystemExit(f"the schema registry does not answer at {self.url}")

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def register(self, subject: str, schema: str) -> int:
        return int(self._ask(f"subjects/{subject}/versions", {"schema": schema})["id"])

    def _ask(self, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/vnd.schemaregistry.v1+json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())
