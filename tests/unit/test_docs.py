"""What people can set, call or meet stands in the reference; nothing is left to be guessed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import frazil
from frazil import errors
from frazil.accounting import OutcomeCounts
from frazil.cli.commands import app
from frazil.config.model import Config
from frazil.config.sections import (
    CatalogConfig,
    CompletenessConfig,
    DeadLettersConfig,
    DecodeConfig,
    HealthConfig,
    LogConfig,
    MetricsConfig,
    NotifyConfig,
    RouteConfig,
    SinkConfig,
    TableConfig,
    TransformConfig,
)
from frazil.errors import kinds
from frazil.steps import STEPS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/frazil"
SECTIONS = (
    SinkConfig,
    DecodeConfig,
    TransformConfig,
    CatalogConfig,
    TableConfig,
    RouteConfig,
    DeadLettersConfig,
    CompletenessConfig,
    MetricsConfig,
    HealthConfig,
    LogConfig,
    NotifyConfig,
)
FIELDS = [(kind.__name__, f.name) for kind in SECTIONS for f in dataclasses.fields(kind)]
COMMANDS = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
ERRORS = [name for name, kind in kinds().items() if kind.__module__ == errors.__name__]


def text(path: str) -> str:
    return (ROOT / path).read_text()


def names(page: str) -> set[str]:
    """All that stands `in code` on a page, and its first words: `topics = [...]` names topics."""
    spans = re.findall(r"`([^`\n]+)`", page)
    return {*spans, *(re.split(r"[\s=(:]", span)[0] for span in spans)}


def test_the_lists_are_not_empty():
    assert len(FIELDS) > 25
    assert {"run", "audit", "status", "demo"} <= set(COMMANDS)
    assert len(ERRORS) > 10
    assert STEPS


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_every_setting_is_in_the_reference(kind: str, name: str):
    assert name in names(text("docs/reference/config.md")), f"{kind}.{name}"


@pytest.mark.parametrize("section", [f.name for f in dataclasses.fields(Config)])
def test_every_section_is_in_the_reference(section: str):
    heading = {"tables": "[[table]]"}.get(section, f"[{section}]")
    assert heading in text("docs/reference/config.md")


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_default_in_the_reference_is_the_codes(kind: type):
    title = re.search(r"`\[+(\w+)\]+`", kind.__doc__ or "")
    assert title
    page = re.split(r"^## ", text("docs/reference/config.md"), flags=re.MULTILINE)
    (section,) = [block for block in page if re.match(rf"`\[+{title[1]}\]+`\n", block)]
    shown = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", section, re.MULTILINE))
    for field in dataclasses.fields(kind):
        if field.default not in ("", (), dataclasses.MISSING):
            assert shown[field.name].strip().strip('`"') == _shown(field.default), field.name


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_reference(name: str):
    assert re.search(rf"`frazil {name}\b|^#+ .*\b{name}\b", text("docs/reference/cli.md"), re.M)


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_in_the_reference(name: str):
    assert name in names(text("docs/reference/errors.md"))


@pytest.mark.parametrize("step", STEPS)
def test_every_step_of_a_batch_is_in_the_architecture(step: str):
    assert step in names(text("docs/architecture.md"))


MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if path.name != "__init__.py"
}


def first_cells(page: str, heading: str) -> set[str]:
    """What stands `in code` in the first column of the tables under a heading."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_module_is_in_the_architecture_and_no_other():
    listed = first_cells(text("docs/architecture.md"), "Modules")
    listed -= {"frazil", "grammar.lark"}
    assert (MODULES - listed, listed - MODULES) == (set(), set()), "lacking, and gone"


def test_every_package_is_in_the_table_for_contributors_and_no_other():
    listed = first_cells(text("CONTRIBUTING.md"), "The packages")
    tops = {name.partition(".")[0] + "/" * ("." in name) for name in MODULES}
    listed -= {"iceberg/table"}
    assert (tops - listed, listed - tops) == (set(), set()), "lacking, and gone"


def test_every_decision_is_listed():
    listed = text("docs/decisions/README.md")
    notes = sorted(p.name for p in (ROOT / "docs/decisions").glob("*.md") if p.name != "README.md")
    assert notes
    assert [name for name in notes if name not in listed] == []
    assert all(re.fullmatch(r"\d{3}-[a-z0-9-]+\.md", name) for name in notes)


