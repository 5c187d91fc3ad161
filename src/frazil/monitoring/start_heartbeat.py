"""The heartbeat of a start: how `frazil status` knows of a run that has claimed nothing yet.

In: a config, and the health of the sink. Out: one small object where the sink stages, or will:
beside the files of the index if there is one, else where the catalog will put it, as far as that is
known without the server (`staging_location`, hadoop and jdbc catalogs). Promised: nothing is
claimed or created in the catalog, and no failure here stops or delays a start. Runs on a thread of
its own, without Spark.
"""

from __future__ import annotations

import json

from frazil.config.model import Config
from frazil.errors import FrazilError
from frazil.iceberg.file_io import FileStore
from frazil.ledger.sink_state import start_folder, start_heartbeat_path
from frazil.monitoring.sink_health import SinkHealth
from frazil.spark.open_table import opener


class StartHeartbeat:
    def __init__(self, config: Config, health: SinkHealth, interval: float) -> None:
        self._config, self._health, self._interval = config, health, interval
        #: the run has heartbeats of its own
        self.claimed = False
        self._path = ""
        self._store = FileStore({})

    def __call__(self) -> None:
        if self.claimed:
            return
        if not self._path:
            self._locate()
        if self._path:
            values = {**self._health.values(), "interval": self._interval}
            self._store.write(self._path, json.dumps(values).encode())

    def last(self) -> None:
        """How the start ended; nothing where the run goes on."""
        if not self.claimed:
            self()
        elif self._path:
            self._store.delete(self._path)

    def _locate(self) -> None:
        properties = self._config.catalog.properties.resolved()
        try:
            index = opener(self._config, spark=False)(self._config.index_table)
        except FrazilError:
            index = None  # the catalog is not made yet, does not answer, or needs Spark
        self._store = FileStore(properties) if index is None else index.store
        if folder := start_folder(self._config, index):
            self._path = start_heartbeat_path(folder)
