"""What should be there: by the topic and the foreign hands alone, snapshot by snapshot.

Every snapshot gets a `Model`: that of its parent, changed as the commit says it changes the table.
A sink's commit says which ranges it adds: so many records of the topic, no more and no less, and
they must begin where the parent's ledger ends. Then a reader reads the snapshot, by Iceberg's rules
for deletes, and must see just that. Nothing here asks the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from frazil.errors import Expired, Fenced, FrazilError, Gap, IdentityMismatch, Overlap
from frazil.ledger import entry as ledger
from frazil.ledger import staged_batch
from frazil.ledger.entry import PREFIX, LedgerEntry
from frazil.ledger.tags import ledger_tag
from frazil.offsets import Cut, Partition
from tests.simulation.catalog import Held, Meta, Server

SINK = "s"
INDEX = "lake.index"
FOREIGN = "foreign"
#: Of a snapshot of somebody else: how it changes rows.
EFFECT = "simulation.effect"


Kinds = tuple[type[FrazilError], ...]
#: What a run may stop with, by what was done to the table that the error names. (Who moves a
#: branch may bring a claim back, also the run's own.)
EXCUSES: dict[str, Kinds] = {
    "moved": (Gap, Overlap, Expired, Fenced),
    "dropped": (IdentityMismatch,),
    # (While it is away a run may begin, which does not know what an older one put there.)
    "renamed": (IdentityMismatch, Gap),
    "recreated": (IdentityMismatch,),
    "untagged": (Expired,),
    # (Overlap: an entry that no tag names yet. Iceberg's own table sets both at once.)
    "expired": (Expired, Gap, Overlap),
}
_ELSEWHERE: Kinds = (Gap, Overlap, Expired, IdentityMismatch)
#: By what was done to the index: the position is another one, and no table need fit it. Who takes a
#: claim away with it unfences a run, which makes tables that the newer one has not looked for.
INDEX_EXCUSES: dict[str, Kinds] = {
    **dict.fromkeys(("dropped", "renamed", "recreated"), _ELSEWHERE),
    "moved": (*_ELSEWHERE, Fenced),
    "untagged": (Expired,),
    "expired": (Expired, Gap),
}


_NO_INDEX = {"dropped", "renamed", "recreated"}


class Topic:
    """Records are a function of where they are: every run reads the same."""

    def __init__(self, tables: Mapping[str, str]) -> None:
        """`tables`: name → append or upsert."""
        self.modes = dict(tables)
        self.names = list(tables)
        self.ends: dict[Partition, int] = {}
        #: what Kafka still has of it; 0 where nothing is said
        self.starts: dict[Partition, int] = {}

    def fate(self, partition: Partition, offset: int) -> str:
        """What becomes of it, whichever table it is for."""
        kind = (offset * 5 + partition.number * 3) % 7
        return "skipped" if kind == 1 else "invisible" if kind == 4 else "routed"

    def tables(self, partition: Partition, offset: int) -> list[str]:
        if self.fate(partition, offset) != "routed":
            return []
        if len(self.names) == 1:
            return self.names
        first = (offset + partition.number) % len(self.names)
        second = (offset * 3 + 1) % len(self.names)
        return [self.names[first]] + [self.names[second]] * (second != first and offset % 3 == 0)

    def routed(self, table: str, partition: Partition, start: int, end: int) -> list[int]:
        return [o for o in range(start, end) if table in self.tables(partition, o)]

    @staticmethod
    def key(partition: Partition, offset: int) -> tuple[int, int]:
        """All records of a key stand in one partition."""
        return partition.number, (offset * 3 + offset // 4) % 3

    @staticmethod
    def tombstone(partition: Partition, offset: int) -> bool:
        return (offset + partition.number) % 5 == 3


class Model:
    """What a snapshot should hold. `rows`: each row, or each key with its row."""

    __slots__ = ("end", "epoch", "ids", "rows")

    def __init__(
        self, rows: dict[Any, Any], end: Mapping[Partition, int], epoch: int, ids: tuple[str, ...]
    ) -> None:
        self.rows = rows
        self.end = end
        self.epoch = epoch
        #: of the sink's newest entry
        self.ids = ids


EMPTY = Model({}, {}, 0, ())


class Oracle:
    def __init__(self, server: Server, topic: Topic) -> None:
        self.server = server
        self.world = server.world
        self.topic = topic
        #: are they looked at, too? A sink that has none is judged by what readers see alone
        self.ledgers = True
        #: the newest run whose claims are all made
        self.settled = 0
        self.epochs: set[int] = set()
        #: table → rows that were ever in it: foreign hands may take them away again
        self.ever: dict[str, set[tuple[Partition, int]]] = {name: set() for name in topic.names}
        #: what foreign hands did that a sink may stop for: table → words
        self.harm: dict[str, set[str]] = {}
        #: what of it was undone: who began before may still stop for it
        self.undone: dict[str, set[str]] = {}
        #: staged files that somebody removed, those that a committer looked for, and those that it
        #: had looked for before they were removed
        self.lost: set[str] = set()
        self.looked: set[str] = set()
        self.unreadable: set[str] = set()
        #: tables of which snapshots of others were expired behind the tag
        self.bridged: set[str] = set()
        #: was the folder of staged batches emptied?
        self.emptied = False
        self.commits = 0
        #: commit ids of the sink that are in some snapshot of a table
        self.commit_ids_of: dict[str, set[str]] = {}

    # ── a snapshot was added ─────────────────────────────────────────────────────────────────

    def added(self, name: str, before: Meta, after: Meta, held: Held, branch: str) -> None:
        self.commits += 1
        parent = held.snapshot.parent
        above = before.snapshots[parent].model if parent is not None else EMPTY
        summary = held.snapshot.summary
        entry = ledger.parse(summary) if PREFIX + "sink" in summary else None
        if entry is None:
            held.model = self._other(above, held)
        else:
            held.model = self._ours(name, above, held, entry)
        if "moved" not in self.harm.get(name, ()):  # or files may be gone with what was moved away
            self._readable(held)
        seen = self._seen(name, held)
        wanted = held.model.rows
        if seen != wanted:
            lost = sorted(map(str, wanted.keys() - seen.keys()))
            more = sorted(map(str, seen.keys() - wanted.keys()))
            other = [k for k in wanted.keys() & seen.keys() if wanted[k] != seen[k]]
            rule = "I4" if self.topic.modes.get(name) == "upsert" else "I1/I2/I6"
            self.world.violated(
                rule,
                f"{name} snapshot {held.snapshot.id}: lost {lost}, too many {more}, other {other}",
            )

    def _ours(self, name: str, above: Model, held: Held, entry: LedgerEntry) -> Model:
        violated = self.world.violated
        where = f"{name} snapshot {held.snapshot.id}"
        if not self.ledgers:
            return self._added_by(name, above, held, entry, where)
        # (A claim that was expired before its tag was set fences nobody, and is made again.)
        if entry.epoch < above.epoch and "expired" not in self.harm.get(name, ()):
            violated("I7", f"{where} is of epoch {entry.epoch}, after epoch {above.epoch}")
        # (Whoever moves a branch back may take the claim away that fenced somebody.)
        # (And no run could claim a table that was away while it began. An older one may commit to
        # it when it is back, once: what it commits then follows in the table's own ledger.)
        fenced = INDEX not in self.harm and not {"moved", "renamed"} & self._ever(name)
        if entry.epoch < self.settled and fenced:
            violated("I7", f"{where} is of epoch {entry.epoch}; run {self.settled} has taken over")
        if not entry.ranges and "expired" in self.harm.get(name, ()):
            # A claim that knows of no more than the tag: it adds nothing, and changes nothing.
            return Model(above.rows, above.end, entry.epoch, entry.commit_ids)
        begin, end = dict(entry.begin), dict(entry.end)
        if any(begin.get(partition) != offset for partition, offset in above.end.items()):
            violated("I1/I2", f"{where} begins at {entry.begin}, after {Cut(above.end)}")
        if any(end[partition] < offset for partition, offset in begin.items()):
            violated("I1", f"{where} goes back from {entry.begin} to {entry.end}")
        for partition, offset in begin.items() if name != INDEX else ():
            # (Where the index is lost and the table is empty, nothing tells that Kafka had more.)
            first = self.topic.starts.get(partition, 0) if INDEX in self.harm else 0
            if partition not in above.end and self.topic.routed(name, partition, first, offset):
                violated(
                    "I1",
                    f"{where} begins with {partition} at {offset}, and what is before "
                    "it is not there",
                )
        self.commit_ids_of.setdefault(name, set()).update(entry.commit_ids)
        return self._added_by(name, above, held, entry, where)

    def _added_by(
        self, name: str, above: Model, held: Held, entry: LedgerEntry, where: str
    ) -> Model:
        """What the entry says that was added."""
        violated = self.world.violated
        if name == INDEX:
            return self._index(above, held, entry, where)
        rows = dict(above.rows)
        upsert = self.topic.modes[name] == "upsert"
        ever = self.ever[name]
        written = 0
        for partition, end in entry.end.items():
            for offset in self.topic.routed(name, partition, entry.begin[partition], end):
                ever.add((partition, offset))
                if not upsert:
                    written += 1
                    rows[partition.number, offset] = 1
                elif self.topic.tombstone(partition, offset):
                    rows.pop(self.topic.key(partition, offset), None)
                else:
                    rows[self.topic.key(partition, offset)] = (partition.number, offset)
        counts = json.loads(held.snapshot.summary["frazil.counts"])
        if not upsert and counts["written"] != written:
            violated(
                "I3",
                f"{where} says {held.snapshot.summary['frazil.counts']}, and has {written} rows",
            )
        return Model(rows, entry.end, entry.epoch, entry.commit_ids)

    def _index(self, above: Model, held: Held, entry: LedgerEntry, where: str) -> Model:
        """The position: all that lies below it is in the tables. (Or was, until others came.)"""
        for partition, end in entry.end.items():
            begin = above.end.get(partition, entry.begin[partition])
            for offset in range(begin, end):
                for name in self.topic.tables(partition, offset):
                    if (partition, offset) not in self.ever[name]:
                        self.world.violated(
                            "I1",
                            f"{where} has the position {entry.end}, and "
                            f"{name} lacks {partition} {offset}",
                        )
        new = [
            row
            for file, sequence in held.files
            if sequence == held.snapshot.sequence
            for row in file.rows
        ]
        rows = {**above.rows, **dict.fromkeys(new, 1)}
        if not self.ledgers:
            return Model(rows, entry.end, entry.epoch, entry.commit_ids)
        reference = "*" if len(self.topic.names) > 1 else self.topic.names[0]
        spans: dict[Any, list[tuple[int, int]]] = {}
        for _, table, partition, start, end in rows:
            if table == reference and end > start:
                spans.setdefault(partition, []).append((start, end))
        for partition, pairs in spans.items():
            pairs.sort()
            for (_, end), (start, _) in pairwise(pairs):
                if end != start:
                    self.world.violated(
                        "I1/I2", f"{where}: its rows of {partition} do not join: {pairs}"
                    )
            if pairs[-1][1] != entry.end.get(partition):
                self.world.violated(
                    "I1",
                    f"{where}: its rows of {partition} end at "
                    f"{pairs[-1][1]}, the position is {entry.end}",
                )
        return Model(rows, entry.end, entry.epoch, entry.commit_ids)

    def _other(self, above: Model, held: Held) -> Model:
        """Somebody else's, or a rewrite, which changes nothing."""
        effect = held.snapshot.summary.get(EFFECT, "")
        if not effect:
            return above
        rows = dict(above.rows)
        word, _, argument = effect.partition(":")
        if word == "append":
            rows[FOREIGN, argument] = 1
        elif word == "overwrite":
            rows = {(FOREIGN, argument): 1}
        else:
            gone = eval(argument)
            for key in gone:
                rows.pop(key, None)
        return Model(rows, above.end, above.epoch, above.ids)

    # ── the tag ──────────────────────────────────────────────────────────────────────────────

    def tagged(self, name: str, before: Meta, after: Meta) -> None:
        """A tag of the sink moved: never back."""
        for tag, number in after.refs.items():
            was = before.snapshots.get(before.refs.get(tag, 0))
            if tag.startswith("frazil/") and was is not None and self.ledgers:
                now = after.snapshots[number].snapshot
                if now.sequence < was.snapshot.sequence and not self.harm:
                    self.world.violated(
                        "H4", f"{tag} of {name} moves back from {was.snapshot.id} to {now.id}"
                    )

    def moved(self, name: str, before: Meta, after: Meta, branch: str) -> None:
        """A commit of the sink set its branch to a snapshot that was there: whose are lost?"""
        was = before.refs.get(branch)
        if was is not None and was not in [snapshot.id for snapshot in after.history(branch)]:
            self.world.violated(
                "I6", f"a commit set {branch} of {name} back from {was} to {after.refs.get(branch)}"
            )

    def done(self, epoch: int, batch: int, branches: Mapping[str, str]) -> None:
        """A run says that a batch is done: no expiry can take its entries any more."""
        for name in (*self.topic.names, INDEX):
            meta = self.server.tables.get(name)
            if meta is None or self.harm or not self.ledgers:
                continue
            tag = meta.head(tag_name(branches[name]))
            for snapshot in meta.history(branches[name]):
                entry = ledger.parse(snapshot.summary)
                own = entry is not None and entry.ranges and entry.epoch <= epoch
                if own and entry.batches[1] <= batch:  # type: ignore[union-attr]
                    if tag is None or tag.snapshot.sequence < snapshot.sequence:
                        self.world.violated(
                            "H4",
                            f"a batch is done, and the tag of {name} is "
                            f"behind snapshot {snapshot.id}",
                        )
                    break

    # ── a reader ─────────────────────────────────────────────────────────────────────────────

    def _seen(self, name: str, held: Held) -> dict[Any, Any]:
        rows: dict[Any, Any] = {}
        deletes = [(s, f) for f, s in held.files if f.content == "equality-deletes"]
        hidden = {row for f, _ in held.files if f.content == "position-deletes" for row in f.rows}
        for file, sequence in held.files:
            if file.content != "data":
                continue
            for n, row in enumerate(file.rows):
                key, value = row if deletes or self.topic.modes.get(name) == "upsert" else (row, 1)
                if any(key in d.rows for s, d in deletes if s > sequence):
                    continue
                if (file.path, n) in hidden:
                    continue
                if key in rows and not (name == INDEX and "moved" in self.harm.get(name, ())):
                    self.world.violated("I2", f"{name} snapshot {held.snapshot.id} has {key} twice")
                rows[key] = value
        return rows

    def _readable(self, held: Held) -> None:
        for path in held.paths:
            if path not in self.server.objects and path not in self.unreadable:
                self.world.violated(
                    "I5", f"snapshot {held.snapshot.id} needs {path}, and it is gone"
                )

    def look(self, manifests: Iterable[str]) -> None:
        """A run looks for staged files. What a committer saw and lost afterwards, it commits: the
        store has no compare-and-set over files, so nobody could tell in time."""
        running = self.world.running
        if running is not None and running.name == "committer":
            self.looked.update(manifests)
            for path in manifests:
                self.looked.update(file.path for file in self.server.objects.get(path, ()))

    def lose(self, path: str) -> None:
        self.lost.add(path)
        if path in self.looked:
            self.unreadable.add(path)

    # ── an object was deleted ────────────────────────────────────────────────────────────────

    def deleted(self, path: str, content: Any) -> None:
        if path.endswith(".json"):
            return self._unstaged(path, content)
        for name, meta in self.server.tables.items():
            for held in self._live(meta) if "moved" not in self.harm.get(name, ()) else ():
                if path in held.paths:
                    self.world.violated(
                        "I5",
                        f"{path} is deleted, and snapshot {held.snapshot.id} of {name} needs it",
                    )

    @staticmethod
    def _live(meta: Meta) -> Iterable[Held]:
        """The snapshots that somebody can read by a name, or go back to."""
        for ref in meta.refs:
            for snapshot in meta.history(ref):
                yield meta.snapshots[snapshot.id]

    def _unstaged(self, path: str, content: bytes) -> None:
        """Only the staged batch records what is in a table and not in the index."""
        batch = staged_batch.load(content)
        if batch is None or INDEX not in self.server.tables:
            return
        head = self.server.tables[INDEX].head("main")
        position = Cut(head.model.end) if head else Cut()
        if position.reaches(batch.end) or self.harm or not self.ledgers:
            return
        if self.emptied:
            return  # batches behind a removed one are read again: the table has a floor
        if self.world.running is None or self.world.running.name != "committer":
            return  # a run that begins has another one for the same ranges, and a floor
        for name in batch.names:
            if batch.commit_id in self.commit_ids_of.get(name, ()):
                self.world.violated(
                    "I8",
                    f"{path} is deleted: its batch is in {name} and not in "
                    f"the index, which is at {position}",
                )

    # ── at the end ───────────────────────────────────────────────────────────────────────────

    def position(self) -> Cut:
        head = self.server.tables[INDEX].head("main") if INDEX in self.server.tables else None
        return Cut(head.model.end) if head else Cut()

    def epoch(self) -> int:
        """The newest run that claimed the index."""
        head = self.server.tables[INDEX].head("main") if INDEX in self.server.tables else None
        return head.model.epoch if head else 0

    def _ever(self, name: str) -> set[str]:
        """What was done to a table, also if it was undone."""
        return self.harm.get(name, set()) | self.undone.get(name, set())

    def undo(self, name: str, how: str) -> None:
        """The table is as it was before the harm."""
        self.harm[name].discard(how)
        if not self.harm[name]:
            del self.harm[name]
        self.undone.setdefault(name, set()).add(how)

    def excused(self, error: BaseException | None, before: bool = False) -> bool:
        """May a run stop with this? After harm that explains it; or where it cannot tell what was
        applied. `before`: a run that began before something was undone, or lost."""
        unsure = isinstance(error, Expired) and "earlier attempt is unknown" in str(error)
        unsure |= "cannot prove that table" in str(error)
        if unsure and self.bridged and self.server.kept < 100:
            return True
        if self.emptied and self.server.kept < 100 and "to there were expired" in str(error):
            return True  # neither a staged batch nor an entry has what the index lacks
        if before and isinstance(error, (Expired, IdentityMismatch)) and self._missed(error):
            return True
        harms = [*self.harm.items(), *(self.undone.items() if before else ())]
        return any(_explains(name, how, error) for name, words in harms for how in words)

    def _missed(self, error: FrazilError) -> bool:
        """Is it about a staged file that somebody removed?"""
        return any(path in str(error) for path in self.lost)

    def complete(self, branches: Mapping[str, str]) -> str:
        """What is missing, when nothing should be."""
        if not self.position().reaches(self.topic.ends):
            return f"the position is {self.position()}, the topic ends at {Cut(self.topic.ends)}"
        for name in self.topic.names:
            wanted = {
                (p, o)
                for p, end in self.topic.ends.items()
                for o in self.topic.routed(name, p, 0, end)
            }
            if wanted - self.ever[name]:
                return f"{name} never had {sorted(wanted - self.ever[name])}"
            meta = self.server.tables.get(name)
            head = meta.head(branches[name]) if meta else None
            end = Cut(head.model.end) if head else Cut()
            if "moved" in self.harm.get(name, ()) and self.harm.get(INDEX, set()) & _NO_INDEX:
                # The table is of before its first entry, and the index is gone: nothing tells of
                # the records that Kafka has deleted since.
                starts = self.topic.starts
                wanted = {(p, o) for p, o in wanted if o >= starts.get(p, 0) or end.get(p)}
            if not end.reaches({p: max(o for q, o in wanted if q == p) + 1 for p, _ in wanted}):
                return f"{name} ends at {end}"
        return ""


def _explains(name: str, how: str, error: BaseException | None) -> bool:
    if name == INDEX:
        return isinstance(error, INDEX_EXCUSES[how])
    return isinstance(error, EXCUSES[how]) and name in str(error)


def forgotten(meta: Meta, branch: str, kept: Iterable[int]) -> str:
    """If only these snapshots were kept, what could nobody tell any more?

    "expired": the sink's newest entry, or whether there was one. "bridged": what others did since;
    and whether a batch that was under way is among that."""
    after: list[int] = []
    for snapshot in meta.history(branch):
        if PREFIX + "sink" in snapshot.summary:
            if snapshot.id not in kept:
                return "expired"
            return "bridged" if any(number not in kept for number in after) else ""
        after.append(snapshot.id)
    return "expired" if any(number not in kept for number in after) else ""


def tag_name(branch: str) -> str:
    return ledger_tag(SINK) if branch == "main" else f"{ledger_tag(SINK)}/{branch}"
