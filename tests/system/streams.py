"""What the stream tests share: records into a topic, a sink's run, a registry, bounded waiting."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fastavro
from confluent_kafka import Producer

from frazil.auditing.evidence import of_sink, of_table
from frazil.auditing.report import TableReport
from frazil.config.model import Config
from frazil.errors import Unavailable
from frazil.iceberg.java import JavaCatalog
from frazil.offsets import Partition
from frazil.run import Run
from frazil.sink import Sink
from frazil.steps import Step

WITHIN = 180.0  # seconds; a bound for what takes a few, on a machine that is busy


def produce(bootstrap: str, topic: str, values: Iterable[bytes], partitions: int = 1) -> int:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    count = 0
    for count, value in enumerate(values, 1):
        producer.produce(topic, value, partition=(count - 1) % partitions)
    assert producer.flush(30) == 0
    return count


def numbered(count: int, start: int = 0) -> Iterator[bytes]:
    return (f"record-{i}".encode() for i in range(start, start + count))


def eventually(
    happened: Callable[[], Any], description: str, within: float = WITHIN, sink: Run | None = None
) -> Any:
    """Poll until it is true; a stream that stops first tells why."""
    deadline = time.monotonic() + within

    def now() -> Any:
        try:
            return happened()
        except Unavailable:  # a partition just made has no leader yet
            return None

    asked = time.monotonic()
    while not (value := now()):
        if sink is not None:
            sink.check()
        assert time.monotonic() < deadline, f"not within {within:.0f} s: {description}"
        time.sleep(max(0.02, time.monotonic() - asked))  # what is waited for needs the cores too
        asked = time.monotonic()
    return value


class Steps:
    """Collects the steps of a sink, and can hold it at one of them."""

    def __init__(self, hold: str = "") -> None:
        self._seen: list[Step] = []
        self._hold = hold
        self.held, self.go = threading.Event(), threading.Event()

    def __call__(self, step: Step) -> None:
        self._seen.append(step)
        if step.name == self._hold:
            self.held.set()
            assert self.go.wait(WITHIN), f"held at {step.name} and never let go"

    def named(self, name: str) -> list[Step]:
        return [step for step in list(self._seen) if step.name == name]


@contextmanager
def running(
    config: Config, spark: Any, steps: Steps | None = None, flush: float = 20.0
) -> Iterator[Run]:
    """One run; at its end what is staged has `flush` seconds to be committed."""
    sink = Sink(config, on_step=steps).start(spark)
    try:
        yield sink
    finally:
        if steps is not None:
            steps.go.set()
        sink.stop(flush)


def catch_up(config: Config, spark: Any, steps: Steps | None = None) -> Run:
    """One run, to the end of the topics as they are now."""
    with running(config, spark, steps) as sink:
        ends = sink.ends()
        assert sink.wait_until(ends, WITHIN), f"at {sink.position}, not at {ends}"
    return sink


def proven(config: Config, spark: Any) -> TableReport:
    return all_proven(config, spark, config.tables[0].name)[config.tables[0].name]


def all_proven(config: Config, spark: Any, *tables: str) -> dict[str, TableReport]:
    """The audit of each of many tables, and of the index."""
    by_table = {report.table: report for report in reports(config, spark)}
    for name in (*tables, config.index_table):
        assert by_table[name].verdict == "proven", by_table[name]
    return {name: by_table[name] for name in tables}


def reports(config: Config, spark: Any) -> list[TableReport]:
    """Of all tables of the sink."""
    proof = of_sink(config, JavaCatalog(spark, config.catalog.name).open_readonly)
    return [report for report in proof.reports if report.sink == config.sink.id]


def audited(spark: Any, name: str, catalog: str = "lake") -> list[TableReport]:
    """Of one table, by its name alone: a report for each of its sinks."""
    proof = of_table(JavaCatalog(spark, catalog).open_readonly, name, "main")
    return [report for report in proof.reports if report.table == name]


def avro(schema: dict[str, Any], value: dict[str, Any], schema_id: int | None = None) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    head = b"" if schema_id is None else b"\0" + schema_id.to_bytes(4, "big")
    return head + out.getvalue()


class Registry:
    """A schema registry of a few schemas. `gate`: ids whose answer waits until it is opened."""

    def __init__(self, **schemas: dict[str, Any]) -> None:
        #: subject → id
        self.subjects: dict[str, int] = {}
        #: the status of every answer, if not 200
        self.status = 200
        self.schemas = {int(key.removeprefix("id")): value for key, value in schemas.items()}
        self.shut: set[int] = set()
        self.gate = threading.Event()
        self.asked: list[int] = []
        registry = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] == "/subjects":
                    return self.answer(registry.status, [*registry.subjects])
                number = int(self.path.split("?")[0].rsplit("/", 1)[-1])
                registry.asked.append(number)
                if number in registry.shut:
                    registry.gate.wait(WITHIN)
                schema = registry.schemas.get(number)
                body: dict[str, Any] = {"error_code": 40403, "message": "Schema not found"}
                if schema is not None:
                    body = {"schema": json.dumps(schema)}
                self.answer(404 if schema is None else 200, body)

            def answer(self, status: int, body: Any) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                with suppress(OSError):  # the one who asked may have been killed
                    self.wfile.write(raw)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Registry:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


def part(topic: str, number: int) -> Partition:
    return Partition(topic, number)
