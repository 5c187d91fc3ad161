"""Whether a sink runs, and how it is, by the heartbeats of its runs. Pure, apart from `read`.

In: the heartbeats in the staging folder, by epoch, that of a start which has no epoch yet, and the
epoch of the ledger. Out: the run that counts, and the verdict on it, as JSON values. A process that
was killed shows by a heartbeat that is old, one that another run has taken over from by its epoch.
Clocks of machines may differ by some seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from frazil.config.model import Config
from frazil.errors import FrazilError
from frazil.iceberg.file_io import FileStore
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.iceberg.table import ReadableTable
from frazil.ledger.sink_state import (
    heartbeat_paths,
    staging_folder,
    start_folder,
    start_heartbeat_path,
)

#: The process runs; it ended and said so; its heartbeats ceased; a newer epoch has taken over; no
#: process has written a heartbeat; the process has claimed nothing yet.
RUNNING, ENDED, SILENT, FENCED, NONE = "running", "ended", "silent", "fenced", "none"
STARTING = "starting"
#: A heartbeat is old after so many of its intervals, and at least so many seconds.
_INTERVALS, _LEAST = 3, 30.0
_OVER = ("stopped", "failed")
#: Largest heartbeat, in bytes.
_LARGEST = 1_000_000

Heartbeats = Mapping[int, Mapping[str, Any]]


def read(config: Config, index: ReadableTable) -> dict[int, dict[str, Any]]:
    """Epoch → heartbeat, of the runs whose heartbeats are kept. One that is being written may be
    unreadable, and is left out."""
    beats = {}
    for epoch, path in heartbeat_paths(index, staging_folder(config, index)).items():
        for _ in range(2):
            try:
                beat = json.loads(index.fetch(path)[:_LARGEST])
                _age(beat, 0.0)
                beats[epoch] = beat
                break
            except (FrazilError, ValueError, KeyError, TypeError):
                continue
    return beats


def read_start(config: Config, index: ReadOnlyTable | None) -> dict[str, Any] | None:
    """The heartbeat of a start that has claimed nothing, also before there is an index."""
    folder = start_folder(config, index)
    if not folder:
        return None
    store = index.store if index else FileStore(config.catalog.properties.resolved())
    try:
        beat: dict[str, Any] = json.loads(store.read(start_heartbeat_path(folder))[:_LARGEST])
        _age(beat, 0.0)
    except (FrazilError, ValueError, KeyError, TypeError):
        return None
    return beat


def run_state(
    beats: Heartbeats, epoch: int | None, now: float, start: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`epoch`: the newest of the ledger; `start`: the heartbeat of a start. It counts where no run
    is alive, and it is the last sign. Returns `run` and the keys of the verdict."""
    state = _of_runs(beats, epoch, now)
    if start is None or state["run"]["state"] == RUNNING:
        return state
    last = state["run"].get("last_heartbeat_at")
    if last and datetime.fromisoformat(last) >= datetime.fromisoformat(start["written_at"]):
        return state
    return {**state, **_of_start(start, now)}


def _of_start(beat: Mapping[str, Any], now: float) -> dict[str, Any]:
    over, fresh = beat.get("state") in _OVER, _fresh(beat, now)
    if over or fresh:
        verdict = {key: beat.get(key) for key in ("state", "verdict", "reason", "remedy", "error")}
        verdict["operator"] = bool(beat.get("operator"))
    else:
        verdict = _verdict(
            "failed",
            f"a start shows no sign since about {beat['written_at']} (from {_place(beat)})",
            "start it again; if the process is there, see whether it reaches the store",
        )
    state = ENDED if over else STARTING if fresh else SILENT
    return {"run": _run(state, beat, now), **verdict}


def _of_runs(beats: Heartbeats, epoch: int | None, now: float) -> dict[str, Any]:
    newest = max(beats, default=None)
    if newest is None:
        return {"run": {"state": NONE}, **_verdict("unknown", "no process has written a heartbeat")}
    beat = beats[newest]
    fresh = _fresh(beat, now)
    over = beat.get("state") in _OVER
    if epoch is not None and newest < epoch and not (over and beat["state"] == "stopped"):
        state = FENCED
        text = (
            f"epoch {newest} ({_place(beat)}) was fenced by epoch {epoch}, which has written "
            "no heartbeat"
        )
        verdict = _verdict(
            "failed", text, "start the sink again, unless another process runs it", "Fenced"
        )
    elif over or fresh:
        state = ENDED if over else RUNNING
        verdict = {key: beat.get(key) for key in ("state", "verdict", "reason", "remedy", "error")}
        verdict["operator"] = bool(beat.get("operator"))
    else:
        state = SILENT
        verdict = _verdict(
            "failed",
            f"not running since about {beat['written_at']} (last heartbeat, from {_place(beat)})",
            "start the sink again; if the process still runs, check that it reaches the store",
        )
    older = [
        {"epoch": number, "fenced_by": newest, **{key: old.get(key) for key in ("host", "pid")}}
        for number, old in beats.items()
        if number < newest and old.get("state") not in _OVER and _age(old, now) <= _LEAST
    ]
    return {"run": _run(state, beat, now), "fenced_runs": older, **verdict}


def _run(state: str, beat: Mapping[str, Any], now: float) -> dict[str, Any]:
    return {
        "state": state,
        **{key: beat.get(key) for key in ("epoch", "host", "pid", "frazil", "started_at")},
        "last_heartbeat_at": beat["written_at"],
        "heartbeat_age": round(_age(beat, now), 1),
        **{key: beat.get(key) for key in ("rate", "rows", "last_failure", "last_rejected")},
        "maintenance": beat.get("maintenance") or "",
    }


def _fresh(beat: Mapping[str, Any], now: float) -> bool:
    return _age(beat, now) <= max(_LEAST, _INTERVALS * float(beat.get("interval", 0)))


def writing(beats: Heartbeats, state: Mapping[str, Any]) -> tuple[int, bool]:
    """Offsets of the batch under way, and whether commits fail, as the run's heartbeat tells."""
    if state["run"]["state"] != RUNNING:
        return 0, False
    lag = beats[max(beats)].get("lag") or {}
    return int(lag.get("writing") or 0), bool(lag.get("catalog"))


def _verdict(state: str, reason: str, remedy: str = "", error: str = "") -> dict[str, Any]:
    text = f"{state}: {reason}"
    operator = state == "failed"
    return {
        **{"state": state, "verdict": text, "reason": reason},
        **{"remedy": remedy, "operator": operator},
        "error": {"class": error, "message": reason, "hint": remedy} if error else None,
    }


def _place(beat: Mapping[str, Any]) -> str:
    return f"{beat.get('host')}, pid {beat.get('pid')}"


def _age(beat: Mapping[str, Any], now: float) -> float:
    return max(0.0, now - datetime.fromisoformat(beat["written_at"]).timestamp())
