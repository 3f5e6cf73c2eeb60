# Everything a user runs. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pip finds torch. Empty: the default index, whose build for Linux carries several GB of CUDA libraries.
# `make TORCH_INDEX=URL serve` takes another one, such as PyTorch's own index of CPU builds.
TORCH_INDEX ?=
DEMO := .prelude/demo
# $(call pip_install,ARGUMENTS): silent when it succeeds, with all warnings and errors when it fails.
pip_install = $(BIN)/pip install --quiet --disable-pip-version-check $(1) 2>$(VENV)/pip.log \
	|| { cat $(VENV)/pip.log >&2; exit 1; }
# Tests run in as many processes; clusters of engines run one at a time in any case.
TEST_PROCESSES ?= 2
SPREAD = -n $(TEST_PROCESSES) --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev serve test test-fast test-chart test-long lint format bench proto clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## install Prelude and a CPU engine into .venv

setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: requirements/torch.txt requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Prelude needs Python 3.11 or newer; set PYTHON=")'
	@echo "Installing into $(VENV): a few minutes, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  1/3 torch"
	@$(call pip_install,$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch.txt)
	@echo "  2/3 SGLang, NIXL and what they need"
	@$(call pip_install,--no-deps -r requirements/cpu.txt)
	@echo "  3/3 Prelude"
	@$(call pip_install,--no-deps --editable .)
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	@echo "Installing what the tests need."
	@$(call pip_install,--no-deps -r requirements/dev.txt)
	@touch $@

serve: setup ## start a demo cluster: make a small model and adapters, print the URL
	@$(BIN)/prelude demo $(DEMO) >/dev/null
	@exec $(BIN)/prelude up --config $(DEMO)/cluster.yaml

test: setup-dev ## run every test
	@$(BIN)/python -m pytest $(SPREAD) -m "not long" --durations 20

test-fast: setup-dev ## run the tests without engines and without the slow ones: under three minutes
	@$(BIN)/python -m pytest -n 6 --no-loadscope-reorder -m "not long and not slow" tests/unit

test-chart: setup-dev ## test the Helm chart and the images; part of `make test`
	@$(BIN)/python -m pytest tests/chart

test-long: setup-dev ## run the long tests too: soak, hundreds of kills
	@$(BIN)/python -m pytest $(SPREAD) --durations 20

lint: setup-dev ## check format, style and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: setup-dev ## format the sources
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only --quiet .

bench: setup ## list the benchmarks
	@$(BIN)/prelude bench --help

proto: setup-dev ## generate the control protocol's Python from cluster/control/control.proto
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. cluster/control/control.proto

clean: ## remove the environment and the demo
	rm -rf $(VENV) .prelude
