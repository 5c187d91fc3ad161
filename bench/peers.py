"""Frazil, Spark's own sink, Flink SQL and Kafka Connect in one run, on one topic and one catalog.

Four topics of the same orders: Avro, Avro with key and headers, JSON, Avro over TLS. Every side
writes each of them into an Iceberg table, in turns, so that all see the same noise. Cold is the
first job of a new process; its start is counted. Warm jobs follow in the same process; the last
three of six count, as a JVM is warm at its fourth. Then every side follows a topic that takes
orders at a steady rate, and commits every five seconds.

    make bench WHAT=peers                          # 12M rows a job: about an hour
    make bench WHAT=peers ARGS='--rows 500000 --repeat 1 --cases avro --seconds 0'
    make bench WHAT=peers ARGS='--write docs'      # also writes docs/benchmarks.md and its plot
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import report
from peer_jobs import COMMIT_SECONDS, SIDES, Catalog
from peer_topics import CASES, Lake, Servers, Topic
from side import Side, answer_requests

#: The last jobs of a side, of which the median is taken.
WARM = 3


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"rows": options.rows, "cores": os.cpu_count(), "cases": {}}
    with tempfile.TemporaryDirectory(prefix="frazil-bench-") as name:
        folder = Path(name)
        with Lake(folder, say) as lake:
            Catalog(lake.servers.catalog).create_namespace()
            for case in options.cases:
                say(f"{CASES[case]}: producing {options.rows:,} orders")
                topic = lake.create(case, case)
                lake.produce(topic, options.rows)
                result["cases"][case] = throughput(options, folder, topic)
            if options.seconds:
                result["freshness"] = {
                    side: freshness(options, folder, lake, side) for side in options.sides
                }
    return result | {"ratios": ratios(result["cases"])}


def ratios(cases: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Frazil's rows per second and CPU seconds by those of its peers and of its own plain Avro."""
    result: dict[str, dict[str, float]] = {}
    for case, sides in cases.items():
        peers = [of for name, of in sides.items() if name != "frazil"]
        if "frazil" not in sides or not peers:
            continue
        own, plain = sides["frazil"], cases.get("avro", {}).get("frazil")
        rates = {"best_peer": max(peer["rows_per_s"] for peer in peers)}
        if "spark" in sides:
            rates["spark"] = sides["spark"]["rows_per_s"]
        if plain and case != "avro":
            rates["own_avro"] = plain["rows_per_s"]
        result[case] = {
            f"to_{name}": round(own["rows_per_s"] / of, 2) for name, of in rates.items()
        }
        least = min(peer["cpu_s_per_million"] for peer in peers)
        result[case]["cpu_of_best_peer"] = round(least / own["cpu_s_per_million"], 2)
    return result


