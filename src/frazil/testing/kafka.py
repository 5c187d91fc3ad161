"""A real Apache Kafka broker as a child process: for the demo, the tests and the benchmarks.

In: a directory. Out: a bootstrap address on loopback, once the broker answers requests. KRaft mode,
one node, free ports from the operating system. The child dies with its parent, so a killed demo
leaves no broker behind. Not for production use.
"""

from __future__ import annotations

import base64
import ctypes
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from frazil.errors import Unavailable
from frazil.spark import jars

#: Quick to start, and small beside Spark on two cores. The benchmarks use the JVM's defaults.
QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx512m", "-Xshare:auto")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def die_with_parent() -> None:
    """Runs in the child before exec: the kernel ends it when the parent is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Broker:
    def __init__(
        self,
        directory: Path,
        *,
        jvm: tuple[str, ...] = QUICK_START,
        settings: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.directory = directory
        self._options = jvm
        self.settings = dict(settings or {})
        self._classpath = jars.classpath(jars.fetch(jars.KAFKA, say=say))
        self._port, self._controller = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def controller(self) -> str:
        return f"127.0.0.1:{self._controller}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, within: float = 60.0) -> None:
        """Start, or start again on the same data after a stop or a kill."""
        config = self.directory / "server.properties"
        if not config.exists():
            self._format(config)
        with open(self.directory / "broker.log", "ab") as log:
            self._process = subprocess.Popen(
                [*self._java(), "kafka.Kafka", str(config)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
                cwd=self.directory,
            )
        self._await_protocol(within)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def _java(self) -> list[str]:
        log_level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        return [jars.java(), *self._options, log_level, "-cp", self._classpath]

    def _format(self, config: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{self._controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self._port},"
            f"CONTROLLER://127.0.0.1:{self._controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self._port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.directory / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            # A killed broker can restart only after its last session has ended.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            **self.settings,
        }
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        run = subprocess.run(
            [
                *self._java(),
                "kafka.tools.StorageTool",
                "format",
                f"--cluster-id={cluster}",
                "-c",
                str(config),
                "--standalone",
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if run.returncode != 0:
            raise Unavailable(f"cannot format the broker's storage: {run.stderr.strip()[-500:]}")

    def _await_protocol(self, within: float) -> None:
        assert self._process is not None
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            # The child must be alive: otherwise another broker answers on the port.
            if self._process.poll() is not None:
                raise Unavailable(
                    f"cannot start Kafka: it ended with exit code {self._process.returncode}",
                    hint=f"see {self.directory / 'broker.log'}",
                )
            try:
                admin.list_topics(timeout=1)
                return
            except KafkaException:
                time.sleep(0.05)
        self.kill()
        raise Unavailable(f"cannot start Kafka: no answer at {self.bootstrap} in {within:.0f} s")
