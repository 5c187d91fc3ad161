"""A child whose sink forgets a file of each run's second batch: written, counted, never staged."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from frazil.commit.staging import Staging
from frazil.testing import process

staged = Staging._staged_table
seen: set[int] = set()


def forgetful(self: Staging, name: str, written: Any, commit_id: str) -> Any:
    seen.add(self._stream.number)
    kept = written.files[1:] if len(seen) == 2 else written.files
    return staged(self, name, replace(written, files=kept), commit_id)


if __name__ == "__main__":
    Staging._staged_table = forgetful  # type: ignore[method-assign]
    os._exit(process.main())