def throughput(options: argparse.Namespace, folder: Path, topic: Topic) -> dict[str, Any]:
    """Every side's jobs on one topic: a cold one each, then warm ones in turns."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    with ExitStack() as stack:
        sides = {}
        for number in range(options.repeat + 1):
            for name in options.sides:
                began = time.monotonic()
                if number == 0:
                    sides[name] = stack.enter_context(started(name, folder, topic))
                table = f"{topic.name}_{name}_{number}"
                run = sides[name].ask(table=table, rows=options.rows)
                if number == 0:
                    run["seconds"] = time.monotonic() - began
                committed = Catalog(topic.servers.catalog).committed(table)
                if committed != options.rows:
                    raise SystemExit(f"{name} committed {committed:,} rows of {options.rows:,}")
                runs[name].append(run)
                say(
                    f"  {'warm' if number else 'cold'} {name:>8}: {run['seconds']:6.2f} s "
                    f"{options.rows / run['seconds']:>9,.0f} rows/s  cpu {run['cpu']:6.1f} s  "
                    f"{run['memory_mib']:,} MiB"
                )
    return {name: _summary(options.rows, of) for name, of in runs.items()}


def _summary(rows: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    cold, warm = runs[0], runs[1:][-WARM:]
    rates = sorted(rows / run["seconds"] for run in warm)
    cpu = sorted(run["cpu"] / rows * 1e6 for run in warm)
    return {
        "rows_per_s_cold": round(rows / cold["seconds"]),
        "rows_per_s": round(statistics.median(rates)),
        "rows_per_s_range": [round(rates[0]), round(rates[-1])],
        "cpu_s_per_million": round(statistics.median(cpu), 2),
        "cpu_s_per_million_range": [round(cpu[0], 2), round(cpu[-1], 2)],
        "memory_mib": max(run["memory_mib"] for run in runs),
        "files": warm[-1]["files"],
        "bytes": warm[-1]["bytes"],
    }


def freshness(options: argparse.Namespace, folder: Path, lake: Lake, name: str) -> dict[str, float]:
    """Seconds from a record's production to the commit that has it, at a steady rate."""
    topic, table = lake.create("avro", f"fresh-{name}"), f"fresh_{name}"
    rows = int(options.rate * options.seconds)
    began: list[float] = []
    with started(name, folder, topic) as side:
        side.ask(table=table, follow=COMMIT_SECONDS)
        producer = Thread(target=lambda: began.append(lake.produce(topic, rows, options.rate)))
        producer.start()
        commits = list(_commits(Catalog(topic.servers.catalog), table, rows))
        producer.join()
        side.ask(stop=True)
    ages: list[float] = []
    last = int(10 * options.rate)  # the first ten seconds: the job starts to work
    for at, total in commits:
        ages += [at - (began[0] + number / options.rate) for number in range(last, total, 1_000)]
        last = max(last, total)
    ages.sort()
    p50, p95 = (round(ages[int(len(ages) * share)], 2) for share in (0.5, 0.95))
    say(f"  freshness {name:>8}: p50 {p50} s, p95 {p95} s, {len(commits)} commits")
    return {"p50": p50, "p95": p95, "commits": len(commits)}


def _commits(catalog: Catalog, table: str, rows: int) -> Iterator[tuple[float, int]]:
    """When each commit was seen, and the rows that the table had then, until it has all."""
    seen, deadline = 0, time.monotonic() + 600
    while seen < rows:
        total = catalog.committed(table)
        if total > seen:
            seen = total
            yield time.time(), total
        if time.monotonic() > deadline:
            raise SystemExit(f"db.{table} has {seen:,} rows of {rows:,} after ten minutes")
        time.sleep(0.05)


def started(name: str, folder: Path, topic: Topic) -> Side:
    own = folder / f"{topic.name}-{name}"
    own.mkdir()
    settings = {"folder": str(own), "case": topic.case, "topic": topic.name}
    settings["servers"] = asdict(topic.servers)  # type: ignore[assignment]
    return Side(name, [sys.executable, __file__, "--side", name, json.dumps(settings)])


def answer(name: str, settings: dict[str, Any]) -> None:
    """The child: jobs of one side on one topic."""
    servers = Servers(**settings["servers"])
    topic, catalog = Topic(settings["case"], settings["topic"], servers), Catalog(servers.catalog)
    side = SIDES[name](Path(settings["folder"]), servers)
    running: list[Any] = []

    def on_request(request: dict[str, Any]) -> dict[str, Any]:
        if request.get("stop"):
            running.pop().stop()
            return {}
        if "follow" in request:
            running.append(side.start(topic, request["table"], request["follow"]))
            return {}
        began = time.monotonic()
        job = side.start(topic, request["table"], 0)
        job.wait(request["rows"])
        seconds = time.monotonic() - began
        job.stop()
        files, size = catalog.size(request["table"])
        return {"seconds": seconds, "files": files, "bytes": size}

    answer_requests(on_request)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=12_000_000)
    parser.add_argument(
        "--repeat", type=int, default=5, help="jobs of each side after the cold one"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rate", type=float, default=50_000, help="orders per second")
    parser.add_argument("--seconds", type=float, default=60, help="of the freshness test; 0: none")
    parser.add_argument("--write", type=Path, help="folder for benchmarks.md and its plot")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        answer(given.side[0], json.loads(given.side[1]))
    else:
        if given.write:
            report.around(given.write, "peers")
        measured = compare(given)
        say(report.peers_table(measured))
        if given.write:
            report.write_peers(given.write, measured)
        print(json.dumps(measured))
