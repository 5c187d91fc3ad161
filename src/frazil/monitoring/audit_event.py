"""The verdict of `frazil audit` as an event for `[notify]`.

In: a config and the reports of its tables. Out: one event, sent before the command ends. Needs
neither Spark nor a run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from datetime import datetime, timezone

from frazil.config.model import Config
from frazil.config.secret_values import secret_values
from frazil.config.sections import EVENTS
from frazil.monitoring.notifier import Notifier
from frazil.render import label


def notify_audit(config: Config, verdict: str, tables: Mapping[str, str], proven: bool) -> None:
    """`verdict`: the worst of `tables`, by table; `proven`: is every offset accounted for?"""
    if "audit" not in (config.notify.events or EVENTS):
        return
    sink, host = config.sink.id, socket.gethostname()
    worse = [f"{table}: {label(own)}" for table, own in tables.items() if own != "proven"]
    text = f"sink {sink} on {host}: audit: {label(verdict)}"
    text += f" ({'; '.join(worse)})" if worse else ""
    now = datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds")
    notifier = Notifier(config.notify, sink, secret_values(config))
    notifier.send(
        {
            **{
                "event": "audit",
                "occurred_at": now,
                "sink": sink,
                "host": host,
                "pid": os.getpid(),
            },
            **{"verdict": verdict, "proven": proven, "tables": dict(tables)},
            **{"remedy": "" if proven else "frazil audit CONFIG", "text": text},
        }
    )
    notifier.close()
