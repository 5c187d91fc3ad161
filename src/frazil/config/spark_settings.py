"""Which settings of `[spark]` concern the whole Spark process, and not one session of it."""

from __future__ import annotations

#: Settings under `spark.sql.` that Spark takes when it starts, and then no more.
STATIC = frozenset(
    f"spark.sql.{name}"
    for name in (
        "broadcastExchange.maxThreadThreshold",
        "cache.serializer",
        "catalog.spark_catalog.defaultDatabase",
        "catalogImplementation",
        "codegen.cache.maxEntries",
        "codegen.comments",
        "debug",
        "defaultUrlStreamHandlerFactory.enabled",
        "event.truncate.length",
        "extensions",
        "extensions.test.loadFromCp",
        "filesourceTableRelationCacheSize",
        "globalTempDatabase",
        "hive.thriftServer.singleSession",
        "legacy.sessionInitWithConfigDefaults",
        "metadataCacheTTLSeconds",
        "queryExecutionListeners",
        "resultQueryStage.maxThreadThreshold",
        "shuffleExchange.maxThreadThreshold",
        "sources.disabledJdbcConnProviderList",
        "sources.schemaStringLengthThreshold",
        "streaming.streamingQueryListeners",
        "streaming.ui.enabled",
        "streaming.ui.enabledCustomMetricList",
        "streaming.ui.retainedProgressUpdates",
        "streaming.ui.retainedQueries",
        "subquery.maxThreadThreshold",
        "ui.retainedExecutions",
        "warehouse.dir",
    )
)


def of_process(key: str) -> bool:
    """Does a setting of `[spark]` concern the whole process? Spark shares the connections of
    `spark.hadoop.…` between sessions, whatever they say of them."""
    return not key.startswith("spark.sql.") or key in STATIC
