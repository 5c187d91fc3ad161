"""Measurements as Markdown tables and SVG plots, and as the sections of `docs/benchmarks.md`.

The page has two sections, the comparison with the peers and the growth of a batch's cost. Each is
written by a bench of its own, and writing one leaves the other as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peer_jobs import VERSIONS
from peer_topics import CASES

PAGE = "benchmarks.md"

NAMES = {
    "frazil": "Frazil",
    "spark": "Spark's Kafka source → Iceberg",
    "flink": "Flink SQL → Iceberg sink (V2)",
    "connect": "Iceberg's Kafka Connect sink",
}
_RATIOS = {
    "to_best_peer": "rows/s by the best peer's",
    "to_spark": "by Spark's",
    "to_own_avro": "by its own of plain Avro",
    "cpu_of_best_peer": "CPU of the best peer by Frazil's",
}
_HEADINGS = (
    "",
    "rows/s warm",
    "(range)",
    "rows/s cold",
    "CPU-s per million",
    "peak MiB",
    "files",
    "MB",
)


_STYLE = 'font-family="sans-serif" font-size="12"'


def write_peers(folder: Path, measured: dict[str, Any]) -> None:
    """The section of the comparison with the peers, and its plot."""
    (folder / "benchmarks.svg").write_text(peers_plot(measured))
    versions = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
    body = (
        f"Rows in each topic: {measured['rows']:,}. Cores: {measured['cores']}. {versions}.\n\n"
        "![Rows per second](benchmarks.svg)\n\n" + peers_table(measured)
    )
    write_section(folder, "peers", body)


def write_growth(folder: Path, measured: dict[str, Any]) -> None:
    """The section of the growth of a batch's cost, and its plot."""
    (folder / "growth.svg").write_text(growth_plot(measured))
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    body = (
        f"Cores: {measured['cores']}. {versions}.\n\n"
        "![Cost per batch](growth.svg)\n\n" + growth_table(measured)
    )
    write_section(folder, "growth", body)


def write_section(folder: Path, section: str, body: str) -> None:
    """Replace what stands between the two markers of a section; the rest of the page stays."""
    head, tail = around(folder, section)
    (folder / PAGE).write_text(head + body + tail)


def around(folder: Path, section: str) -> tuple[str, str]:
    """The page up to the body of a section, and behind it. Raises where it has no such section, so
    that a bench can find out before it measures."""
    page = folder / PAGE
    text = page.read_text() if page.exists() else ""
    head, begin, rest = text.partition(f"<!-- {section} -->\n")
    _, end, tail = rest.partition(f"<!-- /{section} -->\n")
    if not end:
        raise SystemExit(
            f"cannot write {page}: expected a line <!-- {section} --> and <!-- /{section} --> below"
        )
    return head + begin, end + tail


def rows(heads: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """A Markdown table, all columns but the first to the right."""
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'---:|' * (len(heads) - 1)}"
    for line in lines:
        yield f"| {' | '.join(line)} |"


# ── the peers ────────────────────────────────────────────────────────────────────────────────────


def peers_table(measured: dict[str, Any]) -> str:
    """All figures as Markdown tables, one for each topic."""
    parts = []
    for case, sides in measured["cases"].items():
        parts += [f"### {CASES[case]}", "", *rows(_HEADINGS, _figures(sides)), ""]
        if of_case := measured["ratios"].get(case):
            shown = (f"{_RATIOS[name]} {ratio:.2f}" for name, ratio in of_case.items())
            parts += [f"Frazil: {', '.join(shown)}.", ""]
    if measured.get("freshness"):
        parts += ["### Freshness", ""]
        heads = ("", "p50, s", "p95, s", "commits")
        fresh = [
            (NAMES[name], f"{of['p50']:.2f}", f"{of['p95']:.2f}", f"{of['commits']}")
            for name, of in measured["freshness"].items()
        ]
        parts += [*rows(heads, fresh), ""]
    return "\n".join(parts)


def _figures(sides: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, of in sides.items():
        low, high = of["rows_per_s_range"]
        yield (
            NAMES[name],
            f"{of['rows_per_s']:,}",
            f"{low:,}–{high:,}",
            f"{of['rows_per_s_cold']:,}",
            f"{of['cpu_s_per_million']:.2f}",
            f"{of['memory_mib']:,}",
            f"{of['files']}",
            f"{of['bytes'] / 1e6:.1f}",
        )


def peers_plot(measured: dict[str, Any]) -> str:
    """Rows per second of each side on each topic, as bars in SVG."""
    colours = {"frazil": "#1f6feb", "spark": "#e8710a", "flink": "#d6336c", "connect": "#6c757d"}
    top = max(of["rows_per_s"] for sides in measured["cases"].values() for of in sides.values())
    parts, y = [], 24
    for case, sides in measured["cases"].items():
        parts.append(f'<text x="0" y="{y}" font-weight="bold">{CASES[case]}</text>')
        for name, of in sides.items():
            width = max(1, round(420 * of["rows_per_s"] / top))
            parts.append(
                f'<text x="0" y="{y + 19}">{NAMES[name]}</text>'
                f'<rect x="230" y="{y + 8}" width="{width}" height="14" fill="{colours[name]}"/>'
                f'<text x="{236 + width}" y="{y + 19}">{of["rows_per_s"]:,}</text>'
            )
            y += 20
        y += 32
    return _svg(720, y, parts)


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_STYLE}>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )


