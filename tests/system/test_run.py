"""What `frazil run` tells: rows that were written, records that were rejected or skipped."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frazil.cli import commands
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.system.streams import produce


def test_rejected_and_skipped_records_are_distinguished_from_rows(
    broker: Broker,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    create_topic(broker.bootstrap, name, 1)
    good = [json.dumps({"id": i, "kind": "a" if i else "b"}).encode() for i in range(4)]
    produce(broker.bootstrap, name, [*good, b"id;kind", b"5;a"])
    path = write_toml(
        decode={"format": "json"},
        dead_letters={"table": f"db.{name}_dead"},
        route=[{"field": "kind", "values": ["b"], "skip": True}, {"to": [f"db.{name}"]}],
    )
    monkeypatch.setattr("frazil.spark.session.session", lambda *_, **__: spark)
    monkeypatch.setattr(sys, "argv", ["frazil", "run", "--until-caught-up", "--json", str(path)])
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as end:
            commands.main()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    out, err = capfd.readouterr()
    assert end.value.code == 0, err
    answer = json.loads(out)
    assert (answer["rows"], answer["rejected"], answer["skipped"]) == (3, 2, 1)
    ((kind, rejections),) = answer["rejected_by_kind"].items()
    assert rejections["records"] == 2
    assert rejections["last"].startswith(f"{name}[0] offset 5: ")
    assert f"3 rows, 2 rejected ({kind} 2; the last: {name}[0] offset 5), 1 skipped" in err
    assert "5;a" not in err, "the log of a process has no value of a record"
