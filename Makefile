# make demo       the main job, from a fresh clone
# make test       every claim of the docs that needs no GPU, once
# make test-further  further cases of the same claims; .ci/run runs both
# make test-all   those and what takes longer
# make check      ruff and mypy
# make stub       graphfuse/op_graph/op_methods.pyi, the types of op methods, from the op table
# make test-torch TORCH=2.12.1  the plain tests on another torch; TORCH=oldest, TORCH=newest: that pyproject.toml admits;
#                 TURN=1/2: of each test the first case and half of the others
# make gpu-test   the tests that need one; writes docs/records/gpu-tests-DEVICE.json, which names those that failed
# make gpu-check  those, then the kernels under compute-sanitizer; writes docs/records/gpu-check-DEVICE.json
# make bench      every bench, size and peer that is installed; writes docs/records/BENCH-DEVICE.json
# make bench-docs the tables and plots of the docs, from the records (no GPU)
# make docs       the site, in build/site; fails where a link or an anchor leads nowhere
# make kernel-table  registers, instructions and access widths of every kernel, for docs/records (no GPU)
#
# PYTHON: the interpreter that .venv is made with. PIP_ARGS: more arguments for pip, and for uv's.
PYTHON ?= python3
PIP_ARGS ?=
TORCH ?= newest
# Bytecode is kept, whatever the machine's environment says: all workers and hundreds of processes import the same files.
export PYTHONDONTWRITEBYTECODE :=
# Kernels that tests run on the emulator, of all variants and kinds of sanitizers: else the first go before the last come.
export GRAPHFUSE_CACHE_LIMIT ?= 2G

HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
MADE := .venv/made
RUNNABLE := .venv/runnable
DOCUMENTED := .venv/documented
INSTALLED := .venv/installed
KERNEL_TABLE := .venv/kernel-table
OTHER_TORCH := .venv-torch-$(TORCH)

.NOTPARALLEL:
.PHONY: demo test test-further test-all check stub test-torch gpu-test gpu-check bench bench-docs docs kernel-table clean

demo: $(RUNNABLE)
	.venv/bin/python examples/rmsnorm_silu.py

test: $(INSTALLED)
	.venv/bin/python -m pytest -n 2 --dist loadgroup -m 'not (gpu or thorough or further)'

test-further: $(INSTALLED)
	.venv/bin/python -m pytest -n 2 --dist loadgroup -m 'further and not (gpu or thorough)'

test-all: $(INSTALLED)
	.venv/bin/python -m pytest -n 2 --dist loadgroup -m 'not gpu'

check: $(INSTALLED)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/python -m mypy

stub: $(INSTALLED)
	.venv/bin/python tests/op_stub.py

# What torch can change is marked: dispatch, Dynamo, autograd, DTensor, private names. A build of torch also says which
# CUDA version NVRTC is of: what finds and calls NVRTC is tested, too.
test-torch: $(OTHER_TORCH)/installed
	$(OTHER_TORCH)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(OTHER_TORCH)/bin/python -m pytest -n 2 --dist loadgroup -m 'torch and not (gpu or thorough or further or emulate)' \
	  $(if $(TURN),--turn $(TURN))

gpu-test: $(INSTALLED)
	.venv/bin/python -m pytest tests -m gpu -n auto --maxprocesses 16 --dist loadgroup --record=docs/records

gpu-check: $(INSTALLED)
	.venv/bin/python tests/gpu_check.py

bench: $(INSTALLED)
	names=$$(.venv/bin/python -c 'from graphfuse.benchmarks.benches import BENCHES; print(*BENCHES)') && \
	  for name in $$names; do .venv/bin/graphfuse bench $$name --record docs/records || exit; done

bench-docs: $(INSTALLED)
	.venv/bin/python -m pip install $(PIP_ARGS) --quiet --editable '.[bench]'
	.venv/bin/python -m graphfuse.benchmarks.programs.render

docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet
	.venv/bin/python tests/site_check.py build/site

# The table's NVRTC is loaded before torch, which may bring one of its own.
kernel-table: $(KERNEL_TABLE)/installed
	PYTHONPATH=$(KERNEL_TABLE):tests .venv/bin/python -c \
	  'from graphfuse.runtime import toolkit; toolkit.load(); import kernel_table; kernel_table.main()'

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

# With a GPU, packages that PYTHON already has are used (a .pth names their folders), torch above all.
$(MADE):
	$(PYTHON) -m venv .venv
ifeq ($(HAS_GPU),yes)
	$(PYTHON) -c "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\n')" \
	  > "$$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/outer.pth"
endif
	touch $@

# Python looks along its path before it asks the finder of an editable installation, and takes any folder of that name
# for a package: in the parent folder of a clone called graphfuse, the clone. So that finder is asked first.
CLONE_FIRST := import sys; \
  sys.meta_path.sort(key=lambda finder: not getattr(finder, "__module__", "").startswith("__editable___graphfuse_"))

# Without a GPU torch is pinned, and the emulator runs the kernels: NVRTC is for the tests that compile them.
CONSTRAINED := $(if $(HAS_GPU),,--constraint constraints.txt)
$(RUNNABLE): extras := $(if $(HAS_GPU),[cu13])
$(INSTALLED): extras := [test,check,cu13]
# Pages are made from the sources as text: neither torch nor graphfuse is imported.
$(DOCUMENTED): extras := [docs]
# uv takes a sixth of pip's time; packages of the outer Python, which a GPU's machine has, are seen by pip alone. torch
# comes by pip, which may be configured for builds without CUDA: those are imported in half the time.
INSTALL := $(if $(HAS_GPU),.venv/bin/python -m pip,VIRTUAL_ENV=.venv .venv/bin/uv pip) install
$(RUNNABLE) $(INSTALLED) $(DOCUMENTED): $(MADE) pyproject.toml constraints.txt
	$(if $(HAS_GPU),,.venv/bin/python -m pip install $(PIP_ARGS) --quiet $(CONSTRAINED) uv torch)
	$(INSTALL) $(PIP_ARGS) --quiet $(CONSTRAINED) --editable '.$(extras)'
	echo '$(CLONE_FIRST)' > "$$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/graphfuse.pth"
	touch $@

OLDEST := $(or $(shell sed -n 's/^ *"torch>=\(.*\)",$$/\1/p' pyproject.toml),$(error no "torch>=..." in pyproject.toml))
VERSION := $(patsubst oldest,$(OLDEST),$(filter-out newest,$(TORCH)))
# Of the builds on the public index, that of the oldest is for CUDA 12. uv unpacks their 6 GB in a quarter of pip's time.
CUDA := $(if $(filter $(OLDEST) $(OLDEST).%,$(VERSION)),cu12,cu13)
$(OTHER_TORCH)/installed: pyproject.toml
	$(PYTHON) -m venv $(OTHER_TORCH)
	$(OTHER_TORCH)/bin/python -m pip install $(PIP_ARGS) --quiet uv
	VIRTUAL_ENV=$(OTHER_TORCH) $(OTHER_TORCH)/bin/uv pip install $(PIP_ARGS) --quiet --no-cache \
	  'torch$(VERSION:%===%)' --editable '.[test,$(CUDA)]'
	touch $@

$(KERNEL_TABLE)/installed: $(INSTALLED) kernel-table.txt
	rm -rf $(KERNEL_TABLE)
	.venv/bin/python -m pip install $(PIP_ARGS) --quiet --no-deps --target $(KERNEL_TABLE) --requirement kernel-table.txt
	touch $@
