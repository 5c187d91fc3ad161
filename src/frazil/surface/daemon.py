"""Spark's worker daemon with our imports already made: each forked worker starts at once.

Polars stays out: it starts a thread when it is imported, and threads do not survive a fork.
"""

import sys

if __name__ == "__main__":
    assert "polars" not in sys.modules
    from pyspark.daemon import manager

    manager()
