"""What a streaming query keeps in Spark's checkpoint, and which queries are refused for it.

In: the operators of the query's logical plan, the ledger's end, and the checkpoint. Out: the
reasons why the query is bound to its checkpoint, and an error where it cannot start or continue:
neither checkpoint nor ledger is guessed from the other. Runs on the driver; it only reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from frazil.config.sections import AVAILABLE_NOW, SinkConfig
from frazil.errors import ConfigError, Expired, Gap, IdentityMismatch
from frazil.iceberg.java_spark import PlanOperator
from frazil.kafka.planner import kafka_only
from frazil.offsets import BATCHES
from frazil.sources.base import StreamPosition
from frazil.spark.checkpoint import Checkpoint, SourceOffsets, known
from frazil.spark.read import FRAZIL

#: Operators that keep no state. Every other operator is assumed to keep some.
_STATELESS = frozenset(
    [
        "Project",
        "Filter",
        "SubqueryAlias",
        "View",
        "Union",
        "Generate",
        "EventTimeWatermark",
        "MapInArrow",
        "MapInPandas",
        "PythonMapInArrow",
        "MapPartitions",
        "MapElements",
        "SerializeFromObject",
        "DeserializeToObject",
        "TypedFilter",
        "AppendColumns",
        "ResolvedHint",
        "UnresolvedHint",
        "WithCTE",
        "CTERelationDef",
        "CTERelationRef",
        "Repartition",
        "RepartitionByExpression",
        "RebalancePartitions",
        "ArrowEvalPython",
        "BatchEvalPython",
        "Sample",
        "Expand",
        "Unpivot",
        "CollectMetrics",
        "StreamingRelation",
        "StreamingRelationV2",
    ]
)
#: Operators that may leave out a row.
_LEAVES_OUT = ("Filter", "TypedFilter", "Generate")
#: Sources whose offsets are their whole state; others keep more in the checkpoint.
_PORTABLE = frozenset(["kafka", "rate-micro-batch", *FRAZIL])


class QueryState:
    """One query, by the operators of its logical plan."""

    def __init__(self, sink: SinkConfig, operators: Sequence[PlanOperator]) -> None:
        self._sink = sink
        self._operators = operators
        self.sources = [operator for operator in operators if operator.source]
        #: the options of each `frazil.read` and `format("frazil")`
        self.reads = [source.options for source in self.sources if source.source in FRAZIL]
        #: why the checkpoint of the query holds more than offsets
        self.bound = self._why_bound()

    def _why_bound(self) -> list[str]:
        reasons = []
        for operator in self._operators:
            portable = operator.source in _PORTABLE or operator.table.startswith(
                "org.apache.iceberg."
            )
            if operator.source and not portable:
                reasons.append(f"source {operator.source} keeps its position in Spark's checkpoint")
            elif _keeps_state(operator):
                reasons.append(f"operator {operator.name} keeps state in Spark's checkpoint")
        return list(dict.fromkeys(reasons))

    @property
    def stateful(self) -> bool:
        return any(reason.startswith("operator") for reason in self.bound)

    @property
    def holds_back(self) -> bool:
        """May a record come out in a later batch than its own? Not from a query without state, and
        not from one that only deduplicates."""
        return any(
            _keeps_state(operator) and not operator.name.startswith("Deduplicate")
            for operator in self._operators
        )

    def refuse_settings(self) -> None:
        """Refuse a source that may lose records silently, and available-now for sources that do not
        agree on their ends."""
        for source in self.sources:
            for key, value in source.options.items():
                if key.lower() == "failondataloss" and value.lower() == "false":
                    raise ConfigError(
                        f"cannot read source {source.source}: failOnDataLoss is false; a "
                        "lost range must stop the stream"
                    )
        mixed = self.reads and len(self.reads) < len(self.sources)
        if mixed and self._sink.trigger == AVAILABLE_NOW:
            raise ConfigError(
                "cannot use trigger available-now: the query reads with frazil.read and from other "
                "sources, which do not agree on what was there at the start",
                hint="use a duration, and stop the query when it has caught up",
            )

    def refuse_vanishing_rows(self) -> None:
        """Refuse what may leave out the new row of a group in update mode: its former row would
        stay."""
        for operator in self._operators:
            left_out = next((name for name in operator.above if name in _LEAVES_OUT), "")
            if operator.name == "Aggregate" and left_out:
                raise ConfigError(
                    f"cannot write in output mode update: {left_out} is behind the aggregation "
                    "(HAVING), and a group that it leaves out would keep its former row",
                    hint="make the condition a boolean column and name it as delete_column, or "
                    "filter before the aggregation",
                )

    def refuse_no_checkpoint(self) -> None:
        if self.bound and not self._sink.checkpoint_location:
            raise ConfigError(
                f"cannot start sink {self._sink.id}: {'; '.join(self.bound)}: it needs a "
                "permanent checkpoint",
                hint="set checkpoint_location to a folder of its own",
            )

    @property
    def kinds(self) -> list[str]:
        return ["frazil" if source.source in FRAZIL else source.source for source in self.sources]

    def check_seedable(self, ledger_end: SourceOffsets) -> None:
        """Raises where no fresh checkpoint can be made from the ledger for this query."""
        sink = self._sink.id
        if '"batch":' in ledger_end.text:
            raise IdentityMismatch(
                f"cannot start: sink {sink} was written by a stateful query so far; this "
                "query is stateless",
                hint="use another sink id for another query",
            )
        sources = known(ledger_end)
        of_kafka = [kind in ("frazil", "kafka") for kind in self.kinds]
        fits = len(sources) == len(of_kafka) and all(
            ours or not isinstance(source, dict)
            for source, ours in zip(sources, of_kafka, strict=True)
        )
        if ledger_end != SourceOffsets() and not fits:
            raise IdentityMismatch(
                f"cannot start: the ledger of sink {sink} ends at "
                f"{offsets_text(ledger_end)}; found sources "
                f"{', '.join(source.source for source in self.sources)}",
                hint="use another sink id for another stream",
            )

    def check_agreement(self, log: Checkpoint, reached: StreamPosition) -> None:
        """Raises unless checkpoint and ledger agree; neither is guessed from the other."""
        last = log.last()
        ledger_end = offsets_of(reached)
        sink = self._sink.id
        if ledger_end == SourceOffsets() and (last is None or (last == 0 and not log.ended(0))):
            return
        if ledger_end != SourceOffsets() and '"batch":' not in ledger_end.text:
            raise IdentityMismatch(
                f"cannot start: sink {sink} was written by a stateless query so far, up "
                f"to {offsets_text(ledger_end)}; this query is stateful: "
                f"{'; '.join(self.bound)}",
                hint="use another sink id for another query",
            )
        if last is None:
            raise Expired(
                f"cannot start: checkpoint {log.path} is empty, but sink {sink} has "
                f"{reached.cut.get(BATCHES, 0)} batches in the ledger; "
                f"{'; '.join(self.bound)}, and the ledger has no such state",
                hint="restore the checkpoint; or use another sink id, and a source that "
                "starts after the rows of the table: rows of open windows are then lost",
            )
        if ledger_end == SourceOffsets():
            raise IdentityMismatch(
                f"cannot use checkpoint {log.path}: it is at batch {last} of query {log.query}, "
                f"and the ledger has no batch of sink {sink}",
                hint="give the sink a checkpoint of its own",
            )
        if log.after(last) == ledger_end:
            return
        if not log.ended(last) and log.before(last) == ledger_end:
            return  # planned and not staged: Spark runs it again
        recorded = json.loads(reached.source)
        if recorded["query"] != log.query:
            raise IdentityMismatch(
                f"cannot use checkpoint {log.path}: it belongs to query {log.query}, and the "
                f"ledger of sink {sink} to query {recorded['query']}",
                hint="give each sink a checkpoint of its own, and each query a sink",
            )
        if recorded["batch"] > last:
            raise Expired(
                f"cannot start: checkpoint {log.path} is an older copy, at batch {last}; "
                f"the table has batch {recorded['batch']}",
                hint="restore the newest checkpoint; with this one rows would be written twice",
            )
        raise Gap(
            f"cannot start: checkpoint {log.path} has batch {last}, and the ledger of "
            f"sink {sink} ends at batch {recorded['batch']}: the batches between are in "
            "neither",
            hint="the table was rolled back, or staged batches were removed; restore them",
        )


def _keeps_state(operator: PlanOperator) -> bool:
    with_a_table = operator.name == "Join" and operator.streams == 1
    return operator.name not in _STATELESS and not with_a_table


def offsets_of(reached: StreamPosition) -> SourceOffsets:
    """The offsets of Spark's sources at the position of the ledger."""
    cut = kafka_only(reached.cut)
    return SourceOffsets(cut, reached.source, reached.origin.cluster, reached.origin.topics)


def offsets_text(place: SourceOffsets) -> str:
    if place == SourceOffsets():
        return "the beginning"
    return f"{json.dumps(place.cut.nested())} {place.text}".strip()
