"""A child process that reports its steps and can be held at one of them: usually a run of a sink.

The demo, the self-test, `make chaos` and the crash tests kill it with SIGKILL while it is held: no
sleeps, no luck, the kill falls exactly on the step. Parent side: `ChildProcess`, `SinkProcess` for
one run of a sink, and `SinkRuns` for one run after the other. Child side: `python -m
frazil.testing.process`, or any module that reports its steps with `tell`. Standard output is one
JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from frazil.errors import FrazilError
from frazil.render import json_values
from frazil.steps import Step
from frazil.testing.kafka import die_with_parent

Event = dict[str, Any]


class ChildProcess:
    """The parent's handle on `python -m module`. `kill()` ends driver and JVM at once; Spark's
    workers notice and end soon after.

    `scratch`: folder for all temporary files of Python, Java and Spark (Spark alone copies every
    jar), which a killed process cannot remove. `environ`: variables to change; None removes one.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        log: Path | None = None,
        scratch: Path | None = None,
        environ: Mapping[str, str | None] | None = None,
        listens: bool = False,
    ) -> None:
        self._log = open(log, "ab") if log else subprocess.DEVNULL  # noqa: SIM115 (see wait)
        self._where = log
        self._killed = False
        self._scratch = _made(scratch)
        variables = {**os.environ, **_temporary(self._scratch), **(environ or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={name: value for name, value in variables.items() if value is not None},
        )

    def events(self) -> Iterator[Event]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                yield json.loads(line)

    def killed(self, on_event: Callable[[Event], None] = lambda _: None) -> bool:
        """Read events until the process is held, and kill it there; False if it ended successfully
        before. Raises its error if it failed."""
        last: Event = {}
        try:
            for last in self.events():
                on_event(last)
                if "held" in last:
                    return True
            if self.wait() == 0:
                return False
        finally:
            self.kill()
        raise self.failure(last)

    def failure(self, last: Event) -> FrazilError:
        """The child's last message as an error of the parent."""
        text = self._where.read_text(errors="replace") if self._where else ""
        shown = [line for line in text.splitlines() if line.strip()][-5:]
        message = last.get("message") or "it said nothing"
        return FrazilError(
            "cannot continue: a run of the sink ended with exit code "
            f"{self.process.returncode}: {message}",
            hint=last.get("hint") or "\n".join(shown),
        )

    def kill(self) -> None:
        if not self._killed:  # once: its pid may be reused by now
            self._killed = True
            with suppress(ProcessLookupError):  # the process and its children have ended
                os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        code = self.process.wait()
        for pipe in (self.process.stdout, self.process.stdin, self._log):
            if pipe is not None and not isinstance(pipe, int):
                with suppress(BrokenPipeError):  # it died before it read its input
                    pipe.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return code


class SinkProcess(ChildProcess):
    """One run of a sink. With `ready` it starts Spark and waits for `go`."""

    def __init__(
        self,
        config: Path,
        *,
        hold: str = "",
        until: str = "caught-up",
        audit: bool = False,
        log: Path | None = None,
        scratch: Path | None = None,
        ready: bool = False,
        environ: Mapping[str, str | None] | None = None,
        module: str = "frazil.testing.process",
    ) -> None:
        arguments = [str(config), "--until", until]
        arguments += ["--hold", hold] if hold else []
        arguments += ["--audit"] if audit else []
        arguments += ["--ready"] if ready else []
        super().__init__(
            module, *arguments, log=log, scratch=scratch, environ=environ, listens=ready
        )

    def go(self, *, hold: str = "", until: str = "caught-up", audit: bool = False) -> None:
        self._order([hold, until, audit])

    def hold(self, step: str) -> None:
        """Hold the process at another step from now on."""
        self._order(step)

    def _order(self, words: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died already; its exit code reports that
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()


class SinkRuns:
    """Runs of one sink, one after the other: while one runs, the next has its JVM started."""

    def __init__(self, config: Path, **given: Any) -> None:
        self._config, self._given = config, given
        self._spare: SinkProcess | None = None
        self._now: SinkProcess | None = None

    def next(
        self, *, hold: str = "", until: str = "caught-up", audit: bool = False, last: bool = False
    ) -> SinkProcess:
        """The next run, started. `last`: no further run is prepared."""
        process = self._spare or self._made()
        self._now, self._spare = process, None
        process.go(hold=hold, until=until, audit=audit)
        if not last:
            self._spare = self._made()
        return process

    def _made(self) -> SinkProcess:
        return SinkProcess(self._config, ready=True, **self._given)

    def __enter__(self) -> SinkRuns:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._now, self._spare):
            if process is not None:
                process.kill()


def _made(scratch: Path | None) -> Path | None:
    if scratch is None:
        return None
    scratch.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=scratch))


