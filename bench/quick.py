"""The guard: is Frazil still as much faster than Spark's own sink as was recorded?

Both sides in turns on plain Avro, as in `append`, in fewer and shorter jobs. Seconds depend on the
machine; their ratio in one run does much less. So `recorded.json` keeps the ratio of a run that
somebody looked at, and a margin for noise: below ratio less margin the exit code is 1. It is 2
where there is nothing to compare with, or where a run is too noisy to be recorded.

The ratio is the median over the warm turns, each a job of both sides one after the other; its
spread is the lowest and the highest turn.

    make bench WHAT=quick                    # two minutes on two cores
    make bench WHAT=quick ARGS='--record'    # takes this run as the one to compare with
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from append import compare, say
from frazil.spark import jars

RECORDED = Path(__file__).with_name("recorded.json")
#: Differences below a tenth are noise; jobs of some seconds differ a little more.
NOISE = 0.15
#: A run whose turns differ by more than this share of their ratio is no record.
QUIET = 0.25
ROWS, REPEAT, PARTITIONS = 4_000_000, 6, 4


def measure(rows: int, repeat: int) -> dict[str, Any]:
    run = compare(rows, repeat, PARTITIONS, ["plain"])
    warm = run["warm_repetitions"]
    seconds = zip(run["spark_seconds"][-warm:], run["frazil_seconds"][-warm:], strict=True)
    ratios = sorted(spark / frazil for spark, frazil in seconds)
    return {
        "ratio": round(statistics.median(ratios), 2),
        "spread": [round(ratios[0], 2), round(ratios[-1], 2)],
        "cpu_ratio": run["cpu_ratio"],
        "rows": rows,
        "repetitions": repeat,
        "cores": os.cpu_count(),
        "versions": {
            "Frazil": version("frazil"),
            "Python": platform.python_version(),
            "Spark": version("pyspark"),
            "Iceberg": jars.ICEBERG[0].rpartition(":")[2],
            "pyarrow": version("pyarrow"),
            "numba": version("numba"),
        },
    } | {key: run[key] for key in ("frazil_rows_per_s", "spark_rows_per_s")}


def record_of(measured: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run, with its margin: the noise of such runs, or the run's own spread."""
    low, high = measured["spread"]
    margin = max(NOISE * measured["ratio"], high - low)
    kept = {key: measured[key] for key in measured if not key.endswith("_rows_per_s")}
    return {**kept, "margin": round(margin, 2)}


def too_noisy(measured: Mapping[str, Any]) -> str:
    """Why a run is not recorded: a margin as wide as its spread would let everything pass."""
    low, high = measured["spread"]
    if high - low <= QUIET * measured["ratio"]:
        return ""
    return (
        f"cannot record ratio {measured['ratio']}: its turns lie between {low} and {high}; "
        f"repeat on a quiet machine"
    )


def verdict(measured: Mapping[str, Any], recorded: Mapping[str, Any]) -> tuple[bool, str]:
    """Is the ratio as high as it must be, and a sentence that says so."""
    floor = round(recorded["ratio"] - recorded["margin"], 2)
    passed = measured["ratio"] >= floor
    sentence = (
        f"Frazil is {measured['ratio']} × as fast as Spark's sink; expected at least {floor} "
        f"(recorded {recorded['ratio']} less {recorded['margin']} for noise)"
    )
    other = [
        f"{key} {recorded[key]}, found {measured[key]}"
        for key in ("cores", "rows", "repetitions")
        if recorded[key] != measured[key]
    ]
    if other:
        sentence += f"; recorded with {', '.join(other)}"
    return passed, sentence if passed else f"too slow: {sentence}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repeat", type=int, default=REPEAT, help="jobs of each side")
    parser.add_argument("--record", action="store_true", help=f"rewrite {RECORDED.name}")
    given = parser.parse_args()
    if not (given.record or RECORDED.exists()):
        say(f"cannot compare: there is no {RECORDED}; make one with --record")
        return 2
    measured = measure(given.rows, given.repeat)
    if given.record:
        if reason := too_noisy(measured):
            say(reason)
            print(json.dumps({**measured, "passed": False}))
            return 2
        RECORDED.write_text(json.dumps(record_of(measured), indent=2) + "\n")
    recorded = json.loads(RECORDED.read_text())
    passed, sentence = verdict(measured, recorded)
    say(sentence)
    floor = {key: recorded[key] for key in ("ratio", "margin")}
    print(json.dumps({**measured, "recorded": floor, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
