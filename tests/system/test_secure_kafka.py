"""A real broker with TLS and SASL: our Fetch reads behind every door, and says what is wrong."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    NewTopic,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from frazil.errors import Unavailable
from frazil.kafka import connection as connections
from frazil.kafka.fetch import fetch
from frazil.kafka.leader_epochs import asked_epoch_ends
from frazil.kafka.security import mechanism, unsupported
from frazil.offsets import Partition, Range
from frazil.testing.kafka import Broker, free_ports
from tests.certificates import PASSWORD, Authority

RECORDS = 300
SECRET = "pass,word=with the signs of SCRAM"
USER = "ann=e,x"
_MODULE = "org.apache.kafka.common.security"


class SecureBroker:
    """A broker with a listener for each door, and the settings of a client for it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.make(folder / "tls")
        self.other = Authority.make(folder / "other", "stranger")
        own = self.authority.issue("broker")
        self.user = self.authority.issue("user", PASSWORD)
        names = ("ssl", "mutual", "secret", "plain")
        self.ports = dict(zip(names, free_ports(4), strict=True))
        kinds = {"ssl": "SSL", "mutual": "SSL", "secret": "SASL_SSL", "plain": "SASL_PLAINTEXT"}
        self.broker = Broker(folder / "broker")
        at = {name.upper(): f"127.0.0.1:{port}" for name, port in self.ports.items()}
        listeners = ",".join(f"{name}://{place}" for name, place in at.items())
        open_door = f"PLAINTEXT://{self.broker.bootstrap}"
        trust = "".join(self.authority.path.read_text().splitlines(keepends=True))
        settings = {
            "listeners": f"{open_door},{listeners},CONTROLLER://{self.broker.controller}",
            "advertised.listeners": f"{open_door},{listeners}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
            + ",".join(f"{name.upper()}:{kind}" for name, kind in kinds.items()),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _line(own[0].read_text()),
            "ssl.keystore.key": _line(own[1].read_text()),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": _line(trust),
            "listener.name.mutual.ssl.client.auth": "required",
        }
        user = f'user_admin="{SECRET}"'
        for door in ("secret", "plain"):
            lead = f"listener.name.{door}"
            settings |= {
                f"{lead}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
                f"{lead}.connections.max.reauth.ms": "3000" if door == "plain" else "0",
                f"{lead}.plain.sasl.jaas.config": f"{_MODULE}.plain.PlainLoginModule required "
                f"{user};",
                **{
                    f"{lead}.scram-sha-{bits}.sasl.jaas.config": f"{_MODULE}.scram."
                    "ScramLoginModule required;"
                    for bits in (256, 512)
                },
                f"{lead}.oauthbearer.sasl.jaas.config": f"{_MODULE}.oauthbearer."
                'OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";',
            }
        self.broker.settings |= settings

    def kafka(self, door: str, **settings: str) -> dict[str, str]:
        protocols = {"ssl": "ssl", "mutual": "ssl", "secret": "sasl_ssl", "plain": "sasl_plaintext"}
        base = {
            "bootstrap.servers": f"127.0.0.1:{self.ports[door]}",
            "security.protocol": protocols[door],
        }
        if door != "plain":
            base["ssl.ca.location"] = str(self.authority.path)
        if door == "mutual":
            base |= {
                "ssl.certificate.location": str(self.user[0]),
                "ssl.key.location": str(self.user[1]),
                "ssl.key.password": PASSWORD,
            }
        return base | {key.replace("_", "."): value for key, value in settings.items()}


def _line(text: str) -> str:
    """A value of several lines, as Java's properties have it."""
    return text.strip().replace("\n", "\\n\\\n")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    made = SecureBroker(tmp_path_factory.mktemp("secure"))
    with made.broker:
        admin = AdminClient({"bootstrap.servers": made.broker.bootstrap})
        for future in admin.create_topics([NewTopic("doors", 1, 1)]).values():
            future.result()
        for kind in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            wanted = UserScramCredentialUpsertion(
                USER, ScramCredentialInfo(kind, 4096), SECRET.encode()
            )
            for future in admin.alter_user_scram_credentials([wanted]).values():
                future.result()
        producer = Producer({"bootstrap.servers": made.broker.bootstrap})
        for number in range(RECORDS):
            producer.produce("doors", b"%d" % number)
        producer.flush()
        yield made


@pytest.fixture(scope="module")
def tokens() -> Iterator[str]:
    """An endpoint of OAuth 2.0 that gives a token to one client."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            known = base64.b64encode(b"client:" + SECRET.encode()).decode()
            allowed = self.headers["Authorization"] == f"Basic {known}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"access_token": _token()}).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/token"
    server.shutdown()


def _token() -> str:
    """A token without a signature, as the broker's default validator takes it."""
    now = int(time.time())
    claims = {"sub": "ann", "iat": now, "exp": now + 600}
    parts = ({"alg": "none"}, claims)
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    return f"{texts[0].decode()}.{texts[1].decode()}."


def token(_: str) -> tuple[str, float]:
    """A token callable, as `oauth_cb` names it."""
    return _token(), time.time() + 600


