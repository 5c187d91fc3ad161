"""What the benches conclude from their figures, and what they write."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest

from tests.bench import growth, quick, report

RECORDED = {"ratio": 4.0, "margin": 0.6, "cores": 2, "rows": 4_000_000, "repetitions": 6}
PAGE = """# Benchmarks
<!-- peers -->
peers
<!-- /peers -->
between
<!-- growth -->
growth
<!-- /growth -->
after
"""


def point(step: int, cost: float) -> dict[str, Any]:
    parts = dict.fromkeys(("driver", "jvm", "workers"), cost)
    return {"step": step, "wall_s": cost, "cpu_s": cost, "memory_mib": 700, "cpu_by_part": parts}


def test_a_cost_that_grows_as_its_input_does_is_not_flagged():
    result = growth.judged("tables", [point(1, 1.0), point(10, 1.5), point(100, 15.0)])
    assert result["flagged"] == []
    assert [of["exponents"]["wall_s"] for of in result["growth"]] == [0.18, 1.0]


def test_a_cost_that_grows_faster_is_flagged_with_both_points():
    result = growth.judged("tables", [point(10, 1.0), point(20, 2.5)])
    assert [line.partition(":")[0] for line in result["flagged"]] == ["tables 10 → 20 (2.0 ×)"] * 2


@pytest.mark.parametrize(
    "made",
    [
        growth.Point(3, tables=2),
        growth.Point(3, columns=50),
        *(growth.Point(3, bytes=size) for size in (50, 99, 158, 159, 1_000, 100_000)),
    ],
)
def test_generated_records_are_read_by_another_avro_reader(made: growth.Point):
    parsed = fastavro.parse_schema(json.loads(growth.schema(made)))
    for number, value in enumerate(growth.events(made, 3)):
        stream = io.BytesIO(value[5:])
        record = fastavro.schemaless_reader(stream, parsed, None)
        assert stream.read() == b""
        assert len(record) == made.columns + bool(made.bytes)
        assert not made.bytes or made.bytes - 1 <= len(value) <= made.bytes
        assert made.tables == 1 or record["c1"].encode() == growth.kind(number % 2)


def test_a_history_gets_older_snapshots_and_keeps_its_own(tmp_path: Path):
    folder = tmp_path / "metadata"
    folder.mkdir()
    own = [
        {"snapshot-id": 7, "sequence-number": 1, "timestamp-ms": 5_000_000},
        {"snapshot-id": 9, "sequence-number": 2, "timestamp-ms": 6_000_000},
    ]
    own[1]["parent-snapshot-id"] = 7
    metadata = {"snapshots": own, "snapshot-log": own, "last-sequence-number": 2}
    (folder / "v3.metadata.json").write_text(json.dumps({**metadata, "current-snapshot-id": 9}))
    (folder / "version-hint.text").write_text("3")
    growth.lengthen_history(tmp_path, 10)
    growth.check_history(tmp_path, 10)
    number, longer = growth.newest_metadata(tmp_path)
    assert (number, longer["last-sequence-number"], len(longer["snapshots"])) == (4, 10, 10)
    assert [of["sequence-number"] for of in longer["snapshots"]] == list(range(1, 11))
    assert [of["snapshot-id"] for of in longer["snapshots"][-2:]] == [7, 9]
    with pytest.raises(SystemExit, match="10 snapshots of 11"):
        growth.check_history(tmp_path, 11)


@pytest.mark.parametrize("count", [1, 2])
def test_cores_are_not_measured_on_one_or_two(count: int):
    assert growth.core_steps(count) == ()


def test_cores_double_up_to_all():
    assert growth.core_steps(6) == (1, 2, 4, 6)


@pytest.mark.parametrize(("ratio", "passed"), [(3.4, True), (3.39, False)])
def test_the_guard_allows_the_margin_and_no_more(ratio: float, passed: bool):
    assert quick.verdict({**RECORDED, "ratio": ratio}, RECORDED)[0] is passed


def test_the_guard_names_what_differs_from_the_record():
    _, sentence = quick.verdict({**RECORDED, "ratio": 3.0, "cores": 8}, RECORDED)
    assert sentence.startswith("too slow: Frazil is 3.0 × as fast as Spark's sink")
    assert "expected at least 3.4" in sentence
    assert "recorded with cores 2, found 8" in sentence


def test_a_record_has_the_spread_as_margin_where_that_is_more_than_noise():
    measured = {**RECORDED, "spread": [3.5, 4.9], "frazil_rows_per_s": 1}
    assert quick.record_of(measured)["margin"] == 1.4
    assert quick.record_of({**measured, "spread": [3.9, 4.0]})["margin"] == 0.6
    assert "frazil_rows_per_s" not in quick.record_of(measured)


def test_a_noisy_run_is_not_recorded():
    measured = {"ratio": 4.0, "spread": [3.5, 4.6]}
    assert quick.too_noisy(measured) == (
        "cannot record ratio 4.0: its turns lie between 3.5 and 4.6; repeat on a quiet machine"
    )
    assert quick.too_noisy({**measured, "spread": [3.5, 4.5]}) == ""


def test_a_section_is_written_without_touching_the_other(tmp_path: Path):
    page = tmp_path / report.PAGE
    page.write_text(PAGE)
    points = [point(1, 1.0), point(10, 2.0)]
    dimension = {"title": "Tables", "note": "", "points": points}
    unmeasured = {"title": "Cores", "note": "Not measured.", "points": []}
    dimensions = {
        "tables": {**dimension, **growth.judged("tables", points)},
        "cores": {**unmeasured, **growth.judged("cores", [])},
    }
    measured = {"cores": 2, "versions": {}, "dimensions": dimensions, "flagged": []}
    report.write_growth(tmp_path, measured)
    text = page.read_text()
    assert text.startswith(PAGE.partition("growth\n<!-- /")[0])
    assert text.endswith("<!-- /growth -->\nafter\n")
    assert "Nothing grows faster than its input." in text
    assert "Not measured." in text
    assert "Tables" in (tmp_path / "growth.svg").read_text()
    report.write_section(tmp_path, "peers", "other\n")
    assert page.read_text() == text.replace("\npeers\n", "\nother\n")


def test_a_page_without_the_section_is_refused(tmp_path: Path):
    (tmp_path / report.PAGE).write_text("# Benchmarks\n")
    with pytest.raises(SystemExit, match="expected a line <!-- peers -->"):
        report.write_section(tmp_path, "peers", "")


def test_the_page_in_the_docs_has_both_sections(tmp_path: Path):
    page = Path(__file__).parents[2] / "docs" / report.PAGE
    (tmp_path / report.PAGE).write_text(page.read_text())
    for section in ("peers", "growth"):
        report.write_section(tmp_path, section, "")
