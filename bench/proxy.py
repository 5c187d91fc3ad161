"""Between a client and a REST catalog: what happens to one chosen commit.

    with Proxy(catalog.port) as proxy:
        plot = proxy.plot("t1", "503 later", after=True, meanwhile=[foreign, foreign])
        ...                      # a client commits to table t1 through `proxy.uri`
        proxy.settle("t1")       # what is still on its way arrives
        assert plot.fired == 1

A plot waits for the n-th request that commits data to its table (or does what `match` looks for).
`after`: the catalog has applied it, and the fault is in the answer; else the fault comes before the
catalog has seen it.

    500, 502, 503, 429, 409   the answer says so
    503 later                 503 with Retry-After: the client posts again by itself
    dropped                   the connection is closed without an answer
    truncated                 half of the request arrives (so it is not applied), or of the answer
    timeout                   no answer until the client gives up. Before: the request arrives late,
                              after the client has looked in vain whether it was applied
    delayed                   the request, or the answer, takes its time, and arrives
    duplicated                the request arrives twice; the client gets the second answer (before)
                              or the first (after)

`meanwhile` are other writers' commits. The first comes at the fault: after the catalog has applied
the request, or while the request is on its way, and always before the client hears of it. The next
one comes before the client's next request for the table is passed on, and so forth.

The counter counts what the catalog confirms: `fired` stays 0 where a request that should have been
applied was not.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = (
    "500",
    "502",
    "503",
    "503 later",
    "429",
    "409",
    "dropped",
    "truncated",
    "timeout",
    "delayed",
    "duplicated",
)
DELAY = 0.3
#: Longer than any client waits here.
PATIENCE = 30.0
#: Of one connection, not of what it carries.
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "expect"}
_KINDS = {
    "500": "InternalServerError",
    "502": "BadGateway",
    "503": "ServiceUnavailableException",
    "429": "TooManyRequestsException",
    "409": "CommitFailedException",
}


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def table(self) -> str:
        parts = self.path.partition("?")[0].strip("/").split("/")
        return parts[-1] if len(parts) > 1 and parts[-2] == "tables" else ""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes
    length: int


def data(request: Request) -> bool:
    """A commit of files."""
    return any(
        "added-data-files" in update["snapshot"]["summary"]
        or "added-delete-files" in update["snapshot"]["summary"]
        for update in _updates(request)
        if update["action"] == "add-snapshot"
    )


def claim(request: Request) -> bool:
    """A commit of a snapshot without files."""
    snapshots = [update for update in _updates(request) if update["action"] == "add-snapshot"]
    return bool(snapshots) and not data(request)


def tag(request: Request) -> bool:
    """A commit that moves a tag, and nothing else."""
    actions = [(update["action"], update.get("type")) for update in _updates(request)]
    return bool(actions) and set(actions) == {("set-snapshot-ref", "tag")}


def _updates(request: Request) -> list[dict[str, Any]]:
    if request.method != "POST" or not request.table:
        return []
    return list(json.loads(request.body).get("updates", ()))


@dataclass(slots=True)
class Plot:
    table: str
    kind: str
    after: bool
    meanwhile: list[Callable[[], None]]
    match: Callable[[Request], bool] = data
    #: how many such requests pass before, and how many are met
    skip: int = 0
    times: int = 1
    fired: int = 0
    #: commits of others that were made
    slipped: int = 0
    #: requests for the table since, as they were answered
    seen: list[str] = field(default_factory=list)
    struck: bool = False
    late: Request | None = None
    gone: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def strikes(self, request: Request) -> bool:
        with self.lock:
            if not self.times or not self.match(request):
                return False
            self.skip -= 1
            if self.skip >= 0:
                return False
            self.times -= 1
            self.struck = True
            return True

    def slip_in(self) -> None:
        with self.lock:
            if self.meanwhile:
                self.meanwhile.pop(0)()
                self.slipped += 1


class Proxy:
    def __init__(self, port: int) -> None:
        self._upstream = port
        self._plots: dict[str, Plot] = {}
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self._open: set[socket.socket] = set()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Proxy:
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()

    def accept(self) -> None:
        """Listen, always at the same address."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
                body = self.rfile.read(length)
                try:
                    proxy._handle(self, Request(self.command, self.path, headers, body))
                except OSError:  # whoever asked is gone, or the catalog is
                    self.close_connection = True

            do_GET = do_POST = do_HEAD = do_DELETE = _any

            def setup(self) -> None:
                super().setup()
                proxy._open.add(self.connection)

            def finish(self) -> None:
                proxy._open.discard(self.connection)
                super().finish()

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: Any) -> None: ...  # a client that is gone is no news

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def refuse(self) -> None:
        """Nobody listens any more, and connections that were open are not."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self._open):
            _shut(connection)

    def plot(
        self,
        table: str,
        kind: str,
        *,
        after: bool,
        meanwhile: Iterable[Callable[[], None]] = (),
        match: Callable[[Request], bool] = data,
        skip: int = 0,
        times: int = 1,
    ) -> Plot:
        assert kind in FAULTS, kind
        self._plots[table] = Plot(table, kind, after, list(meanwhile), match, skip, times)
        return self._plots[table]

    def settle(self, table: str) -> None:
        """What is on its way arrives now, and other writers who had no occasion commit."""
        plot = self._plots.pop(table)
        self._arrive(plot)
        while plot.meanwhile:
            plot.slip_in()

    # ── one request ──────────────────────────────────────────────────────────────────────────

    def _handle(self, client: BaseHTTPRequestHandler, request: Request) -> None:
        plot = self._plots.get(request.table)
        if plot is None:
            _send(client, self._forward(request))
        elif plot.strikes(request):
            self._strike(client, plot, request)
        else:
            if plot.struck and plot.late is None:
                plot.slip_in()
            answer = self._forward(request)
            plot.seen.append(f"{request.method} {answer.status}")
            if request.method == "GET":
                self._arrive(plot)  # what was just read is old when it is heard
            _send(client, answer)

    def _strike(self, client: BaseHTTPRequestHandler, plot: Plot, request: Request) -> None:
        kind = plot.kind
        plot.seen.append(f"{request.method} ({'after' if plot.after else 'before'} {kind})")
        if kind == "timeout" and not plot.after:
            plot.late = request
            _wait_until_gone(client)
            plot.gone.set()
            client.close_connection = True
            return
        answer = None
        if plot.after or kind == "duplicated":
            answer = self._forward(request)
            plot.fired += answer.status == 200
        else:
            plot.fired += 1
        if kind == "truncated" and not plot.after:
            self._half(request)
        plot.slip_in()
        if kind == "delayed":
            time.sleep(DELAY)
            _send(client, answer or self._forward(request))
        elif kind == "duplicated":
            again = self._forward(request)
            assert answer is not None
            _send(client, answer if plot.after else again)
        elif kind == "truncated" and answer is not None:
            _send(client, answer, half=True)
        elif kind in ("dropped", "truncated"):
            client.close_connection = True
            _shut(client.connection)
        elif kind == "timeout":
            _wait_until_gone(client)
            client.close_connection = True
        else:
            code = kind.split()[0]
            text = {"message": "on purpose", "type": _KINDS[code], "code": int(code)}
            body = json.dumps({"error": text}).encode()
            headers = [("Content-Type", "application/json")]
            headers += [("Retry-After", "1")] if kind == "503 later" else []
            _send(client, Answer(int(code), "on purpose", headers, body, len(body)))

    def _arrive(self, plot: Plot) -> None:
        with plot.lock:
            if plot.late is not None:
                assert plot.gone.wait(PATIENCE), "the client never gave up"
                plot.fired += self._forward(plot.late).status == 200
                plot.late = None
                plot.slip_in()

    # ── the catalog's side ───────────────────────────────────────────────────────────────────

    def _forward(self, request: Request) -> Answer:
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=PATIENCE)
        try:
            upstream.request(request.method, request.path, request.body or None, request.headers)
            answer = upstream.getresponse()
            body = answer.read()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in _HOP]
            length = int(answer.getheader("Content-Length") or len(body))
            return Answer(answer.status, answer.reason, headers, body, length)
        finally:
            upstream.close()

    def _half(self, request: Request) -> None:
        with socket.create_connection(("127.0.0.1", self._upstream)) as upstream:
            lines = [
                f"{request.method} {request.path} HTTP/1.1",
                "Host: catalog",
                *(f"{key}: {value}" for key, value in request.headers.items()),
                f"Content-Length: {len(request.body)}",
                "",
                "",
            ]
            upstream.sendall("\r\n".join(lines).encode() + request.body[: len(request.body) // 2])


def _send(client: BaseHTTPRequestHandler, answer: Answer, half: bool = False) -> None:
    """In one piece: small packets wait for each other."""
    lines = [
        f"HTTP/1.1 {answer.status} {answer.reason}",
        *(f"{key}: {value}" for key, value in answer.headers),
        f"Content-Length: {answer.length}",
        "",
        "",
    ]
    body = answer.body[: len(answer.body) // 2] if half else answer.body
    client.connection.sendall("\r\n".join(lines).encode() + body)
    if half:
        client.close_connection = True
        _shut(client.connection)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _wait_until_gone(client: BaseHTTPRequestHandler) -> None:
    client.connection.settimeout(PATIENCE)
    with suppress(OSError):
        while client.connection.recv(1024):
            pass