# ── growth ───────────────────────────────────────────────────────────────────────────────────────

#: What is drawn: key of a point → legend and colour.
_CURVES = {"wall_s": ("wall", "#1f6feb"), "cpu_s": ("CPU", "#e8710a")}


def growth_table(measured: dict[str, Any]) -> str:
    """A table for each dimension: cost and memory of a batch, and how they grew since the line
    before."""
    parts = []
    for name, dimension in measured["dimensions"].items():
        parts += [f"### {dimension['title']}", ""]
        if not dimension["points"]:
            parts += [dimension["note"], ""]
            continue
        heads = (name, "wall, s", "CPU-s", "driver", "JVM", "workers", "peak MiB", "exponents")
        parts += [dimension["note"], "", *rows(heads, _growth_lines(dimension)), ""]
    if measured["flagged"]:
        parts += ["Faster than its input:", "", *(f"- {line}" for line in measured["flagged"]), ""]
    else:
        parts += ["Nothing grows faster than its input.", ""]
    return "\n".join(parts)


def _growth_lines(dimension: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    exponents = [{}, *(growth["exponents"] for growth in dimension["growth"])]
    for point, of in zip(dimension["points"], exponents, strict=True):
        shown = ", ".join(f"{of[key]:.2f}" for key in ("wall_s", "cpu_s", "memory_mib") if of)
        yield (
            f"{point['step']:,}",
            f"{point['wall_s']:.2f}",
            f"{point['cpu_s']:.2f}",
            *(f"{point['cpu_by_part'][part]:.2f}" for part in ("driver", "jvm", "workers")),
            f"{point['memory_mib']:,}",
            shown,
        )


def growth_plot(measured: dict[str, Any]) -> str:
    """A log-log panel for each dimension: cost per batch, and a dashed line that grows with the
    input."""
    width, height, gap = 300, 170, 60
    drawn = [of for of in measured["dimensions"].values() if len(of["points"]) > 1]
    parts = []
    for number, dimension in enumerate(drawn):
        left, top = 50 + number % 2 * (width + gap), 40 + number // 2 * (height + gap + 10)
        parts.append(f'<g transform="translate({left} {top})">')
        parts += _panel(dimension, width, height)
        parts.append("</g>")
    lines = -(-len(drawn) // 2)
    return _svg(2 * width + gap + 80, 40 + lines * (height + gap + 10), parts)


def _panel(dimension: dict[str, Any], width: int, height: int) -> Iterator[str]:
    points = dimension["points"]
    steps = [point["step"] for point in points]
    costs = [max(point[key], 0.001) for point in points for key in _CURVES]
    low, high = min(costs), max(*costs, min(costs) * 2)

    def at(step: float, cost: float) -> str:
        x = width * math.log(step / steps[0]) / math.log(steps[-1] / steps[0])
        y = height * (1 - math.log(max(cost, 0.001) / low) / math.log(high / low))
        return f"{x:.0f},{y:.0f}"

    yield f'<text x="0" y="-10" font-weight="bold">{dimension["title"]}</text>'
    yield f'<path d="M0,0 V{height} H{width}" fill="none" stroke="#999"/>'
    for cost, y in ((high, 4), (low, height)):
        yield f'<text x="-6" y="{y}" text-anchor="end">{cost:.2g} s</text>'
    for step in steps:
        x = at(step, low).partition(",")[0]
        yield f'<text x="{x}" y="{height + 16}" text-anchor="middle">{step:,}</text>'
    # from the lowest cost on, as far as the panel is high
    last = min(steps[-1], steps[0] * high / low)
    proportional = f"{at(steps[0], low)} {at(last, low * last / steps[0])}"
    yield f'<polyline points="{proportional}" fill="none" stroke="#999" stroke-dasharray="4"/>'
    for place, (key, (legend, colour)) in enumerate(_CURVES.items()):
        line = " ".join(at(point["step"], point[key]) for point in points)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{width - 70 + 40 * place}" y="-10" fill="{colour}">{legend}</text>'
