from __future__ import annotations

import pickle
import re

import pytest

from frazil import errors
from frazil.errors import (
    ConfigError,
    Expired,
    Fatal,
    Fenced,
    FrazilError,
    Gap,
    Retryable,
    SchemaMismatch,
    encode_for_spark,
    from_traceback,
    kinds,
)

OURS = {name: kind for name, kind in kinds().items() if kind.__module__ == errors.__name__}


def drawn() -> dict[str, str | None]:
    """Class → parent, as the module's docstring draws it."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        parsed = re.fullmatch(r"    ((?:│   |    )*)(├── |└── )?([A-Z]\w+)(?:  .*)?", line)
        if not parsed:
            continue
        depth = len(parsed[1]) // 4 + bool(parsed[2])
        path[depth:] = [parsed[3]]
        parents[parsed[3]] = path[depth - 1] if depth else None
    return parents


def test_the_tree_that_is_drawn_is_the_tree_that_is_there():
    actual = {name: kind.__mro__[1].__name__ for name, kind in OURS.items()}
    assert drawn() == {**actual, "FrazilError": None}


def test_every_error_says_what_the_operator_must_do():
    for name in OURS:
        if name != "FrazilError":
            assert re.search(rf"── {name}  +\w", errors.__doc__ or ""), name


def test_an_error_shows_its_hint_on_a_line_of_its_own():
    assert str(Gap("cannot go on", hint="look")) == "cannot go on\nhint: look"
    assert str(Gap("cannot go on")) == "cannot go on"


@pytest.mark.parametrize("kind", OURS.values())
def test_an_error_survives_pickling(kind: type[FrazilError]):
    back = pickle.loads(pickle.dumps(kind("cannot x: 'a'\nb", hint='do "y"')))
    assert type(back) is kind
    assert (back.message, back.hint) == ("cannot x: 'a'\nb", 'do "y"')


def test_the_exit_code_says_whether_a_person_is_needed():
    assert {name: kind.exit_code for name, kind in OURS.items() if kind.exit_code != 1} == {
        "ConfigError": 2,
        "NotProven": 3,
        "Fenced": 4,
    }
    assert issubclass(Fenced, Fatal)
    assert not issubclass(ConfigError, (Retryable, Fatal))


SPARK = """\
[STREAM_FAILED] Query [id = 4d1c, runId = 9a] terminated with exception: Job aborted due to stage \
failure: Task 0 in stage 3.0 failed 1 times, most recent failure: Lost task 0.0 in stage 3.0 \
(TID 9) (localhost executor driver): org.apache.spark.api.python.PythonException: Traceback (most \
recent call last):
  File "/lib/pyspark/worker.py", line 2044, in main
    process()
  File "/src/frazil/pipeline/task.py", line 116, in run_all
    raise across(error) from None
RuntimeError: {line}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handle(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840) [info] ["not", "this"]
Driver stacktrace: SQLSTATE: XXKST
"""


@pytest.mark.parametrize("kind", OURS.values())
@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("cannot go on: a[0] [5, 9) is missing", ""),
        ('cannot read "a\\b" and \'c\': {"x": [1, 2]}', 'say "yes"'),
        ("first line\nsecond line\r\n\ttab", "one\ntwo"),
        ("unter Öl \u2028 ✓ \x00", "→"),
        ("frazil-error:[]", "]"),
    ],
)
def test_an_error_is_found_again_in_sparks_traceback(
    kind: type[FrazilError], message: str, hint: str
):
    text = SPARK.replace("{line}", str(encode_for_spark(kind(message, hint=hint))))
    error = from_traceback("x" * 10_000 + text + text)
    assert type(error) is kind
    assert (error.message, error.hint) == (message, hint)


def test_what_spark_adds_on_the_same_line_does_not_hide_the_error():
    text = f"{encode_for_spark(Expired('cannot go on', hint='look'))} [SQLSTATE: 38000]"
    assert isinstance(from_traceback(text), Expired)


def test_an_error_that_leaves_a_worker_is_one_line():
    assert "\n" not in str(encode_for_spark(SchemaMismatch("a\nb", hint="c\nd")))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "java.lang.OutOfMemoryError: [heap]",
        "frazil-error:",
        'frazil-error:["Gap", "torn',
        'frazil-error:["Gap", ]',
        'frazil-error:["Gap"]',
    ],
)
def test_a_text_that_holds_none_of_ours_gives_none(text: str):
    assert from_traceback(text) is None


def test_an_error_of_a_newer_version_is_still_an_error():
    error = from_traceback('frazil-error:["Novel", "cannot x", "y"]')
    assert type(error) is FrazilError
    assert str(error) == "cannot x\nhint: y"
