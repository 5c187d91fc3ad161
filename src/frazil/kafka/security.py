"""TLS and SASL on a connection to a broker, by librdkafka's own settings. Runs on executors and in
the planner's process.

In: a connected socket, and the `[kafka]` settings. Out: the socket that requests go over, and the
time at which the broker ends its session. `unsupported` has the settings that only librdkafka
knows (Kerberos, key stores, engines); reading then goes through it.

SASL (KIP-152): SaslHandshake names the mechanism, SaslAuthenticate carries its messages. SCRAM
(RFC 5802) proves the password to the broker, and the broker proves that it knows it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib
import json
import os
import secrets
import socket
import ssl
import struct
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

_TLS = ("ssl", "sasl_ssl")
_SASL = ("sasl_plaintext", "sasl_ssl")
_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISMS = ("PLAIN", *_HASHES, "OAUTHBEARER")
#: librdkafka's settings of TLS and SASL that this module knows.
_KNOWN = frozenset(
    [
        "security.protocol",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.key.location",
        "ssl.key.pem",
        "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
        "enable.ssl.certificate.verification",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.extensions",
        "sasl.oauthbearer.token.endpoint.url",
        "oauth_cb",
    ]
)
#: A broker that asks for more rounds than this would keep a worker busy for minutes.
_MOST_ITERATIONS = 1_000_000
_SECONDS = 30.0
_HANDSHAKE, _AUTHENTICATE = 17, 36


def unsupported(kafka: Mapping[str, str]) -> str:
    """Why only librdkafka can connect with these settings; empty: this module can."""
    protocol = kafka.get("security.protocol", "plaintext").lower()
    if protocol not in ("plaintext", *_TLS, *_SASL):
        return f"security.protocol = {protocol}"
    for key in kafka:
        about = key.startswith(("ssl.", "sasl.", "enable.ssl", "enable.sasl")) or key == "oauth_cb"
        if about and key not in _KNOWN:
            return key
    if protocol in _SASL and mechanism(kafka) not in MECHANISMS:
        return f"sasl.mechanism = {mechanism(kafka)}"
    by_token = protocol in _SASL and mechanism(kafka) == "OAUTHBEARER"
    method = kafka.get("sasl.oauthbearer.method", "default").lower()
    if by_token and method != "oidc" and not kafka.get("oauth_cb"):
        return f"sasl.oauthbearer.method = {method}"
    return ""


def mechanism(kafka: Mapping[str, str]) -> str:
    """librdkafka's default is Kerberos."""
    return kafka.get("sasl.mechanism", kafka.get("sasl.mechanisms", "GSSAPI")).upper()


def secured(
    connection: socket.socket,
    host: str,
    kafka: Mapping[str, str],
    request: Callable[[socket.socket, int, int, bytes], bytearray],
) -> tuple[socket.socket, float]:
    """The connection with TLS and SASL as the settings say, and until when the broker accepts it
    (monotonic seconds). `request` sends a body for an API and its version, and reads the answer."""
    protocol = kafka.get("security.protocol", "plaintext").lower()
    if protocol in _TLS:
        connection = _context(tuple(sorted(_tls_settings(kafka).items()))).wrap_socket(
            connection, server_hostname=host
        )
    if protocol not in _SASL:
        return connection, float("inf")
    seconds = _authenticated(connection, kafka, request)
    return connection, time.monotonic() + seconds if seconds else float("inf")


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────


def _tls_settings(kafka: Mapping[str, str]) -> dict[str, str]:
    """The settings, with the time of change of the files: a renewed certificate is read again."""
    settings = {key: value for key, value in kafka.items() if "ssl" in key}
    for key in ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location"):
        if path := settings.get(key):
            settings[f"{key} changed"] = str(os.stat(path).st_mtime_ns)
    return settings


@lru_cache(maxsize=16)
def _context(settings: tuple[tuple[str, str], ...]) -> ssl.SSLContext:
    kafka = dict(settings)
    context = ssl.create_default_context()
    if authority := kafka.get("ssl.ca.location"):
        folder = os.path.isdir(authority)
        context.load_verify_locations(**{"capath" if folder else "cafile": authority})
    if text := kafka.get("ssl.ca.pem"):
        context.load_verify_locations(cadata=text)
    if kafka.get("ssl.endpoint.identification.algorithm", "https").lower() == "none":
        context.check_hostname = False
    if kafka.get("enable.ssl.certificate.verification", "true").lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    with _file(kafka, "ssl.certificate") as certificate, _file(kafka, "ssl.key") as key:
        if certificate:
            context.load_cert_chain(certificate, key or None, kafka.get("ssl.key.password"))
    return context


@contextmanager
def _file(kafka: Mapping[str, str], name: str) -> Iterator[str]:
    """The file of a certificate or key. Python reads them from files alone: a text is one for as
    long as that takes, readable by this user only."""
    if text := kafka.get(f"{name}.pem"):
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(text)
            file.flush()
            yield file.name
    else:
        yield kafka.get(f"{name}.location", "")


# ── SASL ─────────────────────────────────────────────────────────────────────────────────────────


class AuthenticationFailed(OSError):
    """The broker refused the credentials, or the broker is not the one that knows them."""


