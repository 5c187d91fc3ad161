"""Python on a column: e-mail addresses leave the stream as their domain and a fingerprint.

    python examples/python_udf.py customers.toml

Whole columns go in and come out, by Arrow. The rows keep topic, partition and offset, so every
record is accounted for: written, or left out by the filter.
"""

from __future__ import annotations

import hashlib
import sys

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.functions import arrow_udf, col
from pyspark.sql.streaming.query import StreamingQuery

import frazil


def main(spark: SparkSession, config: frazil.Config) -> StreamingQuery:
    @arrow_udf("string")
    def domain(mail: pa.Array) -> pa.Array:
        return pc.utf8_lower(pc.extract_regex(mail, "@(?P<domain>.+)$").field("domain"))

    @arrow_udf("string")
    def fingerprint(mail: pa.Array) -> pa.Array:
        return pa.array(
            [hashlib.sha256(address.encode()).hexdigest() for address in mail.to_pylist()]
        )

    rows = (
        frazil.read(spark, config)
        .filter(col("email").contains("@"))
        .withColumn("domain", domain("email"))
        .withColumn("fingerprint", fingerprint("email"))
        .drop("email", "_key", "_headers")
    )
    return frazil.write(rows, config).start()


if __name__ == "__main__":
    given = frazil.Config.from_toml(sys.argv[1])
    main(frazil.session(given), given).awaitTermination()
