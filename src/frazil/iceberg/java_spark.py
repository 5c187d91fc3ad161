"""The few parts of Spark that only Java exposes. Plain Python values in and out.

The active session of a thread, the operators of a streaming query, the rows that its progress
shows, and the files of a checkpoint on any file system that Spark supports. Errors are translated
by `iceberg.java_errors`. Runs on the driver.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from frazil.errors import ConfigError
from frazil.iceberg.java_errors import translated

#: Spark's mark of a column that is a time window.
_TIME_WINDOW = "spark.timeWindow"


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Makes `spark` the active session of this thread: Spark looks up catalogs and registered data
    sources there, whichever session it is called through."""
    sessions: Any = SparkSession._get_j_spark_session_class(spark._jvm)
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def runs(spark: SparkSession) -> bool:
    """Does Spark's process still run, and take jobs?"""
    try:
        return spark.sparkContext.defaultParallelism > 0
    except (Py4JError, PySparkException, OSError, AttributeError):  # killed, or stopped
        return False


@dataclass(frozen=True, slots=True)
class PlanOperator:
    """One operator of a query's analyzed plan."""

    name: str
    #: number of its streaming inputs
    streams: int
    #: names of the operators that its rows pass
    above: tuple[str, ...] = ()
    #: of a streaming source: its name, class and options
    source: str = ""
    table: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets


def operators(frame: DataFrame) -> list[PlanOperator]:
    """The streaming operators of a query, sources included."""
    steps: list[PlanOperator] = []

    def visit(node: Any, above: tuple[str, ...] = ()) -> None:
        if not node.isStreaming():
            return
        name = node.getClass().getSimpleName()
        inputs = node.children()
        below = [inputs.apply(i) for i in range(inputs.size())]
        if name == "StreamingRelationV2":
            table = node.table().getClass().getName()
            options = {str(k): str(v) for k, v in dict(node.extraOptions()).items()}
            source = str(node.sourceName()).lower()
            steps.append(PlanOperator(name, 0, above, source, table, options))
        elif name == "StreamingRelation":
            steps.append(PlanOperator(name, 0, above, str(node.sourceName())))
        else:
            streams = sum(bool(child.isStreaming()) for child in below)
            steps.append(PlanOperator(name, streams, above))
        for child in below:
            visit(child, (*above, name))

    with translated("look at the query"):
        visit(frame._jdf.queryExecution().analyzed())
    return steps


def group_columns(frame: DataFrame) -> list[tuple[str, ...]] | None:
    """Of each group of an aggregation the columns of the query that hold it: the group itself, or
    begin or end of a time window. None: more than names and projections is behind the aggregation,
    or there is none."""
    with translated("look at the query"):
        plan: Any = frame._jdf.queryExecution().analyzed()
        projections: list[Any] = []
        node = plan
        while (name := node.getClass().getSimpleName()) in ("Project", "SubqueryAlias", "WithCTE"):
            projections += [node.projectList()] if name == "Project" else []
            node = node.plan() if name == "WithCTE" else node.child()
        if name != "Aggregate":
            return None
        groups = _items(node.groupingExpressions())
        #: id of an attribute → the number of the group that it holds
        held: dict[Any, int] = {}
        for expression in _items(node.aggregateExpressions()):
            inner = _holder(expression)
            for number, group in enumerate(groups):
                if inner.semanticEquals(group):
                    held[expression.exprId().id()] = number
        for projection in reversed(projections):
            expressions = [(e, _holder(e)) for e in _items(projection)]
            held = {
                expression.exprId().id(): held[inner.exprId().id()]
                for expression, inner in expressions
                if inner.getClass().getSimpleName() == "AttributeReference"
                and inner.exprId().id() in held
            }
        ids = [held.get(attribute.exprId().id()) for attribute in _items(plan.output())]
        return [
            tuple(name for name, at in zip(frame.columns, ids, strict=True) if at == number)
            for number in range(len(groups))
        ]


