"""Version 1 of every stored format, compared with the examples in tests/fixtures/format-1.

Each example is read to the values below, and the values are written as the example again. A test
that fails here means that tables, batch records or checkpoints of users could no longer be read, or
that an older Frazil would misread new ones. Never edit an example: a new form needs a new version.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from frazil import format_version
from frazil.accounting import OutcomeCounts, RangeCounts
from frazil.commit import rewind, rewind_note
from frazil.commit.rewind_note import RewindNote
from frazil.config.sections import TableConfig, deleted_keys_table, replayed
from frazil.errors import Fatal, IdentityMismatch
from frazil.files.writer import WriterSpec
from frazil.iceberg import foreign_commits
from frazil.iceberg.foreign_commits import ForeignCommits
from frazil.iceberg.maintenance_tasks import CREATED_BY, MERGE, orphan_files
from frazil.iceberg.rewrite_data_files import COMPACT
from frazil.iceberg.schema import iceberg_schema
from frazil.iceberg.static_table import COLUMNS_PROPERTY, ReadOnlyTable
from frazil.kafka.range_source import check_offset, spark_offset
from frazil.ledger import entry as ledger
from frazil.ledger import index, staged_batch
from frazil.ledger.entry import LedgerEntry, OperatorNote
from frazil.ledger.packing import unpack
from frazil.ledger.range_columns import of_entries
from frazil.ledger.sink_state import announced_tables, property_tables, tables_property, tables_text
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.ledger.tags import filled_by, ledger_tag
from frazil.offsets import BATCHES, Cut, Partition, Range
from frazil.ops.index_rebuild import REBUILD
from frazil.pipeline import upsert
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.replay import NOTE_COLUMNS, NOTES
from frazil.pipeline.task import DEAD_LETTER_COLUMNS, DEAD_LETTER_METADATA
from frazil.spark.checkpoint import Checkpoint, SourceOffsets, known
from tests.unit.test_checkpoint import ICEBERG, log, ours

EXAMPLES = Path(__file__).parents[1] / "fixtures" / "format-1"
NEEDED = "a new format version is needed (docs/reference/compatibility.md)"

A, B, C = Partition("orders", 0), Partition("orders", 1), Partition("refunds", 0)
TOPICS = {"orders": "hFt7vPPmTdCZlm6sIYlkwQ", "refunds": "W1bqVBMmQ7uXf7gJmPqCgA"}
COMMITS = ("5b0c2f0e-6d2b-4b52-9f1c-0a3f6f5f7c11", "9e4a3a54-6f0c-4d0b-8d43-4f1f5b8a2d77")
UUIDS = {"shop.orders": "0d2c8a7e-52a1-4a0e-9d54-1a7a3c7be001", "shop.refunds": "7f3b"}

NOTE = OperatorNote(
    "accept-loss", "ann@ops", "2026-11-15T10:00:00+00:00", "retention", "3 offsets accepted as lost"
)
#: An entry with every key that a short one can have.
ENTRY = LedgerEntry(
    sink="orders",
    epoch=12,
    commit_ids=COMMITS,
    batches=(40, 41),
    begin=Cut({A: 1000, B: 2000, C: 0, BATCHES: 40}),
    end=Cut({A: 1010, B: 2005, C: 0, BATCHES: 42}),
    outcomes={
        A: OutcomeCounts(rejected=1, skipped=2, invisible=1),
        B: OutcomeCounts(merged=1, elsewhere=1, lost=3),
    },
    topics=TOPICS,
    cluster="MkU3OEVBNTcwNTJENDM2Qg",
    schema_id=3,
    watermark=(1_790_000_000_000_000, 1_790_000_060_000_000),
    tables=UUIDS,
    rows=7,
    source=('{"sources":["17"]}', '{"sources":["18"]}'),
    index="shop.frazil_index",
    keys=5,
    unknown_before=11,
    note=NOTE.text(),
    leaders={A: 4, B: 0},
)
#: A topic with partitions 3 to 799, so that their numbers are listed; and one with 0 to 3.
MANY = [Partition("orders", n) for n in range(3, 800)] + [Partition("refunds", n) for n in range(4)]
#: Offsets below 2^40 with no pattern: the entry needs a base.
FAR = [i * 2654435761 * 40503 % 2**40 for i in range(len(MANY))]
#: A large entry. Most offsets of each partition were skipped, so that is the remainder.
LARGE = LedgerEntry(
    sink="orders",
    epoch=12,
    commit_ids=COMMITS[:1],
    batches=(41, 41),
    begin=Cut(dict(zip(MANY, FAR, strict=True))),
    end=Cut({p: FAR[i] + 100 + i for i, p in enumerate(MANY)}),
    outcomes={p: OutcomeCounts(skipped=90 + i, invisible=i % 3) for i, p in enumerate(MANY)},
    topics=TOPICS,
    cluster="MkU3OEVBNTcwNTJENDM2Qg",
    schema_id=3,
    index="shop.frazil_index",
    leaders={p: 4 + i % 2 for i, p in enumerate(MANY) if i != 5},
)
BATCH = StagedBatch(
    sink="orders",
    epoch=12,
    number=41,
    commit_id=COMMITS[0],
    begin=Cut({A: 1000, C: 0}),
    end=Cut({A: 1010, C: 4}),
    topics=TOPICS,
    cluster="MkU3OEVBNTcwNTJENDM2Qg",
    staged_at_ms=1_790_000_061_000,
    window_start_ms=1_790_000_060_000,
    tables=(
        StagedTable(
            "shop.orders",
            UUIDS["shop.orders"],
            3,
            ("T2JqAQ==", "T2JqAg=="),
            ("s3://lake/shop/orders/metadata/m0.avro", "s3://lake/shop/orders/metadata/m1.avro"),
            2,
            4096,
            (
                RangeCounts(
                    Range(A, 1000, 1010),
                    3,
                    1,
                    2,
                    1,
                    1,
                    (1000, 1009),
                    (1_790_000_000_000_000, 1_790_000_060_000_000),
                    2,
                ),
                RangeCounts(Range(C, 0, 4), 0, invisible=4),
            ),
            5,
        ),
    ),
    total=(RangeCounts(Range(A, 1000, 1010), 10), RangeCounts(Range(C, 0, 4), 4)),
    source=("", '{"sources":["18"]}'),
    note=NOTE.text(),
    leaders={A: 4},
    already_written={"shop.items": Cut({A: 1005})},
)
REWIND = RewindNote("2026-11-15T10:00:00Z", 41, {"orders": {"0": 1000, "1": 2000}})
FOREIGN = ForeignCommits(8270633197658268308, "overwrite", 1_790_000_000_000, True, {A: (10, 20)})
#: Three sources of a bound query: Frazil's, Spark's Kafka source, and one of Iceberg.
PLACE = SourceOffsets(
    Cut({A: 1010, Partition("clicks", 0): 7}),
    (EXAMPLES / "source-offsets.json").read_text(),
    "k",
    {"orders": "o"},
)


def example(name: str) -> str:
    return (EXAMPLES / name).read_text()


def loaded(name: str) -> Any:
    return json.loads(example(name))


def reads(name: str, actual: object, meant: object) -> None:
    assert actual == meant, (
        f"{name} of version 1 is read as another value: {NEEDED}, and version 1 is read for ever"
    )


def same(name: str, written: object, stored: object) -> None:
    assert written == stored, (
        f"the written form of {name} has changed, and what users have stored has not: {NEEDED}"
    )


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────


def test_a_ledger_entry():
    stored = loaded("ledger-entry.json")
    reads("a ledger entry", ledger.parse(stored), ENTRY)
    same("a ledger entry", ENTRY.summary(), stored)


def test_a_large_ledger_entry_and_its_properties():
    stored = loaded("ledger-entry-packed.json")
    summary, properties = stored["summary"], stored["properties"]
    entry = ledger.parse(ledger.joined(summary, properties))
    reads("a large ledger entry", entry, LARGE)
    assert entry is not None
    written = ledger.split(replace(LARGE, kept=entry.kept).summary())
    same(
        "a large ledger entry", [*map(unpacked, written)], [unpacked(summary), unpacked(properties)]
    )
    # The same without the properties that it was read with: they are written anew.
    written = ledger.split(LARGE.summary())
    assert [sorted(map(kind, part)) for part in written] == [
        sorted(map(kind, part)) for part in (summary, properties)
    ]
    columns = of_entries([ledger.joined(summary, properties)])
    assert columns.skipped.tolist() == [LARGE.outcomes[p].skipped for p in sorted(MANY)]


def kind(key: str) -> str:
    """`frazil.base.orders.12.<digest>`, without the digest."""
    return key.rpartition(".")[0] if key.count(".") > 2 else key


def unpacked(values: Mapping[str, str]) -> dict[str, object]:
    """Without what deflate makes of the numbers: its output differs between builds of zlib."""
    readable: dict[str, object] = {}
    for key, text in values.items():
        if key.startswith("frazil.partitions."):
            assert key.endswith(f".{hashlib.sha256(text.encode()).hexdigest()[:16]}")
            readable[kind(key)] = json.loads(zlib.decompress(base64.b85decode(text)))
        elif key.startswith("frazil.base."):
            assert key.endswith(f".{hashlib.sha256(text.encode()).hexdigest()[:16]}")
            readable[kind(key)] = unpack(text.partition(":")[2], len(MANY)).tolist()
        elif text.startswith("packed:"):
            readable[key] = (text.split(":")[1], unpack(text, len(MANY)).tolist())
        elif key in ("frazil.partitions", "frazil.base"):
            readable[key] = text.partition(".")[0]
        else:
            readable[key] = text
    return readable


def test_an_operators_note():
    reads("an operator's note", OperatorNote.of(example("operator-note.json")), NOTE)
    same("an operator's note", NOTE.text(), example("operator-note.json"))


# ── batch records ────────────────────────────────────────────────────────────────────────────────


def test_a_batch_record():
    name = f"00000012-0000000041-{COMMITS[0]}.json"
    stored = (EXAMPLES / name).read_bytes()
    reads("a batch record", staged_batch.load(stored), BATCH)
    same("a batch record", staged_batch.dump(BATCH), stored)
    same("the name of a batch record", BATCH.file_name, name)


# ── columns of Frazil's own tables ───────────────────────────────────────────────────────────────


def deleted_columns() -> tuple[pa.Schema, MetadataColumns]:
    """Of an upsert table with the key `id` and the version column `after.lsn`."""
    after = pa.struct([pa.field("lsn", pa.int64(), nullable=False)])
    columns = pa.schema([pa.field("id", pa.int64(), nullable=False), ("after", after)])
    metadata = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
    schema = iceberg_schema(columns, metadata, TableConfig("shop.orders"))
    shape = WriterSpec("shop.orders", "", schema, 0, "", {}, 0, "", {})
    plan = upsert.TablePlan(shape, metadata, "", key=("id",), order="after.lsn")
    return upsert.deleted_keys_columns(plan), metadata


TABLES: dict[str, Callable[[], tuple[pa.Schema, MetadataColumns]]] = {
    "index": lambda: (index.COLUMNS, MetadataColumns("", "", "", "")),
    "dead-letters": lambda: (DEAD_LETTER_COLUMNS, DEAD_LETTER_METADATA),
    "replayed": lambda: (NOTE_COLUMNS, NOTES),
    "deleted": deleted_columns,
}


@pytest.mark.parametrize("name", TABLES)
def test_the_columns_of_a_table_of_frazils_own(name: str):
    columns, metadata = TABLES[name]()
    schema = json.loads(iceberg_schema(columns, metadata, TableConfig("shop.t")))
    stored = loaded(f"{name}-schema.json")
    if name == "index":  # optional columns may be added: `Startup.widen_index`
        known, more = len(stored["fields"]), schema["fields"]
        schema["fields"], more = more[:known], more[known:]
        same(
            "the columns of the index", [column["required"] for column in more], [False] * len(more)
        )
    same(f"the columns of {name} tables", schema, stored)


def test_names_of_tables_tags_properties_and_files():
    file = f"frazil-orders-12-41-{COMMITS[0]}"
    names = {
        "tag": ledger_tag("orders"),
        "tag of a branch": ledger_tag("orders", "side"),
        "table of replayed dead letters": replayed("shop.dead_letters"),
        "table of deleted keys": deleted_keys_table("shop.orders"),
        "summary key of an entry's version, property of a table's version": format_version.KEY,
        "version of tables": format_version.TABLE,
        "property: creating sink": CREATED_BY,
        "property: sink that fills a table": filled_by("orders"),
        "property: metadata columns": COLUMNS_PROPERTY,
        "property: tables of a sink": tables_property("orders"),
        "property: unfinished rewind": f"{rewind_note.PROPERTY}.orders",
        "property: foreign commits": foreign_commits.key_of("orders"),
        "summary key: compaction": COMPACT,
        "summary key: merge of index files": MERGE,
        "summary key: rebuild of the index": REBUILD,
        "summary key: rewind of the index": rewind.REWOUND,
        "data file": f"{file}.parquet",
        "manifest": f"{file}-m1.avro",
        "deletion vectors": f"{file}.puffin",
    }
    same("names", names, loaded("names.json"))
    files = [names[kind] for kind in ("data file", "manifest", "deletion vectors")]
    assert orphan_files(files, sink="orders", epoch=13, referenced=[], staged=[]) == files
    assert orphan_files(files, sink="orders", epoch=13, referenced=[], staged=[BATCH]) == []


# ── table properties ─────────────────────────────────────────────────────────────────────────────


def test_the_property_of_an_unfinished_rewind():
    stored = example("rewind-property.json")
    note = rewind_note.note_of({"frazil.rewind.orders": stored}, "orders")
    reads("an unfinished rewind", note, REWIND)
    same("an unfinished rewind", REWIND.text(), stored)


def test_the_property_of_foreign_commits():
    stored, key = example("foreign-commits-property.json"), "frazil.foreign-commits.orders"
    recorded = foreign_commits.recorded("shop.orders", {key: stored})
    reads("foreign commits", recorded, {key: FOREIGN})
    same("foreign commits", FOREIGN.text(), stored)


def test_the_property_of_a_sinks_tables():
    stored, key = example("tables-property.json"), "frazil.tables.orders"
    reads("the tables of a sink", announced_tables(key, {key: stored}), UUIDS)
    same("the tables of a sink", tables_text(UUIDS), stored)


# ── Spark's checkpoint ───────────────────────────────────────────────────────────────────────────


def test_an_offset_in_sparks_checkpoint():
    stored = loaded("spark-offset.json")
    check_offset(stored)
    cut = Cut({A: 1010, B: 2005})
    reads("an offset in Spark's checkpoint", Cut.of(stored["cut"]), cut)
    written = spark_offset(cut, start=Cut({A: 0}), cluster="k", topics=TOPICS)
    same("an offset in Spark's checkpoint", written, stored)


def test_source_offsets():
    kafka = json.dumps({"clicks": {"0": 7}})
    query = log([ours(Cut({A: 1010}), orders="o"), kafka, ICEBERG], bound=True)
    assert query.after(0) == PLACE
    same("source offsets", query.after(0).text, PLACE.text)
    sources = [{"frazil": ["orders"]}, {"kafka": ["clicks"]}, ICEBERG]
    reads("source offsets", known(PLACE), sources)
    fresh = log(query="q")
    fresh._folder.files.clear()  # type: ignore[attr-defined]
    fresh.seed(PLACE, ["frazil", "kafka", "iceberg"])
    assert Checkpoint(fresh._folder, bound=False).after(0).cut == PLACE.cut


# ── versions that this Frazil does not know ──────────────────────────────────────────────────────


def record(**more: object) -> bytes:
    body = json.loads(staged_batch.dump(BATCH).split(b"\n")[1])
    text = json.dumps({**body, **more}).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n"


def newer(name: str) -> str:
    return json.dumps({**loaded(name), "version": 2})


def table(folder: Path, version: str) -> ReadOnlyTable:
    metadata = {
        "format-version": 2,
        "table-uuid": "u",
        "location": str(folder),
        "current-schema-id": 0,
        "schemas": [{"schema-id": 0, "type": "struct", "fields": []}],
        "properties": {"frazil.format-version": version},
    }
    (folder / "v1.metadata.json").write_text(json.dumps(metadata))
    return ReadOnlyTable("shop.orders", f"{folder}/v1.metadata.json", {})


def offset_of(version: int) -> str:
    return json.dumps({**loaded("spark-offset.json"), "version": version})


REFUSED: dict[str, Callable[[Path], object]] = {
    "read a ledger entry of sink orders": lambda _: ledger.parse(
        {**ENTRY.summary(), "frazil.format-version": "2"}
    ),
    "read staged batch s3://b": lambda _: staged_batch.load(record(version=2), "s3://b"),
    "open table shop.orders": lambda folder: table(folder, "2"),
    "read property frazil.rewind.orders of the index": lambda _: rewind_note.note_of(
        {"frazil.rewind.orders": newer("rewind-property.json")}, "orders"
    ),
    "read property frazil.foreign-commits.orders of table t": lambda _: foreign_commits.recorded(
        "t", {"frazil.foreign-commits.orders": newer("foreign-commits-property.json")}
    ),
    "read an offset in Spark's checkpoint": lambda _: log([offset_of(2)]).after(0),
}


@pytest.mark.parametrize("action", REFUSED)
def test_a_newer_version_is_refused_with_both_versions(action: str, tmp_path: Path):
    with pytest.raises(Fatal) as refused:
        REFUSED[action](tmp_path)
    assert refused.value.message == f"cannot {action}: expected Frazil format version 1, found 2"
    assert "newer" in refused.value.hint


def test_a_newer_entry_is_refused_among_many():
    with pytest.raises(Fatal, match="expected Frazil format version 1, found 2"):
        of_entries([ENTRY.summary(), {**ENTRY.summary(), "frazil.format-version": "2"}])


def test_no_version_is_refused_where_there_must_be_one():
    stored = {k: v for k, v in ENTRY.summary().items() if k != "frazil.format-version"}
    with pytest.raises(Fatal, match="expected Frazil format version 1, found none"):
        ledger.parse(stored)
    with pytest.raises(Fatal, match=r"expected Frazil format version 1, found 1\.5"):
        staged_batch.load(record(version=1.5))


def test_a_table_of_others_has_no_version(tmp_path: Path):
    format_version.check_table("shop.orders", None)
    assert table(tmp_path, "1").properties == {"frazil.format-version": "1"}


# ── the reference ────────────────────────────────────────────────────────────────────────────────


def test_every_key_and_column_is_in_the_architecture():
    page = (EXAMPLES.parents[2] / "docs" / "architecture.md").read_text()
    record = json.loads(staged_batch.dump(BATCH).split(b"\n")[1])
    keys = {*loaded("ledger-entry.json"), *loaded("ledger-entry-packed.json")["summary"]}
    keys |= {*record, *record["tables"][0], *loaded("operator-note.json")}
    keys |= {*loaded("rewind-property.json"), *loaded("foreign-commits-property.json")}
    keys |= {*loaded("spark-offset.json"), format_version.KEY, CREATED_BY, COLUMNS_PROPERTY}
    for name in ("index", "dead-letters", "replayed"):
        keys |= {column["name"] for column in loaded(f"{name}-schema.json")["fields"]}
    keys |= {COMPACT, MERGE, REBUILD, rewind.REWOUND}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


@pytest.mark.parametrize("text", ["{", "[1]", "5", "null"])
def test_a_list_of_tables_that_was_altered_by_hand_is_refused_by_name(text: str):
    with pytest.raises(IdentityMismatch, match=r"property frazil\.tables\.s of the index"):
        property_tables({"frazil.tables.s": text}, tables_property("s"))
