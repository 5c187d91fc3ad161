"""From a seed to a verdict: what there is, who does what and when, what fails; then peace.

Each schedule draws which kinds of faults and of foreign hands there are at all, and how often: rare
things meet when few others are in the way. When the schedule is over all faults end and a last run
must bring everything home, unless foreign hands did what it may stop for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from frazil.errors import CommitStateUnknown, Fenced, FrazilError, Gap, Overlap, Retryable
from frazil.ledger import staged_batch
from frazil.offsets import Partition
from tests.simulation.catalog import File, Held, Meta, Request, Server, add, expire
from tests.simulation.oracle import EFFECT, FOREIGN, INDEX, Oracle, Topic, forgotten, tag_name
from tests.simulation.sink_run import SinkRun, config, context
from tests.simulation.world import Halt, Task, World

#: Which tables: name, mode, branch.
TABLES = (
    (("lake.a", "append", "main"),),
    (("lake.u", "upsert", "main"),),
    (("lake.a", "append", "side"),),
    (("lake.a", "append", "main"), ("lake.u", "upsert", "main")),
    (("lake.a", "append", "main"), ("lake.b", "append", "main")),
    (("lake.a", "append", "main"), ("lake.u", "upsert", "side"), ("lake.b", "append", "main")),
)
FAULTS = ("down", "conflict", "late", "lost", "read", "torn", "unstored", "stored late", "stored")
#: What foreign hands do: the first ones need not disturb anybody.
HARMLESS = ("append", "expire", "rewrite", "expire", "overwrite", "delete", "unstage")
HARMFUL = ("rollback", "rollforward", "drop", "recreate", "move", "untag", "restore", "rename")
#: Where there is little else: what moves a branch, what hides that, and all the others.
WILD = (
    "rollback",
    "rollback",
    "append",
    "append",
    "expire",
    "expire",
    "rewrite",
    "overwrite",
    "delete",
    "move",
    "rollforward",
    "drop",
    "recreate",
    "untag",
    "unstage",
    "lose",
    "lose",
    "restore",
    "restore",
    "rename",
)
#: How many of the wild schedules know no order that is shut out; how many of these have hands that
#: go together, and which: what they do, and to whom ("": to any table).
OPEN = 0.5
THEMED = 0.4
TABLE = "table"
THEMES: tuple[dict[str, str], ...] = (
    {"untag": INDEX, "expire": INDEX, "rewrite": INDEX},
    {"drop": INDEX, "restore": TABLE, "rollback": TABLE, "retain": ""},
    {"rename": "", "unstage": "", "expire": ""},
    {"rename": TABLE, "lose": "", "append": TABLE},
)
#: How often who could rename a table back does so.
BACK = 0.7
#: Turns at most, until peace and after it.
TURNS, PEACE = 60, 400


@dataclass
class Outcome:
    seed: int
    broken: list[str] = field(default_factory=list)
    commits: int = 0
    points: int = 0
    sink_runs: int = 0
    harmed: bool = False
    #: how the last run ended, if it did not come home
    ended: str = ""


class Schedule:
    def __init__(
        self,
        seed: int,
        trace: list[str] | None = None,
        ledgers: bool = True,
        hard: bool = False,
        wild: bool = False,
    ) -> None:
        self.seed = seed
        self.world = world = World(seed, trace)
        dice = world.dice
        small = not hard and dice.random() < 0.8  # most faults need little to be seen
        self.tables = dice.choice(TABLES[:4] if small else TABLES)
        self.branches = {name: branch for name, _, branch in self.tables} | {INDEX: "main"}
        self.server = Server(world)
        self.topic = Topic({name: mode for name, mode, _ in self.tables})
        self.oracle = self.server.oracle = Oracle(self.server, self.topic)
        self.oracle.ledgers = ledgers
        self.config = config(
            self.tables,
            dice.choice(("0s", "0s", "1s")),
            dice.choice((1, 2, 64)),
            dice.choice((0, 1, 2)),
        )
        self.server.strict = dice.random() < 0.25
        self.server.kept = Random(f"{seed} kept").choice((0, 0, 3, 100))
        world.switch = dice.choice((0.02, 0.05, 0.1, 0.25))
        world.die = dice.choice((0.0, 0.005, 0.02, 0.05))
        world.stop = dice.choice((0.0, 0.0, 0.02, 0.05))
        world.deaths = dice.randint(0, 3)
        world.stops = dice.randint(0, 2)
        several = dice.choice((0, 0, 1, 2, 4))
        self.faults = {kind: dice.choice((0.03, 0.1, 0.3)) for kind in dice.sample(FAULTS, several)}
        self.stale = dice.choice((0.0, 0.0, 0.0, 0.3))
        hands = dice.choice((0, 0, 1, 2, 3))
        self.hands = dice.sample(HARMLESS, hands) if hands else []
        if dice.random() < 0.25:
            self.hands += dice.sample(HARMFUL[:6], dice.randint(1, 2))
        self.foreign = dice.choice((0.05, 0.2, 0.4)) if self.hands else 0.0
        self.most_runs = dice.randint(1, 2 if small else 4)
        self.takeover = dice.choice((0.0, 0.05, 0.2))
        if hard:  # everything at once
            kinds = {"lost", "late", "conflict", *dice.sample(FAULTS, 2)}
            self.faults = {kind: dice.choice((0.2, 0.3)) for kind in sorted(kinds)}
            self.stale, self.most_runs, self.takeover = 0.2, 4, 0.1
            self.hands, self.foreign = dice.sample(HARMLESS, 2), 0.1
            world.switch, world.die, world.stop, world.deaths, world.stops = 0.1, 0.02, 0.03, 3, 2
        if wild:  # foreign hands of every kind, in any order, and little else
            self.hands = dice.sample(WILD, dice.randint(2, 5))
            self.foreign = dice.choice((0.1, 0.2, 0.4))
            self.faults = dict(list(self.faults.items())[:1])
            self.most_runs, self.takeover = dice.randint(2, 4), dice.choice((0.05, 0.2))
        # From a stream of its own: the other schedules stay what they were.
        self.extra = Random(f"{seed} open")
        #: may every order of hands happen, also several victims?
        self.open = wild and self.extra.random() < OPEN
        #: the hands that go together, if they do
        self.theme: dict[str, str] = {}
        if self.open and self.extra.random() < THEMED:
            self.theme = self.extra.choice(THEMES)
            self.hands = list(self.theme)
        self.sink_runs: list[SinkRun] = []
        for number in range(dice.randint(1, 2)):
            self.topic.ends[Partition("t", number)] = dice.randint(1, 3 if small else 6)
        self.growth = dice.randint(0, 2 if small else 4)
        self.turns = 0
        self.expired = False
        self.quiet = 0  # runs that were begun in peace
        context.world, context.server, context.oracle, context.parsed = (
            world,
            self.server,
            self.oracle,
            {},
        )
        context.branches = self.branches

    # ── the time of troubles, and peace ──────────────────────────────────────────────────────

    def run(self) -> Outcome:
        outcome = Outcome(self.seed)
        world = self.world
        try:
            self._begin()
            world.next = self._in_trouble
            world.run()
            self._calm()
            world.next = lambda: self._in_peace(outcome)
            world.run()
            self._judge(outcome)
        except Halt:
            pass
        finally:
            world.clear()
        outcome.broken = world.broken
        outcome.commits, outcome.points = self.oracle.commits, world.points
        outcome.sink_runs, outcome.harmed = len(self.sink_runs), bool(self.oracle.harm)
        return outcome

    def _in_trouble(self) -> Task | None:
        """Who goes on. Before that, anything may happen."""
        dice = self.world.dice
        self._bury()
        while self.turns < TURNS:
            self.turns += 1
            drawn = dice.random()
            if drawn < self.foreign:
                self._foreign(dice.choice(self.hands))
            elif drawn < self.foreign + 0.05 and self.server.flying:
                self.server.arrive(dice.randrange(len(self.server.flying)))
            elif drawn < self.foreign + 0.1 and self.growth:
                self._grow()
            elif (
                drawn < self.foreign + 0.1 + self.takeover and len(self.sink_runs) < self.most_runs
            ):
                self._begin()
            elif drawn > 0.99:
                self._stop()
            elif drawn > 0.93 and (stopped := [run for run in self.sink_runs if run.stopped]):
                dice.choice(stopped).stopped = False
            elif (task := self._ready()) is not None:
                return task
            elif not self._nobody():
                break
        return None

    def _ready(self) -> Task | None:
        world = self.world
        ready = world.ready()
        if not ready and world.later():
            ready = world.ready()
        return None if not ready else ready[0] if len(ready) == 1 else world.dice.choice(ready)

    def _nobody(self) -> bool:
        """Nobody can go on: something must happen, if it still can."""
        if any(run.stopped for run in self.sink_runs):
            next(run for run in self.sink_runs if run.stopped).stopped = False
        elif self.growth:
            self._grow()
        elif not self._alive and len(self.sink_runs) < self.most_runs:
            self._begin()
        else:
            return False
        return True

    @property
    def _alive(self) -> list[SinkRun]:
        return [run for run in self.sink_runs if not run.dead and not run.over]

    def _begin(self, quiet: bool = False) -> SinkRun:
        sink_run = SinkRun(len(self.sink_runs) + 1, self.config, self.server)
        self.quiet += quiet
        if not quiet:
            sink_run.client.faults, sink_run.client.stale = self.faults, self.stale
        self.sink_runs.append(sink_run)
        self.world.say(f"{sink_run} is started")
        self.world.spawn(sink_run, "main", sink_run.run)
        return sink_run

    def _stop(self) -> None:
        """Somebody asks a run to end well."""
        running = [run for run in self._alive if run.query and not run.asked]
        if running:
            sink_run = self.world.dice.choice(running)
            sink_run.asked = True
            self.world.say(f"{sink_run} is asked to stop")
            self.world.spawn(sink_run, "stop", sink_run.stop)

    def _bury(self) -> None:
        """A process that ended takes its threads with it; why it ended must be a reason."""
        for sink_run in self.sink_runs:
            if not sink_run.dead and sink_run.look():
                sink_run.dead = True
                self.world.say(f"{sink_run} ends: {sink_run.error or 'well'}")
                self._reason(sink_run)

    def _reason(self, sink_run: SinkRun) -> None:
        error = sink_run.error
        if error is None or isinstance(error, (Retryable, CommitStateUnknown)):
            return
        if isinstance(error, Fenced) and len(self.sink_runs) > 1:
            return
        if self.oracle.excused(error, before=True):
            return
        overtaken = (
            sink_run.sink is not None and getattr(sink_run.sink, "epoch", 0) < self.oracle.epoch()
        )
        committer = getattr(sink_run.sink, "committer", None)
        by_commit = committer is not None and committer.failure is error
        if overtaken and not (by_commit and isinstance(error, (Gap, Overlap))):
            return  # overtaken, and it saw what the other does before it saw who it is
        self.world.violated(
            "I10", f"{sink_run} stopped for no reason: {type(error).__name__}: {error}"
        )

    def _calm(self) -> None:
        """Faults end; what is on its way arrives; who was stopped goes on."""
        world = self.world
        world.say("peace")
        world.switch, world.die, world.stop = min(world.switch, 0.02), 0.0, 0.0
        for run in self.sink_runs:
            run.client.faults, run.client.stale, run.stopped = {}, 0.0, False
        while self.server.flying:
            self.server.arrive(0)
        self.turns = 0

    def _in_peace(self, outcome: Outcome) -> Task | None:
        """Until a run that was not disturbed has brought everything home, or says why not."""
        self._bury()
        self.turns += 1
        if self._home() or (self.turns > PEACE and (self.quiet or not self.oracle.harm)):
            return None
        if self.turns > PEACE:
            self._replace()  # who began before the harm need not look again
        if not self._alive:
            last = self.sink_runs[-1].error
            if self.quiet and last is not None and self.oracle.excused(last):
                outcome.ended = f"{type(last).__name__}: {last}"
                return None
            self._begin(quiet=True)
        if self.turns > 60 and self._stalled():
            if self.quiet:
                outcome.ended = "stalled"
                return None
            self._replace()
        task = self._ready()
        if task is None and self.oracle.harm and not self.quiet:
            self._replace()
            task = self._ready()
        return task

    def _replace(self) -> None:
        """Does a new run know better?"""
        for sink_run in self._alive:
            self.world.kill(sink_run, "by the hand of who waits for it")
        self._begin(quiet=True)
        self.turns = 0

    def _judge(self, outcome: Outcome) -> None:
        missing = self.oracle.complete(self.branches)
        if not missing or outcome.ended:
            return
        how = self.sink_runs[-1].error
        if self.oracle.harm and self._complains():
            outcome.ended = "waits"
            return
        silent = " says nothing" if self.oracle.harm and how is None else f": {how}"
        self.world.violated("I10", f"peace, and {missing}; the last run{silent}")

    def _complains(self) -> bool:
        """Does the last run say of a table that was harmed what is wrong with it?"""
        sink_run = self.sink_runs[-1]
        if isinstance(sink_run.error, (Retryable, CommitStateUnknown)):
            return True
        return any(map(self.oracle.excused, _complaints(sink_run)))

    def _home(self) -> bool:
        return (
            bool(self._alive)
            and self._alive[-1].epoch > 0
            and not self.oracle.complete(self.branches)
        )

    def _stalled(self) -> bool:
        """Does a table wait for a person, and rightly?"""
        if not self._alive:
            return False
        sink_run = self._alive[-1]
        # (A run of peace began after all that was undone or lost.)
        return any(
            self.oracle.excused(error, before=not self.quiet) for error in _complaints(sink_run)
        )

    # ── what others do ───────────────────────────────────────────────────────────────────────

    def _grow(self) -> None:
        dice, ends = self.world.dice, self.topic.ends
        self.growth -= 1
        if dice.random() < 0.15 and len(ends) < 3:
            ends[Partition("t", len(ends))] = dice.randint(1, 3)
        else:
            where = dice.choice(list(ends))
            ends[where] += dice.randint(1, 4)
        self.world.say(f"the topic grows: {[*ends.values()]}")
        self.world.wake(self.topic)

    def _foreign(self, act: str) -> None:
        dice = self.world.dice
        if act == "rename" and self.open and self._rename_back():
            return
        if act == "retain":
            return self._retain()
        rows = act in ("append", "overwrite", "delete")  # nobody has any for the index
        names = [
            name
            for name in (*self.topic.names, *([] if rows else [INDEX]))
            if name in self.server.tables
        ]
        if aim := self.theme.get(act):
            names = [name for name in names if (name == INDEX) == (aim == INDEX)]
        if not names:
            return
        name = dice.choice(names)
        another = self.oracle.emptied or (self.oracle.harm and name not in self.oracle.harm)
        if act in HARMFUL and another and not self.open:
            return  # one victim: what a run makes of it is easier to see
        meta, branch = self.server.tables[name], self.branches[name]
        head = meta.head(branch)
        self.world.say(f"other: {act} {name}")
        getattr(self, f"_hand_{act}")(name, meta, branch, head)

    def _change(self, name: str, meta: Meta, branch: str, change: Any) -> None:
        self.server.apply(Request(name, meta.uuid, {}, change, "somebody's", branch))

    def _put(
        self,
        name: str,
        meta: Meta,
        branch: str,
        gone: Any,
        new: list[File],
        effect: str = "",
        operation: str = "append",
    ) -> None:
        number = self.world.number() + 1000
        listed, written = (f"/{name}/metadata/foreign-{number}{end}.avro" for end in ("", "-m0"))
        self.server.objects[listed] = True
        self.server.objects[written] = ()
        for file in new:
            self.server.objects[file.path] = self.server.files[file.path] = file
        summary = {EFFECT: effect} if effect else {}
        if rows := sum(len(file.rows) for file in new if file.content == "data"):
            summary["added-records"] = str(rows)

        def change(after: Meta) -> Held | None:
            return add(
                after,
                number,
                after.refs.get(branch),
                branch,
                gone,
                new,
                [written],
                summary,
                operation,
                listed,
                self.world.milliseconds,
            )

        self._change(name, meta, branch, change)

    def _file(self, name: str, tag: str) -> File:
        row: Any = (FOREIGN, tag)
        rows = ((row, 1),) if self.topic.modes[name] == "upsert" else (row,)
        return File(f"/{name}/data/foreign-{tag}.parquet", rows)

    def _hand_append(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        tag = f"f{self.world.number()}"
        self._put(name, meta, branch, (), [self._file(name, tag)], f"append:{tag}")

    def _hand_overwrite(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        tag = f"f{self.world.number()}"
        gone = {file.path for file, _ in head.files} if head else ()
        new = [self._file(name, tag)]
        self._put(name, meta, branch, gone, new, f"overwrite:{tag}", "overwrite")

    def _hand_delete(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        """Rows that are in one file, or keys."""
        if head is None:
            return
        if self.topic.modes[name] == "upsert":
            keys = self.world.dice.sample(sorted(head.model.rows, key=str), len(head.model.rows))
            keys = keys[: self.world.dice.randint(1, 3)]
            number = self.world.number()
            file = File(f"/{name}/data/foreign-{number}.parquet", tuple(keys), "equality-deletes")
            if keys:
                self._put(name, meta, branch, (), [file], f"delete:{keys}", "delete")
            return
        files = [file for file, _ in head.files]
        if files:
            file = self.world.dice.choice(files)
            self._put(name, meta, branch, {file.path}, [], f"delete:{list(file.rows)}", "delete")

    def _hand_rewrite(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        """Compaction by somebody else: of an append table, or of the index."""
        if head is None or self.topic.modes.get(name) == "upsert" or len(head.files) < 2:
            return
        rows = tuple(row for file, _ in head.files for row in file.rows)
        made = File(f"/{name}/data/foreign-{self.world.number()}.parquet", rows)
        gone = {file.path for file, _ in head.files}
        self._put(name, meta, branch, gone, [made], "", "replace")

    def _hand_expire(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        """With `retain_last => 1`."""
        kept = {n for ref, n in meta.refs.items()}
        lost = forgotten(meta, branch, kept)
        if self.oracle.emptied and (not self.open or self._untold(lost)):
            return
        self.expired = True
        if lost == "expired":
            self._harm(name, lost)
        elif lost:
            self.oracle.bridged.add(name)
        expire(self.server, name, 1)

    def _untold(self, lost: str) -> bool:
        """Would nothing tell of a batch that is in a table and not in the index? Its staged record
        does, or its ledger entry, or an earlier metadata file: who takes all three away makes a
        table that looks as if the batch had never been tried."""
        return lost == "expired" and self.server.kept < 100

    def _hand_unstage(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        """The folder of staged batches is emptied: the tables are the checkpoint."""
        words = {word for harmed in self.oracle.harm.values() for word in harmed}
        if not self.open and (words or self.expired):
            return
        if any(map(self._untold, words)):
            return
        if any(not run.epoch for run in self._alive):
            return  # one that lists them now would see a part of them, and stop for that
        if len(self._alive) > 1 or "stored late" in self.faults:
            return  # what an older run stores afterwards is not what is in the tables
        self.oracle.emptied = True
        for path in [path for path in self.server.objects if "/stage/" in path]:
            del self.server.objects[path]

    def _hand_lose(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        """Files that no snapshot refers to are removed, of a batch whose run is over."""
        if self.server.flying or (self._alive and not self.open):
            return  # who sent a request looked before, and it may arrive at any time
        objects = self.server.objects
        paths = [path for path in objects if "/stage/" in path and isinstance(objects[path], bytes)]
        staged = [batch for path in sorted(paths) if (batch := staged_batch.load(objects[path]))]
        # A run does not look for what it staged itself a moment ago: nobody could tell in time.
        own = {sink_run.epoch for sink_run in self._alive}
        staged = [batch for batch in staged if batch.epoch not in own]
        live = {
            path
            for meta in self.server.tables.values()
            for held in meta.snapshots.values()
            for path in held.paths
        }
        listed = [path for batch in staged for table in batch.tables for path in table.manifests]
        listed += [file.path for path in listed for file in objects.get(path, ())]
        listed = [path for path in listed if path in objects and path not in live]
        if listed:
            gone = self.world.dice.choice(listed)
            self.world.say(f"loses {gone}")
            del objects[gone]
            self.oracle.lose(gone)

    def _retain(self) -> None:
        """Kafka deletes some of what the index says is in the tables."""
        for partition, end in self.oracle.position().items():
            start = self.topic.starts.get(partition, 0)
            self.topic.starts[partition] = max(start, self.extra.randint(0, end))
        self.world.say(f"the topic begins: {[*self.topic.starts.values()]}")

    def _hand_rollback(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        history = list(meta.history(branch))
        if len(history) > 1:
            self._move(name, meta, branch, self.world.dice.choice(history[1:]).id)

    def _hand_rollforward(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        newest = max((n for n in meta.snapshots), default=None)
        if newest is not None:
            self._move(name, meta, branch, newest)

    def _hand_move(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        if meta.snapshots:
            self._move(name, meta, branch, self.world.dice.choice(list(meta.snapshots)))

    def _move(self, name: str, meta: Meta, branch: str, to: int) -> None:
        if meta.refs.get(branch) == to or self._shut(name, "untagged"):
            return

        def change(after: Meta) -> None:
            after.refs[branch] = to

        self._harm(name, "moved")
        self._change(name, meta, "", change)

    def _hand_drop(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        self._harm(name, "dropped")
        del self.server.tables[name]

    def _hand_recreate(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        self._harm(name, "recreated")
        self.server.create(name)

    def _hand_restore(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        """The catalog gets an older metadata file again: a backup, or `register_table`. Ledger,
        tag and properties go back together."""
        past = [version for version in self.server.past[name] if version.uuid == meta.uuid]
        # What is there refers to files which must be there as well.
        whole = [
            version
            for version in past[:-1]
            if all(
                path in self.server.objects
                for held in version.snapshots.values()
                for path in held.paths
            )
        ]
        if not whole or self._shut(name, "untagged") or self._shut(name, "dropped"):
            return
        older = self.world.dice.choice(whole)
        again = Meta(
            meta.uuid,
            meta.version + 1,
            dict(older.snapshots),
            dict(older.refs),
            older.sequence,
            older.properties,
            older.manifests,
        )
        self._harm(name, "moved")
        self.world.say(f"restores version {older.version} of {name}")
        self.server.tables[name] = again
        self.server.past[name].append(again)

    def _hand_rename(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        """Away; and sometimes back again (`_rename_back`)."""
        aside = f"{name}_old"
        if aside in self.server.tables or (name == INDEX and not self.open):
            return
        self._harm(name, "renamed" if self.open else "dropped")
        self.server.tables[aside] = self.server.tables.pop(name)
        self.server.past[aside] = self.server.past[name]

    def _rename_back(self) -> bool:
        """The table is what it was, if nobody took its name meanwhile: the next run must come
        home with it."""
        tables = self.server.tables
        away = [n for n in self.branches if f"{n}_old" in tables and n not in tables]
        if not away or self.extra.random() > BACK:
            return False
        name = self.extra.choice(away)
        self.world.say(f"other: renames {name} back")
        tables[name] = tables.pop(f"{name}_old")
        self.server.past[name] = self.server.past.pop(f"{name}_old")
        self.oracle.undo(name, "renamed")
        return True

    def _hand_untag(self, name: str, meta: Meta, branch: str, head: Held | None) -> None:
        """Somebody tidies up what he does not know."""
        if self._shut(name, "moved"):
            return

        def change(after: Meta) -> None:
            after.refs.pop(tag_name(branch), None)

        self._harm(name, "untagged")
        self._change(name, meta, branch, change)

    def _shut(self, name: str, word: str) -> bool:
        """In schedules that are not open, what does not come after what."""
        return not self.open and word in self.oracle.harm.get(name, ())

    def _harm(self, name: str, how: str) -> None:
        self.oracle.harm.setdefault(name, set()).add(how)


def _complaints(sink_run: SinkRun) -> list[FrazilError]:
    """What a run says of tables that only a person can help."""
    if isinstance(sink_run.error, FrazilError):
        return [sink_run.error]
    committer = getattr(sink_run.sink, "committer", None)
    startup = getattr(sink_run.sink, "_startup", None)
    hopeless = committer.queue.needs_operator.values() if committer is not None else ()
    return [*hopeless, *(startup.tables.unhealthy.values() if startup is not None else ())]


def run(
    seed: int,
    trace: list[str] | None = None,
    ledgers: bool = True,
    hard: bool = False,
    wild: bool = False,
) -> Outcome:
    """`ledgers`: False for a sink without them, which is judged by what readers see. `hard`: all
    kinds of faults at once, and many. `wild`: foreign hands of every kind, in any order."""
    return Schedule(seed, trace, ledgers, hard, wild).run()
