"""The VAE of WAN as diffusers has it, at the published widths with random weights: decode and encode, by everybody.

    python -m graphfuse.benchmarks.programs.wan_vae [--record FOLDER] [--resume] [--only CASE ...] [--ways WAY ...]
                                                    [--seconds N] [--rounds N] [--quick] [--top N]

Times are of whole calls, the host's part in them, from CUDA events, all ways in turns. Beside them are those of a CUDA
graph of the call, without the host's part. The time by kind of kernel, and that of the kernels that take longest, is
the profiler's. Memory is torch's peak over what was allocated before the call. First calls are measured in processes of
their own: eager's, and ours with no kernels kept and with those of the process before. `graphfuse bench wan-vae` is
this program.

The record is written after each case. torch.compile takes minutes: with --resume, --only and --ways a session can
measure some ways, and keep the others of the record that is there. The slowest, alone:

    graphfuse bench wan-vae --record FOLDER --resume --ways compile_max_autotune --seconds 480
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from graphfuse.base import settings
from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs import vae_calls
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.programs.wan_vae_cases import CASES, COMPILED, EAGER, OURS, QUICK
from graphfuse.benchmarks.target import Target

NAME = "wan-vae"
STARTS = 3
"""Processes whose first calls are timed."""


def _milliseconds(content: dict) -> list[tuple[float, str]]:
    return [(ours["ms"]["median"], name) for name, (ours,) in vae_calls.measured(content, str(CASES[0]), OURS)]


def _started(what: str, key: str, limit: float) -> Target:
    def figures(content: dict):
        return [(content["start"][key], "")] if "start" in content else []

    return Target(f"first decode, {what}, seconds", limit, False, figures)


TARGETS = (
    Target(f"{CASES[0]}, milliseconds", 97.0, False, _milliseconds),
    vae_calls.faster(EAGER, "decode", 2.1),
    vae_calls.faster(COMPILED, "decode", 2.1),
    vae_calls.faster(EAGER, "encode", 1.8),
    vae_calls.no_more("error against float32", "error", 1.05),
    vae_calls.no_more("peak memory", "peak_bytes", 1.0),
    _started("no kernels kept", "cold_s", 10.0),
    _started("kernels kept", "kept_s", 2.0),
)


def started() -> dict[str, float]:
    """Seconds of a first decode in a process: fusing with it, with no kernels kept and with those that this kept, and
    as diffusers has it. Medians of processes, but for that without kernels, of which there is one."""
    with tempfile.TemporaryDirectory() as folder:
        cold = _first(OURS, folder)
        kept, eager = ([_first(way, folder) for _ in range(STARTS)] for way in (OURS, EAGER))
    return {"cold_s": cold, "kept_s": statistics.median(kept), "eager_s": statistics.median(eager)}


_CHILD = """
import sys, time, torch
from graphfuse.benchmarks.programs import wan_vae_cases as cases
case = cases.CASES[0]
vae, x = case.model(torch.bfloat16, "cuda"), case.given("cuda").bfloat16()
import graphfuse.torch
torch.nn.functional.conv2d(x[:, :, 0], torch.ones(1, 16, 3, 3, device="cuda", dtype=x.dtype))  # loads cuDNN
torch.cuda.synchronize()
begin = time.perf_counter()
with torch.no_grad():
    case.called(cases.WAYS[sys.argv[1]].make(vae))(x)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def _first(way: str, folder: str) -> float:
    # Bytecode is kept, as Python does by default.
    env = settings.environment(GRAPHFUSE_CACHE_DIR=folder, PYTHONDONTWRITEBYTECODE="")
    done = subprocess.run([sys.executable, "-c", _CHILD, way], capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def starts(content: dict) -> tables.Table:
    """First calls of processes, where a record has that of eager, too."""
    found = content.get("start", {})
    called = {"eager_s": EAGER, "kept_s": f"{OURS}, kernels kept", "cold_s": f"{OURS}, no kernels kept"}
    rows = [(title, f"{found[key]:.1f}") for key, title in called.items() if "eager_s" in found]
    return tables.Table(f"the first {CASES[0]} of a process, seconds", ("way", "s"), rows)


def shown(content: dict) -> tuple[tables.Table, ...]:
    more = starts(content)
    return *vae_calls.shown(content), *((more,) if more.rows else ())


STUDY = Study(
    NAME,
    __doc__,
    shown,
    TARGETS,
    vae_calls.DISTRIBUTIONS,
    rounds=12,
    quick=f"short cases, nothing compiled, {vae_calls.QUICK_ROUNDS} rounds",
)


def main(arguments: Sequence[str] | None = None, called_as: str | None = None, no_gpu: int = 2) -> None:
    """arguments, called_as: the command line and how it is called. no_gpu: the exit code where there is no GPU."""
    asked = vae_calls.asked(STUDY, CASES, arguments, called_as, no_gpu, QUICK)
    vae_calls.run(STUDY, asked, {} if asked.quick else {"start": started})


if __name__ == "__main__":
    main()
