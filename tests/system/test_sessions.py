"""What a user's own session sees: with Iceberg's cache of tables on, as it is by default."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

import frazil
from frazil.config.model import Config, from_document
from frazil.sink import Sink
from frazil.sources import range_tasks
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import WITHIN, numbered, produce


def cached(spark: Any, lake: Lake, name: str, bootstrap: str) -> Config:
    """A catalog of Iceberg's own default settings, in a session that has others."""
    document = lake.document(name, name, bootstrap)
    settings = {"": "org.apache.iceberg.spark.SparkCatalog", **document["catalog"]}
    for key, value in settings.items():
        spark.conf.set(".".join(filter(None, ["spark.sql.catalog", name, key])), value)
    document["catalog"]["name"] = name
    return from_document(document)


def test_a_session_sees_each_commit_whatever_it_read_before(
    broker: Broker, lake: Lake, spark: Any, name: str
):
    create_topic(broker.bootstrap, name, 1)
    config = cached(spark, lake, name, broker.bootstrap)
    tables = [f"{name}.{table}" for table in (config.tables[0].name, config.index_table)]
    for run in range(2):  # the second begins with a table that is there
        sent = 20 * run
        produce(broker.bootstrap, name, numbered(10, sent))
        sink = Sink(config).start(spark)
        assert sink.wait_until(sink.ends(), WITHIN)
        expected = [sent + 10, 2 * run + 1]
        assert [spark.table(table).count() for table in tables] == expected, "while it runs"
        produce(broker.bootstrap, name, numbered(10, sent + 10))
        assert sink.wait_until(sink.ends(), WITHIN)
        sink.stop()
        sink.awaitTermination()
        expected = [sent + 20, 2 * run + 2]
        assert [spark.table(table).count() for table in tables] == expected, "at its end"


def test_a_sibling_session_starts_sinks_of_its_own_and_sees_their_commits(
    broker: Broker, lake: Lake, spark: Any, name: str
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(10))
    frazil.register(spark)  # the session that is active here, and not the one that is used
    sibling = spark.newSession()
    config = cached(sibling, lake, name, broker.bootstrap)
    table = f"{name}.{config.tables[0].name}"
    sink = Sink(config).start(sibling)
    assert sink.wait_until(sink.ends(), WITHIN)
    assert sibling.table(table).count() == 10
    sink.stop()
    frame = frazil.read(sibling, config, end={name: {"0": 7}})
    assert frame.count() == 7
    assert SparkSession.getActiveSession()._jsparkSession.equals(spark._jsparkSession)


#: A Python that is called for a source's process and, while there is work in the file `lost`, calls
#: Spark's port as a stranger would and says nothing that Spark understands.
STRANGER = """\
import os, runpy, socket, sys
lost = {lost!r}
times = int(open(lost).read())
if times and "pyspark.sql.streaming.python_streaming_source_runner" in sys.argv:
    open(lost, "w").write(str(times - 1))
    if path := os.environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH"):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(path)
    else:
        port = int(os.environ["PYTHON_WORKER_FACTORY_PORT"])
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(b"\\0\\0\\0\\5hello")
    sys.exit()
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def test_a_stream_goes_on_after_spark_could_not_reach_a_python_process(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(10))
    lost, script, python = (tmp_path / file_name for file_name in ("lost", "stranger.py", "python"))
    lost.write_text("2")
    script.write_text(STRANGER.format(lost=str(lost), python=sys.executable))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    sibling = spark.newSession()  # knows the sources with the Python that there is now
    with monkeypatch.context() as patched:
        patched.setattr(spark.sparkContext, "pythonExec", str(python))
        frazil.register(sibling)
    config = lake.config(name, name, broker.bootstrap)
    sink = Sink(config).start(sibling)
    assert sink.wait_until(sink.ends(), WITHIN)
    assert lost.read_text() == "0"
    collect, done = range_tasks._collect, []

    def unreachable(*args: Any) -> Any:
        if not done:
            done.append(collect(*args))  # its files are written, and nobody hears of them
            raise PySparkRuntimeError(
                errorClass="CANNOT_OPEN_SOCKET", messageParameters={"errors": "refused"}
            )
        return collect(*args)

    monkeypatch.setattr(range_tasks, "_collect", unreachable)
    produce(broker.bootstrap, name, numbered(10, 10))
    sink.processAllAvailable()
    assert done
    assert sink.isActive
    assert sink.committer.progress.blocked == ""
    sink.stop()
    assert caplog.text.count("the query is started again") == 3
    rows = sibling.table(f"lake.{config.tables[0].name}")
    assert sorted(row._offset for row in rows.collect()) == list(range(20))
