"""What failed attempts left behind: listed, and removed on request. Never anything live.

A file of ours says in its name which sink, life and batch made it. It is a leftover if its life is
over (an older epoch than the ledger's newest: fenced, so it can never be committed), no snapshot
refers to it, and no staged batch that may still be committed does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from frazil.ingest.stage import StagedBatch


def leftovers(
    paths: Iterable[str],
    *,
    sink: str,
    epoch: int,
    referenced: Iterable[str],
    staged: Iterable[StagedBatch],
) -> list[str]:
    """Those of `paths` that lives of `sink` before `epoch` made and nothing needs."""
    ours = re.compile(
        rf"frazil-{re.escape(sink)}-(\d+)-(\d+)-[0-9a-f-]{{36}}(-m0)?\.(parquet|avro)"
    )
    kept = {_plain(path) for path in referenced}
    waiting = {(batch.epoch, batch.number) for batch in staged}
    found = []
    for path in paths:
        name = ours.fullmatch(path.rsplit("/", 1)[-1])
        if name is None or int(name[1]) >= epoch or _plain(path) in kept:
            continue
        if (int(name[1]), int(name[2])) not in waiting:
            found.append(path)
    return found


def _plain(path: str) -> str:
    """One spelling for a local path, which Hadoop and Python write differently."""
    return re.sub(r"^file:/+", "/", path)
