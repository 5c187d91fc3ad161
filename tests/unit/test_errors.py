from __future__ import annotations

import pickle
import re

import pytest

from frazil import errors
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Expired,
    Fatal,
    Fenced,
    FrazilError,
    Gap,
    Retryable,
    SchemaMismatch,
    Undecodable,
    Unroutable,
    Unwritable,
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
    special = {"FrazilError": 1, "ConfigError": 2, "SqlError": 2, "NotProven": 3, "Fenced": 4}
    for name, kind in OURS.items():
        again = issubclass(kind, (Retryable, CommitStateUnknown))
        assert kind.exit_code == special.get(name, 75 if again else 5), name
    assert issubclass(Fenced, Fatal)
    assert not issubclass(ConfigError, (Retryable, Fatal))


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (
            Undecodable("cannot decode t[3] offset 17: no JSON: 'canary' (and 2 more of 9)"),
            "cannot decode t[3] offset 17",
        ),
        (
            Undecodable("cannot read t[3] from offset 17 on: ValueError: canary"),
            "cannot read t[3] from offset 17 on",
        ),
        (
            Unroutable("cannot route t[3] offset 17: no rule takes kind = 'canary'"),
            "cannot route t[3] offset 17",
        ),
        (
            SchemaMismatch(
                "cannot write t[0] offset 1: cannot fit db.t: column 'price' does not fit; "
                "the table has int32, the record string: Failed to parse canary"
            ),
            "cannot write t[0] offset 1: column 'price'",
        ),
        (
            Unwritable("cannot write to table db.t: ArrowInvalid: canary; the records are unknown"),
            "cannot write to table db.t",
        ),
        (
            Fatal(
                "cannot read t[0]: more than 100 of 900 records kill it; one at offset 5: canary"
            ),
            "cannot read t[0]",
        ),
        (
            Fatal("cannot route by rules.py:way: KeyError: 'canary' (rules.py:4)"),
            "cannot route by rules.py",
        ),
        (
            FrazilError(
                "cannot continue: Spark stopped the stream: [CAST_INVALID_INPUT] The canary"
            ),
            "cannot continue: Spark stopped the stream: [CAST_INVALID_INPUT]",
        ),
        (
            FrazilError(
                "cannot continue: Spark stopped the stream: java.lang.SomeException: canary"
            ),
            "cannot continue: Spark stopped the stream: java.lang.SomeException",
        ),
        (FrazilError("cannot commit: ValueError: canary"), "cannot commit: ValueError"),
        (FrazilError("canary without our form: canary"), "canary without our form"),
    ],
)
def test_a_log_has_place_and_class_of_an_error_and_no_value(error: FrazilError, kept: str):
    kind = type(error).__name__
    assert error.log_text == f"{kept} ({kind}; values are not logged)"


@pytest.mark.parametrize(
    "error",
    [
        Gap("cannot go on: t[0] [5, 9) is missing"),
        SchemaMismatch("cannot write to the index db.i: it lacks a column"),
        Fatal("cannot read table db.t: expected a format version up to 3, found 4"),
        Fenced("cannot commit to table db.t: sink s has a newer run"),
    ],
)
def test_an_error_that_quotes_no_record_is_logged_whole(error: FrazilError):
    assert error.log_text == error.message


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
