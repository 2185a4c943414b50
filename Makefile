# Everything installs into .venv, with the versions of constraints.txt. `make PYTHON=python3.12 test` takes another interpreter.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
CODE := packer loaders recipes tests

help:  ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(INSTALLED)  ## make a small weld set, pack it to tar and memmap, verify, load batches, train a little
	$(BIN)/python recipes/make_welding_v2.py demo-data/raw --num 48
	$(BIN)/pack build --overwrite --recipe recipes/welding_v2.toml --resize 640 --mode letterbox demo-data/raw demo-data/tar
	$(BIN)/pack build --overwrite --recipe recipes/welding_v2.toml --format memmap --resize 640 --mode letterbox demo-data/raw demo-data/memmap
	$(BIN)/pack verify demo-data/tar
	$(BIN)/pack verify demo-data/memmap
	$(BIN)/python recipes/demo.py demo-data/tar demo-data/memmap
	$(BIN)/python recipes/train_detection.py --data demo-data/memmap --epochs 3

test: lint types $(INSTALLED)  ## lint, types and all tests: what CI runs
	$(MAKE) --jobs 2 --keep-going slow fast long

fast: $(INSTALLED)  ## the tests that take little time each
	$(BIN)/python -m pytest -m "not slow and not long"

slow: $(INSTALLED)  ## tests that take seconds
	$(BIN)/python -m pytest -m "slow and not long"

long: $(INSTALLED)  ## tests that take most of a minute, or whole files of slow ones
	$(BIN)/python -m pytest -m long

lint: $(INSTALLED)  ## ruff: rules and format
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(INSTALLED)  ## mypy, strict
	$(BIN)/mypy packer loaders recipes

bench: $(INSTALLED)  ## loading against peers, packing against bare loops: BENCH="--list", "--install", "memmap224 --rounds 3", ...
	$(BIN)/python recipes/benchmarks/run.py $(BENCH)

robustness: $(INSTALLED)  ## kill and resume, mutations, what users see, a million rows and 100,000 files, each with its figure: a quarter of an hour
	$(BIN)/python recipes/robustness/kill_and_resume.py
	$(BIN)/python recipes/robustness/mutations.py
	$(BIN)/python recipes/robustness/what_users_see.py
	$(BIN)/python recipes/robustness/scale.py

fuzz: $(INSTALLED)  ## hostile bytes for every reader, one minute; longer: see README
	$(BIN)/python recipes/robustness/fuzz.py --seconds 60

clean:  ## remove everything that make made, .venv too
	rm -rf .venv .bench demo-data fuzz-failures build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.PHONY: help demo test fast slow long lint types bench robustness fuzz clean
