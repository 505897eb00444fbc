# On a fresh machine: `make demo` and `make test`. Both set everything up first.

# Which Python .venv is made with, such as 3.12 or /usr/bin/python3.12; if not set, the newest that works.
PYTHON ?=
STEPS ?= 15
ARGS ?=
# Marks of the tests that `make test` runs, and of those that `make test-sglang` runs.
MARKS ?= not slow and not long
ENGINES ?= engines

VENV := .venv
SGLANG := .venv-sglang
BIN := $(VENV)/bin
# Folders of tests that need more than .venv; all other tests are chosen by their marks, which pyproject.toml lists.
APART := tests/hosts tests/sglang tests/slurm tests/viewer_browser
TWO = $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
PEERS := benchmarks/peers/harness
STAMP := $(VENV)/setup.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help setup demo demo-data learning-curves agent-curve test test-main test-fast test-long test-ends test-slow test-faults test-slurm test-hosts test-view test-trackers setup-modelopt test-modelopt setup-sglang setup-sglang-gpu test-sglang check bench bench-async bench-convert bench-reshard bench-peers test-peers mutants docs

# Makes .venv and installs all that runs, tests and checks need.
setup: $(STAMP)
# A PYTHON that is set is compared with that of .venv even if nothing else is to be done.
	@$(if $(PYTHON),requirements/make_venv.sh $(VENV) $(PYTHON))

# pip 25.1 is the first that shows its progress while it installs.
$(STAMP): requirements/torch.txt requirements/lock.txt pyproject.toml
	@requirements/make_venv.sh $(VENV) $(PYTHON)
	@echo 'Installing into $(VENV) takes some minutes and 7 GB, or 3 GB if pip finds a CPU build of torch.'
	$(PIP) install --quiet 'pip>=25.1'
	$(PIP) install -c requirements/lock.txt -r requirements/torch.txt
	$(PIP) install --no-deps -r requirements/lock.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@
	@echo '$(VENV) is ready: `. $(BIN)/activate` puts megatron-grpo on your PATH'

# SGLang, in an environment of its own: some minutes more.
setup-sglang: $(SGLANG)/setup.stamp

$(SGLANG)/setup.stamp: requirements/torch.txt requirements/sglang.txt $(wildcard requirements/sgl_kernel/*/*.py) | setup
	@requirements/make_venv.sh $(SGLANG) $(PYTHON)
	@! $(SGLANG)/bin/python -m pip show -q sglang-kernel 2>/dev/null || \
		{ echo '$(SGLANG) is that of make setup-sglang-gpu: remove it (rm -r $(SGLANG))'; exit 1; }
	$(SGLANG)/bin/python -m pip install --quiet 'pip>=25.1'
	$(SGLANG)/bin/python -m pip install -c requirements/sglang.txt -r requirements/torch.txt
	$(SGLANG)/bin/python -m pip install --no-deps -r requirements/sglang.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps --no-build-isolation requirements/sgl_kernel -e .
	touch $@

# The same for NVIDIA GPUs, with all that SGLang asks for and no stand-ins.
setup-sglang-gpu:
	@requirements/make_venv.sh $(SGLANG) $(PYTHON)
	@! $(SGLANG)/bin/python -m pip show -q sgl-kernel-stand-in 2>/dev/null || \
		{ echo '$(SGLANG) is that of make setup-sglang: remove it (rm -r $(SGLANG))'; exit 1; }
	$(SGLANG)/bin/python -m pip install -e '.[sglang]'

# Lists these commands.
help:
	@awk '/^# / { if (!text) text = substr($$0, 3); next } /^[a-z][a-z-]*:/ && text { \
	  sub(/:.*/, ""); sub(/\. .*/, "", text); printf "make %-16s %s\n", $$0, text } { text = "" }' Makefile

# Fetches the demo's model and makes its data.
demo-data: setup
	$(BIN)/python demo/model.py models/SmolLM2-135M-Instruct
	$(BIN)/python demo/make_sums.py data/sums.jsonl

# SmolLM2-135M-Instruct learns to add; ARGS="key.sub=value" overrides keys of its config, STEPS their number.
demo: demo-data
	dtype=$$($(BIN)/python -m demo.dtype) && \
	$(BIN)/megatron-grpo train configs/demo_smollm2_135m.yaml $$dtype train.num_steps=$(STEPS) $(ARGS)

# Draws docs/learning_curves.png; takes a few minutes.
learning-curves: setup
	$(BIN)/python tests/helpers/models/tiny.py models/tiny_qwen3
	OMP_NUM_THREADS=1 $(BIN)/python -m demo.learning_curves $(ARGS)

# Draws docs/agents_curve.png: a model learns to call a tool.
agent-curve: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m demo.calculator_curve $(ARGS)

# Format, lint, types and layers of imports.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# All but the longest tests, two at once: twenty minutes. One thread per process, as tests start many.
test: check test-main

