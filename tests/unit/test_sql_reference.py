"""The SQL pages say what the grammar and the option tables say, and their examples work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from frazil.sql.connections import CATALOGS, TYPES, known_options
from frazil.sql.definition_set import config_of
from frazil.sql.definitions import file_definitions
from frazil.sql.option_names import option_names, setting_of
from frazil.sql.parser import keywords
from frazil.sql.tree_reader import read_statements

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs/reference/sql.md").read_text()
GUIDE = (ROOT / "docs/guide/sql.md").read_text()
GRAMMAR = (ROOT / "src/frazil/sql/grammar.lark").read_text()


def options(after: str) -> dict[str, str]:
    """Option → setting, of the table behind a sentence."""
    rows = REFERENCE.partition(after)[2].partition("|---|---|\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", rows, re.MULTILINE))


@pytest.mark.parametrize(
    ("after", "scopes"),
    [
        ("those behind `FORMAT`", ("decode",)),
        ("Options of a route", ("route",)),
        ("Options behind `WITH`", ("sink", "table")),
    ],
)
def test_every_option_is_in_its_table_with_its_setting(after: str, scopes: tuple[str, ...]):
    listed = options(after)
    assert list(listed) == list(option_names(scopes))
    for name, shown in listed.items():
        section, key = setting_of(tuple(name.split()), "", scopes)
        assert shown.split() == [shown.split()[0], key]
        assert shown.split()[0].strip("[]") == section


def test_every_option_of_a_connection_is_in_its_row():
    for kind, (words, _) in TYPES.items():
        row = next(line for line in REFERENCE.splitlines() if line.startswith(f"| `{words}` |"))
        assert {f"`{option}`" for option in known_options(kind)} <= set(re.findall(r"`[^`]+`", row))
    assert all(f"`{kind}`" in REFERENCE for kind in CATALOGS)


def test_every_keyword_is_in_the_reference():
    words = set(re.findall(r"[A-Z]+", REFERENCE))
    assert keywords() - words == set()


def test_every_statement_is_in_the_reference():
    begun = re.findall(r"^\w+: (_[A-Z]+(?: _[A-Z]+)*)", GRAMMAR, re.MULTILINE)
    begun += re.findall(r"^\s+\| (_SHOW _[A-Z]+)", GRAMMAR, re.MULTILINE)
    statements = [words.replace("_", "") for words in begun if words.split()[0][1:] in VERBS]
    assert len(statements) >= 12
    for words in statements:
        first, *rest = words.split()
        lines = [line for line in REFERENCE.splitlines() if f"`{first} " in line]
        assert any(all(word in line for word in rest) for line in lines), words


VERBS = {"CREATE", "DROP", "ALTER", "SHOW", "DESCRIBE", "EXPLAIN", "VALIDATE", "START", "STOP"}
VERBS |= {"AUDIT"}


def test_the_statements_of_the_guide_make_configs():
    blocks = re.findall(r"```sql\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 4
    text = (
        "\n".join(blocks)
        + """
        CREATE SINK hours FROM per_hour TO ICEBERG CATALOG lake TABLE 'shop.hours'
        WITH (CHECKPOINT LOCATION '/c')"""
    )
    objects = file_definitions(text, Path("guide.sql")).objects
    ways = {name: bool(config_of(objects, name)[0].transform) for _, name in objects if _ == "sink"}
    assert ways == {"orders": False, "big": True, "by_country": True, "hours": True}
    assert config_of(objects, "by_country")[0].transform.output_mode == "update"


def test_statements_in_the_console_examples_can_be_read():
    for text in re.findall(r"""frazil sql -c (?:"([^"]+)"|'([^']+)')""", GUIDE):
        assert read_statements("".join(text))
