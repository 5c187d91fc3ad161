"""The real sink in a world that is made of a seed.

`sink.py`, `life.py`, `commit.py`, `committer.py`, `ledger.py`, `tables.py`, `maintain.py` and
`compact.py` run as they are, threads included. What they stand on is simulated: catalog, store,
clock, Kafka, Spark's driving of batches (`life`, `catalog`). One thread runs at a time and which
one is drawn (`world`), as is what fails, who else writes, when a life dies, stops, or is taken over
(`schedule`). After every commit that is applied the `oracle` compares what a reader sees with what
should be there, by rules of its own. One number decides everything: `schedule.run(seed)` twice is
twice the same.
"""
