"""The real sink in a simulated environment that a seed determines.

`sink`, `commit`, `ledger` and maintenance run as they are, threads included. Their environment is
simulated: catalog, store, clock, Kafka, Spark's calls of `foreachBatch` (`sink_run`, `catalog`).
One thread runs at a time, and which one is drawn (`world`), as are the faults, the other writers,
and when a run dies, pauses, or is taken over from (`schedule`). After every applied commit the
`oracle` compares what a reader sees with the expected rows, by rules of its own. The seed decides
everything: `schedule.run(seed)` gives the same result every time.
"""
