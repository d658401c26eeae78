# Two commands set everything up on a fresh machine: `make demo` and `make test`.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = .venv/bin

.PHONY: demo test lint clean

# The embedded model completes a line of Python.
demo: .venv/demo.done
	$(BIN)/ds4mlx generate "def fibonacci(n):" -n 60

test: lint
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile  # a core each

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find metal -name '*.metal' -exec $(BIN)/clang-format --dry-run --Werror {} +

clean:
	rm -rf .venv build dist ds4mlx.egg-info

.venv/demo.done: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/test.done: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ .venv/demo.done

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/it"; exit 1; }
	$(PYTHON) -m venv .venv
