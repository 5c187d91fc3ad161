# Two commands to know: `make demo` and `make test`. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
#: Side by side: the tests wait more than they compute, so two cores run three workers well.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help demo test test-long unit check bench proof lock clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 14

demo: $(READY)  ## broker, pipeline, two SIGKILLs, and the proof (ARGS='--rows 300000 --json')
	@$(BIN)/frazil demo $(ARGS)

test: $(READY) check  ## every test, against real Kafka, Spark and Iceberg
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-long: $(READY)  ## the tests that take their time and that `make test` leaves out
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long $(ARGS)

unit: $(READY)  ## the tests that need no JVM, in seconds
	@$(BIN)/python -m pytest -q tests/unit tests/property $(ARGS)

check: $(READY)  ## lint and types
	@$(BIN)/ruff check . 1>&2
	@$(BIN)/ruff format --check -q . 1>&2
	@$(BIN)/mypy 1>&2

bench: $(READY)  ## measure one thing beside its peer, the last line is JSON: WHAT=append|quick|peers|growth|df|tables|upsert|order|compact|index|audit|service|operator|decode|json_decode|select_columns
	@$(BIN)/python bench/$(or $(FILE_$(WHAT)),$(WHAT)).py $(ARGS)

proof: $(READY)  ## one long proof: WHAT=poison|roundtrip|planted|json_ways|avro_ways|upserts|simulate|faults|chaos|soak (N=…, ARGS='--help')
	@$(BIN)/python bench/$(WHAT).py $(if $(N),$(COUNT_$(WHAT)) $(N)) $(if $(SEED),--seed $(SEED) $(TRACE_$(WHAT))) $(ARGS)

WHAT ?= append
FILE_df := frames
#: A module named operator would hide Python's own.
FILE_operator := operations
#: The option of each proof that takes N.
COUNT_poison := --hostile
COUNT_roundtrip := --count
COUNT_planted := --count
COUNT_json_ways := --records
COUNT_avro_ways := --records
COUNT_simulate := --count
COUNT_chaos := --kills
TRACE_simulate := --trace
N ?= $(KILLS)

# The same by their own names: make bench-upsert, make simulate N=1000000, make chaos KILLS=200.
bench-%:
	@$(MAKE) --no-print-directory bench WHAT=$*

PROOFS := poison roundtrip planted json_ways avro_ways upserts simulate faults chaos soak
.PHONY: $(PROOFS)
$(PROOFS):
	@$(MAKE) --no-print-directory proof WHAT=$@

lock:  ## resolve the dependencies anew (needs uv)
	uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
	  --group dev pyproject.toml -o requirements.lock
	uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
	  --group build -c requirements.lock pyproject.toml -o deploy/container/requirements.lock

clean:  ## remove the environment; jars and class archive in ~/.cache/frazil stay
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
	@$(BIN)/python -m frazil.spark.class_archive
	@$(BIN)/python -m frazil.native.warm_up >/dev/null
	@touch $@
