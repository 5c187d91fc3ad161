"""What `frazil rewind` does: a sink's tables and its index go back to a cut, all together.

`look` says what would go and why it may not; `rewind` does it. What is possible,
`commit.rewind_plan` finds; the steps are those of `commit.rewind`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from pyspark.sql import SparkSession
from rich.console import Console

from frazil.commit.protocol import TableCommitter
from frazil.commit.rewind import RewindSteps, Without, fence
from frazil.commit.rewind_plan import COLUMNS, RewindPlan, earliest
from frazil.commit.tables import parallel_map, writer_spec
from frazil.config.model import Config, TableConfig
from frazil.errors import ConfigError, Expired, Fatal, FrazilError, IdentityMismatch
from frazil.iceberg.java import JavaCatalog, JavaTable
from frazil.kafka.planner import Planner, TopicIdentity
from frazil.ledger import index as offset_index
from frazil.ledger import staged_batch
from frazil.ledger.sink_state import REPLAY, TABLES_PROPERTY, announced_tables
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import BATCHES, Cut, Range
from frazil.ops.index_rebuild import taken_out
from frazil.ops.locate import branch_of
from frazil.render import TextTable, counted
from frazil.startup import staging_folder

#: Of more tables than this, only sums are shown.
_SHOWN = 50
_CALL_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class RewindReport:
    """What a rewind would do, or did."""

    sink: str
    index: str
    to: str
    choice: RewindPlan
    position: Cut
    #: batches of the index that go, and batches that are staged
    batches: int
    staged: int
    #: a rewind that was begun and not finished is finished by this one
    unfinished: bool = False
    #: what a person should know, and what forbids it
    warnings: tuple[str, ...] = ()
    refusals: tuple[FrazilError, ...] = field(default=(), compare=False)

    @property
    def nothing(self) -> bool:
        """Do all stand there already?"""
        return not (self.choice.moves or self.batches or self.staged or self.unfinished)

    def values(self) -> dict[str, Any]:
        """For `--json`."""
        boundary = self.choice.boundary
        return {
            "sink": self.sink,
            "index": self.index,
            "to": self.to,
            "batch": boundary.batch,
            "cut": boundary.cut.nested(),
            "committed_at": boundary.at and boundary.at.isoformat(),
            "position": self.position.nested(),
            "batches": self.batches,
            "staged": self.staged,
            "unfinished": self.unfinished,
            "because": list(self.choice.because),
            "warnings": list(self.warnings),
            "refused": [error.message for error in self.refusals],
            "tables": [
                {
                    "table": each.table,
                    "branch": each.branch,
                    "moves": each.moves,
                    "snapshot_now": each.now,
                    "snapshot_then": each.then,
                    "commits": each.commits,
                    "rows": each.rows,
                    "ranges": [[*r.partition, r.start, r.end] for r in each.ranges],
                    "foreign": [
                        {"snapshot": lost.snapshot_id, "sink": lost.sink, "says": lost.said}
                        for lost in each.foreign
                    ],
                    "expired": each.expired,
                }
                for each in self.choice.stands
            ],
        }


def look(
    config: Config, spark: SparkSession, to: str, *, discard_foreign: bool = False
) -> RewindReport:
    """Nothing is claimed, nothing is written."""
    return _RewindCommand(config, spark, to, discard_foreign).look()


def rewind(
    config: Config,
    spark: SparkSession,
    to: str,
    *,
    discard_foreign: bool = False,
    on_step: Callable[[str, str], None] = lambda name, table: None,
) -> RewindReport:
    """Go back; running lives of the sink are fenced. Raises what `look` refuses.

    `on_step` is told each of `table.rewind.STEPS`, and the table it speaks of.
    """
    doing = _RewindCommand(config, spark, to, discard_foreign, on_step)
    plan = doing.look()
    for refusal in plan.refusals:
        raise refusal
    if not plan.nothing:
        doing.run(plan)
    return plan


class _RewindCommand:
    def __init__(
        self,
        config: Config,
        spark: SparkSession,
        to: str,
        discard_foreign: bool,
        on_step: Callable[[str, str], None] = lambda name, table: None,
    ) -> None:
        self._config = config
        self._spark = spark
        self._to = to
        self._discard_foreign = discard_foreign
        self._sink = config.sink.id
        self._replay = config.sink.id + REPLAY
        self._catalog = JavaCatalog(spark, config.catalog.name)
        found = self._catalog.load(config.index_table)
        if found is None:
            raise ConfigError(
                f"cannot rewind sink {self._sink}: its index {config.index_table} does not exist"
            )
        self._index = found
        self._tables = self._open()
        self._doing = RewindSteps(
            self._sink,
            found,
            self._tables,
            rows=lambda: self._rows(self._sink),
            staged=lambda: self._stored(self._sink),
            without=self._without,
            clock=time,
            step=on_step,
        )

    # ── what there is ────────────────────────────────────────────────────────────────────────

    def _open(self) -> dict[str, tuple[JavaTable, str]]:
        """Every table that config, index or stage name, with the branch that the sink fills."""
        config, index = self._config, self._index
        entry = TableCommitter(index, "main", self._sink, 0, time, claimed_first=True).head().entry
        if entry is None:
            raise ConfigError(
                f"cannot rewind sink {self._sink}: its index {config.index_table} "
                "knows nothing of it"
            )
        known = announced_tables(entry.tables, index.properties)
        announced = json.loads(index.properties.get(f"{TABLES_PROPERTY}.{self._sink}", "{}"))
        names = [table.name for table in config.tables if "{" not in table.name]
        names += [config.dead_letters.table] if config.dead_letters else []
        names += [n for _, each in self._stored(self._sink) if each for n in each.names]
        names = list(dict.fromkeys([*names, *known, *announced]))
        branches = {each.name: each.branch for each in config.tables}
        found = {}
        for name, table in zip(names, parallel_map(self._catalog.load, names), strict=True):
            if table is None and name not in known:
                continue  # not made yet
            if table is None or table.uuid != known.get(name, table.uuid):
                fact = "is gone" if table is None else "was dropped and made again"
                raise IdentityMismatch(
                    f"cannot rewind table {name}: it {fact}", hint="restore the table"
                )
            found[name] = table, branch_of(branches, name)
        return found

    def _stored(self, sink: str) -> list[tuple[str, StagedBatch | None]]:
        config = replace(self._config, sink=replace(self._config.sink, id=sink))
        paths = self._index.listing(staging_folder(config, self._index))
        return [
            (path, staged_batch.load(self._index.fetch(path), path))
            for path in paths
            if path.endswith(".json")
        ]

    def _rows(self, sink: str) -> pa.Table:
        """Of the index as it is now, with Spark: whatever the store, and deletes applied."""
        self._index.refresh()
        newest = next(self._index.history("main"))
        reader = self._spark.read.option("versionAsOf", str(newest.id))
        rows = reader.table(f"{self._catalog.name}.{self._index.name}")
        return rows.where(rows.sink == sink).select(*COLUMNS).toArrow()

    def _without(self, batch: int, epoch: int) -> Without:
        """The files of the index that hold rows of batches behind one, written anew."""
        self._index.refresh()
        base, files = self._index.live()
        assert base is not None
        shape = writer_spec(self._index, TableConfig(self._index.name))

        def gone(rows: pa.Table) -> pa.ChunkedArray:
            return pc.and_(pc.equal(rows["sink"], self._sink), pc.greater(rows["batch"], batch))

        removed, left = taken_out(shape, files, gone, "rewind")
        rows = pa.concat_tables([shape.arrow.empty_table(), *left])
        if not rows.num_rows:
            return Without(base.id, removed)
        prefix = f"frazil-{self._sink}-{epoch}-{max(0, batch)}"
        added = offset_index.put(shape, prefix, offset_index.ordered(rows))
        return Without(base.id, removed, added)

    def _read(self) -> None:
        self._doing.read()
        #: when a replay of dead letters last wrote something, and how much of it is staged
        self._replayed_at = pc.max(self._rows(self._replay)["committed_at"]).as_py()
        self._replay_staged = len(self._stored(self._replay))

    # ── looking ──────────────────────────────────────────────────────────────────────────────

    def look(self) -> RewindReport:
        doing = self._doing
        self._read()
        note, to = doing.note, self._to
        if note is not None and note.to != to:
            raise ConfigError(
                f"cannot rewind to {to}: a rewind to {note.to} was begun and not finished",
                hint=f"finish that one first: --to '{note.to}'",
            )
        stream = doing.stream
        start = stream.at(note.batch) if note is not None else stream.named(to)
        choice = doing.choice(start)
        number = choice.boundary.batch
        refusals = list(self._refusals(choice))
        if to.startswith("batch:") and note is None and choice.because:
            refusals.insert(
                0,
                ConfigError(
                    f"cannot rewind to {to}: {'; '.join(choice.because)}",
                    hint=f"the nearest boundary below is --to batch:{number}",
                ),
            )
        later = stream.rows.filter(pc.greater(stream.rows["batch"], number))
        return RewindReport(
            sink=self._sink,
            index=self._index.name,
            to=to,
            choice=choice,
            position=doing.entry.end,
            batches=pc.count_distinct(later["batch"]).as_py(),
            staged=doing.staged,
            unfinished=note is not None,
            warnings=tuple(self._warnings(choice)),
            refusals=tuple(refusals),
        )

    def _refusals(self, choice: RewindPlan) -> Iterator[FrazilError]:
        where = f"cannot rewind sink {self._sink} to {choice.boundary}"
        if choice.trouble:
            yield Fatal(f"{where}: {choice.trouble}", hint="see `frazil audit`")
        if choice.expired:
            names = ", ".join(each.table for each in choice.expired[:4])
            yield Expired(f"{where}: snapshots of {names} were expired", hint=self._instead(choice))
        if said := self._replayed(choice):
            yield Fatal(f"{where}: {said}", hint=self._instead(choice))
        elif choice.foreign and not self._discard_foreign:
            table = next(each for each in choice.stands if each.foreign)
            yield IdentityMismatch(
                f"{where}: table {table.table} would lose "
                f"{counted(len(table.foreign), 'commit')} of others, as {table.foreign[0]}",
                hint="--discard-foreign, if nobody wants them; or a later cut",
            )
        if lost := self._lost(choice):
            yield Expired(
                f"{where}: Kafka does not have {', '.join(map(str, lost[:4]))} any more; they "
                "would be gone for good",
                hint=self._instead(choice),
            )

    def _replayed(self, choice: RewindPlan) -> str:
        """Did a replay of dead letters write what this would undo, or undo the letters of?"""
        if any(lost.sink == self._replay for lost in choice.foreign):
            return "dead letters were replayed into its tables after that"
        if self._replay_staged:
            return "a replay of dead letters was staged and not committed"
        since = min((each.since_ms for each in choice.stands if each.since_ms), default=None)
        if since is None or self._replayed_at is None:
            return ""
        if self._replayed_at >= datetime.fromtimestamp(since / 1000, timezone.utc):
            return "dead letters were replayed after that; they may be those of batches that go"
        return ""

    def _lost(self, choice: RewindPlan) -> list[Range]:
        """What could not be read again."""
        if not self._config.kafka:
            return []
        end, kept = self._doing.entry.end, self._first_kept
        gone = {key: min(offset, kept.get(key, offset)) for key, offset in end.items()}
        cut = Cut({p: o for p, o in choice.boundary.cut.items() if p != BATCHES})
        return [Range(key, o, gone[key]) for key, o in cut.items() if o < gone[key]]

    @cached_property
    def _first_kept(self) -> Cut:
        """The first offsets that Kafka has."""
        config, entry = self._config, self._doing.entry
        planner = Planner(
            config.kafka.resolved(),
            topics=config.sink.topics,
            pattern=config.sink.topic_pattern,
            origin=TopicIdentity.of(entry),
        )
        _, partitions = planner.origin()
        return planner.watermarks(partitions).low

    def _instead(self, refused: RewindPlan) -> str:
        """The earliest cut that nothing forbids."""
        doing = self._doing

        def allowed(choice: RewindPlan) -> bool:
            return not self._replayed(choice) and not self._lost(choice)

        found = earliest(doing.stream, doing.states, self._sink, refused, allowed)
        if found is None:
            return "no later cut is possible either"
        return f"the earliest possible cut is --to batch:{found.batch} {_offsets(found.cut)}"

    def _warnings(self, choice: RewindPlan) -> Iterator[str]:
        config = self._config
        if config.sink.checkpoint_location and config.transform:
            yield (
                f"Spark's checkpoint in {config.sink.checkpoint_location} is not taken back: a "
                "query that keeps state in it needs one of that moment, or starts anew"
            )
        if choice.moves and (compacted := self._compacted()):
            yield (
                f"topic {', '.join(compacted)} is compacted: what was compacted away since does "
                "not come again"
            )
        losers = {lost.sink for lost in choice.foreign if lost.sink}
        for sink in sorted(losers) if self._discard_foreign else ():
            yield f"sink {sink} loses records, and will say so when it starts"

    def _compacted(self) -> list[str]:
        topics = {p.kafka_topic for p in self._doing.entry.end.current if p != BATCHES}
        if not self._config.kafka or not topics:
            return []
        admin = AdminClient({"log_level": "2", **self._config.kafka.resolved()})
        wanted = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
        found = []
        for topic, answer in admin.describe_configs(wanted, request_timeout=_CALL_SECONDS).items():
            try:
                policy = answer.result()["cleanup.policy"].value
            except (KafkaException, KeyError):  # not allowed to ask; no more than a warning is lost
                continue
            found += [topic.name] if "compact" in policy else []
        return sorted(found)

    # ── doing ────────────────────────────────────────────────────────────────────────────────

    def run(self, plan: RewindReport) -> None:
        doing = self._doing
        self._fence_replay()
        doing.claim()
        self._read()
        choice = doing.choice(doing.stream.at(plan.choice.boundary.batch))
        if choice.boundary != plan.choice.boundary:
            raise Fatal(
                f"cannot rewind sink {self._sink}: it went on meanwhile, and "
                f"{'; '.join(choice.because)}",
                hint="run it again",
            )
        self._refuse(choice)
        doing.run(choice, plan.to, self._refuse)

    def _refuse(self, choice: RewindPlan) -> None:
        for error in self._refusals(choice):
            raise error

    def _fence_replay(self) -> None:
        """A replay that still runs is another sink: its lives are fenced one by one."""
        target = TableCommitter(self._index, "main", self._replay, 0, time, claimed_first=True)
        entry = target.head().entry
        if entry is not None:
            known = announced_tables(entry.tables, self._index.properties)
            mine = [each for name, each in self._tables.items() if name in known]
            fence(
                target,
                [TableCommitter(each, branch, self._replay, 0, time) for each, branch in mine],
            )


def _offsets(cut: Cut) -> str:
    named = [f"{partition}@{offset}" for partition, offset in cut.items()]
    return f"({', '.join(named[:4])}{' …' if len(named) > 4 else ''})"


def show(plan: RewindReport, console: Console, done: bool = False) -> None:
    """Table by table: where it is, where it goes, and what goes."""
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    boundary, moves = plan.choice.boundary, plan.choice.moves
    rows = sum(each.rows for each in moves)
    if moves:
        shown = TextTable(title=f"sink {plan.sink} {'went' if done else 'goes'} back to {boundary}")
        for name in ("table", "snapshot now", "then", "commits", "rows", "ranges"):
            shown.add_column(name, justify="right" if name in ("commits", "rows") else "left")
        for each in moves[:_SHOWN]:
            ranges = [str(one).replace("[", "\\[") for one in each.ranges]
            shown.add_row(
                each.table if each.branch == "main" else f"{each.table} ({each.branch})",
                str(each.now),
                "empty" if each.then is None else str(each.then),
                f"{each.commits:,}",
                f"{each.rows:,}",
                "\n".join(ranges[:8]) + ("\n…" if len(ranges) > 8 else ""),
            )
        console.print(shown)
    if len(moves) > _SHOWN:
        say(f"and {counted(len(moves) - _SHOWN, 'table')} more: {counted(rows, 'row')}")
    for text in (*plan.choice.because, *plan.warnings):
        say(text)
    for each in moves:
        for lost in each.foreign:
            say(f"{each.table} loses {lost}")
    if plan.nothing:
        say(f"all tables of sink {plan.sink} stand at {boundary} {_offsets(boundary.cut)} already")
        return
    went = "went" if done else "would go"
    say(
        f"{counted(rows, 'row')} of {counted(len(moves), 'table')}, "
        f"{counted(plan.batches, 'batch', 'batches')} of the index and "
        f"{counted(plan.staged, 'staged batch', 'staged batches')} {went}; the stream goes on at "
        f"{_offsets(boundary.cut)}"
    )
