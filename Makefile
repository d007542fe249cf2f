# Each target does its own set-up: a fresh clone needs only Python 3.11 or newer, make and the package registry.
# PYTHON: the newest that runs here. A shim that only says which versions there are does not run, and is passed over.
PYTHON ?= $(shell for python in python3.14 python3.13 python3.12 python3.11 python3; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PACKAGES  := topology proto farhop regional_lb global_lb entry_dns entry_anycast farhop_drill farhop_lab farhop_cli

# Tests that need more than a plain machine are marked with what they need (tests/conftest.py).
SYSTEM := docker or root or browser or history or envoy or chaos
# Nor real engines: `make engines` installs them outside of $(VENV), `make test-engines` runs what needs them.
APART  := $(SYSTEM) or engines
# Tests wait more than they work: on 2 cores six workers take 197 s where four take 260, and the same CPU time.
WORKERS ?= 6
# What share of its examples a test of a property plays in `make test` and `make coverage`; `make test-system` plays all.
EXAMPLES ?= 0.1

.PHONY: demo test test-system coverage mutants lint bench fuzz stubs engines test-engines engine-pages image dist deploy chart chart-tools chaos-tools screenshots clean

$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'Farhop needs Python 3.11 or newer: $(if $(PYTHON),$(PYTHON) is not one,none is on the PATH).' \
	    'Install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q $(PACKAGES)  # a world is a dozen processes, and some machines keep no bytecode
	@touch $@

demo: $(STAMP)
	$(BIN)/farhop demo

# Each worker reads every test file, and pytest's own rewriting of them is most of that: it is done once and kept. So is
# Hypothesis' table of all letters, which takes a second.
TESTS_STAMP := $(VENV)/.tests-compiled
$(TESTS_STAMP): $(STAMP) $(shell find tests -name '*.py')
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only -qq > /dev/null || true  # what is wrong is told below
	$(BIN)/python -c 'from hypothesis.internal import charmap; charmap.charmap(); charmap.intervals_from_codec("utf-8")'
	@touch $@

test: $(TESTS_STAMP)
	PYTHONDONTWRITEBYTECODE= FARHOP_EXAMPLES=$(EXAMPLES) \
	  $(BIN)/pytest -n $(WORKERS) -m 'not (long or $(APART))'

# vLLM's CPU build, llama.cpp's server, tiny models for them, and others' clients: some 16 GB. Nothing else needs them.
engines:
	$(PYTHON) tests/engines/install.py

# One after another: engines start in minutes where others compute beside them. No dump before that.
test-engines: $(STAMP)
	$(BIN)/pytest -n 0 -o faulthandler_timeout=900 -m engines tests/engines tests/drills

# What they say, written down for the tests that run without them (tests/pages).
engine-pages: $(STAMP)
	$(BIN)/python tests/engines/capture.py

# pytest ends with 5 where no test is marked so: then there is nothing to do. Building images takes minutes: no dump before.
# One at a time: two at once took as long (608 s, one alone 662), as images and worlds need both cores.
# Then the tests of properties, with all the examples that they name, and the long ones: not beside them, as hold timers and
# health checks of others' programs are late where everything computes. These compute more than they wait: four workers.
test-system: $(TESTS_STAMP)
	@$(BIN)/pytest -o faulthandler_timeout=600 --durations=12 -m '$(SYSTEM)'; ended=$$?; \
	  if [ $$ended = 5 ]; then echo 'No test needs $(SYSTEM): nothing to do.'; \
  elif [ $$ended != 0 ]; then exit $$ended; fi
	$(BIN)/pytest -n 4 -m '(hypothesis or long) and not ($(APART))'

# Lines and branches, by the tests that mirror what ships: minutes. `make coverage TESTS=tests` takes all but the drills,
# which a tracer slows beyond what they are about, and whose killed processes would tell nothing. Two figures: what
# ships, and the lab (by these tests, so without its own it is low).
coverage: TESTS ?= tests/topology tests/proto tests/farhop tests/global_lb tests/regional_lb tests/entry_dns tests/entry_anycast tests/farhop_cli
coverage: $(STAMP)
	rm -f .coverage .coverage.*
	FARHOP_EXAMPLES=$(EXAMPLES) $(BIN)/coverage run -m pytest -n $(WORKERS) -m 'not ($(APART))' --ignore=tests/drills $(TESTS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered --skip-empty --sort=cover
	@echo "Covered of what ships: $$($(BIN)/coverage report --format=total --omit='farhop_lab/*') % of lines and branches."
	@echo "Covered of the lab: $$($(BIN)/coverage report --format=total --include='farhop_lab/*') % of lines and branches."

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

# The console's views on the demo world, for the README and docs/operate/console.md; needs chromium and chromedriver.
screenshots: $(STAMP)
	PYTHONPATH=. $(BIN)/python tests/screenshots.py

# Small changes to the law, the ledger, the retry rules and the hop token: is each noticed? Survivors: tests/mutants.md.
mutants: $(STAMP)
	$(BIN)/python tests/mutants.py

bench: $(STAMP)
	$(BIN)/farhop bench decide

# A million heads, bodies and answers: a night's run. `make fuzz ROUNDS=1000 SEED=7` runs fewer, from a seed.
fuzz: $(STAMP)
	$(BIN)/python tests/security/fuzz_night.py --rounds $(or $(ROUNDS),1000000) $(if $(SEED),--seed $(SEED)) --jobs $(or $(JOBS),2)
	$(BIN)/python tests/security/fuzz_dns.py --rounds $(or $(ROUNDS),1000000) $(if $(SEED),--seed $(SEED))

stubs: $(STAMP)
	$(BIN)/python proto/generate.py

# The container image of every role (deploy/image); needs Docker. BASE is an image with the Python that made $(VENV).
image: $(STAMP)
	$(BIN)/python deploy/image/build.py $(if $(BASE),--base $(BASE)) $(if $(EXTRAS),--extras $(EXTRAS)) --tag $(or $(TAG),farhop:latest)

# Wheel and source distribution in dist/, their metadata checked, the wheel installed alone and a tier started from it.
dist: $(STAMP)
	$(BIN)/python deploy/dist.py

# What in deploy/ is generated from the metrics that there are: dashboards, and the rules in the chart.
deploy: $(STAMP)
	$(BIN)/python deploy/grafana/generate.py

# The plain manifest, rendered from the chart. Its tools stand in an environment of their own, as they are large.
CHART := .venv-chart
chart-tools: $(CHART)/.installed
$(CHART)/.installed: deploy/kubernetes/requirements.txt
	$(PYTHON) -m venv $(CHART)
	$(CHART)/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/kubernetes/requirements.txt
	@touch $@

# Chaos Toolkit, which runs the experiments that `farhop drill export` writes: it pins what we use, too, to other versions.
CHAOS := .venv-chaos
chaos-tools: $(CHAOS)/.installed
$(CHAOS)/.installed:
	$(PYTHON) -m venv $(CHAOS)
	$(CHAOS)/bin/python -m pip install --quiet --disable-pip-version-check 'chaostoolkit>=1.19,<2'
	@touch $@

chart: chart-tools
	$(CHART)/bin/python deploy/kubernetes/render.py --plain deploy/kubernetes/plain/farhop.yaml

clean:
	rm -rf $(VENV) $(CHART) $(CHAOS)
