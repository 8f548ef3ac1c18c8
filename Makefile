# Everything runs inside .venv, which is rebuilt only when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.installed

.PHONY: install test test-oldest lint types unit coverage docs dist serve clean

# Types are checked beside the tests, since mypy uses one core.
test: lint
	$(MAKE) --jobs=2 types unit

install: $(READY)

$(READY): pyproject.toml
	@echo "installing into $(VENV), which takes a few minutes, and gigabytes with CUDA's libraries"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet uv
	$(VENV)/bin/python -m uv pip install --quiet --compile-bytecode --python $(VENV)/bin/python --editable '.[serve,train,openvino,dev]'
	touch $@

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/mypy

# Without the plugins of schemathesis and hypothesis, where they are installed: importing them takes seconds.
# With bytecode written, whatever the shell says: the tests start many processes.
# Three workers for two cores: tests often wait for the processes that they start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder --durations=10 -p no:schemathesis -p no:hypothesispytest

unit: $(READY)
	$(PYTEST)

# The oldest supported torch (pyproject.toml), with the torchvision that belongs to it. Its Triton needs numpy below 2.4.
OLDEST := .venv-oldest
OLDEST_TESTS := layer.py kernels.py compile.py conversion.py export.py training.py \
	fit.py::test_training_learns_logs_and_leaves_a_state

$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv
	$(OLDEST)/bin/python -m uv pip install --quiet --compile-bytecode --python $(OLDEST)/bin/python --editable '.[openvino,train,dev]' 'torch==2.11.*' 'torchvision==0.26.*' 'numpy<2.4'
	touch $@

test-oldest: $(OLDEST)/.installed
	$(subst $(VENV)/,$(OLDEST)/,$(PYTEST)) $(OLDEST_TESTS:%=tests/test_%)

# Apart from the tests, since watching every line takes them a quarter longer.
coverage: $(READY)
	$(PYTEST) --cov --cov-report=term

# The documentation as a website in site/, by `python3 -m http.server --directory site`. Every warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "open site/index.html in a browser"

serve: $(READY)
	$(VENV)/bin/bkn-zoo serve

# Needs the package `build`. The workflow for releases calls it; `python -m twine check --strict dist/*` checks the result.
dist:
	rm -rf dist
	$(PYTHON) -m build

clean:
	rm -rf $(VENV) $(OLDEST) build dist site .mypy_cache .pytest_cache .ruff_cache .coverage *.egg-info
