"""One command line for proofs that read records in several ways: many seeds, in all processors.

A case is a function of a seed; it raises where two ways differ, and returns what it has counted.
With `--checked` each access to memory of compiled code is checked (FRAZIL_NATIVE_CHECKED=1), and
there must be none outside the buffers; that is slower. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import get_context

from frazil.native import memory

#: Seconds between two lines of progress.
PACE = 30


def checked_case(case: Callable[[int], Mapping[str, int]], seed: int) -> Mapping[str, int]:
    try:
        counts = case(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}"[:2_000]) from error
    faults, last = memory.faults()
    assert not faults, f"seed {seed}: {faults} accesses outside the buffers, the last at {last}"
    return counts


def prove(about: str | None, case: Callable[[int], Mapping[str, int]], size: int) -> None:
    """`size`: records of a case. Ends with the sums of all counts."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, help="only this case")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--checked", action="store_true", help="check each access to memory")
    given = parser.parse_args()
    if given.checked and not memory.CHECKED:
        os.environ["FRAZIL_NATIVE_CHECKED"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    started = reported = time.monotonic()
    count = 1 if given.seed is not None else -(-given.records // size)
    first = given.first if given.seed is None else given.seed
    run = partial(checked_case, case)
    run(first)  # compiles
    sums: Counter[str] = Counter()
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for counts in pool.imap_unordered(run, range(first, first + count), chunksize=4):
            sums.update({"cases": 1, **counts})
            if time.monotonic() - reported > PACE:
                reported = time.monotonic()
                print(f"{sums['cases']} of {count} cases", file=sys.stderr, flush=True)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({**sums, "differences": 0, "checked": memory.CHECKED, "seconds": seconds}))
