# `make demo` and `make test` need Python 3.11 or newer and nothing else; everything goes into .venv.
# Paths are relative, so that the repository may lie in a folder with a space in its name.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all bench lint pytest docs clean

demo: $(VENV)/installed
	$(RUN) -m madam_lab demo

test: lint pytest docs

test-all: lint docs
	$(RUN) -m pytest -n 2 -m "not gpu"
	TRITON_INTERPRET=1 $(RUN) -m pytest -n 2 tests/kernels
	ELSEWHERE=1 $(RUN) -m pytest -n 2 tests/elsewhere
	$(MAKE) torch-2.11.0
	$(MAKE) torch-2.15.0

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
	ELSEWHERE=1 $(RUN) -m pytest -n 2 tests/elsewhere

# The site, into site/; a broken link or an undocumented name fails.
docs: $(VENV)/complete
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# Another PyTorch in an environment of its own, such as torch-2.11.0, the oldest we support, and torch-2.15.0, the newest.
torch-%: .venv-torch-%/installed
	.venv-torch-$*/bin/python -m pytest -n 2 -m "not gpu"
	TRITON_INTERPRET=1 .venv-torch-$*/bin/python -m pytest -n 2 tests/kernels
	ELSEWHERE=1 .venv-torch-$*/bin/python -m pytest -n 2 tests/elsewhere

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

.PRECIOUS: .venv-torch-%/installed
.venv-torch-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check torch==$*
	grep -v '^torch==\|^triton==' constraints.txt > .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check -e ".[all]" -c .venv-torch-$*/constraints.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
