# draftmill's front door. `make` prints the targets; everything else is a Python module with a --help of its own.
PROFILE ?= smollm2
RUNNER  ?=
PYTHON  ?=
export PROFILE RUNNER
# Two busy processes with spinning OpenMP threads slow each other tenfold.
export OMP_WAIT_POLICY = PASSIVE
export GOMP_SPINCOUNT = 0

STAGES := fetch data teacher distill qat wheels pack selfcheck
PY := $(if $(filter system,$(RUNNER)),python3,.venv/bin/python)

.DEFAULT_GOAL := help
# Goals one after the other even under -j: `make -j8 clean all` is clean, then all.
.NOTPARALLEL:
.PHONY: help all install plan $(STAGES) rehearse size-check verify report serve plan-bits inspect bench-train bench-resume bench-bits bench-load bench-parity bench-serve bench-tau bench-variety bench-data bench-teacher test lint lock lock-sources images base-image clean clean-all

# Run $(1) with the first Python 3.12 that really runs (a pyenv shim may be on PATH and refuse).
define with_python_312
for python in $(if $(PYTHON),"$(PYTHON)",python3.12 python3 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python /opt/venv/bin/python .venv/bin/python); do \
	"$$python" -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && exec "$$python" $(1); \
done; \
echo 'draftmill: no Python 3.12 found$(if $(PYTHON), at $(PYTHON)). Install one (with pyenv: pyenv install 3.12), or say make PYTHON=/path/to/python3.12' >&2; exit 2
endef

##@ Build (each does nothing where nothing changed; PROFILE=smollm2 unless told otherwise)
all: install ## every stage, then the report: a complete submission in output/
	@$(PY) -m stages.run all
	@$(PY) -m stages.report
fetch: ## bring the pinned upstream files to vendor/; the only stage that meets a network
data: ## prompts for training, and those held out
teacher: ## the target's greedy continuations with top-k logprobs
distill: ## train the drafter in bf16
qat: ## train it through the codec's rounding, and pack its weights
wheels: ## the wheelhouse for serving, proven complete offline
pack: ## write output/, the submission
selfcheck: ## rehearse the grader on a copy of output/
$(STAGES): install
	@$(PY) -m stages.run $@ --with-upstream

##@ Look
plan: install ## what each stage would do, take and leave
	@$(PY) -m stages.plan
rehearse: install ## rehearse output/ again, without a record (QUICK=1: only the examples' openings)
	@$(PY) -m stages.rehearse $(if $(QUICK),--quick)
report: install ## tau, bytes, gates and times of what was built
	@$(PY) -m stages.report
size-check: install ## bytes of output/ by component; fails over the limit
	@$(PY) -m stages.size
plan-bits: install ## what bits each row and each base gets for the allotment
	@$(PY) -m stages.bits
inspect: install ## what output/ holds, tensor by tensor (AGAINST=FILE compares)
	@$(PY) -m drafter.inspect output $(if $(AGAINST),--against "$(AGAINST)")
verify: install ## hash everything anew against the records
	@$(PY) -m stages.verify
serve: install ## start output/serve.sh (HOST, PORT, MODEL_NAME)
	@test -f output/serve.sh || { echo 'draftmill: there is no output/ yet; run make all' >&2; exit 2; }
	@PATH="$$PWD/.venv/bin:$$PATH" exec bash output/serve.sh

##@ Work on it
install: ## make .venv from the hashed locks, once (PYTHON=/path/to/python3.12 if it is hidden)
ifeq ($(RUNNER),system)
	@python3 -m stages.environment --system
else
	@.venv/bin/python -m stages.environment --check 2>/dev/null || { $(call with_python_312,-m stages.environment); }
endif
test: install ## the whole test suite
	@$(PY) -m pytest
bench-train: install ## the training loop against the matmul rate and a plain loop, one GPU
	@$(PY) -m benchmarks.train
bench-resume: install ## what a kill costs a training, on what PROFILE has built
	@$(PY) -m benchmarks.resume --profile $(PROFILE)
bench-bits: install ## codecs by rate beside other quantisers: bits, error, speed
	@$(PY) -m benchmarks.bits
bench-load: install ## random Qwen3 shapes under 1,000,000,000 bytes: build, load, memory; a GPU if there is one
	@$(PY) -m benchmarks.load
bench-parity: install ## what output/ serves beside float32 on dev: choices, and tau replayed against simulated
	@$(PY) -m benchmarks.parity --conversations build/$(PROFILE)/teacher/dev.jsonl
bench-serve: install ## drafting beside transformers and the floor, and a whole replay over HTTP; one GPU
	@$(PY) -m benchmarks.serve
bench-teacher: install ## the teacher's generation beside transformers and the floor; one GPU
	@$(PY) -m benchmarks.teacher
bench-tau: install ## tau per byte of every codec, real files, on all GPUs (SECONDS=1500)
	@$(PY) -m benchmarks.tau $(if $(SECONDS),--seconds $(SECONDS))
bench-variety: install ## what each source of prompts is worth, on all GPUs (STEPS=300 SECONDS=1500)
	@$(PY) -m benchmarks.variety $(if $(STEPS),--steps $(STEPS)) $(if $(SECONDS),--seconds $(SECONDS))
bench-data: install ## the data stage at a million made-up prompts: speed and memory
	@$(PY) -m benchmarks.data 1000000
lint: install ## ruff and mypy
	@$(PY) -m ruff check
	@$(PY) -m mypy
lock: install ## make lock/*.txt from lock/*.in again
	@$(PY) -m stages.lock
lock-sources: install ## fill in the hashes of a hub source (SOURCE=qwen3-8b), where the hub can be reached
	@$(PY) -m stages.upstream.relock $(SOURCE)
images: install ## build the pinned images of docker/ for RUNNER=docker or podman; needs an image registry
	@docker/images "$(PY)"
base-image: install ## make a base image without an image registry; needs root, debootstrap and podman or docker
	@docker/base "$(PY)"
clean: ## remove build/, logs/, wheels/ and output/
	@$(call with_python_312,-m stages.clean)
clean-all: ## the same, and vendor/ and .venv/
	@$(call with_python_312,-m stages.clean --all)
help: ## this text
	@echo 'draftmill: make TARGET [PROFILE=$(PROFILE)] [RUNNER=docker|podman|host|system]'
	@awk '/^##@ /{print "\n" substr($$0, 5)} /^[a-z-]+:.* ## /{split($$0, part, ":.* ## |: ## "); printf "  %-14s%s\n", part[1], part[2]}' Makefile