def test_no_decision_is_listed_that_is_not_there():
    for link in re.findall(r"\]\((\d{3}-[^)]+\.md)\)", text("docs/decisions/README.md")):
        assert (ROOT / "docs/decisions" / link).is_file(), link


def test_the_readme_begins_with_the_two_commands():
    head = "\n".join(text("README.md").splitlines()[:40])
    assert "make demo" in head
    assert "make test" in head


def test_nothing_is_left_to_be_filled_in():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    left = [
        (page.name, word)
        for page in pages
        for word in re.findall(r"^[A-Z]{4,}$", page.read_text(), re.M)
    ]
    assert left == []


def test_links_between_the_docs_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link and not (page.parent / link).exists():
                broken.append((str(page.relative_to(ROOT)), link))
    assert broken == []


def test_readme_docs_and_examples_import_nothing_below_the_package():
    """`frazil` is the API; `frazil.testing` has a broker and a generator for users' own tests."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    deeper = [
        (page.name, line)
        for page in pages
        if "decisions" not in page.parts
        for line in re.findall(r"^(?:from|import) frazil\..*$", page.read_text(), re.M)
        if not re.match(r"from frazil\.testing import ", line)
    ]
    assert deeper == []


def test_every_public_name_is_documented():
    guide = text("docs/guide/python.md") + text("docs/guide/tables.md")
    known = set(re.findall(r"(?:`(?:frazil\.)?|frazil\.)(\w+)\b", guide))
    assert [name for name in frazil.__all__ if name not in known] == []
    assert all(hasattr(frazil, name) for name in frazil.__all__)


def test_the_glossary_has_at_most_twelve_words_of_our_own_and_every_outcome():
    own, outcomes = (
        re.findall(r"^\| ([a-z ]+) \|", part, re.M)[1:]
        for part in re.split(
            r"^(?:The outcomes|Words) of ", text("docs/reference/glossary.md"), flags=re.M
        )[:2]
    )
    assert len(own) <= 12
    named = re.findall(r"^\| outcome \| .*?: (.*?) \|$", text("docs/reference/glossary.md"), re.M)
    assert [word.strip() for word in named[0].split(",")] == outcomes
    assert set(outcomes) == {field.name for field in dataclasses.fields(OutcomeCounts)}


def test_words_are_defined_in_the_glossary_alone():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    defining = [
        page.name for page in pages if re.search(r"^\| word \| meaning \|", page.read_text(), re.M)
    ]
    assert defining == ["glossary.md"]


#: Our own words and uses of words on the pages: each is an entry of the glossary, or goes.
OWN = (
    "absorbed",
    "bound",
    "claim",
    "cut",
    "elsewhere",
    "floor",
    "in doubt",
    "invisible",
    "need",
    "portable",
    "replay sink",
    "staged batch",
    "stuck",
)


@pytest.mark.parametrize("word", OWN)
def test_a_word_of_our_own_is_in_the_glossary_or_not_in_use(word: str):
    glossary = text("docs/reference/glossary.md")
    entries = re.findall(r"^\| ([^|]+) \|", glossary, re.M)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if page.name != "glossary.md"]
    using = [p.name for p in pages if re.search(rf"(?<![`\w]){word}(?![`\w])", p.read_text())]
    assert not using or word in ", ".join(entries).split(", ")


#: Coined words of earlier versions, and the word that replaced each.
COINED = {
    "life": "run, epoch",
    "lives": "runs",
    "witness": "tag; source of evidence",
    "witnesses": "tags; sources of evidence",
    "amiss": "unhealthy",
    "leftovers": "orphans",
    "parcel": "shuffle block",
    "told": "recorded, reported",
    "untold": "unknown",
}


@pytest.mark.parametrize("word", COINED)
def test_no_page_uses_a_coined_word_that_the_glossary_lacks(word: str):
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    using = [
        page.name
        for page in pages
        if page.name != "060-packages-as-chapters.md"  # the table of former names
        and re.search(rf"(?<![`\w]){word}(?![`\w])", page.read_text())
    ]
    assert using == []
