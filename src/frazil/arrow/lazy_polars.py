"""polars as `pl`, imported at its first use. Runs on executors.

Spark's worker daemon imports all that a task needs before it forks the workers, but not polars:
that starts threads, which do not survive a fork. A worker that uses it imports it, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["pl"]

if TYPE_CHECKING:
    import polars as pl
else:

    class _Polars:
        def __getattr__(self, name: str) -> Any:
            import polars

            return getattr(polars, name)

    pl = _Polars()