# The same without static checks.
test-main: export OMP_NUM_THREADS = 1
test-main: setup
	@failed=0; log=$$(mktemp); \
	$(BIN)/pytest -m "waits and ($(MARKS))" $(addprefix --ignore=,$(APART)) >$$log 2>&1 & waits=$$!; \
	trap 'kill $$waits; wait $$waits; rm $$log; exit 130' INT TERM; \
	$(TWO) -m "not timed and not waits and ($(MARKS))" $(addprefix --ignore=,$(APART)) || failed=1; \
	wait $$waits || failed=1; \
	cat $$log; rm $$log; \
	exit $$failed

# The longest ones: whole runs, every engine's parameters; then, alone, how a run ends. Half an hour.
test-long: export OMP_NUM_THREADS = 1
test-long: setup
	@failed=0; \
	$(TWO) -m "long and not slow and not timed" $(addprefix --ignore=,$(APART)) || failed=1; \
	$(MAKE) test-ends || failed=1; \
	exit $$failed

# How a run ends, alone: some of these tests measure how long that takes.
test-ends: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "timed and not slow" $(addprefix --ignore=,$(APART))

# While you work: the mathematics on real ranks, formats, checkpoints, and the golden values. Three minutes.
test-fast: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "fast and not slow and not long" $(addprefix --ignore=,$(APART))

# Every slow test, including those of faults.
test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

# The faults of docs/faults.md that end or disturb a run, including slow tests and 50 kills at random.
test-faults: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "fault or timed or waits" $(addprefix --ignore=,$(APART))

# The scripts of slurm/ on a Slurm with twelve nodes on this host: ten minutes.
test-slurm: setup
	@PATH=$$PATH:/usr/sbin:/sbin; for p in slurmctld slurmd sbatch munged shellcheck; do command -v $$p >/dev/null || \
		{ echo "make test-slurm needs $$p: apt-get install slurmctld slurmd slurm-client munge shellcheck"; exit 1; }; done
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" tests/slurm

# The page of `megatron-grpo view` in a browser without a window: half a minute.
test-view: setup
	@command -v chromium >/dev/null || { echo "make test-view needs chromium: apt-get install chromium"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/viewer_browser

# Runs over several hosts, each a set of Linux namespaces (root, iproute2): a cable out, a host killed, slow networks, Slurm. Seven minutes.
test-hosts: setup
	OMP_NUM_THREADS=1 $(TWO) -m "not slow" tests/hosts

# Rollouts by SGLang: its own tests, and those of engines in general.
test-sglang: setup setup-sglang
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and ($(ENGINES))" --engine sglang

# trackio and swanlab: their own pins exclude versions of lock.txt, so they lie apart from it.
test-trackers: setup
	$(PIP) install --quiet --upgrade --no-deps --target $(VENV)/trackers -r requirements/trackers.txt
	PYTHONPATH=$(VENV)/trackers $(BIN)/pytest tests/megatron_grpo/reporting/test_trackers.py

# NVIDIA's ModelOpt, for PYTHONPATH=.venv/modelopt: requirements/modelopt.txt says why it lies apart.
setup-modelopt: setup
	$(PIP) install --quiet --upgrade --no-deps --target $(VENV)/modelopt -r requirements/modelopt.txt

# ModelOpt: folders that it calibrated in vLLM, and its quantisation-aware training beside ours. Two minutes.
test-modelopt: setup-modelopt
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/modelopt $(BIN)/pytest -m "not slow" -k "calibration or modelopt" \
	  tests/checkpoint_convert/test_calibration.py tests/megatron_grpo/policy/test_model.py

# Builds the documentation as a site, build/site/index.html; a dead link or a page without a place is an error.
docs: setup
	$(PIP) install --quiet --upgrade --no-deps --target $(VENV)/docs -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(VENV)/docs $(BIN)/python -m mkdocs build --strict

# Times the demo; ARGS are those of benchmarks/bench_demo.py.
bench: demo-data
	$(BIN)/python benchmarks/bench_demo.py $(ARGS)

# Times conversions of checkpoints.
bench-convert: setup
	$(BIN)/python benchmarks/bench_convert.py $(ARGS)

# Times pushes of weights between layouts. One thread per process, as torchrun has it.
bench-reshard: setup
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python benchmarks/bench_reshard.py $(ARGS)

# Times generating beside the training.
bench-async: setup
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python benchmarks/bench_async.py $(ARGS)

# Compares with other projects, which it installs from the package index; writes docs/peers.md. Takes
# about an hour, an otherwise idle machine with 16 GB of free memory and, as the others do, Python 3.12
# (VENV=.venv-3.12 PYTHON=3.12); ARGS selects some of the comparisons.
bench-peers: setup
	PYTHONPATH=.:tests:benchmarks $(BIN)/python $(PEERS)/bench_peers.py $(ARGS)
	$(MAKE) test-peers

# Its page against its results, and the rules of vLLM that it counts by; slow ones too with MARKS="".
test-peers: setup
	PYTHONPATH=$(PEERS) $(BIN)/pytest -m "$(MARKS)" $(PEERS)

# Breaks the code in many places, and says which tests do not see it: half an hour, or ARGS="--modules FILE ...".
mutants: setup
	$(BIN)/python benchmarks/mutants.py $(ARGS)
