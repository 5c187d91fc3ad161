"""Tells a program or a URL what happens to a sink: `[notify]`.

In: events, as JSON values. Out: a call of the command for each, with the event on its standard
input, and a POST. Promised: `send` never blocks and never raises; a target that hangs, fails or
answers without end takes a bounded time of a thread of its own; what does not fit into the queue is
counted and logged. No shell runs, redirects are not followed, and secrets are masked in what is
sent. Runs on the driver.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from frazil.config.messages import within
from frazil.config.monitoring_checks import check_webhook
from frazil.config.secret_values import masked
from frazil.config.sections import NotifyConfig
from frazil.config.settings import resolve_reference
from frazil.config.units import duration
from frazil.errors import ConfigError

_log = logging.getLogger("frazil")
#: Events that may wait; one more is dropped.
MOST_WAITING = 100
#: Calls of one event: the webhook is tried again where it may help.
TRIES = 3
#: Seconds before the second and the third try.
_PAUSES = (1.0, 3.0)
#: Answers that may change.
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class Notifier:
    def __init__(self, config: NotifyConfig, sink: str, secrets: list[str]) -> None:
        """Raises ConfigError if a secret cannot be resolved."""
        self._command = config.command
        self._timeout = duration(config.timeout)
        self._webhook = ""
        if config.webhook:
            self._webhook = resolve_reference("[notify] webhook", config.webhook)
            with within("notify"):
                check_webhook(self._webhook)
        self._headers = {
            name: resolve_reference(f"[notify] headers {name}", value)
            for name, value in config.headers.items()
        }
        if any(not value.isprintable() for value in self._headers.values()):
            raise ConfigError("cannot use [notify] headers: a value has a line break")
        self._sink, self._secrets = sink, secrets
        self.dropped = self.failed = 0
        self._events: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._closing = threading.Event()
        #: a POST that has not come back in time
        self._hanging: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="frazil-notify", daemon=True)
        self._thread.start()

    def send(self, event: Mapping[str, Any]) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1 or self.dropped % MOST_WAITING == 0:
                self._warn(f"{self.dropped:,} notifications dropped: {MOST_WAITING} wait already")

    def close(self, timeout: float = 15.0) -> None:
        """Sends what waits, for no longer than `timeout`."""
        deadline = time.monotonic() + timeout
        with suppress(queue.Full):
            self._events.put(None, timeout=timeout / 2)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._closing.set()
            left = self._events.qsize()
            self._warn(f"the last notifications were not sent in {timeout:.0f} s: {left} wait")

    def _run(self) -> None:
        while not self._closing.is_set() and (event := self._events.get()) is not None:
            event = masked(event, self._secrets)
            content = json.dumps(event, ensure_ascii=False).encode(errors="replace")
            for name, target, call in (
                ("command", self._command, self._call),
                ("webhook", self._webhook, self._post),
            ):
                try:
                    failure = call(event, content) if target else ""
                except Exception as error:  # whatever it is, the next event is sent
                    failure = type(error).__name__
                if failure:
                    self.failed += 1
                    self._warn(f"cannot notify by {name} of {event.get('event')}: {failure}")

    def _call(self, event: Mapping[str, Any], content: bytes) -> str:
        """Run the command. Returns why that failed."""
        variables = {
            f"FRAZIL_{name.upper()}": str(event[name]).replace("\0", "")
            for name in ("event", "sink", "verdict", "reason", "remedy")
            if name in event
        }
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **variables},
            )
        except (OSError, ValueError) as error:
            return f"{self._command[0]}: {getattr(error, 'strerror', None) or error}"
        try:
            process.communicate(content + b"\n", timeout=self._timeout)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it did not end within {self._timeout:g} s"
        return f"exit code {process.returncode}" if process.returncode else ""

    def _post(self, event: Mapping[str, Any], content: bytes) -> str:
        """POST the event. Returns why that failed."""
        failure = ""
        for number in range(TRIES):
            if number and self._closing.wait(_PAUSES[number - 1]):
                break
            failure, again = self._try(content)
            if not (failure and again):
                break
        return failure

    def _try(self, content: bytes) -> tuple[str, bool]:
        """Why one POST failed, and whether another may not. On a thread of its own: a server that
        sends a byte now and then never meets the timeout of a socket."""
        if self._hanging is not None and self._hanging.is_alive():
            return "the POST before it has not come back yet", False
        outcome: list[tuple[str, bool]] = []
        thread = threading.Thread(
            target=lambda: outcome.append(self._exchange(content)), name="frazil-post", daemon=True
        )
        thread.start()
        thread.join(self._timeout)
        if outcome:
            return outcome[0]
        self._hanging = thread
        return f"no answer within {self._timeout:g} s", False

    def _exchange(self, content: bytes) -> tuple[str, bool]:
        headers = {"Content-Type": "application/json", "User-Agent": "frazil", **self._headers}
        request = urllib.request.Request(self._webhook, content, headers, method="POST")
        try:
            with _OPENER.open(request, timeout=self._timeout) as answer:
                status = answer.status  # its body is not read
        except urllib.error.HTTPError as error:
            status = error.code
            error.close()
        except OSError as error:  # without its text: that of some errors has the URL
            reason = getattr(error, "reason", error)
            return getattr(reason, "strerror", None) or type(reason).__name__, True
        except Exception as error:  # http.client's and those of a URL that is none
            return type(error).__name__, True
        return ("" if status < 300 else f"HTTP status {status}"), status in _AGAIN

    def _warn(self, text: str) -> None:
        fields = {"event": "notify", "dropped": self.dropped, "failed": self.failed}
        _log.warning("%s", text, extra={"sink": self._sink, "fields": fields})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Headers with secrets go to no other place."""
        return


_OPENER = urllib.request.build_opener(_NoRedirect)
