# make demo       the main job, from a fresh clone
# make test       every test that needs no GPU
# make test-all   those and what takes longer
# make gpu-test   the tests that need one; writes docs/records/gpu-tests-DEVICE.json
# make gpu-check  those, then the kernels under compute-sanitizer; writes docs/records/gpu-check-DEVICE.json
# make bench      every bench, size and peer that is installed; writes docs/records/BENCH-DEVICE.json
# make bench-docs the tables and plots of the docs, from the records (no GPU)
# make kernel-table  registers, instructions and access widths of every kernel, for docs/records (no GPU)
#
# PYTHON: the interpreter that .venv is made with. PIP_ARGS: more arguments for pip.
PYTHON ?= python3
PIP_ARGS ?=

HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
INSTALLED := .venv/installed

.PHONY: demo test test-all gpu-test gpu-check bench bench-docs kernel-table clean

demo: $(INSTALLED)
	.venv/bin/python examples/rmsnorm_silu.py

test: $(INSTALLED)
	.venv/bin/python -m pytest -n 2 --dist loadgroup

test-all: $(INSTALLED)
	.venv/bin/python -m pytest -n 2 --dist loadgroup -m 'not gpu'

gpu-test: $(INSTALLED)
	.venv/bin/python -m pytest tests -m gpu -n 4 --dist loadgroup --record=docs/records

gpu-check: $(INSTALLED)
	.venv/bin/python tests/gpu_check.py

bench: $(INSTALLED)
	names=$$(.venv/bin/python -c 'from graphfuse.benchmarks.benches import BENCHES; print(*BENCHES)') && \
	  for name in $$names; do .venv/bin/graphfuse bench $$name --record docs/records || exit; done

bench-docs: $(INSTALLED)
	.venv/bin/python -m pip install $(PIP_ARGS) --quiet --editable '.[bench]'
	.venv/bin/python -m graphfuse.benchmarks.render

kernel-table: $(INSTALLED)
	.venv/bin/python tests/kernel_table.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis

# With a GPU, packages that PYTHON already has are used (a .pth names their folders), torch
# above all; without one, torch is pinned, because the newest plain torch brings all of CUDA.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
ifeq ($(HAS_GPU),yes)
	$(PYTHON) -c "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\n')" \
	  > "$$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/outer.pth"
	.venv/bin/python -m pip install $(PIP_ARGS) --quiet --editable '.[test,nvrtc]'
else
	.venv/bin/python -m pip install $(PIP_ARGS) --quiet --constraint constraints.txt --editable '.[test,nvrtc]'
endif
	touch $@
