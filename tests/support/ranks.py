"""Functions run on several ranks: a process each, started once for all of them.

On CPUs, ranks are forks of one process that has imported torch: no rank does so anew. CUDA survives no fork.
"""

import datetime
import json
import multiprocessing
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
import torch

SECONDS = 60
"""After which a rank no longer waits for another, which has then failed."""

_IMPORTED = ("graphfuse.torch", "torch._inductor.compile_fx", "torch.distributed.tensor.parallel")
"""What ranks are forked with: graphfuse before torch has DTensors, as in a program."""


def run(module: str, names: Sequence[str], backend: str = "gloo", ranks: int = 2) -> Mapping[str, Sequence[str]]:
    """What went wrong, by name: the traceback of each rank that failed.

    module: its CASES has the functions of these names, which take the mesh of all ranks. backend: gloo on the CPU, or
    nccl on as many GPUs as there are ranks.
    """
    start = context(backend == "nccl").get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        given = module, tuple(names), backend, ranks, folder
        torch.multiprocessing.start_processes(_rank, given, nprocs=ranks, start_method=start)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [made[name] for made in found if made[name]] for name in names}


def context(cuda: bool) -> BaseContext:
    """Starts processes: forks of one that has imported torch, or new ones for CUDA, which survives no fork."""
    made = multiprocessing.get_context("spawn" if cuda else "forkserver")
    if not cuda:
        made.set_forkserver_preload([*_IMPORTED])
    return made


def cases(request: pytest.FixtureRequest) -> list[str]:
    """Cases for which this run asks for a fixture, and for the parameter that it has, if any."""
    name, parameter = request.fixturename, getattr(request, "param", None)
    asked = (i.callspec.params for i in request.session.items if i.path == request.path and name in i.fixturenames)
    return list(dict.fromkeys(given["case"] for given in asked if given.get(name) == parameter))


def on_two_gpus(module: str, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """The same of two GPUs. Skips the test where there are none."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    return run(module, names, "nccl")


def _rank(rank: int, module: str, names: Sequence[str], backend: str, ranks: int, folder: str) -> None:
    import importlib

    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    functions = importlib.import_module(module).CASES
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    waits = datetime.timedelta(seconds=SECONDS)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=waits
    )
    mesh = init_device_mesh("cuda" if backend == "nccl" else "cpu", (ranks,))
    made = {}
    for name in names:
        try:
            torch.manual_seed(0)
            functions[name](mesh)
            made[name] = ""
        except Exception:
            made[name] = f"rank {rank}: {traceback.format_exc()}"
    (Path(folder) / f"{rank}.json").write_text(json.dumps(made))
    distributed.destroy_process_group()
