"""Tensor-parallel decoder layers with our operators in them, beside the same with NCCL and inductor.

    torchrun --nproc-per-node 2 -m graphfuse.benchmarks.programs.tensor_parallel [--record FOLDER] [--only CASE ...]
                                                                                 [--quick]

A process for each GPU of one host; on CPUs by gloo. Models are those of `models`, split by `parallelize_module` of
torch: products that make queries, keys, values and the inner vectors by columns, those behind them by rows. So each
layer has two sums over ranks. Decoding is one token for each sequence, as a CUDA graph; prefill is the wall time of a
call. A round takes all ways in turns, the slowest rank counts. Every way is compared with float32 first. The record is
written after each case.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import faulthandler
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphfuse.benchmarks import record, session, tables
from graphfuse.benchmarks.programs import model_check, turns
from graphfuse.benchmarks.programs.llama import milliseconds
from graphfuse.benchmarks.programs.model_cases import WORKS
from graphfuse.benchmarks.programs.model_decoder import Cached
from graphfuse.benchmarks.programs.model_ways import WAYS, Running, Way
from graphfuse.benchmarks.programs.tensor_parallel_record import CASES, STUDY, SplitCase

ROUNDS, WARM, REPLAYS = 12, 3, 5
SECONDS = 150
"""After which a case that hangs says where, and ends."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="folder that gets the record")
    parser.add_argument("--only", nargs="+", choices=list(map(str, CASES)), metavar="CASE", help="only these cases")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(distributed.get_node_local_rank())
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=SECONDS))
    chosen = [case for case in CASES if options.only is None or str(case) in options.only][:: 4 if options.quick else 1]
    run(chosen, WAYS, device, 3 if options.quick else ROUNDS, options.record)
    distributed.destroy_process_group()


def run(
    cases: Sequence[SplitCase], ways: Sequence[Way], device: str, rounds: int, folder: Path | None = None
) -> dict[str, object]:
    """The record, on each rank."""
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    agreed = functools.partial(_agreed, distributed.new_group(backend="gloo"))
    made = {"ranks": mesh.size(), "cases": []}
    about = record.environment(record.CHECKOUT) if device == "cuda" else {}
    for case in cases:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        made["cases"].append({"case": str(case), "ways": _measured(case, ways, mesh, agreed, rounds)})
        faulthandler.cancel_dump_traceback_later()
        if distributed.get_rank() == 0:
            print(
                case, {n: w.get("error") or w["ms"]["median"] for n, w in made["cases"][-1]["ways"].items()}, flush=True
            )
            if folder is not None:
                record.write(folder, STUDY.name, about, made)
    if distributed.get_rank() == 0:
        for each in STUDY.shown(made):
            print(tables.markdown(each))
    return made


def _tried(agreed: Callable[[str], str], make: Callable[[], object]) -> tuple[Any, str]:
    """What is made, and what went wrong on any rank, "" if nothing did: no rank goes on with what another has not."""
    made, error = None, ""
    try:
        made = make()
    except Exception as failure:
        error = session.first_line(failure)
    return made, agreed(error)


def _agreed(group: distributed.ProcessGroup, error: str) -> str:
    """The first error of all ranks."""
    found: list[str] = [""] * distributed.get_world_size(group)
    distributed.all_gather_object(found, error, group)
    return next(filter(None, found), "")


def _measured(
    case: SplitCase, ways: Sequence[Way], mesh: DeviceMesh, agreed: Callable[[str], str], rounds: int
) -> dict[str, dict[str, object]]:
    torch._dynamo.reset()  # of what other cases compiled: their modules have the same code
    work, model = WORKS[case.work], dataclasses.replace(case.model, shapes={case.work: case.shape})
    module, inputs = model.make(work, mesh.device_type)
    module.eval()
    exact = model_check.exact(module, inputs, gradients=False)
    own = model_check.distances(model_check.values(module, module, inputs, gradients=False), exact)
    entries, samplers = dict[str, dict[str, object]](), dict[str, Callable[[], float]]()
    for way in ways:
        made, error = _tried(agreed, lambda way=way: way.make(case, split(copy.deepcopy(module), mesh)))
        if not error:
            made, error = _tried(agreed, lambda made=made: _ready(made, case, inputs, exact, own))
        if error:
            entries[way.name] = {"error": error}
        else:
            entries[way.name], samplers[way.name] = made
    for name, times in turns.take(samplers, rounds).items():
        entries[name] |= {"ms": turns.quartiles(times)}
    return entries


def split(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Decoder layers with a part of each product, and of what is cached, on each rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, object] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in module.model.layers:
        parallelize_module(layer, mesh, plan)
    if isinstance(module, Cached):
        for held in module.held:
            for name in ("keys", "values"):
                part = getattr(held, name).chunk(mesh.size(), 1)[mesh.get_rank()]
                setattr(held, name, part.clone())
    return module


def _ready(
    made: Running,
    case: SplitCase,
    inputs: tuple[torch.Tensor, ...],
    exact: model_check.Values,
    own: Mapping[str, float],
) -> tuple[dict[str, object], Callable[[], float]]:
    """What is known of a way that is right, and what takes a sample of it, in milliseconds of the slowest rank."""
    start = time.perf_counter()
    with torch.no_grad():
        found = {"output": made.call(*inputs).clone()}
    first = time.perf_counter() - start
    if reason := model_check.wrong(found, exact, own):
        raise ArithmeticError(reason)
    call = torch.no_grad()(functools.partial(made.call, *inputs))
    for _ in range(WARM):
        call()
    cuda = inputs[0].device.type == "cuda"
    take = _graph_sampler(call) if cuda and WORKS[case.work].graph else _wall_sampler(call, cuda)
    output = model_check.distances(found, exact)["output"]
    return {"distance": float(f"{output:.3g}"), "first_s": round(first, 1)}, functools.partial(_slowest, take)


def _wall_sampler(call: Callable[[], object], cuda: bool) -> Callable[[], float]:
    return functools.partial(milliseconds, call, torch.cuda.synchronize if cuda else lambda: None)


def _graph_sampler(call: Callable[[], object]) -> Callable[[], float]:
    torch.cuda.synchronize()
    distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events meanwhile
        call()

    def take(_keeps: object = call) -> float:  # the graph has addresses alone
        graph.replay()
        return turns.between_events(lambda: [graph.replay() for _ in range(REPLAYS)]) / REPLAYS

    return take


def _slowest(take: Callable[[], float]) -> float:
    distributed.barrier()
    slowest = torch.tensor(take(), device="cuda" if torch.cuda.is_available() else "cpu")
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    main()
