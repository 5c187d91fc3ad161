"""For tests of users: a broker, topics with records, the jars of Spark's own Kafka source.

    from frazil.testing import Broker, create_topic, spark_kafka_jars

Imported at their first use: the modules below need Kafka's client or Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frazil.testing.datagen import create_topic
    from frazil.testing.jars import spark_kafka_jars
    from frazil.testing.kafka import Broker

__all__ = ["Broker", "create_topic", "spark_kafka_jars"]

_LAZY = {"Broker": "kafka", "create_topic": "datagen", "spark_kafka_jars": "jars"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'frazil.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
