"""Isolates the record that makes a step fail with an unexpected error. Runs on executors.

Expected faults of a record are values: a step rejects it and goes on. This module handles the rest:

    process a chunk ─▶ error ─▶ process parts of it, down to one record ─▶ rejected: `failed`
    write a range   ─▶ error ─▶ write parts of it, down to one record   ─▶ rejected: `unwritable`

Parts that succeed are kept, so all other records are processed and written as usual. Frazil's own
errors (`FrazilError`) already state the cause and pass through. Before a record is blamed for a
failed write, the store is probed: if it does not answer, the task fails instead.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pyarrow as pa

from frazil.errors import Fatal, FrazilError, Unavailable, Unwritable
from frazil.files.writer import DataFileDescriptor, TableWriter, WriterSpec, discard, probe
from frazil.kafka.record_batch import RawRecords
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult, Rejection, without_offsets
from frazil.pipeline.missing_columns import add_need
from frazil.pipeline.routing import Route
from frazil.pipeline.table_plan import TablePlan

#: Up to this many records are tried one by one after they failed together.
FEW = 256
#: Most records of a chunk that may be rejected this way; with more the task fails.
MOST = 100


class StepFailed(Exception):
    """An unexpected error, in one line."""


@contextmanager
def noticing() -> Iterator[None]:
    """Convert errors other than `FrazilError` to `StepFailed`."""
    try:
        yield
    except (FrazilError, StepFailed):
        raise
    except Exception as error:
        raise StepFailed(f"{type(error).__name__}: {error}"[:1000]) from error


# ── processing ───────────────────────────────────────────────────────────────────────────────────


class IsolatingPipeline:
    """Processes chunks as a whole, or in parts if that fails."""

    kind, does = "failed", "cannot be processed"
    hint = "so many failures indicate a software fault: report the message"

    def __init__(self, pipeline: ChunkPipeline) -> None:
        self._pipeline = pipeline

    def process(
        self, partition: Partition, opened: RawRecords, below: frozenset[str]
    ) -> ChunkResult:
        answer = self._ask((partition, opened, below))
        if isinstance(answer, ChunkResult):
            return answer
        whole = ChunkResult()
        way = self._pipeline.way(partition)
        tables = way.tables if isinstance(way, Route) else None
        spans = _parts(0, len(opened.offsets))
        alone = len(spans) == 1
        bad = 0
        while spans:
            start, end = spans.pop()
            if not alone:  # otherwise `answer` is already the one for this record
                answer = self._ask((partition, part_of(opened, start, end), below))
            if isinstance(answer, ChunkResult):
                add_part(whole, answer, start)
            elif end - start > 1:
                spans += _parts(start, end)
            elif tables == ():
                whole.skipped += 1  # a rule skips the whole topic
            else:
                reason = f"cannot read the record: {answer}"
                whole.reject(Rejection(start, self.kind, reason, tables or ()))
                bad += 1
                if bad > MOST:
                    raise Fatal(
                        f"cannot read {partition}: more than {MOST} of {len(opened.offsets)} "
                        f"records {self.does}; the one at offset {opened.offsets[start]}: {answer}",
                        hint=self.hint,
                    )
        return whole

    def _ask(self, work: tuple[Partition, RawRecords, frozenset[str]]) -> ChunkResult | str:
        """The result for these records, or the error."""
        try:
            with noticing():
                return self._pipeline.process(*work)
        except StepFailed as error:
            return str(error)


def _parts(start: int, end: int) -> list[tuple[int, int]]:
    """The spans of the parts, in reverse order."""
    step = math.isqrt(end - start) if end - start > FEW else 1
    return [(at, min(at + step, end)) for at in range(start, end, step)][::-1]


def part_of(opened: RawRecords, start: int, end: int) -> RawRecords:
    """The records of a chunk at these positions."""
    if end - start == len(opened.offsets):
        return opened
    # Taken, not sliced: the pickle of a slice contains the whole array.
    at = pa.array(range(start, end))
    keys, headers = (column if column is None else column.take(at) for column in opened[3:])
    offsets, stamps = opened.offsets[start:end], opened.stamps[start:end]
    return RawRecords(opened.values[start:end], offsets, stamps, keys, headers)


def add_part(whole: ChunkResult, part: ChunkResult, start: int) -> None:
    whole.rows += part.rows
    whole.gone += part.gone
    whole.left += part.left
    whole.skipped += part.skipped
    for rejection in part.rejections.values():
        whole.reject(replace(rejection, index=start + rejection.index))
    for name, columns in part.needs.items():
        add_need(whole.needs, name, columns)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def written_apart(
    shape: WriterSpec, rows: pa.Table, prefix: str
) -> tuple[list[DataFileDescriptor], dict[int, str]]:
    """Files with all rows that can be written, and position → reason of the other rows."""
    files: list[DataFileDescriptor] = []
    bad: dict[int, str] = {}
    spans = [(0, len(rows))] if len(rows) else []
    while spans:
        start, end = spans.pop()
        try:
            files += _written(shape, rows.slice(start, end - start), prefix)
        except StepFailed as error:
            ask_store(shape, prefix)
            if end - start > 1:
                middle = (start + end) // 2
                spans += [(middle, end), (start, middle)]
                continue
            try:  # again, now that the store is known to answer
                files += _written(shape, rows.slice(start, 1), prefix)
            except StepFailed:
                ask_store(shape, prefix)
                bad[start] = str(error)
            if len(bad) > MOST:
                raise Unwritable(
                    f"cannot write to table {shape.name}: more than {MOST} of {len(rows)} rows "
                    f"cannot be written; one of them: {error}"
                ) from None
    return files, bad


def _written(shape: WriterSpec, rows: pa.Table, prefix: str) -> list[DataFileDescriptor]:
    writer = TableWriter(shape, prefix)
    with noticing():
        writer.write(rows)
        return writer.close()


def ask_store(shape: WriterSpec, prefix: str) -> None:
    """Raise `Unavailable` if no file can be written to the table's location."""
    try:
        with noticing():
            probe(shape, f"{prefix}-{uuid.uuid4()}.probe")
    except StepFailed as error:
        raise Unavailable(
            f"cannot write to table {shape.name}: its store takes no files: {error}",
            hint="check that the store is up, and that the sink may write there",
        ) from None


