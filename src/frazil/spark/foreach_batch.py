"""How Structured Streaming calls a sink: the trigger of the query, and the gate before each batch.

Runs on the driver, on the thread that Spark runs `foreachBatch` on. A closed gate lets no batch
begin, and Spark records none as done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from frazil.config.model import Config
from frazil.config.sections import AUTO, AVAILABLE_NOW
from frazil.config.units import duration
from frazil.errors import FrazilError, encode_for_spark
from frazil.spark.query import translated

_STOP_SECONDS = 60.0
_INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling a batch: "
    "java.lang.InterruptedException"
)


class BatchGate:
    """One batch at a time, and none once it is closed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False

    def close(self) -> None:
        """After the batch in progress."""
        with self.lock:
            self.closed = True

    def run(
        self, batch: Callable[[DataFrame, int], None], frame: DataFrame, spark_batch_id: int
    ) -> bool:
        """False, without a call of `batch`, if the gate is closed. Errors leave as texts that
        survive the way through Spark."""
        with self.lock:
            if self.closed:
                return False
            try:
                batch(frame, spark_batch_id)
                return True
            except PySparkException as error:
                raise encode_for_spark(translated(error)) from None
            except FrazilError as error:
                raise encode_for_spark(error) from None


def interrupt(active: Callable[[], bool]) -> NoReturn:
    """End a batch that the gate refused. Returning would make Spark record it as done. Spark takes
    this error for its own interruption, once it has been asked to stop the query."""
    deadline = time.monotonic() + _STOP_SECONDS
    while active() and time.monotonic() < deadline:
        time.sleep(0.01)
    raise RuntimeError(f"{_INTERRUPTED}: the sink was stopped")


def with_trigger(
    writer: DataStreamWriter, config: Config, *, paced: bool, gathers: bool
) -> DataStreamWriter:
    """`paced`: the source plans one batch after the other by itself, within its limits; `gathers`:
    and waits until one is due."""
    trigger = config.sink.trigger
    if trigger == AVAILABLE_NOW and not paced:
        return writer.trigger(availableNow=True)
    if trigger == AVAILABLE_NOW:
        pause = 0.1
    elif trigger != AUTO:
        pause = duration(trigger)
    else:
        # A source that gathers is polled for a batch; another one when a batch is due.
        pause = max(0.2, min(1.0, config.gather / 10) if gathers else config.gather)
    return writer.trigger(processingTime=f"{int(pause * 1000)} milliseconds")
