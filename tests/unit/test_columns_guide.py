"""Every example of docs/guide/columns.md: its config, its records, and their rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from frazil.config.model import from_document, tomllib
from tests.selects import Sent, World

PAGE = (Path(__file__).parents[2] / "docs/guide/columns.md").read_text()
EXAMPLES = re.findall(r"```toml\n(.*?)```\s+```json\n(.*?)```\s+```json\n(.*?)```", PAGE, re.DOTALL)


def test_the_guide_has_its_examples():
    assert len(EXAMPLES) == PAGE.count("```toml") == 6


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_is_what_happens(number: int):
    settings, records, rows = EXAMPLES[number]
    document = tomllib.loads(settings)
    table = document.pop("table", [{"name": "shop.orders"}])
    config = from_document(
        {
            "sink": {"id": "s", "topics": ["events"]},
            "kafka": {"bootstrap.servers": "none:1"},
            "decode": {"format": "json"},
            "catalog": {"type": "rest", "uri": "http://none"},
            "table": table,
            **document,
        }
    )
    world = World(config)
    made = world.send(*map(sent, records.splitlines()), table=table[0]["name"])
    assert [shown(row) for row in made] == [json.loads(line) for line in rows.splitlines()]


def sent(line: str) -> Sent:
    record = json.loads(line)
    if record.keys() != {"key", "headers", "value"}:
        return Sent(line.encode())
    key = record["key"]
    key = json.dumps(key) if isinstance(key, dict) else key
    headers = [(name, text.encode()) for name, text in record["headers"]]
    return Sent(json.dumps(record["value"]).encode(), key and key.encode(), headers)


def shown(value: Any) -> Any:
    """A row as the guide shows it: what JSON has no word for is its text."""
    if isinstance(value, dict):
        return {name: shown(inner) for name, inner in value.items() if name != "_offset"}
    if isinstance(value, list):
        return [shown(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
