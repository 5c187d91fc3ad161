"""What an operator waits for, and what monitoring costs.

    make bench WHAT=operator         # about five minutes
    make bench WHAT=operator ARGS='--blocks 4 --rows 2000000'

Commands are processes of their own, with Kafka and a catalog of one sink that has committed; their
seconds are the median of several. A scrape is that of a process with 100 tables, over HTTP. The
overhead is that of `--metrics` and a JSON log on the append bench: runs of one process, in blocks
of without, with, with, without, so that a drift of the machine meets both. Its noise is the same
figure between the two runs without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from append import prepare, started
from frazil.config.model import from_document
from frazil.monitoring.metrics_observer import MetricsObserver
from frazil.steps import Step, WrittenFiles
from frazil.testing import datagen
from frazil.testing.kafka import Broker

#: Seconds, and the share of the overhead.
BARS = {
    "help": 0.5,
    "status": 1.5,
    "check": 5.0,
    "scrape_100_tables": 0.05,
    "overhead_cpu": 0.01,
    "first_sink": 300.0,
}
TABLES = 100
#: Runs until a JVM is warm.
WARM_UP = 4
#: Which runs of a block are monitored.
BLOCK = "0110"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds_of(call: Callable[[], object], times: int) -> list[float]:
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return sorted(spent)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


def frazil(*words: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "frazil", *words], capture_output=True, text=True, timeout=300
    )
    if ran.returncode:
        raise SystemExit(f"frazil {' '.join(words)}: exit {ran.returncode}\n{ran.stderr[-2000:]}")
    return ran.stdout


def commands(broker: Broker, folder: Path, times: int) -> dict[str, list[float]]:
    topic, path = "events", str(folder / "events.toml")
    datagen.create_topic(broker.bootstrap, topic, 4)
    produce(broker.bootstrap, topic, 20_000)
    began = time.perf_counter()
    frazil(
        *("init", "--bootstrap-servers", broker.bootstrap, "--topic", topic, "--yes"),
        *("--catalog", "type=hadoop", "--catalog", f"warehouse={folder / 'lake'}", "-o", path),
    )
    frazil("check", path)
    frazil("run", path, "--until-caught-up")
    first = time.perf_counter() - began
    say(
        f"  first sink: init, check and run of 20,000 records in {first:.1f} s, without pip install"
    )
    timed = {
        "help": ("--help",),
        "status": ("status", path),
        "check": ("check", path),
        "plan": ("plan", path),
        "audit": ("audit", path),
        "config explain": ("config", "explain", path),
    }
    spent = {"first_sink": [first]}
    for name, words in timed.items():
        spent[name] = seconds_of(lambda words=words: frazil(*words), times)  # type: ignore[misc]
        median, worst = statistics.median(spent[name]), spent[name][-1]
        say(f"  {name:16} median {median:.2f} s, worst {worst:.2f} s")
    return spent


def produce(bootstrap: str, topic: str, count: int) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    for number in range(count):
        value = {"id": number, "kind": "abc"[number % 3], "at": "2026-11-19T10:00:00Z"}
        producer.produce(topic, json.dumps(value).encode())
    if producer.flush(30):
        raise SystemExit("the records did not reach Kafka")


# ── a scrape ─────────────────────────────────────────────────────────────────────────────────────


def scrapes(times: int) -> list[float]:
    """Seconds of scrapes of a sink with 100 tables, each with every metric that a table has."""
    observer = MetricsObserver(
        from_document(
            {
                "sink": {"id": "wide", "topics": ["plain"]},
                "kafka": {"bootstrap.servers": "127.0.0.1:1"},
                "decode": {"format": "json"},
                "catalog": {"type": "hadoop", "warehouse": "/nowhere"},
                "table": [{"name": f"db.t{n}"} for n in range(TABLES)],
                "route": [{"to": [f"db.t{n}" for n in range(TABLES)]}],
                "metrics": {"address": "127.0.0.1:0", "lag_interval": "never"},
            }
        )
    )
    from frazil.errors import Conflict

    now = time.time()
    for number in range(20):
        for n in range(TABLES):
            name = f"db.t{n}"
            files = {name: WrittenFiles(10, 1, 5000, int(now * 1e6))}
            step = {"table": name, "tables": files, "seconds": {"commit": 0.3}}
            observer.step(Step("committed", number, now, **step))
            observer.step(Step("tagged", number, now + 0.1, table=name))
            observer.step(Step("commit-retried", number, now, table=name, error=Conflict("x")))
    size = 0

    def scrape() -> None:
        nonlocal size
        with urllib.request.urlopen(observer.url, timeout=30) as answer:
            size = len(answer.read())

    spent = seconds_of(scrape, times)
    observer.ended(None)
    say(f"  {size:,} bytes: median {statistics.median(spent) * 1000:.1f} ms")
    return spent


# ── the overhead ─────────────────────────────────────────────────────────────────────────────────


def overhead(broker: Broker, folder: Path, rows: int, blocks: int) -> dict[str, Any]:
    prepare(broker.bootstrap, "plain", rows, 4)
    (folder / "order.avsc").write_text(datagen.SCHEMA)
    runs = []
    with started("frazil", folder=str(folder), bootstrap=broker.bootstrap) as side:
        for number in range(WARM_UP + blocks * len(BLOCK)):
            monitored = BLOCK[number % len(BLOCK)] == "1"
            run = side.ask(case="plain", number=number, monitored=monitored)
            if run["rows"] != rows:
                raise SystemExit(f"the table has {run['rows']} rows of {rows}")
            runs.append(run)
            which = "with" if monitored else "without"
            say(f"  {number + 1:>3} {which:8}{run['seconds']:6.2f} s  cpu {run['cpu']:6.2f} s")
    return {
        f"{name}_{key}": value
        for key in ("cpu", "seconds")
        for name, value in compared([run[key] for run in runs[WARM_UP:]]).items()
    }


def compared(values: list[float]) -> dict[str, float]:
    """Share by which runs with monitoring take more: the median of the blocks, the standard error,
    and the mean difference between the two runs without of a block."""
    shares, noise = [], []
    for at in range(0, len(values), len(BLOCK)):
        before, *monitored, after = values[at : at + len(BLOCK)]
        plain = (before + after) / 2
        shares.append(sum(monitored) / len(monitored) / plain - 1)
        noise.append(abs(before - after) / plain)
    error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
    return {
        "overhead": round(statistics.median(shares), 4),
        "overhead_error": round(error, 4),
        "noise": round(statistics.mean(noise), 4),
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    say(f"scrapes of {TABLES} tables")
    result["scrape_100_tables"] = round(statistics.median(scrapes(given.scrapes)), 4)
    with tempfile.TemporaryDirectory(prefix="frazil-bench-") as name:
        folder = Path(name)
        say("starting Apache Kafka")
        with Broker(folder / "kafka", jvm=("-Xmx1g",), say=say) as broker:
            if given.times:
                for name, spent in commands(broker, folder, given.times).items():
                    result[name] = round(statistics.median(spent), 2)
            if given.blocks:
                result |= overhead(broker, folder, given.rows, given.blocks)
    return {**result, "bars": judged(result)}


def judged(result: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Each bar with its figure. An overhead within twice its standard error of the bar does not
    miss it; what was not measured is neither kept nor missed."""
    bars: dict[str, dict[str, Any]] = {}
    for name, bar in BARS.items():
        figure = result.get(name)
        verdict = "not measured" if figure is None else "kept" if figure <= bar else "missed"
        if name == "overhead_cpu" and verdict == "missed":
            error = 2 * result.get("overhead_error_cpu", 0.0)
            verdict = "within noise" if figure is not None and figure - error <= bar else verdict
        bars[name] = {"bar": bar, "figure": figure, "verdict": verdict}
    return bars


def table(result: Mapping[str, Any]) -> str:
    """The bars as a table for docs/guide/monitoring.md."""
    lines = ["| bar | limit | figure | |", "|---|---|---|---|"]
    for name, one in result["bars"].items():
        figure = "" if one["figure"] is None else f"{one['figure']:g}"
        lines.append(f"| `{name}` | {one['bar']:g} | {figure} | {one['verdict']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=7, help="of each command")
    parser.add_argument("--scrapes", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=6, help="of four runs")
    parser.add_argument("--rows", type=int, default=4_000_000)
    measured = measure(parser.parse_args())
    say(table(measured))
    print(json.dumps(measured))
