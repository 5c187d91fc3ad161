"""Scratch resources of the self-test on the user's broker and catalog: created and removed.

Topics, tables, a namespace if it does not exist, consumer groups, staged files, a local folder:
each has the name of the self-test in it, and nothing else is touched.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from frazil.config import model as configs
from frazil.config.model import Config
from frazil.errors import ConfigError, FrazilError, Unavailable
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.kafka.setting_names import refusals
from frazil.ledger.sink_state import staging_folder
from frazil.steps import STEPS
from frazil.testing.process import toml

MODES = ("append", "upsert")
PARTITIONS = 3
CALL_SECONDS = 30.0
#: A broker's error codes for missing permissions.
_FORBIDDEN = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.POLICY_VIOLATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
}
#: Schema of the table that checks whether tables can be created.
_PROBE = (
    '{"type": "struct", "schema-id": 0, "fields": '
    '[{"id": 1, "name": "n", "required": false, "type": "long"}]}'
)


@dataclass(frozen=True, slots=True)
class ScratchPart:
    """One scratch topic into one scratch table."""

    mode: str
    name: str  # of the topic, the sink and its group
    table: str
    index: str


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """The resources to create, and the steps to kill at."""

    name: str
    namespace: str
    rows: int
    steps: tuple[str, ...]
    parts: tuple[ScratchPart, ...]

    @property
    def creates(self) -> list[str]:
        resources = [f"topic {part.name} ({PARTITIONS} partitions)" for part in self.parts]
        resources += [f"table {name}" for part in self.parts for name in (part.table, part.index)]
        return [*resources, f"namespace {self.namespace}, if it does not exist"]


def plan(
    given: Config,
    *,
    rows: int,
    steps: Sequence[str] = (),
    modes: Sequence[str] = (),
    namespace: str = "",
) -> ScratchPlan:
    """A plan with unique names; raises if an option makes no sense."""
    steps = tuple(steps) or STEPS
    if unknown := [step for step in steps if step not in STEPS]:
        raise ConfigError(
            f"cannot kill at step {unknown[0]!r}: a batch has none of that name",
            hint=f"its steps are {', '.join(STEPS)}",
        )
    if rows < 3 * len(steps):
        raise ConfigError(
            f"cannot run the self-test with {rows} rows: expected at least "
            f"{3 * len(steps)}, three for each step"
        )
    if not given.kafka.get("bootstrap.servers"):
        raise ConfigError(
            "cannot run the self-test: the config names no broker",
            hint='set [kafka] "bootstrap.servers"',
        )
    name = f"frazil_selftest_{uuid.uuid4().hex[:8]}"
    namespace = namespace or name
    parts = [
        ScratchPart(
            mode, f"{name}_{mode}", f"{namespace}.{name}_{mode}", f"{namespace}.{name}_{mode}_index"
        )
        for mode in modes or MODES
    ]
    return ScratchPlan(name, namespace, rows, steps, tuple(parts))


class Scratch:
    def __init__(
        self, given: Config, wanted: ScratchPlan, catalog: JavaCatalog, folder: Path
    ) -> None:
        self.given, self.plan, self.catalog, self.folder = given, wanted, catalog, folder
        self.kafka = given.kafka.resolved()
        with refusals(self.kafka):
            self.admin = AdminClient({"log_level": "2", **self.kafka})
        self._made_namespace = False
        #: folder of the namespace → a table that can access it
        self._above: dict[str, JavaTable] = {}
        self._topics: list[str] = []
        #: folders of dropped tables whose names do not prove that they belong to the self-test
        self._unsure: list[str] = []

    def make(self) -> None:
        """Create the namespace and the topics, and briefly a table, to check that this is
        allowed."""
        with _kafka_errors("reach the broker"):
            self.admin.list_topics(timeout=CALL_SECONDS)
        probe = f"{self.plan.namespace}.{self.plan.name}_probe"
        try:
            self._made_namespace = self.catalog.make_namespace(self.plan.namespace)
            self.catalog.create(probe, _PROBE, '{"spec-id": 0, "fields": []}', properties={})
            self._drop(probe)
        except ConfigError as error:
            raise ConfigError(
                error.message,
                hint="the self-test makes and drops tables in a namespace of its own; --namespace "
                "names one in which it may",
            ) from None
        for topic in (part.name for part in self.plan.parts):
            self._topics.append(topic)  # before the call: its answer may be lost
            try:
                with _kafka_errors(
                    f"create topic {topic}", "the self-test creates and deletes topics"
                ):
                    new = NewTopic(topic, PARTITIONS, -1)  # the broker's default replication
                    self.admin.create_topics([new], operation_timeout=CALL_SECONDS)[topic].result()
            except ConfigError:
                self._topics.remove(topic)
                raise

    def config(self, part: ScratchPart) -> Path:
        """Write the config of a part. Secrets stay references, as in the user's config."""
        of, upsert = self.given.sink, part.mode == "upsert"
        per_run = self.plan.rows // len(self.plan.steps)
        document = {
            "sink": {
                "id": part.name,
                "topics": [part.name],
                "index_table": part.index,
                "trigger": "50ms",
                "commit_interval": "0s",
                "max_records_per_trigger": max(1, per_run // 3),
                "kafka_client": of.kafka_client,
                "unavailable_timeout": of.unavailable_timeout,
                "staging_location": of.staging_location,
                "consumer_group": part.name,
            },
            "kafka": dict(self.given.kafka),
            "decode": {"format": "json"},
            "catalog": {"name": self.given.catalog.name, **self.given.catalog.properties},
            "spark": dict(self.given.spark),
            "table": [
                {
                    "name": part.table,
                    "mode": part.mode,
                    "key": ["id"] if upsert else [],
                    "format_version": self.given.tables[0].format_version,
                }
            ],
        }
        path = self.folder / f"{part.mode}.toml"
        path.write_text(toml(document))
        return path

    def clear(self) -> list[str]:
        """Remove everything, in an order in which nothing is written to a removed resource. Returns
        what could not be removed, and why."""
        left: list[str] = []

        def attempt(resource: str, remove: Callable[..., None], *given: object) -> None:
            try:
                remove(*given)
            except (FrazilError, KafkaException, OSError) as error:
                left.append(f"{resource}: {getattr(error, 'message', error)}")

        for topic in self._topics:
            attempt(f"consumer group {topic}", self._delete_group, topic)
            attempt(f"topic {topic}", self._delete_topic, topic)
        for part in self.plan.parts:
            for name in (part.index, part.table):
                attempt(f"table {name}", self._drop, name)
        if self._made_namespace:
            name = self.plan.namespace
            attempt(f"namespace {name}", self.catalog.drop_namespace, name)
            for above, table in self._above.items():
                attempt(f"folder {above}", self._delete_empty, above, table)
        attempt(f"folder {self.folder}", shutil.rmtree, self.folder)
        left += [f"folder {folder}: its name does not say whose it is" for folder in self._unsure]
        return left

    def _drop(self, name: str) -> None:
        """Drop a table with its staging folder and with files that no snapshot references."""
        table = self.catalog.load(name)
        if table is None:
            return
        where = table.location
        self.catalog.drop(name)
        for part in self.plan.parts:
            if name == part.index and self.given.sink.staging_location:
                table.delete_folder(staging_folder(configs.load(self.config(part), {}), table))
        if table.listing(f"{where}/") or _folder(where):
            if self.plan.name in where:
                table.delete_folder(where)
            else:  # the catalog's choice: other tables may use it, too
                self._unsure.append(where)
        above = where.rpartition("/")[0]
        if above.endswith((f"/{self.plan.name}", f"/{self.plan.name}.db")):
            self._above[above] = table

    def _delete_empty(self, folder: str, table: JavaTable) -> None:
        """Delete the folder that a dropped namespace leaves on file systems."""
        if not table.listing(f"{folder}/"):
            table.delete_folder(folder)

    def _delete_topic(self, topic: str) -> None:
        future = self.admin.delete_topics([topic], operation_timeout=CALL_SECONDS)[topic]
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise

    def _delete_group(self, group: str) -> None:
        future = self.admin.delete_consumer_groups([group], request_timeout=CALL_SECONDS)[group]
        try:
            future.result()
        except KafkaException as error:  # no run has committed
            if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise


def _folder(where: str) -> bool:
    """Whether it is a local folder: those remain after their files are deleted."""
    return Path(where.removeprefix("file:")).is_dir()


@contextmanager
def _kafka_errors(doing: str, hint: str = "") -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        fact = error.args[0]
        if fact.code() in _FORBIDDEN:
            raise ConfigError(f"cannot {doing}: {fact.str()}", hint=hint) from None
        raise Unavailable(f"cannot {doing}: {fact.str()}") from None