class WriteSieve:
    """Finds the records of a chunk that cannot be written, and rejects them.

    The files of append tables are kept. Upsert tables are written later, when all changes of a key
    are known; their files written here are only a test and are discarded.
    """

    def __init__(self, tables: Mapping[str, TablePlan], prefix: str, keep: bool = True) -> None:
        self._tables = tables
        self._prefix = prefix
        self._keep = keep
        self.files: dict[str, list[DataFileDescriptor]] = {}

    def sift(self, result: ChunkResult, opened: RawRecords, below: frozenset[str]) -> ChunkResult:
        bad: dict[str, dict[int, str]] = {}
        for name, rows in result.rows:
            if name not in below:
                table = self._tables[name]
                bad.setdefault(name, {}).update(self._offsets(table, rows, self._rows(table, rows)))
        for name, keys in (*result.gone, *result.left):
            if name not in below:
                table = self._tables[name]
                failed = self._offsets(table, keys, self._deletes(table, keys))
                bad.setdefault(name, {}).update(failed)
        if not any(bad.values()):
            return result
        for name, reasons in bad.items():
            for offset, reason in reasons.items():
                at = int(np.searchsorted(opened.offsets, offset))
                message = f"cannot write to {name}: {reason}"
                result.reject(Rejection(at, "unwritable", message, (name,)))
        for group in (result.rows, result.gone, result.left):
            for i, (name, rows) in enumerate(group):
                offsets = np.array([*bad.get(name, ())], np.int64)
                column = self._tables[name].metadata.offset
                group[i] = (name, without_offsets(rows, column, offsets))
        return result

    def put(self, dead_letters: TablePlan, rows: pa.Table) -> None:
        """Write dead letters. One that cannot be written fails the task."""
        files, bad = written_apart(dead_letters.shape, rows, self._prefix)
        if bad:
            at = min(bad)
            unwritable(
                dead_letters.shape.name, [rows.slice(at, 1)], dead_letters, StepFailed(bad[at])
            )
        self.files.setdefault(dead_letters.shape.name, []).extend(files)

    def _rows(self, table: TablePlan, rows: pa.Table) -> dict[int, str]:
        files, bad = written_apart(table.shape, rows, self._prefix)
        if table.key or not self._keep:
            discard(table.shape, files)
            return {**self._deletes(table, rows), **bad} if table.key else bad
        self.files.setdefault(table.shape.name, []).extend(files)
        return bad

    def _deletes(self, table: TablePlan, keys: pa.Table) -> dict[int, str]:
        assert table.deletes is not None
        files, bad = written_apart(table.deletes, keys.select(table.key), self._prefix)
        discard(table.deletes, files)
        return bad

    @staticmethod
    def _offsets(table: TablePlan, rows: pa.Table, bad: Mapping[int, str]) -> dict[int, str]:
        offsets = rows.column(table.metadata.offset)
        return {offsets[at].as_py(): reason for at, reason in bad.items()}


def unwritable(table: str, rows: list[pa.Table], plan: TablePlan, error: StepFailed) -> NoReturn:
    """Raise an error with the table and the offset ranges, if the record at fault is unknown."""
    spans: dict[tuple[str, int], list[int]] = {}
    for part in rows:
        with suppress(KeyError):
            names = (plan.metadata.topic, plan.metadata.partition, plan.metadata.offset)
            topics, numbers, offsets = (part.column(name).to_pylist() for name in names)
            for topic, number, offset in zip(topics, numbers, offsets, strict=True):
                spans.setdefault((topic, number), []).append(offset)
    where = ", ".join(
        f"{Partition(*at)} [{min(seen)}, {max(seen) + 1})" for at, seen in sorted(spans.items())
    )
    raise Unwritable(
        f"cannot write to table {table}: {error}; the records are {where or 'unknown'}",
        hint="nothing of the batch was written; this is a fault of the software or of the table: "
        "report the message",
    ) from error