def _holder(expression: Any) -> Any:
    """The expression without its name, and without the begin or end that it takes of a window."""
    kind = expression.getClass().getSimpleName()
    if kind == "Alias":
        return _holder(expression.child())
    if kind == "GetStructField":
        inner = expression.child()
        name = expression.childSchema().apply(expression.ordinal()).name()
        attribute = inner.getClass().getSimpleName() == "AttributeReference"
        if attribute and name in ("start", "end") and inner.metadata().contains(_TIME_WINDOW):
            return inner
    return expression


def _items(several: Any) -> list[Any]:
    return [several.apply(number) for number in range(several.size())]


def refuse_unsupported(frame: DataFrame, output_mode: str) -> None:
    """Runs Spark's own check of a streaming query in an output mode, append or update, which Spark
    itself runs only at its start."""
    jvm: Any = frame.sparkSession._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    try:
        jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(
            frame._jdf.queryExecution().analyzed(),
            modes.Update() if output_mode == "update" else modes.Append(),
        )
    except PySparkException as error:
        fact = str(error).strip().splitlines()[0].rstrip(";")
        raise ConfigError(
            f"cannot stream this query into a table: {fact}",
            hint="in output mode append a table takes rows once and for all: aggregations need "
            "withWatermark; output mode update goes into a table of mode upsert, whose key is "
            "their groups"
            if output_mode == "append"
            else "",
        ) from None


def set_input_rows(
    spark: SparkSession, query: str, rows: Callable[[Mapping[str, Any]], int | None]
) -> None:
    """Corrects how many rows Spark counted for the sources of the batch under way of the query of
    that name. `rows`: from a source's end offset to their number; None: Spark's own count holds.

    Spark reads the counts from the scans' metrics once `foreachBatch` has returned.
    """
    with translated("report the rows of a batch to Spark"):
        for started in spark.streams.active:
            if started.name != query:
                continue
            execution = started._jsq.streamingQuery().lastExecution()
            for scan in _scans(execution.executedPlan()) if execution is not None else ():
                number = rows(json.loads(scan.end().json()))
                if number is not None:
                    scan.metrics().apply("numOutputRows").set(number)


def _scans(plan: Any) -> Iterator[Any]:
    """The scans of streaming sources in a physical plan."""
    leaves = plan.collectLeaves()
    for leaf in (leaves.apply(number) for number in range(leaves.size())):
        name = leaf.getClass().getSimpleName()
        if name == "MicroBatchScanExec":
            yield leaf
        elif name == "AdaptiveSparkPlanExec":
            yield from _scans(leaf.executedPlan())
        elif name.endswith("QueryStageExec"):
            yield from _scans(leaf.plan())


class HadoopFolder:
    """A folder on any file system that Spark supports, for checkpoints."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path.rstrip("/")
        self._path: Any = spark._jvm.org.apache.hadoop.fs.Path  # type: ignore[union-attr]
        with translated(f"open {path}"):
            configuration = spark._jsparkSession.sessionState().newHadoopConf()
            self._files = self._path(path).getFileSystem(configuration)

    def names(self, folder: str) -> list[str]:
        with translated(f"list {self.path}/{folder}"):
            where = self._path(f"{self.path}/{folder}")
            if not self._files.exists(where):
                return []
            return [status.getPath().getName() for status in self._files.listStatus(where)]

    def read(self, name: str) -> str | None:
        """The text of a small file; None if there is no such file."""
        with translated(f"read {self.path}/{name}"):
            where = self._path(f"{self.path}/{name}")
            if not self._files.exists(where):
                return None
            stream = self._files.open(where)
            try:
                return bytes(stream.readAllBytes()).decode()
            finally:
                stream.close()

    def write(self, name: str, text: str) -> None:
        with translated(f"write {self.path}/{name}"):
            stream = self._files.create(self._path(f"{self.path}/{name}"), False)
            try:
                stream.write(bytearray(text.encode()))
            finally:
                stream.close()
