"""JSON by compiled code, the reference, and the standard library: mutated records, all read alike.

Each case has random columns, of all types that JSON fills, and records of them, plain, odd and
mutated (`tests/json_ways.py`). Whatever compiled code reads must be what the one-by-one reader and
`json` read; the rejections must be the same, with their reasons. With FRAZIL_NATIVE_CHECKED=1
every access to memory is checked, and there must be none outside the buffers; that is slower.

    make proof WHAT=json_ways N=1000000
    FRAZIL_NATIVE_CHECKED=1 python bench/json_ways.py --records 100000
    python bench/json_ways.py --seed 17      # one case
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.json_ways import Maker, compare

from frazil.native import memory

#: Records of a case, one half of them mutated.
RECORDS = 1_000


def case(seed: int) -> tuple[int, int]:
    """How many records were read by compiled code, and how many rejected."""
    make = Maker(seed)
    columns = make.columns()
    records = [make.record(columns) for _ in range(RECORDS // 2)]
    try:
        counts = compare(columns, [*records, *map(make.mutated, records)])
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}"[:2_000]) from error
    faults, last = memory.faults()
    assert not faults, f"seed {seed}: {faults} accesses outside the buffers, the last at {last}"
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    started = time.monotonic()
    count = 1 if given.seed is not None else -(-given.records // RECORDS)
    first = given.first if given.seed is None else given.seed
    case(first)  # compiles
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        results = pool.map(case, range(first, first + count), chunksize=4)
    read, rejected = (sum(column) for column in zip(*results, strict=True))
    result = {
        "records": count * RECORDS,
        "read_by_compiled_code": read,
        "rejected": rejected,
        "differences": 0,
        "checked": os.environ.get("FRAZIL_NATIVE_CHECKED") == "1",
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
