"""The monitoring server: what it answers, and what no client can do to it."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest

from frazil.config.units import address
from frazil.errors import ConfigError
from frazil.monitoring import http
from frazil.monitoring.http import MonitoringServer


def hello() -> tuple[int, str, bytes]:
    return 200, "text/plain", b"hello\n"


@pytest.fixture
def server() -> Iterator[MonitoringServer]:
    opened = MonitoringServer.open("127.0.0.1:0", {"/hello": hello})
    yield opened
    opened.close()


def port_of(server: MonitoringServer) -> int:
    return int(server.url.rpartition(":")[2])


def raw(server: MonitoringServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port_of(server)), 10) as client:
        client.sendall(request)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer


def test_a_route_is_answered_and_its_query_is_ignored(server: MonitoringServer):
    with urllib.request.urlopen(f"{server.url}/hello?x=1", timeout=10) as answer:
        assert answer.read() == b"hello\n"
        assert "Python" not in str(answer.headers)


def test_head_has_the_length_and_no_body(server: MonitoringServer):
    answer = raw(server, b"HEAD /hello HTTP/1.0\r\n\r\n")
    assert b"Content-Length: 6\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/", "/hello/", "/../hello", "/etc/passwd", "/%68ello"])
def test_what_is_no_route_is_not_found(server: MonitoringServer, path: str):
    assert b" 404 " in raw(server, f"GET {path} HTTP/1.0\r\n\r\n".encode()).splitlines()[0]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(server: MonitoringServer, method: str):
    answer = raw(server, f"{method} /hello HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
    assert b" 405 " in answer.splitlines()[0]
    assert b"Allow: GET, HEAD" in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET " + b"/" * 70_000 + b" HTTP/1.0\r\n\r\n",
        b"GET /hello HTTP/1.0\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"GET /hello HTTP/9.9\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_a_malformed_request_harms_no_other(server: MonitoringServer, request_bytes: bytes):
    answer = raw(server, request_bytes)
    assert b" 200 " not in answer
    assert b" 200 " in raw(server, b"GET /hello HTTP/1.0\r\n\r\n")


def test_a_route_that_fails_says_nothing_of_why():
    def failing() -> tuple[int, str, bytes]:
        raise RuntimeError("secret")

    with closing(MonitoringServer.open("0", {"/x": failing, "/hello": hello})) as server:
        answer = raw(server, b"GET /x HTTP/1.0\r\n\r\n")
        assert b" 500 " in answer
        assert b"secret" not in answer
        assert b" 200 " in raw(server, b"GET /hello HTTP/1.0\r\n\r\n")


def test_slow_clients_are_cut_off_and_block_no_other(
    server: MonitoringServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "DEADLINE", 1.0)
    clients = [
        socket.create_connection(("127.0.0.1", port_of(server)), 10)
        for _ in range(2 * http.MOST_CONNECTIONS)
    ]
    try:
        for client in clients:
            client.sendall(b"GET /hello HTTP/1.0\r\nX: ")
        assert b" 200 " in raw(server, b"GET /hello HTTP/1.0\r\n\r\n")
        busy = [t for t in threading.enumerate() if "process_request" in t.name]
        assert len(busy) <= http.MOST_CONNECTIONS + 1
        end = time.monotonic() + 20
        for client in clients:  # each sends more and more, and is cut off all the same
            while time.monotonic() < end:
                try:
                    client.sendall(b"x")
                    client.settimeout(0.05)
                    if client.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
        assert time.monotonic() < end
    finally:
        for client in clients:
            client.close()


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "DEADLINE", 0.5)
    ended = threading.Event()

    def large() -> tuple[int, str, bytes]:
        return 200, "text/plain", b"x" * 50_000_000

    with closing(MonitoringServer.open("0", {"/large": large})) as server:
        shutdown = server._server.shutdown_request
        monkeypatch.setattr(
            server._server, "shutdown_request", lambda r: (shutdown(r), ended.set())
        )
        with socket.create_connection(("127.0.0.1", port_of(server)), 10) as client:
            client.sendall(b"GET /large HTTP/1.0\r\n\r\n")
            assert ended.wait(10)


def test_a_taken_port_is_a_config_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot serve metrics at .*: .*in use"):
            MonitoringServer.open(where, {})


def test_one_address_of_a_process_is_one_server():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    first = MonitoringServer.open(where, {"/hello": hello})
    second = MonitoringServer.open(where, {"/other": hello})
    assert first is second
    first.close()
    for path in ("/hello", "/other"):
        assert urllib.request.urlopen(second.url + path, timeout=10).status == 200
    second.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(second.url + "/hello", timeout=10)
    third = MonitoringServer.open(where, {})  # the port is free at once
    third.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("metrics.local:1", ("metrics.local", 1)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_an_address_is_on_loopback_unless_it_says_otherwise(text: str, expected: tuple[str, int]):
    assert address(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1:2:3", "host:", "h:65536", "http://h:1", "::1:9464"])
def test_an_address_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        address(text)
