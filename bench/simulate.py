"""The real sink in seeded worlds: is anything lost, doubled or unreadable in any of them?

Each schedule is one world (`tests/simulation`): runs of the real sink against a catalog and a
store in memory, with lost answers, late requests, stale reads, torn writes, zombies, foreign
writers, compaction, expiry, rollback, dropped tables, deaths at any point; then peace, in which all
must come home. I1 to I7 are looked at after every commit that is applied.

The simulation is itself tested: bugs are planted in the protocol, one at a time, and each must be
caught; and a naive sink (check-then-commit, delete on failure, no epoch) runs through the same
schedules as the real one, of the hard kind.

    make simulate N=1000000
    make simulate SEED=17                                    # one schedule, step by step
    python bench/simulate.py --seed 6 --planted "upsert batches share a snapshot" --trace
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulation import planted, schedule, sink_run

#: Schedules of one job of a process.
CHUNK = 500
#: A planted bug that so many schedules do not show is not caught.
MOST = 50_000
#: Violations that are printed one by one.
SHOWN = 20
#: Schedules of the naive sink, for each hundred of the real one; at least and at most.
NAIVE = (500, 5_000)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ── in the processes ─────────────────────────────────────────────────────────────────────────────


_entered = ExitStack()


def begin() -> None:
    gc.disable()  # there is little to find, and much to look through: once per job is enough
    _entered.enter_context(sink_run.simulated())


def plain(first: int, end: int, kind: str) -> tuple[str, Any]:
    """`kind`: plain, hard or wild."""
    violations = []
    commits = sink_runs = harmed = 0
    for seed in range(first, end):
        outcome = schedule.run(seed, hard=kind == "hard", wild=kind == "wild")
        commits += outcome.commits
        sink_runs += outcome.sink_runs
        harmed += outcome.harmed
        if outcome.broken:
            violations.append((seed, outcome.broken[0]))
    gc.collect()
    return kind, (end - first, violations, commits, sink_runs, harmed)


def one_planted(name: str, most: int) -> tuple[str, Any]:
    """How many schedules it takes until one shows it, which without it is well; and how."""
    wild = name in planted.WILD
    for seed in range(most):
        with planted.plant(name):
            outcome = schedule.run(seed, wild=wild)
        if outcome.broken and not schedule.run(seed, wild=wild).broken:
            return "planted", (name, seed + 1, outcome.broken[0])
        if seed % CHUNK == 0:
            gc.collect()
    return "planted", (name, None, "")


def naive(first: int, end: int) -> tuple[str, Any]:
    with planted.naive():
        failed = sum(
            bool(schedule.run(seed, ledgers=False, hard=True).broken) for seed in range(first, end)
        )
    gc.collect()
    return "naive", (end - first, failed)


# ── here ─────────────────────────────────────────────────────────────────────────────────────────


def chunks(first: int, number: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + number, CHUNK):
        yield start, min(start + CHUNK, first + number)


def simulate(given: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    few = max(NAIVE[0], min(NAIVE[1], given.count // 100)) if not given.only else 0
    names = [] if given.only else list(planted.PLANTED)
    violations: list[tuple[int, str, str]] = []
    needed: dict[str, int | None] = {}
    done = {"plain": 0, "hard": 0, "wild": 0, "naive": 0}
    commits = sink_runs = harmed = failed = 0
    spent, next_word = 0.0, 5.0
    with ProcessPoolExecutor(given.processes, get_context("spawn"), begin) as pool:
        jobs: list[Future[tuple[str, Any]]] = []
        jobs += [pool.submit(one_planted, name, given.most) for name in names]
        for chunk in chunks(given.first, few):
            jobs += [pool.submit(naive, *chunk), pool.submit(plain, *chunk, "hard")]
        for chunk in chunks(given.first, given.count // 4):
            jobs.append(pool.submit(plain, *chunk, "wild"))
        jobs += [pool.submit(plain, *chunk, "plain") for chunk in chunks(given.first, given.count)]
        for job in as_completed(jobs):
            kind, result = job.result()
            if kind == "planted":
                name, seeds, how = result
                needed[name] = seeds
                say(
                    f"{'never' if seeds is None else seeds:>6} schedules for: {name}"
                    + (f" ({how.splitlines()[0][:90]})" if how else "")
                )
                if len(needed) == len(names):
                    spent = time.monotonic() - begun
            elif kind == "naive":
                done["naive"] += result[0]
                failed += result[1]
            else:
                number, failures, *more = result
                done[kind] += number
                commits, sink_runs, harmed = (
                    commits + more[0],
                    sink_runs + more[1],
                    harmed + more[2],
                )
                for seed, how in failures:
                    violations.append((seed, kind, how))
                    if len(violations) > SHOWN:
                        continue
                    args = f" ARGS=--{kind}" if kind != "plain" else ""
                    say(f"VIOLATION {how}\n  replay: make simulate SEED={seed}{args}")
            elapsed = time.monotonic() - begun
            if elapsed > next_word and done["plain"]:
                rate = done["plain"] / (elapsed - spent)
                say(f"{done['plain']} schedules, {rate:.0f} a second, {len(violations)} violations")
                next_word = elapsed + 5
    seconds = time.monotonic() - begun
    return {
        "schedules": done["plain"] + done["hard"] + done["wild"],
        "violations": len(violations),
        "seeds": [seed for seed, _, _ in violations][:SHOWN],
        "planted": len(names),
        "caught": sum(seeds is not None for seeds in needed.values()),
        "naive_schedules": done["naive"],
        "naive_failed": failed,
        "commits": commits,
        "runs": sink_runs,
        "harmed": harmed,
        "seconds": round(seconds, 1),
        "needed": {name: needed[name] for name in names},
    }


def story(given: argparse.Namespace) -> int:
    """One schedule, step by step."""
    trace: list[str] = []
    with sink_run.simulated(), planted.plant(given.planted) if given.planted else nullcontext():
        outcome = schedule.run(given.seed, trace, hard=given.hard, wild=given.wild)
    if given.trace or outcome.broken:
        say("\n".join(trace))
    say(
        f"seed {given.seed}: {outcome.sink_runs} runs, {outcome.commits} commits"
        + (f"; the last one: {outcome.ended}" if outcome.ended else "")
    )
    for violation in outcome.broken:
        say(f"VIOLATION {violation}")
    print(json.dumps({"schedules": 1, "violations": len(outcome.broken), "seed": given.seed}))
    return 1 if outcome.broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this schedule alone")
    parser.add_argument("--trace", action="store_true", help="with its steps, also if all is well")
    parser.add_argument("--hard", action="store_true", help="all kinds of faults at once")
    parser.add_argument("--wild", action="store_true", help="foreign hands of every kind")
    parser.add_argument("--planted", default="", help="with this bug in the protocol")
    parser.add_argument("--only", action="store_true", help="the real sink alone")
    parser.add_argument("--most", type=int, default=MOST, help="schedules for each planted bug")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if given.planted and given.planted not in planted.PLANTED:
        parser.error("no such bug; there are:\n  " + "\n  ".join(planted.PLANTED))
    if given.seed is not None:
        return story(given)
    if given.hard or given.wild:
        parser.error("--hard and --wild go with --seed: a sweep has schedules of every kind")
    sums = simulate(given)
    say(
        f"{sums['schedules']} schedules with {sums['runs']} runs and {sums['commits']} commits, "
        f"{sums['violations']} violations; {sums['caught']} of {sums['planted']} planted bugs "
        f"caught; the naive sink fails {sums['naive_failed']} of {sums['naive_schedules']}"
    )
    print(json.dumps(sums))
    return 0 if not sums["violations"] and sums["caught"] == sums["planted"] else 1


if __name__ == "__main__":
    sys.exit(main())
