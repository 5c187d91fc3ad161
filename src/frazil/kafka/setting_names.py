"""Settings that librdkafka knows, and what it refuses.

In: the `[kafka]` settings, and what a client of librdkafka raises when it is made. Out: a
`ConfigError` with the setting at fault, and the nearest known name. librdkafka itself decides what
is known: the names here are only for the hint. Runs on the driver and on executors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka import KafkaException

from frazil.config.messages import nearest
from frazil.config.settings import SECRET
from frazil.errors import ConfigError

#: Of a client that reads.
NAMES = (
    *("allow.auto.create.topics", "api.version.request", "api.version.request.timeout.ms"),
    *("bootstrap.servers", "broker.address.family", "broker.address.ttl"),
    *("broker.version.fallback", "check.crcs", "client.dns.lookup", "client.id", "client.rack"),
    *("connections.max.idle.ms", "debug", "enable.metrics.push", "enable.random.seed"),
    *("enable.sasl.oauthbearer.unsecure.jwt", "enable.sparse.connections"),
    *("enable.ssl.certificate.verification", "fetch.error.backoff.ms", "fetch.max.bytes"),
    *("fetch.message.max.bytes", "fetch.min.bytes", "fetch.queue.backoff.ms", "fetch.wait.max.ms"),
    *("group.protocol", "heartbeat.interval.ms", "https.ca.location", "https.ca.pem"),
    *("isolation.level", "log.connection.close", "log.thread.name", "log_level"),
    *("max.in.flight.requests.per.connection", "max.partition.fetch.bytes", "max.poll.interval.ms"),
    *("message.copy.max.bytes", "message.max.bytes", "metadata.max.age.ms"),
    *("metadata.recovery.strategy", "metadata.recovery.rebootstrap.trigger.ms", "oauth_cb"),
    *("partition.assignment.strategy", "plugin.library.paths", "queued.max.messages.kbytes"),
    *("queued.min.messages", "receive.message.max.bytes", "reconnect.backoff.max.ms"),
    *("reconnect.backoff.ms", "retry.backoff.max.ms", "retry.backoff.ms"),
    *("sasl.kerberos.keytab", "sasl.kerberos.kinit.cmd", "sasl.kerberos.min.time.before.relogin"),
    *("sasl.kerberos.principal", "sasl.kerberos.service.name", "sasl.mechanism"),
    *("sasl.mechanisms", "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret"),
    *("sasl.oauthbearer.config", "sasl.oauthbearer.extensions", "sasl.oauthbearer.grant.type"),
    *("sasl.oauthbearer.method", "sasl.oauthbearer.scope", "sasl.oauthbearer.token.endpoint.url"),
    *("sasl.password", "sasl.username", "security.protocol", "session.timeout.ms"),
    *("socket.connection.setup.timeout.ms", "socket.keepalive.enable", "socket.max.fails"),
    *("socket.nagle.disable", "socket.receive.buffer.bytes", "socket.send.buffer.bytes"),
    *("socket.timeout.ms", "ssl.ca.certificate.stores", "ssl.ca.location", "ssl.ca.pem"),
    *("ssl.certificate.location", "ssl.certificate.pem", "ssl.cipher.suites", "ssl.crl.location"),
    *("ssl.curves.list", "ssl.endpoint.identification.algorithm", "ssl.engine.id"),
    *("ssl.engine.location", "ssl.key.location", "ssl.key.password", "ssl.key.pem"),
    *("ssl.keystore.location", "ssl.keystore.password", "ssl.providers", "ssl.sigalgs.list"),
    *("statistics.interval.ms", "topic.blacklist", "topic.metadata.refresh.interval.ms"),
)
_UNKNOWN = re.compile(r'No such configuration property: "([^"]+)"')


@contextmanager
def refusals(kafka: Mapping[str, str]) -> Iterator[None]:
    """What a client refuses when it is made with these settings is a `ConfigError`."""
    try:
        yield
    except (KafkaException, TypeError, ValueError) as error:
        raise refusal(error, kafka) from None


def refusal(error: Exception, kafka: Mapping[str, str]) -> ConfigError:
    cause = error.args[0] if error.args else error
    fact = str(cause.str() if hasattr(cause, "str") else cause).strip()
    if unknown := _UNKNOWN.search(fact):
        key = unknown[1]
        near = nearest(key, NAMES)
        return ConfigError(
            f"cannot read [kafka]: {key!r} is not a setting that librdkafka knows"
            f"{near if 'did you mean' in near else ''}",
            hint="https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md",
            path=("kafka", key),
        )
    named = [key for key in kafka if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", fact)]
    for key, value in kafka.items():
        if SECRET.search(key) and value:
            fact = fact.replace(value, "***")
        elif not named and value and value in fact:
            named.append(key)
    return ConfigError(
        f"cannot make a Kafka client: {fact}",
        hint="correct [kafka]; its settings are librdkafka's",
        path=("kafka", *named[:1]),
    )
