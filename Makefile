# make demo    from a fresh clone: install, check a config, train it on 8 CPU ranks, held-out loss before and after
# make test    ruff, mypy, the import contract, and the tests
# make prove   the same with every test, but for parts that were green at the same content; FRESH=1: all; PART=kills: one
# make parts   the parts of `make prove`
# make lint    the checks alone
# make versions  `make test` with the oldest and the newest torch, and other Pythons: docs/versions.md; ROW=3.11-oldest: one
# make docs    these pages as a site, in build/site; a dead link is an error
# make vscode  the extension for Visual Studio Code, in build/, and its size; needs npm
# make vscode-check  the extension in a real VS Code, which npm installs below build/; its pictures in docs/; needs Node 20
# make bench   side-by-side measurements, as ratios
# make gpu     what only a GPU can show, as a table, with PYTHON's torch; CHECKS="layers speed_350M": some of it
# make gpu-wheels  what `make gpu` needs where there is torch and no network, in build/gpu-wheels; GPU_PYTHON=3.11: not 3.12's
# make setup   .venv alone; PYTHON=python3.12 chooses the interpreter

PYTHON ?= python3
# worksteal gives each worker a run of neighbours: what a module computes once is computed by one worker.
# Ranks wait for each other, and guards for time to pass: a worker more than there are cores fills the gaps.
PYTEST ?= -q -n $(shell expr $$(nproc) + 1) --dist worksteal --durations=20
CONFIG ?= configs/gpt_3d.py
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
STAMP := $(VENV)/.complete
BEGUN := $(VENV)/.begun

export OMP_NUM_THREADS ?= 1
# Compiled ops and their lock files live and die with the environment.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions
unexport PYTHONDONTWRITEBYTECODE
# Not exported for all: `setup` needs the machine's own python3.
IN := PATH="$(CURDIR)/$(BIN):$$PATH"

.DEFAULT_GOAL := help
.PHONY: help setup demo test prove part-exists parts versions lint lint-code lint-prose bench docs vscode vscode-check gpu gpu-wheels

help:
	@sed -n '/^# make/s/^# //p' Makefile

setup: $(STAMP)

# An environment whose installation was cut short (BEGUN is there), or that has no working pip, is made anew. torch
# comes first: DeepSpeed's own set-up imports it. editable_mode=compat: one line in a .pth file; the default, a finder,
# costs every start of Python in this environment 10 ms.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@rm -f $(STAMP)
	@if test -e $(BEGUN) || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "making $(VENV)" && $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(BEGUN)
	@echo "installing torch, DeepSpeed and the tools"
	@$(PIP) torch setuptools wheel
	@$(PIP) --no-build-isolation --config-settings editable_mode=compat --editable '.[train,mpi,test,docs]'
	@$(BIN)/python -m compileall -q dslpar layers
	@rm -f $(BEGUN)
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/dslpar lint $(CONFIG) --world-size 8
	rm -rf outputs/demo
	$(IN) DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu} \
		deepspeed --num_gpus 8 train.py --config $(CONFIG) train.output_dir=outputs/demo
	@awk '/held-out loss before.*after/ { line = $$0; fell = $$(NF-2) - $$NF } \
		END { sub(/.*held-out/, "held-out", line); print line; exit !(fell >= 1.0) }' outputs/demo/log.txt

# mypy and the prose take longest, ten seconds each on one core: both halves run at once, and print when they end.
lint: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint-code lint-prose

lint-code:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy dslpar benchmarks
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config .importlinter-torch

lint-prose:
	$(BIN)/python tools/prose.py

test: lint
	$(IN) python -m tests.support.durations run $(PYTEST)

prove: part-exists lint
	$(IN) python -m tests.support.prove $(if $(PART),--part $(PART)) $(if $(FRESH),--fresh) $(PYTEST)

# Before lint, which takes a minute.
part-exists: $(STAMP)
	@$(BIN)/python -m tests.support.prove --list $(if $(PART),--part $(PART)) >/dev/null

parts: $(STAMP)
	@$(BIN)/python -m tests.support.prove --list

versions: $(STAMP)
	$(BIN)/nox --noxfile tools/noxfile.py $(if $(ROW),--session "tests($(ROW))")

docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --conf-dir docs . build/site
	@echo "build/site/docs/index.html"

vscode:
	@mkdir -p build
	cd editors/vscode && npm ci --no-audit --no-fund --ignore-scripts && npm run package
	@du -b build/dslpar-*.vsix | awk '{ print int($$1 / 1000) " KB: " $$2; exit $$1 > 200000 }'

vscode-check: $(STAMP) vscode
	bash tools/code_server.sh build/code-server
	$(IN) python -m pytest -q -p no:xdist -m "" tests/system/test_vscode.py
	$(IN) python tools/vscode_pictures.py

bench: $(STAMP)
	@$(BIN)/python -m compileall -q dslpar layers
	$(BIN)/python -m benchmarks

# Of another Python than ours, perhaps: DeepSpeed and hjson come as sources and run on any; the others as built.
GPU_WHEELS := build/gpu-wheels
GPU_PYTHON ?= 3.12
GPU_SOURCES := deepspeed hjson
GPU_BUILT := annotated-types einops msgpack ninja numpy packaging psutil py-cpuinfo pydantic pydantic-core PyYAML \
	safetensors setuptools tqdm typing-extensions typing-inspection xxhash

gpu-wheels: $(STAMP)
	@rm -rf $(GPU_WHEELS)
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation \
		--constraint constraints.txt --wheel-dir $(GPU_WHEELS) $(GPU_SOURCES)
	$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON) --constraint constraints.txt --dest $(GPU_WHEELS) $(GPU_BUILT)
	@du -sm $(GPU_WHEELS) | awk '{ print $$1 " MiB in " $$2; exit $$1 > 60 }'

gpu:
	@if test -d $(GPU_WHEELS); then $(PYTHON) -m pip --disable-pip-version-check install --quiet --no-index \
		--find-links $(GPU_WHEELS) $(GPU_SOURCES) $(GPU_BUILT); fi
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-build-isolation --editable .
	$(PYTHON) -m benchmarks.gpu $(CHECKS)
