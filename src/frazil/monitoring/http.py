"""The HTTP server of a process that runs sinks: metrics, health, readiness.

In: an address, and a mapping from path to route, a function that returns status, content type and
body. Out: answers to GET and HEAD. Promised: no request reaches a file or a broker, a slow or
hostile client holds a bounded number of threads for a bounded time, and an address that is taken is
an error before anything is claimed. One server for each address of a process: sinks of one address
share it. Runs on the driver, on threads of its own.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from frazil.config.units import address
from frazil.errors import ConfigError

#: Returns status, content type and body; called on the thread of a request, by several at once.
Route = Callable[[], tuple[int, str, bytes]]

#: Connections served at once; the oldest is closed for one more.
MOST_CONNECTIONS = 32
#: Seconds a connection may take from its first byte to the last of the answer.
DEADLINE = 10.0
_TEXT = "text/plain; charset=utf-8"

_log = logging.getLogger("frazil")
_servers: dict[tuple[str, int], MonitoringServer] = {}
_lock = threading.Lock()


class MonitoringServer:
    """A shared server: `close` ends it once everybody who opened it has closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._server = _Server((host, port))
        self._users = 0
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.25,), name="frazil-http", daemon=True
        )
        self._thread.start()

    @classmethod
    def open(cls, where: str, routes: Mapping[str, Route]) -> MonitoringServer:
        """The server at `where`, `HOST:PORT`, with these routes added. Port 0 is a free one of its
        own. Raises ConfigError if the address cannot be bound."""
        host, port = address(where, "[metrics] address", ("metrics", "address"))
        with _lock:
            server = _servers.get((host, port))
            if server is None:
                try:
                    server = cls(host, port)
                except (OSError, OverflowError) as error:
                    raise ConfigError(
                        f"cannot serve metrics at {where}: {getattr(error, 'strerror', error)}",
                        hint="choose another port, or 0 for a free one; see [metrics] address",
                    ) from None
                if port:
                    _servers[host, port] = server
            server._users += 1
            server._server.routes.update(routes)
            return server

    @property
    def url(self) -> str:
        """`http://127.0.0.1:9464`."""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def close(self) -> None:
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            for key in [key for key, server in _servers.items() if server is self]:
                del _servers[key]
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_address = True  # a port whose last connections are closing is free
    allow_reuse_port = False  # and one that another process listens on is not

    def __init__(self, where: tuple[str, int]) -> None:
        self.routes: dict[str, Route] = {}
        #: open connection → when it is closed
        self._open: dict[socket.socket, float] = {}
        self._guard = threading.Lock()
        if ":" in where[0]:
            self.address_family = socket.AF_INET6
        super().__init__(where, _Request)

    def server_bind(self) -> None:
        # Without the look-up of the host's name that HTTPServer makes: it may ask a name server.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._guard:
            if len(self._open) >= MOST_CONNECTIONS:
                self._end(min(self._open, key=lambda connection: self._open[connection]))
            self._open[request] = time.monotonic() + DEADLINE
        return True

    def service_actions(self) -> None:
        """About every quarter of a second: connections beyond their deadline are closed."""
        now = time.monotonic()
        with self._guard:
            for connection in [c for c, deadline in self._open.items() if deadline <= now]:
                self._end(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def _end(self, connection: socket.socket) -> None:
        """Its thread meets the end of the stream, and closes it."""
        del self._open[connection]
        with suppress(OSError):  # the client has closed it
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request of %s failed", client_address, exc_info=True)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    server_version = "frazil"
    sys_version = ""
    timeout = 5.0  # of one read or write; the whole has DEADLINE

    def do_GET(self) -> None:
        route = self.server.routes.get(self.path.partition("?")[0])
        status, kind, body = 404, _TEXT, b"not found\n"
        if route is not None:
            try:
                status, kind, body = route()
            except Exception as error:  # a defect of a route ends neither the server nor a stream
                _log.warning("%s failed: %s: %s", self.path, type(error).__name__, error)
                status, kind, body = 500, _TEXT, b"failed; see the log\n"
        self._answer(status, kind, body)

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._answer(405, _TEXT, b"expected GET or HEAD\n", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(
        self, status: int, kind: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
