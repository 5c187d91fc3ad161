"""Random schemas, from bytes to data files and back: every value equal, every bound true.

Each case comes from its number (`tests/roundtrip.py`): records of Avro, JSON or Debezium's
envelopes are decoded, settled and written; a later writer's schema is followed; everything is
compacted. Arrow and DuckDB read the files, and every value is compared with the one that was
encoded. No JVM, no server.

    make roundtrip N=20000
    make roundtrip N=0 ARGS='--engines 500'  # through Iceberg's tables, read by Spark and DuckDB
    python bench/roundtrip.py --seed 17      # one case, with its trace
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # small tables, and a process for each core
os.environ.setdefault("RUST_BACKTRACE", "0")

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.roundtrip import Case

#: Cases that a process takes at once, and failures that are shown in full.
SHARE, SHOWN = 100, 20


def run(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Kinds of cases, and seeds that failed with the reason."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # polars prints each panic that the decoder takes for "not a block"
    kinds: Counter[str] = Counter()
    failed = []
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(prefix="frazil-roundtrip-") as folder:
            try:
                case = Case(seed)
                kinds[case.kind] += 1
                case.check(Path(folder))
            except BaseException as error:  # a crash in a library is a finding, too
                failed.append((seed, f"{type(error).__name__}: {error}"[:1000]))
    return kinds, failed


def _run_share(share: tuple[int, int]) -> tuple[Counter[str], list[tuple[int, str]]]:
    return run(*share)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this case alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2)
    parser.add_argument(
        "--engines",
        type=int,
        default=0,
        metavar="N",
        help="beside these, N cases through Iceberg's tables, read by Spark and DuckDB",
    )
    given = parser.parse_args()
    if given.seed is not None:
        return story(given.seed)
    report = all_of(given.first, given.count, given.processes)
    if given.engines:
        report["engines"] = by_engines(given.first, given.engines)
    print(json.dumps(report))
    failures = report["failed"] + report.get("engines", {"failed": 0})["failed"]
    return 1 if failures else 0


def story(seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="frazil-roundtrip-") as folder:
        try:
            Case(seed).check(Path(folder))
        except BaseException:
            traceback.print_exc()
            return 1
    print(f"seed {seed}: every value is equal")
    return 0


def all_of(first: int, count: int, processes: int) -> dict[str, Any]:
    began = time.monotonic()
    kinds: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    done = 0
    # Half a megabyte stays with each schema, in caches of ours and of the libraries below.
    with get_context("spawn").Pool(processes, maxtasksperchild=10) as pool:
        shares = [(s, min(SHARE, first + count - s)) for s in range(first, first + count, SHARE)]
        for some, bad in pool.imap_unordered(_run_share, shares):
            kinds += some
            failed += bad
            done += sum(some.values())
            for seed, reason in bad:
                if len(failed) <= SHOWN:
                    print(f"seed {seed}: {reason}", file=sys.stderr)
            rate = done / (time.monotonic() - began)
            print(f"{done} of {count} schemas, {len(failed)} failed, {rate:.0f}/s", file=sys.stderr)
    return {
        "schemas": done,
        **kinds,
        "failed": len(failed),
        "seeds": sorted(seed for seed, _ in failed)[:100],
        "seconds": round(time.monotonic() - began, 1),
    }


def by_engines(first: int, count: int) -> dict[str, Any]:
    """One JVM, one case after the other."""
    from tests import roundtrip_engines
    from tests.oracle import Lake

    from frazil.spark.session import session  # with a JVM

    began = time.monotonic()
    failed = []
    with tempfile.TemporaryDirectory(prefix="frazil-roundtrip-") as folder:
        lake = Lake(Path(folder))
        settings = {"spark.sql.shuffle.partitions": "2"}
        spark = session(lake.config("roundtrip", "none", "none:1", spark=settings))
        for seed in range(first, first + count):
            try:
                roundtrip_engines.check(spark, lake, f"db.t{seed}", Case(seed, engines=True))
            except Exception as error:
                failed.append(seed)
                print(f"engines, seed {seed}: {error}"[:1000], file=sys.stderr)
        spark.stop()
    seconds = round(time.monotonic() - began, 1)
    return {"schemas": count, "failed": len(failed), "seeds": failed[:100], "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
