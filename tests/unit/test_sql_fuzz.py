"""Whatever is typed: statements, or an error with line, column and the line itself. Never another
exception, never a secret."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.errors import ConfigError, SqlError
from frazil.sql.completion import complete
from frazil.sql.definition_changes import apply
from frazil.sql.definition_files import decoded
from frazil.sql.definitions import MemoryStore
from frazil.sql.parser import is_open, keywords
from frazil.sql.source_text import masked
from frazil.sql.statements import Alter, Create, Drop
from frazil.sql.tree_reader import read_statements

GOOD = """CREATE SECRET pass AS 'env:PASSWORD';
CREATE CONNECTION k TO KAFKA (BROKER 'b:1', SASL PASSWORD = SECRET pass, 'client.id' = 'it''s');
CREATE CONNECTION reg TO CONFLUENT SCHEMA REGISTRY (URL 'http://r', USER 'u', PASSWORD SECRET pass);
CREATE CONNECTION a TO AWS (ACCESS KEY ID = 'x', SECRET ACCESS KEY = SECRET pass, REGION 'eu');
CREATE CONNECTION cat TO ICEBERG CATALOG (TYPE = 'rest', URI 'http://c', AWS CONNECTION = a);
CREATE OR REPLACE VIEW v AS SELECT `a;b`, "c" /* x */ FROM KAFKA CONNECTION k (TOPIC 'o') FORMAT
  AVRO USING CONFLUENT SCHEMA REGISTRY CONNECTION reg (KEY FORMAT 'text') o WHERE a > 5 -- end
;
CREATE SINK IF NOT EXISTS s FROM v TO ICEBERG CATALOG cat USING AWS CONNECTION a NAMESPACE 'shop'
  TABLE 'orders' (SORT BY = (x desc)) PARTITION BY (day(at), bucket(16, id)) WITH (TRIGGER '5s',
  PROPERTIES = MAP ['a.b' => 'c'], STARTING OFFSETS = MAP ['t' => MAP ['0' => 17]], PRIORITY 3);
CREATE SINK r FROM KAFKA CONNECTION k (TOPIC PATTERN 'o.*') FORMAT JSON ENVELOPE DEBEZIUM
  TO ICEBERG CATALOG cat TABLE 'a.b', TABLE 'a.c' ROUTE WHEN x.y IN ('1', 2, TRUE) AND TOPIC = 'o'
  TO TABLE 'a.c' ROUTE WHEN HEADER 'h' IS NOT NULL SKIP ROUTE ELSE REJECT DEAD LETTERS TABLE 'a.d';
ALTER SINK s SET (COMMIT INTERVAL = '20m', MAX TABLES 1.5e+3); ALTER SINK s RESET (PRIORITY);
ALTER CONNECTION k SET (CLIENT ID 'y'); SHOW SINKS; SHOW CREATE SINK "s"; DESCRIBE SINK s;
EXPLAIN SINK s; VALIDATE CONNECTION k; START SINK s; STOP SINK r; AUDIT SINK s;
DROP SINK IF EXISTS r;
"""
PIECES = [*re.findall(r"\w+|\s+|'[^']*'|.", GOOD), *sorted(keywords())]
PIECES += [
    "''",
    "'",
    '"',
    "`",
    "/*",
    "*/",
    "--",
    "\0",
    "\N{ZERO WIDTH SPACE}",
    "é",
    "=>",
    "\x1b[2J",
]
PIECES += ["99999999999999999999999999999999999999999999", "1e999", "-", "(" * 60, "[" * 60, "\r\n"]


def check(text: str) -> None:
    """Parses, executes, completes and masks; anything but an error with its place fails."""
    store = MemoryStore()
    error: SqlError | None = None
    try:
        for statement in read_statements(text, "x.sql"):
            if isinstance(statement, Create | Alter | Drop):
                apply(store, statement)
    except SqlError as caught:
        error = caught
    if error is not None:
        place = re.search(r"(?:x|\w+s/[^:]+)\.sql:(\d+):(\d+)", error.message)
        assert place, error.message
        assert int(place[1]) >= 1
        assert int(place[2]) >= 1
        lines = error.excerpt.split("\n")
        assert len(lines) == 2, error.excerpt
        assert lines[1].strip() == "^"
        assert all(character.isprintable() for line in lines for character in line)
    assert is_open(text) in (True, False)
    complete(text[: len(text) // 2], {})
    masked(text)


def mutated(generator: random.Random) -> Iterator[str]:
    statements = GOOD.split(";\n")
    for _ in range(300):
        text = ";".join(generator.sample(statements, generator.randint(1, 3)))
        pieces = re.findall(r"\w+|\s+|'[^']*'|.", text, re.DOTALL)
        for _ in range(generator.randint(1, 6)):
            at = generator.randrange(len(pieces) or 1)
            change = generator.randrange(5)
            if not pieces or change == 1:
                pieces.insert(at, generator.choice(PIECES))
            elif change == 0:
                pieces[at] = generator.choice(PIECES)
            elif change == 2 and len(pieces) > 1:
                del pieces[at]
            elif change == 3:
                end = generator.randrange(len(pieces))
                pieces[at], pieces[end] = pieces[end], pieces[at]
            else:
                pieces = pieces[: at + 1]
        yield "".join(pieces)


def test_the_statements_to_start_from_are_good():
    store = MemoryStore()
    for statement in read_statements(GOOD):
        if isinstance(statement, Create):
            apply(store, statement)
    assert len(store.definitions.objects) == 8


@pytest.mark.parametrize("seed", range(2))
def test_mutated_statements_are_errors_with_a_place(seed: int):
    for text in mutated(random.Random(seed)):
        check(text)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
)
def test_any_text_is_an_error_with_a_place(text: str):
    check(text)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_an_error_with_a_place(content: bytes):
    try:
        text = decoded("x.sql", content)
    except ConfigError:
        text = content.decode("latin-1")
    check(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 20_000,
        "CREATE CONNECTION k TO KAFKA (A = " + "[" * 20_000,
        "CREATE CONNECTION k TO KAFKA (A = MAP " + "['a' => " * 3_000 + "1" + "]" * 3_000 + ")",
        "CREATE SINK s FROM KAFKA CONNECTION k (TOPIC 'o') TO ICEBERG CATALOG c TABLE 'a.b' KEY ("
        + "f(" * 3_000
        + ")" * 3_001,
        "/*" * 50_000,
        "SHOW SINKS;" * 5_000,
        "CREATE VIEW v AS SELECT " + "x, " * 50_000,
        "'" + "''" * 100_000,
    ],
    ids=lambda text: text[:30],
)
def test_deep_and_long_texts_are_read_in_time_or_refused(text: str):
    check(text)


def test_no_secret_is_in_an_error(tmp_path: Path):
    """Wherever the statement breaks."""
    good = "CREATE CONNECTION x TO KAFKA (BROKER 'b', SASL PASSWORD = 'hunter2', CLIENT ID 'y')"
    generator = random.Random(5)
    for _ in range(400):
        at, piece = generator.randrange(len(good)), generator.choice(PIECES)
        begin = good.index("SASL")
        if begin <= at < good.index("hunter2") + 8:
            continue  # what is broken there is not known as a password any more
        text = good[:at] + piece + good[at:]
        errors = []
        try:
            read_statements(text, "x.sql")
        except SqlError as error:
            errors.append(str(error))
        assert "hunter2" not in "".join(errors), text
