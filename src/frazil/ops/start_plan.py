"""What a start of a sink would do now: `frazil plan`.

In: a config, and a function that opens tables read-only. Out: `StartPlan`: tables to create, to
change and to leave, the position, the records that wait, what a start would refuse. The code of a
start itself runs (`commit.startup`, `commit.provisioning`, the source's sample), on tables whose
changes stay in memory (`iceberg.memory_table`): so plan and start cannot differ but by what
happens in between. Kafka is read, the catalog is read, nothing is written. Runs on the driver;
Spark is needed only for a `[transform]` and where only Spark can open the catalog.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from frazil.commit.provisioning import TableProvisioner
from frazil.commit.startup import Startup
from frazil.config.model import Config
from frazil.errors import FrazilError, cause
from frazil.iceberg.file_io import FileStore, NeedsSpark
from frazil.iceberg.memory_table import MemoryCatalog, MemoryTable
from frazil.kafka.range_source import BatchGathering
from frazil.ledger.sink_state import index_entry, new_location
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut
from frazil.render import error_values
from frazil.retry import Retry
from frazil.sink import MicroBatches
from frazil.sources.base import BatchSource, BatchTables, StreamState
from frazil.sources.factory import refuse_keys, source_of
from frazil.spark.open_table import Open

#: How long a broker may be silent: a plan answers in seconds, a start waits longer.
_PATIENCE = "5s"


@dataclass
class StartPlan:
    sink: str
    index: str
    #: of the newest run, and of the one that would start
    epoch_now: int | None = None
    epoch: int = 1
    position: Cut = field(default_factory=Cut)
    ends: Cut = field(default_factory=Cut)
    staged: list[StagedBatch] = field(default_factory=list)
    tables: dict[str, MemoryTable] = field(default_factory=dict)
    #: table → why records for it would be rejected, or its batches wait
    refused: dict[str, str] = field(default_factory=dict)
    #: what would stop the start
    stops: FrazilError | None = None
    #: the tables as the first batch would find them, and the source, for a look at other records
    batch_tables: BatchTables | None = None
    source: BatchSource[Any] | None = None

    @property
    def waiting(self) -> int:
        """Offsets from the position to the end of the topics."""
        return sum(max(0, end - self.position.get(p, 0)) for p, end in self.ends.items())

    @property
    def exit_code(self) -> int:
        """That of the start; 1 where a table is refused."""
        return self.stops.exit_code if self.stops else int(bool(self.refused))

    @property
    def stopped_by(self) -> dict[str, str] | None:
        return error_values(self.stops) if self.stops else None


class _NoSession:
    """Stands for Spark's session where none was started."""

    def __getattr__(self, name: str) -> Any:
        raise NeedsSpark("cannot plan without Spark: the index has files that only Spark reads")


def start_plan(config: Config, opened: Open, spark: Any = None) -> StartPlan:
    """`spark`: a session; needed for a [transform]."""
    sink = dataclasses.replace(config.sink, unavailable_timeout=_PATIENCE)
    if not config.transform:  # a source of ranges would remove the folders of old checkpoints
        sink = dataclasses.replace(sink, checkpoint_location="")
    config = dataclasses.replace(config, sink=sink)
    plan = StartPlan(config.sink.id, config.index_table)
    catalog = MemoryCatalog(
        opened,
        lambda name: new_location(config, name),
        FileStore(config.catalog.properties.resolved()),
    )
    plan.tables = catalog.tables
    try:
        index = opened(config.index_table)
        entry = index_entry(index, config.sink.id) if index is not None else None
        plan.epoch_now = entry.epoch if entry else None
        _begin(config, cast(Any, catalog), plan, spark or _NoSession())
    except FrazilError as error:
        plan.stops = error
    finally:
        if plan.source is not None:
            plan.source.close()
    return plan


def _begin(config: Config, catalog: Any, plan: StartPlan, spark: Any) -> None:
    """The steps of `Sink.start`, up to the first batch."""
    retry = Retry(0.0, lambda: True)
    source = plan.source = source_of(config, retry, BatchGathering(0.0))
    refuse_keys(config, source)
    startup = Startup(config, catalog, source)
    startup.claim(spark)
    startup.widen_index()
    left = startup.recover()
    plan.epoch, plan.staged, plan.position = startup.epoch, list(left.staged), left.reached.cut
    stream = StreamState(config.sink.id, startup.epoch, left.reached, left.number)
    tables = TableProvisioner(config, startup, stream, retry, source.metadata)
    with startup.explaining_missing_files():
        if config.transform:  # its checkpoint belongs to a run
            tables.ensure(source.required)
        else:
            MicroBatches(
                source,
                tables,
                cast(Any, None),
                cast(Any, None),
                stream=stream,
                changed=set(),
                retry=retry,
                on_step=lambda _: None,
            ).resume()
    plan.refused = dict(tables.refused)
    plan.batch_tables = tables.plans(versions=False)
    plan.ends = source.ends()


def unexpected(error: Exception) -> FrazilError:
    """An error that no check foresees, as a sentence."""
    return FrazilError(
        f"cannot plan: {type(error).__name__}: {cause(str(error))}"[:500],
        hint="a library below says so; look at the server that it names, and report it otherwise",
    )


def names_of(config: Config) -> list[str]:
    """The tables that a config names: data, dead letters, index."""
    tables = [table.name for table in config.tables if "{" not in table.name]
    return [*tables, *filter(None, [config.dead_letters.table]), config.index_table]


def roles(config: Config) -> Mapping[str, str]:
    """What a table of the sink is for, where it does not hold rows of records."""
    dead_letters = config.dead_letters.table
    return {
        config.index_table: "offset_index",
        **({dead_letters: "dead_letters"} if dead_letters else {}),
    }