def _temporary(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    java = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -Djava.io.tmpdir={folder}".strip()
    return {"TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder), "JAVA_TOOL_OPTIONS": java}


def toml(document: Mapping[str, Any]) -> str:
    """A config for a child, as TOML: sections, and lists of sections."""
    lines = []
    for section, values in document.items():
        for table in values if isinstance(values, list) else [values]:
            lines.append(f"[[{section}]]" if isinstance(values, list) else f"[{section}]")
            lines += [f"{json.dumps(key)} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(
        value, ensure_ascii=False
    )  # strings, numbers and booleans are the same in TOML


# ── the child's side ─────────────────────────────────────────────────────────────────────────────


def tell(out: IO[str], **event: object) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()


class StepHold:
    """Holds the process at `step`, or at `step:n` the n-th time it is reached, until it is killed.
    Of several, separated by commas, the first that is reached holds."""

    def __init__(self, wanted: str, out: IO[str]) -> None:
        self._out = out
        self._counting = threading.Lock()  # tables are committed in parallel
        self.want(wanted)

    def want(self, wanted: str) -> None:
        with self._counting:
            steps = (name.partition(":") for name in wanted.split(",") if name)
            self._left = {step: int(count or 1) for step, _, count in steps}

    def __call__(self, step: str, **more: object) -> None:
        with self._counting:
            tell(self._out, step=step, **more)
            if step not in self._left:
                return
            self._left[step] -= 1
            if self._left[step]:
                return
            tell(self._out, held=step)
        threading.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--hold", default="", help="see `StepHold`")
    parser.add_argument("--until", default="caught-up", help="caught-up, or forever")
    parser.add_argument("--audit", action="store_true")
    parser.add_argument("--ready", action="store_true", help="read these three from standard input")
    given = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")  # Spark's output must not mix with the events
    os.dup2(2, 1)
    try:
        return _run(given, out)
    except FrazilError as error:
        tell(out, error=type(error).__name__, message=error.message, hint=error.hint)
        return error.exit_code


def _run(given: argparse.Namespace, out: IO[str]) -> int:
    from frazil.auditing.evidence import of_sink
    from frazil.config import model as configs
    from frazil.iceberg.java import JavaCatalog
    from frazil.sink import Sink
    from frazil.spark.session import session

    config = configs.load(given.config)
    spark = session(config)
    if given.ready:
        tell(out, ready=True)
        line = sys.stdin.readline()
        if not line:
            return 0  # this run is not needed
        given.hold, given.until, given.audit = json.loads(line)
    hold = StepHold(given.hold, out)
    if given.ready:
        threading.Thread(target=_listen, args=(hold,), daemon=True).start()

    def on_step(reached: Step) -> None:
        hold(reached.name, batch=reached.batch, records=reached.records)

    run = Sink(config, on_step=on_step).start(spark)
    tell(out, started=run.epoch, position=run.position.nested())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        if given.until == "caught-up":
            run.wait_until(run.ends())
        else:
            while True:
                run.awaitTermination(1)
                run.check()
    finally:
        run.stop()
    tell(out, caught_up=run.position.nested())
    if given.audit:
        name, catalog = config.tables[0].name, JavaCatalog(spark, config.catalog.name)
        proof = of_sink(config, catalog.open_readonly)
        [report] = [candidate for candidate in proof.reports if candidate.table == name]
        table = catalog.load(name)
        assert table is not None
        tell(out, audit=json_values(report), metadata_file=table.metadata_file)
    return 0


def _listen(hold: StepHold) -> None:
    for line in sys.stdin:
        hold.want(json.loads(line))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # without waiting for Spark's shutdown
