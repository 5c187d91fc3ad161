"""Avro is read by compiled code where a datum is as its schema says, and by the strict reader where
not: a value is the same, or rejected, both ways and as fastavro reads it, whatever stands beside
it."""

from __future__ import annotations

import json

import pytest

from frazil.arrow.avro import WriterSchema
from tests.avro_ways import Maker, compare, rows_of


@pytest.mark.parametrize("seed", range(30))
def test_any_schema_and_mutated_datums_are_read_alike(seed: int):
    """A share of `make proof WHAT=avro_ways`."""
    read = rejected = 0
    for part in range(10):
        make = Maker(10_000 + 10 * seed + part)
        schema = make.schema()
        good = [make.datum(schema) for _ in range(10)]
        mutated = [make.mutated(make.r.choice(good), make.r.choice(good)) for _ in range(50)]
        counts = compare(schema, [*good, *mutated], len(good))
        read, rejected = read + counts[0], rejected + counts[1]
    assert read > 100, "the comparison means something"
    assert rejected > 100


@pytest.mark.parametrize("seed", range(20))
def test_a_datum_is_read_alike_whatever_stands_beside_it(seed: int):
    make = Maker(seed)
    schema = make.schema()
    datums = [make.datum(schema) for _ in range(40)]
    datums += [make.mutated(make.r.choice(datums), make.r.choice(datums)) for _ in range(40)]
    make.r.shuffle(datums)
    writer = WriterSchema(json.dumps(schema))
    table, bad = writer.read(datums)
    alone = [writer.read([datum]) for datum in datums]
    assert bad == [(i, why) for i, (_, bad) in enumerate(alone) for _, why in bad]
    rows = [row for single, _ in alone for row in rows_of(single)]
    assert repr(rows_of(table)) == repr(rows)
