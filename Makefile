# Each target does its own set-up: a fresh clone needs only Python 3.11, make and the package registry.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ROOMS  := topology proto farhop regional_lb global_lb farhop_lab farhop_cli

.PHONY: demo test lint bench fuzz stubs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q $(ROOMS)  # a world is a dozen processes, and some machines keep no bytecode
	@touch $@

demo: $(STAMP)
	$(BIN)/farhop demo

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

bench: $(STAMP)
	$(BIN)/farhop bench

# A million heads, bodies and answers: a night's run. `make fuzz ROUNDS=1000 SEED=7` runs fewer, from a seed.
fuzz: $(STAMP)
	$(BIN)/python tests/security/fuzz_night.py --rounds $(or $(ROUNDS),1000000) $(if $(SEED),--seed $(SEED)) --jobs $(or $(JOBS),2)

stubs: $(STAMP)
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV)
