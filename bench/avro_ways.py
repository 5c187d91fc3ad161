"""Avro by compiled code, by the strict reader, and by fastavro: mutated datums, all read alike.

Each case has a random schema, datums of it in all forms that Avro allows, and mutated ones
(`tests/avro_ways.py`). Whatever compiled code reads must be what the strict reader and fastavro
read; the rejections must be the same, with their reasons.

    make proof WHAT=avro_ways N=1000000
    python bench/avro_ways.py --checked --records 100000
    python bench/avro_ways.py --seed 17      # one case
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.avro_ways import Maker, compare

from ways import prove

#: Datums of a case: as written, and mutated.
GOOD, MUTATED = 50, 400


def case(seed: int) -> dict[str, int]:
    make = Maker(seed)
    schema = make.schema()
    good = [make.datum(schema) for _ in range(GOOD)]
    mutated = [make.mutated(make.r.choice(good), make.r.choice(good)) for _ in range(MUTATED)]
    read, rejected = compare(schema, [*good, *mutated], GOOD)
    counts = {"schemas": 1, "datums": GOOD + MUTATED, "mutated": MUTATED}
    return {**counts, "read_by_compiled_code": read, "rejected": rejected}


if __name__ == "__main__":
    prove(__doc__, case, MUTATED)
