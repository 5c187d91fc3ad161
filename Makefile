# Two commands to know: `make demo` and `make test`. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-long unit check bench bench-df bench-tables bench-upsert bench-audit poison planted upserts simulate faults chaos soak lock clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 14

demo: $(READY)  ## broker, pipeline, two SIGKILLs, and the proof (ARGS='--rows 300000 --json')
	@$(BIN)/frazil demo $(ARGS)

test: $(READY) check  ## every test, against real Kafka, Spark and Iceberg
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-long: $(READY)  ## the tests that take their time and that `make test` leaves out
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m long $(ARGS)

unit: $(READY)  ## the tests that need no JVM, in seconds
	@$(BIN)/python -m pytest -q tests/unit tests/property $(ARGS)

check: $(READY)  ## lint and types
	@$(BIN)/ruff check . 1>&2
	@$(BIN)/ruff format --check -q . 1>&2
	@$(BIN)/mypy 1>&2

bench: $(READY)  ## Frazil against Spark's own way, one run; the last line is JSON
	@$(BIN)/python bench/append.py $(ARGS)

bench-df: $(READY)  ## the same for DataFrames: frazil.write and frazil.read against Spark's own
	@$(BIN)/python bench/frames.py $(ARGS)

bench-tables: $(READY)  ## one stream into a thousand tables: what a table costs, and at rest
	@$(BIN)/python bench/tables.py $(ARGS)

bench-upsert: $(READY)  ## upserts against MERGE INTO, with and without maintenance, and full scans after them
	@$(BIN)/python bench/upsert.py $(ARGS)

bench-audit: $(READY)  ## the audit of a billion rows in 100,000 batches, from metadata alone
	@$(BIN)/python bench/audit.py $(ARGS)

poison: $(READY)  ## hostile records among good ones: every good one exact, every bad one told once (N=1000000)
	@$(BIN)/python bench/poison.py --hostile $(or $(N),1000000) $(ARGS)

roundtrip: $(READY)  ## random schemas from bytes to data files and back: every value equal, every bound true (N=20000, ARGS='--engines 500' for tables by Spark)
	@$(BIN)/python bench/roundtrip.py --count $(or $(N),20000) $(ARGS)

planted: $(READY)  ## corruption planted in tables that were well: all of it found, and nothing else (N=2000)
	@$(BIN)/python bench/planted.py --count $(or $(N),2000) $(ARGS)

upserts: $(READY)  ## 5M changes, kills at every step, compaction and expiry: every snapshot exact, by two engines
	@$(BIN)/python bench/upserts.py $(ARGS)

simulate: $(READY)  ## the real committer in seeded worlds full of faults; planted bugs are caught (N=100000, SEED=17)
	@$(BIN)/python bench/simulate.py --count $(or $(N),100000) $(if $(SEED),--seed $(SEED) --trace) $(ARGS)

faults: $(READY)  ## every fault of a REST catalog at every commit: what is in the table afterwards, ours and others'
	@$(BIN)/python bench/faults.py $(ARGS)

chaos: $(READY)  ## random kills of driver, worker, broker and catalog; every offset compared meanwhile (KILLS=10)
	@$(BIN)/python bench/chaos.py --kills $(or $(KILLS),10) $(ARGS)

soak: $(READY)  ## a sink with default settings for 30 minutes: nothing grows that must not (ARGS='--commit-interval 1s')
	@$(BIN)/python bench/soak.py $(ARGS)

lock:  ## resolve the dependencies anew (needs uv)
	uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
	  --group dev pyproject.toml -o requirements.lock

clean:  ## remove the environment; the jar cache in ~/.cache/frazil stays
	rm -rf $(VENV)

$(READY): requirements.lock pyproject.toml
	@command -v java >/dev/null || [ -n "$$JAVA_HOME" ] || { echo "frazil needs Java 17: install it, for example with: apt-get install -y openjdk-17-jre-headless" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "frazil needs Python 3.10 or newer; found $$($(PYTHON) --version); set PYTHON=python3.x" >&2; exit 2; }
	@echo "setting up $(VENV) from requirements.lock (a minute or two, once)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check --require-hashes -r requirements.lock 1>&2
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . 1>&2
	@echo "fetching the jars of Iceberg and Kafka (once)" >&2
	@$(BIN)/python -m frazil.spark.jars
	@touch $@
