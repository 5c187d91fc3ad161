"""A pipeline in a process of its own, which tells its steps and can be held at one of them.

The demo and the crash tests kill it with SIGKILL while it is held: no sleeps, no luck, the kill
falls exactly on the step. Parent side: `Pipeline`. Child side: `python -m frazil.surface.child`.
The child's standard output is one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from frazil.core.errors import FrazilError
from frazil.surface.broker import die_with_parent


class Pipeline:
    """The parent's handle. Iterate over `events()`; `kill()` takes driver and JVM at once."""

    def __init__(
        self, config: Path, *, hold: str = "", until: str = "caught-up", audit: bool = False,
        log: Path | None = None, environ: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        command = [sys.executable, "-m", "frazil.surface.child", str(config), "--until", until]
        command += ["--hold", hold] if hold else []
        command += ["--audit"] if audit else []
        self._log = open(log, "ab") if log else subprocess.DEVNULL  # noqa: SIM115 (see wait)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=die_with_parent,
            env={**os.environ, **(environ or {})},
        )  # fmt: skip

    def events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                yield json.loads(line)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        code = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if not isinstance(self._log, int):
            self._log.close()
        return code


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument(
        "--hold",
        default="",
        help="STEP or STEP:N, the N-th time it is "
        "reached; several with commas: whichever comes first",
    )
    parser.add_argument("--until", default="caught-up", help="caught-up, or forever")
    parser.add_argument("--audit", action="store_true")
    given = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")  # what Spark prints must not get between the lines
    os.dup2(2, 1)
    try:
        return _run(given, out)
    except FrazilError as error:
        _tell(out, error=type(error).__name__, message=error.message, hint=error.hint)
        return error.exit_code


def _run(given: argparse.Namespace, out: IO[str]) -> int:
    from frazil.core import config as configs
    from frazil.sink import Sink, Step
    from frazil.surface.proof import of_sink
    from frazil.surface.session import session

    left = {}
    for each in filter(None, given.hold.split(",")):
        step, _, count = each.partition(":")
        left[step] = int(count or 1)
    never = threading.Event()

    def on_step(reached: Step) -> None:
        _tell(out, step=reached.name, batch=reached.batch, records=reached.records)
        if reached.name in left:
            left[reached.name] -= 1
            if left[reached.name] == 0:
                _tell(out, held=reached.name)
                never.wait()

    config = configs.load(given.config)
    spark = session(config)
    sink = Sink(config, on_step=on_step)
    query = sink.start(spark)
    _tell(out, started=sink.epoch, position=sink.position.nested())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        if given.until == "caught-up":
            sink.wait_until(sink.ends())
        else:
            while True:
                query.awaitTermination(1)
                sink.check()
    finally:
        sink.stop()
    _tell(out, caught_up=sink.position.nested())
    if given.audit:
        name = config.tables[0].name
        proof = of_sink(config, sink.catalog.look)
        [report] = [each for each in proof.reports if each.table == name]
        table = sink.catalog.load(name)
        assert table is not None
        _tell(out, audit=report.values(), metadata_file=table.metadata_file)
    return 0


def _tell(out: IO[str], **event: object) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # nothing of Spark's own shutdown is worth waiting for
