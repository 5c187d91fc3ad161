"""Real servers for the tests. A missing one fails; it never skips."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from frazil.config.model import Config, from_document
from frazil.spark import jars
from frazil.spark.session import session
from frazil.testing.jars import rest_catalog_jars, spark_kafka_jars
from frazil.testing.kafka import Broker
from frazil.testing.process import toml
from tests.oracle import Lake

_names = itertools.count(1)

settings.register_profile("frazil", deadline=None)  # a busy machine is no error
settings.load_profile("frazil")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where tests run side by side, their jars are fetched before, once: Ivy shares its cache."""
    if getattr(session.config.option, "numprocesses", None):
        for group in (jars.ICEBERG, jars.SQLITE, jars.AWS):
            jars.fetch(group, transitive=False)
        spark_kafka_jars()
        rest_catalog_jars()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    # Some records are of years ago: no look of the broker's at its retention may take them away.
    forever = {"log.retention.ms": "-1"}
    with Broker(tmp_path_factory.mktemp("kafka") / "broker", settings=forever) as running:
        yield running


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return Lake(tmp_path_factory.mktemp("lake"))


@pytest.fixture(scope="session")
def spark(lake: Lake) -> Iterator[Any]:
    more = jars.fetch(jars.AWS, transitive=False)  # for the tests with an object store
    more += spark_kafka_jars()  # and those with Spark's own Kafka source
    settings = {"spark.jars": ",".join(map(str, more)), "spark.sql.shuffle.partitions": "2"}
    settings["spark.scheduler.mode"] = "FAIR"  # as in a process of several sinks
    config = lake.config("spark", "none", "none:1", spark=settings)
    running = session(config)
    # The catalog's file is there from now on, whichever test comes first.
    running.sql(f"SHOW NAMESPACES IN {config.catalog.name}").collect()
    yield running
    running.stop()


@pytest.fixture
def name() -> str:
    """A name no other test has: for topics, sinks and tables."""
    return f"t{next(_names)}"


@pytest.fixture
def make_config(broker: Broker, lake: Lake, name: str) -> Callable[..., Config]:
    """A config for this test's own topic, sink and table."""

    def make(**sections: Any) -> Config:
        return lake.config(name, name, broker.bootstrap, **sections)

    return make


@pytest.fixture
def write_toml(broker: Broker, lake: Lake, name: str, tmp_path: Path) -> Callable[..., Path]:
    def write(**sections: Any) -> Path:
        document = lake.document(name, name, broker.bootstrap, **sections)
        from_document(document)
        path = tmp_path / "sink.toml"
        path.write_text(toml(document))
        return path

    return write
