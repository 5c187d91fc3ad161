"""Settings that Frazil itself gives to librdkafka, Spark and Iceberg, for `frazil config explain`.

In: a config. Out: section → setting → value, and whether it is a default that the config overrides,
or required. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from frazil.config.model import Config
from frazil.kafka.connection import DEFAULTS, FIXED
from frazil.spark.session import CATALOG_DEFAULTS, process_settings

#: As `explain` shows where a setting comes from.
DEFAULT, REQUIRED = "default of Frazil", "required by Frazil"


def own_settings(config: Config) -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """Section → setting → value and origin, of settings that the config leaves open or may not
    change."""
    spark = process_settings(f"frazil-{config.sink.id}", transform=bool(config.transform))
    own = {
        "kafka": {key: (value, DEFAULT) for key, value in DEFAULTS.items()},
        "spark": {key: (value, DEFAULT) for key, value in spark.items()},
        "catalog": {key: (value, DEFAULT) for key, value in CATALOG_DEFAULTS.items()},
    }
    given = {"kafka": config.kafka, "spark": config.spark, "catalog": config.catalog.properties}
    shown = {
        section: {key: pair for key, pair in settings.items() if key not in given[section]}
        for section, settings in own.items()
    }
    shown["kafka"] |= {key: (value, REQUIRED) for key, value in FIXED.items()}
    return shown
