# `make demo` and `make test` need Python 3.11 or newer and nothing else; everything goes into .venv.
# Paths are relative, so that the repository may lie in a folder with a space in its name.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all bench lint pytest docs torch-oldest clean

demo: $(VENV)/installed
	$(RUN) -m madam_lab demo

test: lint pytest docs

test-all: lint docs
	$(RUN) -m pytest -n 2 -m "not gpu"
	TRITON_INTERPRET=1 $(RUN) -m pytest -n 2 tests/kernels
	$(MAKE) torch-oldest

bench: $(VENV)/installed
	$(RUN) -m benchmarks

lint: $(VENV)/complete
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

pytest: $(VENV)/complete
	$(RUN) -m pytest -n 2 -m "not slow and not gpu"
	TRITON_INTERPRET=1 $(RUN) -m pytest -n 2 tests/kernels

# The site, into site/; a broken link or an undocumented name fails.
docs: $(VENV)/complete
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# The oldest PyTorch we support, in an environment of its own.
torch-oldest: .venv-torch-2.11/installed
	.venv-torch-2.11/bin/python -m pytest -n 2 -m "not gpu"

# torch comes first and alone: with it in place, nothing that follows asks for another build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 -c constraints.txt
	$(PIP) -e ".[dev]" -c constraints.txt
	touch $@

# And what only the tests need: Hugging Face, Lightning, the site's tools, a notebook's.
$(VENV)/complete: $(VENV)/installed
	$(PIP) -e ".[all]" -c constraints.txt
	touch $@

.venv-torch-2.11/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-2.11
	.venv-torch-2.11/bin/python -m pip install --quiet --disable-pip-version-check torch==2.11.0
	grep -v '^torch==' constraints.txt > .venv-torch-2.11/constraints.txt
	.venv-torch-2.11/bin/python -m pip install --quiet --disable-pip-version-check -e ".[all]" -c .venv-torch-2.11/constraints.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-2.11 site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