CREDENTIALS: dict[str, dict[str, str]] = {
    "PLAIN": {"sasl_username": "admin", "sasl_password": SECRET},
    "SCRAM-SHA-256": {"sasl_username": USER, "sasl_password": SECRET},
    "SCRAM-SHA-512": {"sasl_username": USER, "sasl_password": SECRET},
}


def read(kafka: dict[str, str], patience: float = 20.0) -> list[bytes]:
    assert unsupported(kafka) == ""
    connections._own.connections.clear()
    wanted = Range(Partition("doors", 0), 0, RECORDS)
    chunks = fetch(kafka, wanted, patience=patience)
    return [value for chunk in chunks for value in chunk.open().values]


EXPECTED = [b"%d" % number for number in range(RECORDS)]


@pytest.fixture(autouse=True)
def _no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read here is read over our own connections."""
    from frazil.kafka import fetch as fetching

    def refused(_: Any) -> Any:
        raise AssertionError("read by librdkafka")

    monkeypatch.setattr(fetching, "_consumer", refused)


@pytest.mark.parametrize("door", ["ssl", "mutual"])
def test_a_topic_is_read_over_tls(secure: SecureBroker, door: str):
    assert read(secure.kafka(door)) == EXPECTED


def test_certificates_may_be_texts(secure: SecureBroker):
    kafka = secure.kafka("mutual")
    for part in ("ca", "certificate", "key"):
        kafka[f"ssl.{part}.pem"] = Path(kafka.pop(f"ssl.{part}.location")).read_text()
    assert read(kafka) == EXPECTED


@pytest.mark.parametrize("door", ["secret", "plain"])
@pytest.mark.parametrize("name", [*CREDENTIALS])
def test_a_topic_is_read_with_a_password(secure: SecureBroker, door: str, name: str):
    kafka = secure.kafka(door, sasl_mechanism=name, **CREDENTIALS[name])
    assert mechanism(kafka) == name
    assert read(kafka) == EXPECTED


def test_a_topic_is_read_with_a_token_of_an_endpoint(secure: SecureBroker, tokens: str):
    kafka = secure.kafka("secret", sasl_mechanism="OAUTHBEARER", sasl_oauthbearer_method="oidc")
    kafka |= {
        "sasl.oauthbearer.client.id": "client",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.token.endpoint.url": tokens,
    }
    assert read(kafka) == EXPECTED


def test_a_topic_is_read_with_a_token_of_a_function(secure: SecureBroker):
    kafka = secure.kafka("secret", sasl_mechanism="OAUTHBEARER")
    kafka["oauth_cb"] = f"{__name__}:token"
    assert read(kafka) == EXPECTED


def test_a_session_that_the_broker_ends_is_begun_again(secure: SecureBroker):
    """The broker closes connections that are not authenticated again in time (KIP-368)."""
    kafka = secure.kafka("plain", sasl_mechanism="PLAIN", **CREDENTIALS["PLAIN"])
    partition = Partition("doors", 0)
    connections._own.connections.clear()
    first = connections.connection_to(kafka, partition)
    assert connections.connection_to(kafka, partition) is first
    [(_, until)] = connections._own.connections.values()
    remaining = until - time.monotonic()
    assert 0 < remaining < 3
    threading.Event().wait(remaining + 0.01)
    again = connections.connection_to(kafka, partition)
    assert again is not first
    assert asked_epoch_ends(kafka, {partition: 0}) == {partition: RECORDS}


def test_a_wrong_password_is_reported_without_it(secure: SecureBroker):
    """librdkafka looks up the leader, and asks for longer than a reader is patient."""
    for name, known in CREDENTIALS.items():
        kafka = secure.kafka("plain", sasl_mechanism=name, **known)
        connections._own.connections.clear()
        connections.leader_of(kafka, Partition("doors", 0))
        wrong = kafka | {"sasl.password": "guessed-at-random"}
        with pytest.raises(OSError, match=f"SASL {name}|SCRAM") as raised:
            connections._connected(("127.0.0.1", secure.ports["plain"]), wrong)
        assert "guessed-at-random" not in str(raised.value)


def test_a_broker_that_a_stranger_vouches_for_is_not_trusted(secure: SecureBroker):
    kafka = secure.kafka("ssl") | {"ssl.ca.location": str(secure.other.path)}
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        connections._connected(("127.0.0.1", secure.ports["ssl"]), kafka)
    unchecked = kafka | {"enable.ssl.certificate.verification": "false"}
    connections._connected(("127.0.0.1", secure.ports["ssl"]), unchecked)[0].close()


def test_a_broker_by_another_name_is_not_trusted(secure: SecureBroker):
    kafka = secure.kafka("ssl")
    place = ("localhost", secure.ports["ssl"])
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        connections._connected(place, kafka)
    anyone = kafka | {"ssl.endpoint.identification.algorithm": "none"}
    connections._connected(place, anyone)[0].close()


def test_a_plain_reader_at_a_locked_door_waits_no_longer_than_its_patience(secure: SecureBroker):
    kafka = {"bootstrap.servers": f"127.0.0.1:{secure.ports['ssl']}"}
    where = (kafka["bootstrap.servers"], "doors", 0)
    connections._own.leaders[where] = ("127.0.0.1", secure.ports["ssl"])
    with pytest.raises(Unavailable):
        list(fetch(kafka, Range(Partition("doors", 0), 0, 1), patience=1))
