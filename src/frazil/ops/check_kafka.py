"""Checks of the broker, the topics and the consumer group, before a sink runs.

In: a config. Out: findings. Kafka is asked, and nothing is created: a consumer group is described
only where the cluster has its topic of offsets, which the question would create.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterable
from typing import Any

from confluent_kafka import (
    ConsumerGroupState,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclOperation,
    AdminClient,
    ConfigResource,
    OffsetSpec,
)

from frazil.config.model import Config
from frazil.errors import counted
from frazil.kafka.connection import client_settings
from frazil.kafka.setting_names import refusal
from frazil.offsets import Cut
from frazil.ops.findings import CheckFinding

#: Seconds for the first answer of a broker, and for each later one.
_FIRST, _CALL = 5.0, 5.0
_SERVERS = ("kafka", "bootstrap.servers")
_PROTOCOL = ("kafka", "security.protocol")
#: What librdkafka reports → the setting at fault, and the remedy.
_REASONS = (
    (
        r"PLAINTEXT broker listener|wrong version number",
        _PROTOCOL,
        'the port is one without TLS: set "security.protocol" to PLAINTEXT or SASL_PLAINTEXT, or '
        "give the port of the TLS listener",
    ),
    (
        r"incorrect security\.protocol|security\.protocol configuration",
        _PROTOCOL,
        'the port speaks another protocol, TLS as a rule: set "security.protocol" to SSL or '
        "SASL_SSL",
    ),
    (
        r"certificate verify failed|unable to get local issuer",
        ("kafka", "ssl.ca.location"),
        'set "ssl.ca.location" to the certificate of the authority that signed the broker\'s',
    ),
    (
        r"[Mm]echanism",
        ("kafka", "sasl.mechanism"),
        'set "sasl.mechanism" to one that the listener has, or "security.protocol" without SASL',
    ),
    (
        r"[Aa]uthentication|credentials|SASL",
        ("kafka", "sasl.password"),
        'check "sasl.username" and "sasl.password"',
    ),
    (r"resolve", _SERVERS, 'check the host name in "bootstrap.servers"'),
    (r"refused", _SERVERS, "no broker listens there: check host and port, and that it runs"),
    (
        r"timed out|timeout",
        _SERVERS,
        "nothing answers there: check host and port, the network and its firewalls",
    ),
)


class BrokerCheck:
    """One look at the cluster: `run` gives the findings."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._reports: list[KafkaError] = []
        self.findings: list[CheckFinding] = []
        #: topics of the sink that exist and may be described
        self.topics: dict[str, int] = {}
        self._names: set[str] = set()

    def run(self) -> list[CheckFinding]:
        if self.connect():
            self._check_topics()
            self._check_group()
        return self.findings

    def connect(self) -> bool:
        """Whether a broker answers and lets us in."""
        kafka: dict[str, Any] = client_settings(self._config.kafka.resolved())
        try:
            quick: dict[str, Any] = {"socket.connection.setup.timeout.ms": 4000, **kafka}
            quick |= {"log_level": "0", "error_cb": self._reports.append}
            self._admin = AdminClient(quick)
        except (KafkaException, ValueError, TypeError) as error:
            self.findings.append(CheckFinding.of("config", refusal(error, kafka)))
            return False
        return self._reached()

    def _add(
        self,
        area: str,
        verdict: str,
        says: str,
        hint: str = "",
        *,
        setting: Any = (),
        temporary: bool = False,
    ) -> None:
        finding = CheckFinding(area, verdict, says, hint, setting, temporary=temporary)
        self.findings.append(finding)

    # ── broker ───────────────────────────────────────────────────────────────────────────────

    def _reached(self) -> bool:
        servers = self._config.kafka.get("bootstrap.servers", "")
        deadline = time.monotonic() + _FIRST
        trouble: KafkaException | None = None
        while time.monotonic() < deadline:
            try:
                metadata = self._admin.list_topics(timeout=1.0)
            except KafkaException as error:
                trouble = error
                self._admin.poll(0.05)
                if self._facts():
                    break
                continue
            self._names = set(metadata.topics)
            protocol = self._config.kafka.get("security.protocol", "PLAINTEXT")
            self._add(
                "broker",
                "ok",
                f"Kafka answers at {servers} ({protocol}), cluster {metadata.cluster_id}, "
                f"{counted(len(metadata.brokers), 'broker')}",
            )
            self._admin.poll(0.05)
            for fact in self._facts():  # of one address, while another answered
                self._add("broker", "warning", f"one of {servers}: {fact}", setting=_SERVERS)
            return True
        facts = self._facts() or [_fact(trouble) if trouble else "no answer"]
        setting, hint = _remedy(facts)
        self._add(
            "broker",
            "error",
            f"cannot reach Kafka at {servers}: {'; '.join(facts[:3])}",
            hint,
            setting=setting if setting[1] in self._config.kafka else _SERVERS,
            temporary=setting == _SERVERS,
        )
        return False

    def _facts(self) -> list[str]:
        """What librdkafka reported, each once, without its times."""
        texts = (
            re.sub(r" \((after|repeated|\d+ identical).*", "", error.str())
            for error in list(self._reports)
            if error.name() != "_ALL_BROKERS_DOWN"
        )
        return list(dict.fromkeys(texts))

    # ── topics ───────────────────────────────────────────────────────────────────────────────

    def _check_topics(self) -> None:
        sink = self._config.sink
        names = list(sink.topics)
        if sink.topic_pattern:
            expected = re.compile(sink.topic_pattern)
            names = sorted(
                n for n in self._names if expected.fullmatch(n) and not n.startswith("__")
            )
            if not names:
                self._add(
                    "topics",
                    "warning",
                    f"no topic matches {sink.topic_pattern!r} yet",
                    _nearest("", self._names),
                    setting=("sink", "topic_pattern"),
                )
                return
        described = self._admin.describe_topics(
            TopicCollection(names), include_authorized_operations=True, request_timeout=_CALL
        )
        for name in names:
            self._check_topic(name, described[name])
        if self.topics:
            partitions = counted(sum(self.topics.values()), "partition")
            self._add("topics", "ok", f"{', '.join(self.topics)}: {partitions}, may be read")

    def _check_topic(self, name: str, future: Any) -> None:
        setting = ("sink", "topics" if self._config.sink.topics else "topic_pattern")
        try:
            topic = future.result()
        except KafkaException as error:
            kind = error.args[0].name()
            if kind == "UNKNOWN_TOPIC_OR_PART":
                hint = "create it, or correct [sink] topics" + _nearest(name, self._names)
                self._add("topics", "error", f"topic {name} does not exist", hint, setting=setting)
            else:
                self._add(
                    "topics",
                    "error",
                    f"cannot describe topic {name}: {error.args[0].str()}",
                    f"allow the user DESCRIBE and READ on topic {name}",
                    setting=setting,
                )
            return
        operations = topic.authorized_operations
        if operations is not None and AclOperation.READ not in operations:
            self._add(
                "topics",
                "error",
                f"topic {name} may be described, and not be read",
                f"allow the user READ on topic {name}",
                setting=setting,
            )
            return
        leaderless = [part.id for part in topic.partitions if part.leader is None]
        if leaderless:
            self._add(
                "topics",
                "warning",
                f"topic {name} has partitions without a leader: {leaderless[:8]}",
                "a broker is down: their records wait until it is back",
            )
        self.topics[name] = len(topic.partitions)

    def retention(self, position: Cut) -> list[CheckFinding]:
        """Warnings where Kafka is about to delete the next records to read."""
        if not self.topics:
            return []
        kept = self._retention_ms()
        now = time.time() * 1000
        soon = {
            partition: TopicPartition(partition.kafka_topic, partition.number)
            for partition in position
            if partition.topic in kept
        }
        if not soon:
            return []
        asked = {
            place: OffsetSpec.for_timestamp(int(now - 0.9 * kept[partition.topic]))
            for partition, place in soon.items()
        }
        futures = self._admin.list_offsets(asked, request_timeout=_CALL)
        latest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        ends = self._admin.list_offsets(
            dict.fromkeys(asked, latest),
            request_timeout=_CALL,
        )
        old = []
        for partition, place in soon.items():
            try:
                first, end = futures[place].result().offset, ends[place].result().offset
            except KafkaException:
                continue  # a plan reports partitions that do not answer
            if position[partition] < (end if first < 0 else first):
                old.append(str(partition))
        if not old:
            return []
        return [
            CheckFinding(
                "position",
                "warning",
                f"the next records of {', '.join(old[:8])} are older than nine tenths of the "
                "topic's retention: Kafka deletes them soon",
                "start the sink soon, or raise retention.ms of the topic until it has caught up",
            )
        ]

    def _retention_ms(self) -> dict[str, int]:
        """Topic → its retention in milliseconds, where it has one and may be asked for it."""
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in self.topics]
        kept = {}
        for resource, future in self._admin.describe_configs(
            resources, request_timeout=_CALL
        ).items():
            try:
                values = future.result()
            except KafkaException:
                continue
            entry = values.get("retention.ms")
            policy = getattr(values.get("cleanup.policy"), "value", "")
            if entry is not None and int(entry.value) > 0 and "delete" in policy:
                kept[resource.name] = int(entry.value)
        return kept

    # ── consumer group ───────────────────────────────────────────────────────────────────────

    def _check_group(self) -> None:
        group = self._config.group
        setting = ("sink", "consumer_group" if self._config.sink.consumer_group else "id")
        if "__consumer_offsets" not in self._names:
            # To ask would make Kafka create its topic of offsets: a check changes nothing.
            says = f"offsets are published as group {group}; the cluster has no groups yet"
            self._add("group", "ok", says)
            return
        future = self._admin.describe_consumer_groups(
            [group], include_authorized_operations=True, request_timeout=_CALL
        )[group]
        try:
            described = future.result()
        except KafkaException as error:
            kind = error.args[0].name()
            if kind == "GROUP_ID_NOT_FOUND":
                self._add("group", "ok", f"offsets are published as group {group}")
                return
            hint = f"allow the user READ and DESCRIBE on group {group}; the tables do not need it"
            says = f"offsets cannot be published as group {group}: {error.args[0].str()}"
            self._add("group", "warning", says, hint, setting=setting)
            return
        operations = described.authorized_operations
        if operations and AclOperation.READ not in operations:
            says = f"offsets cannot be published as group {group}: the user has no right to READ it"
            hint = f"allow the user READ on group {group}; the tables do not need it"
            self._add("group", "warning", says, hint, setting=setting)
        elif described.members and described.state == ConsumerGroupState.STABLE:
            says = f"group {group} has {counted(len(described.members), 'member')} of its own"
            hint = "Kafka refuses offsets of others while they live: set another consumer_group"
            self._add("group", "warning", says, hint, setting=setting)
        else:
            self._add("group", "ok", f"offsets are published as group {group}")


def _remedy(facts: Iterable[str]) -> tuple[tuple[str, ...], str]:
    for pattern, setting, hint in _REASONS:
        if any(re.search(pattern, fact) for fact in facts):
            return setting, hint
    return _SERVERS, "check [kafka], and that the brokers are up"


def _nearest(name: str, known: Iterable[str]) -> str:
    visible = sorted(topic for topic in known if not topic.startswith("__"))
    close = difflib.get_close_matches(name, visible, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(visible[:8])}" if visible else "; there are no topics"


def _fact(error: Exception) -> str:
    first = error.args[0] if error.args else error
    return str(first.str() if isinstance(first, KafkaError) else first)
