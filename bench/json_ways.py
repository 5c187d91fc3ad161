"""JSON by compiled code, the reference, and the standard library: mutated records, all read alike.

Each case has random columns, of all types that JSON fills, and records of them, plain, odd and
mutated (`tests/json_ways.py`). Whatever compiled code reads must be what the one-by-one reader and
`json` read; the rejections must be the same, with their reasons.

    make proof WHAT=json_ways N=1000000
    python bench/json_ways.py --checked --records 100000
    python bench/json_ways.py --seed 17      # one case
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.json_ways import Maker, compare

from ways import prove

#: Records of a case, one half of them mutated.
RECORDS = 1_000


def case(seed: int) -> dict[str, int]:
    make = Maker(seed)
    columns = make.columns()
    records = [make.record(columns) for _ in range(RECORDS // 2)]
    read, rejected = compare(columns, [*records, *map(make.mutated, records)])
    return {"records": RECORDS, "read_by_compiled_code": read, "rejected": rejected}


if __name__ == "__main__":
    prove(__doc__, case, RECORDS)
