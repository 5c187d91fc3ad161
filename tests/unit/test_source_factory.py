"""Which settings of tables with a key a source takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from frazil.config.model import for_frame
from frazil.errors import ConfigError
from frazil.sources.factory import refuse_keys

UPSERT = {"id": "s", "mode": "upsert", "key": ["id"]}


@pytest.mark.parametrize(
    ("changes", "table", "words"),
    [
        ("records", {**UPSERT, "delete_column": "gone"}, "delete_column is for rows of a query"),
        ("rows", {**UPSERT, "mode": "changelog"}, "its mode is changelog, and only records"),
        ("rows", {**UPSERT, "partitioned_by_key": True}, "partitioned_by_key is for records"),
        ("", UPSERT, "its key may have a newer row than a dead letter"),
        ("", {**UPSERT, "mode": "changelog"}, "its key may have a newer row than a dead letter"),
    ],
)
def test_a_source_refuses_keys_that_it_has_no_use_for(changes: str, table: Any, words: str):
    source = cast(Any, SimpleNamespace(changes=changes))
    with pytest.raises(ConfigError, match=words):
        refuse_keys(for_frame("db.t", "lake", table), source)


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        ("records", {**UPSERT, "partitioned_by_key": True, "version_column": "v"}),
        ("records", {**UPSERT, "mode": "changelog"}),
        ("rows", {**UPSERT, "delete_column": "gone", "version_column": "v"}),
        ("", {"id": "s"}),
    ],
)
def test_a_source_takes_the_others(changes: str, table: Any):
    refuse_keys(for_frame("db.t", "lake", table), cast(Any, SimpleNamespace(changes=changes)))
