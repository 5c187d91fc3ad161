"""The comparison as a table for the terminal, and as `benchmarks.md` with a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer_jobs import VERSIONS
from peer_topics import CASES

NAMES = {
    "frazil": "Frazil",
    "spark": "Spark's Kafka source → Iceberg",
    "flink": "Flink SQL → Iceberg sink (V2)",
    "connect": "Iceberg's Kafka Connect sink",
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


def table(measured: dict[str, Any]) -> str:
    """All figures as Markdown tables, one for each topic."""
    parts = []
    for case, sides in measured["cases"].items():
        parts += [f"### {CASES[case]}", "", *_rows(_HEADINGS, _figures(sides)), ""]
    if measured.get("freshness"):
        parts += ["### Freshness", ""]
        heads = ("", "p50, s", "p95, s", "commits")
        fresh = [
            (NAMES[name], f"{of['p50']:.2f}", f"{of['p95']:.2f}", f"{of['commits']}")
            for name, of in measured["freshness"].items()
        ]
        parts += [*_rows(heads, fresh), ""]
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


def _rows(heads: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'---:|' * (len(heads) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def plot(measured: dict[str, Any]) -> str:
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
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {y}" {style}>'
        f'<rect width="720" height="{y}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def write(folder: Path, measured: dict[str, Any]) -> None:
    """`benchmarks.md`: what stands between its two markers, and the plot."""
    (folder / "benchmarks.svg").write_text(plot(measured))
    page = folder / "benchmarks.md"
    head, begin, rest = page.read_text().partition("<!-- peers -->\n")
    _, end, tail = rest.partition("<!-- /peers -->\n")
    versions = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
    body = (
        f"Rows in each topic: {measured['rows']:,}. Cores: {measured['cores']}. {versions}.\n\n"
        "![Rows per second](benchmarks.svg)\n\n" + table(measured)
    )
    page.write_text(head + begin + body + end + tail)