def _authenticated(
    connection: socket.socket,
    kafka: Mapping[str, str],
    request: Callable[[socket.socket, int, int, bytes], bytearray],
) -> float:
    """Seconds that the session lasts; 0: as long as the connection."""
    name = mechanism(kafka)
    encoded = name.encode()
    answer = request(connection, _HANDSHAKE, 1, struct.pack(">h", len(encoded)) + encoded)
    error, count = struct.unpack_from(">hi", answer, 0)
    if error:
        offered, at = [], 6
        for _ in range(max(0, min(count, 16))):
            size = struct.unpack_from(">h", answer, at)[0]
            offered.append(bytes(answer[at + 2 : at + 2 + size]).decode(errors="replace"))
            at += 2 + size
        raise AuthenticationFailed(
            f"the broker does not offer SASL {name}; it offers {', '.join(offered) or 'none'}"
        )

    seconds = 0.0

    def exchange(message: bytes) -> bytes:
        nonlocal seconds
        answer = request(connection, _AUTHENTICATE, 1, struct.pack(">i", len(message)) + message)
        error, size = struct.unpack_from(">hh", answer, 0)
        at = 4 + max(0, size)
        fact = bytes(answer[4:at]).decode(errors="replace")
        size = struct.unpack_from(">i", answer, at)[0]
        content = bytes(answer[at + 4 : at + 4 + max(0, size)])
        lifetime = struct.unpack_from(">q", answer, at + 4 + max(0, size))[0]
        if error:
            raise AuthenticationFailed(f"SASL {name}: {fact or f'error {error}'}")
        seconds = lifetime / 1000 * 0.8 if lifetime > 0 else 0.0
        return content

    _EXCHANGES[name](kafka, exchange)
    return seconds


def _plain(kafka: Mapping[str, str], exchange: Callable[[bytes], bytes]) -> None:
    exchange(f"\0{kafka.get('sasl.username', '')}\0{kafka.get('sasl.password', '')}".encode())


def _scram(kafka: Mapping[str, str], exchange: Callable[[bytes], bytes]) -> None:
    name = _HASHES[mechanism(kafka)]
    user = kafka.get("sasl.username", "").replace("=", "=3D").replace(",", "=2C")
    nonce = secrets.token_urlsafe(24)
    first = f"n={user},r={nonce}"
    answer = exchange(f"n,,{first}".encode())
    fields = _fields(answer)
    salt, rounds = base64.b64decode(fields.get("s", "")), int(fields.get("i", "0"))
    if not fields.get("r", "").startswith(nonce) or fields["r"] == nonce:
        raise AuthenticationFailed("SCRAM: the broker's answer is not one to this request")
    if not 4096 <= rounds <= _MOST_ITERATIONS:
        raise AuthenticationFailed(f"SCRAM: expected 4,096 to 1,000,000 rounds, found {rounds}")
    salted = hashlib.pbkdf2_hmac(name, kafka.get("sasl.password", "").encode(), salt, rounds)
    proven = f"{first},{answer.decode()},c=biws,r={fields['r']}"
    client_key = hmac.digest(salted, b"Client Key", name)
    signature = hmac.digest(hashlib.new(name, client_key).digest(), proven.encode(), name)
    proof = bytes(left ^ right for left, right in zip(client_key, signature, strict=True))
    final = f"c=biws,r={fields['r']},p={base64.b64encode(proof).decode()}"
    verified = _fields(exchange(final.encode())).get("v", "")
    server_key = hmac.digest(salted, b"Server Key", name)
    expected = base64.b64encode(hmac.digest(server_key, proven.encode(), name)).decode()
    if not hmac.compare_digest(verified, expected):
        raise AuthenticationFailed("SCRAM: the broker does not know the password")


def _fields(message: bytes) -> dict[str, str]:
    """`r=…,s=…,i=…`; a message that is none has no fields."""
    parts = message.decode(errors="replace").split(",")
    return {part[0]: part[2:] for part in parts if part[1:2] == "="}


def _bearer(kafka: Mapping[str, str], exchange: Callable[[bytes], bytes]) -> None:
    extensions = kafka.get("sasl.oauthbearer.extensions", "")
    pairs = "".join(f"\x01{pair.strip()}" for pair in extensions.split(",") if pair.strip())
    if refusal := exchange(f"n,,\x01auth=Bearer {_token(kafka)}{pairs}\x01\x01".encode()):
        raise AuthenticationFailed(f"OAUTHBEARER: {refusal.decode(errors='replace')[:300]}")


def _token(kafka: Mapping[str, str]) -> str:
    if function := kafka.get("oauth_cb"):
        token, _ = token_function(function)(kafka.get("sasl.oauthbearer.config", ""))
        return str(token)
    form = {"grant_type": "client_credentials", "scope": kafka.get("sasl.oauthbearer.scope", "")}
    body = urllib.parse.urlencode({key: value for key, value in form.items() if value}).encode()
    asked = urllib.request.Request(kafka["sasl.oauthbearer.token.endpoint.url"], body)
    names = (kafka.get(f"sasl.oauthbearer.client.{part}", "") for part in ("id", "secret"))
    asked.add_header(
        "Authorization", f"Basic {base64.b64encode(':'.join(names).encode()).decode()}"
    )
    with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:  # its errors are OSErrors
        try:
            return str(json.loads(answer.read(1_000_000))["access_token"])
        except (ValueError, KeyError, TypeError):
            raise AuthenticationFailed("OAUTHBEARER: the token endpoint gave no token") from None


def token_function(name: str) -> Callable[[str], tuple[str, float]]:
    """`module:function`, as confluent-kafka's `oauth_cb`: from `sasl.oauthbearer.config` to a token
    and the time at which it expires, in seconds since 1970."""
    module, _, attribute = name.partition(":")
    function: Callable[[str], tuple[str, float]] = getattr(
        importlib.import_module(module), attribute
    )
    return function


_EXCHANGES: Mapping[str, Callable[[Mapping[str, str], Callable[[bytes], bytes]], None]] = {
    "PLAIN": _plain,
    "SCRAM-SHA-256": _scram,
    "SCRAM-SHA-512": _scram,
    "OAUTHBEARER": _bearer,
}
