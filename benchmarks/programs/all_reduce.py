"""The sum over ranks, residual sum and RMSNorm in one kernel, beside NCCL and torch's symmetric memory.

    torchrun --nproc-per-node 2 -m graphfuse.benchmarks.programs.all_reduce [--record FOLDER] [--quick]
    torchrun --nproc-per-node 2 -m graphfuse.benchmarks.programs.all_reduce --once

A process for each GPU of one host. First results: against float64, the same bits on all ranks and, replayed in CUDA
graphs in any order, the same bits each time. Then microseconds of a call in a captured graph of many, the largest of
all ranks, in rounds that take all in turns. Peers add up over ranks and then call our residual sum and RMSNorm.

--once calls each kernel once and checks it: for the compute-sanitizer, as docs/testing.md has it.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import functools
import json
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import distributed

from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs import turns
from graphfuse.benchmarks.programs.all_reduce_record import LIMITS, NORM, OURS, PARTS, REPLAYS, STUDY
from graphfuse.functional import (
    all_reduce_add_rmsnorm,
    fused_add_rmsnorm,
    fused_add_rmsnorm_quant,
    reduce_scatter_add_rmsnorm,
    reduce_scatter_add_rmsnorm_all_gather,
    rmsnorm_all_gather,
)

ROWS, HIDDEN = (1, 6, 32, 64, 128, 138), (4096, 6144, 8192)
LARGEST = 4096 * 8192
OFFSET = 128
"""Elements of the symmetric memory before the input: not where the memory begins."""
EPS = 1e-6
TOLERANCE, FP8_TOLERANCE = 2.0**-7, 0.08
CALLS, ROUNDS = 20, 9
SECONDS = 95
"""After which a run that hangs says where, and ends."""
SLOW_SECONDS = 280
"""The same under a sanitizer."""
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="folder that gets the record")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, replays and rounds")
    parser.add_argument("--once", action="store_true", help="each kernel once, no replays, no times")
    options = parser.parse_args()
    if options.once and options.record:
        parser.error("--once leaves no record; accepted: one of --once and --record")
    seconds = SLOW_SECONDS if options.once else SECONDS
    faulthandler.dump_traceback_later(seconds, exit=True)
    distributed.init_process_group("nccl", timeout=datetime.timedelta(seconds=seconds))
    rank = distributed.get_node_local_rank()
    torch.cuda.set_device(rank)
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(OFFSET + LARGEST, dtype=BF16, device=f"cuda:{rank}")
    _symmetric_memory.rendezvous(memory, distributed.group.WORLD)
    gathered = _symmetric_memory.empty(2 * LARGEST, dtype=torch.uint8, device=f"cuda:{rank}")
    _symmetric_memory.rendezvous(gathered, distributed.group.WORLD)
    made = {"results": [], "parts": [], "replays": [], "times": []}
    shapes = [(rows, hidden) for rows in ROWS for hidden in HIDDEN]
    for rows, hidden in [(6, 6144)] if options.once else shapes[:: 5 if options.quick else 1]:
        made["results"].append(results(memory, rows, hidden))
        said(made["results"][-1])
        if rows % distributed.get_world_size() == 0:
            made["parts"].append(in_parts(memory, gathered, rows, hidden))
            said(made["parts"][-1])
    if not options.once:
        measured(made, memory, gathered, options.quick)
    if distributed.get_rank() == 0 and not options.once:
        made = {"ranks": distributed.get_world_size()} | made
        for each in STUDY.shown(made):
            print(tables.markdown(each))
        if options.record is not None:
            print(STUDY.write(options.record, made))
    distributed.destroy_process_group()
    if not all(found["right"] for found in (*made["results"], *made["parts"])):
        raise SystemExit(1)


def measured(made: dict[str, list], memory: torch.Tensor, gathered: torch.Tensor, quick: bool) -> None:
    """Adds replays and times to what was made."""
    for rows, hidden, out in ((6, 6144, BF16), (138, 6144, FP8)):
        made["replays"].append(replays(memory, rows, hidden, out, REPLAYS // (10 if quick else 1)))
        said(made["replays"][-1])
    for rows, hidden in LIMITS:
        made["times"].append(times(memory, gathered, rows, hidden, 3 if quick else ROUNDS))
        said(made["times"][-1])


def said(found: Mapping[str, object]) -> None:
    """Prints a part of the record, on one rank."""
    if distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)


def given(memory: torch.Tensor, rows: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Input in symmetric memory, other on each rank; residual and weight, the same on all."""
    device = memory.device
    own = torch.Generator(device).manual_seed(1000 * seed + distributed.get_rank() + 1)
    shared = torch.Generator(device).manual_seed(1000 * seed)
    x = memory[OFFSET : OFFSET + rows * hidden].view(rows, hidden)
    x.copy_(torch.randn(rows, hidden, generator=own, device=device))
    residual = torch.randn(rows, hidden, generator=shared, device=device).to(BF16)
    return x, residual, torch.randn(hidden, generator=shared, device=device).to(BF16)


def of_all(t: torch.Tensor) -> list[torch.Tensor]:
    """A tensor as each rank has it."""
    t = t.contiguous()
    found = [torch.empty_like(t) for _ in range(distributed.get_world_size())]
    distributed.all_gather([f.view(torch.uint8) for f in found], t.view(torch.uint8))
    return found


def alike(t: torch.Tensor) -> bool:
    """True if all ranks have the same bits."""
    first, *others = (found.view(torch.uint8) for found in of_all(t))
    return all(torch.equal(first, other) for other in others)


def wanted(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the residual becomes, bit by bit, and the norm in float64."""
    inputs = of_all(x)
    total = functools.reduce(torch.add, (one.float() for one in inputs)) + residual.float()
    exact = functools.reduce(torch.add, (one.double() for one in inputs)) + residual.double()
    norm = exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + EPS) * weight.double()
    return total.to(BF16), norm


def away(out: torch.Tensor, norm: torch.Tensor, factor: float = 1.0, least: float = 0.01) -> float:
    """The largest error of a norm that was multiplied with a factor. least: added to what it is divided by."""
    exact = norm * factor
    return ((out.double() - exact).abs() / (exact.abs() + least)).max().item()


def results(memory: torch.Tensor, rows: int, hidden: int) -> dict[str, object]:
    """Whether a call is right: the residual bit by bit, out against float64."""
    x, residual, weight = given(memory, rows, hidden, seed=rows + hidden)
    before, (total, norm) = residual.clone(), wanted(x, residual, weight)
    out = all_reduce_add_rmsnorm(x, residual, weight, EPS)
    right = torch.equal(residual, total)
    scaled, scale = torch.empty(rows, hidden, dtype=FP8, device=x.device), torch.full((1,), 0.25, device=x.device)
    residual.copy_(before)
    all_reduce_add_rmsnorm(x, residual, weight, EPS, out=scaled, scale=scale)
    error, quantized = away(out, norm), away(scaled, norm, 4, 0.1)
    same = alike(out) and alike(residual) and alike(scaled)
    right = right and same and torch.equal(residual, total) and error < TOLERANCE and quantized < FP8_TOLERANCE
    found = {"rows": rows, "hidden": hidden, "right": right, "same bits on all ranks": same}
    return found | {"error": round(error, 6), "error of FP8": round(quantized, 6)}


def in_parts(memory: torch.Tensor, gathered: torch.Tensor, rows: int, hidden: int) -> dict[str, object]:
    """The same of parts of a sequence: a sum of one, gathered behind the norm or not, and a norm that is gathered."""
    x, residual, weight = given(memory, rows, hidden, seed=rows + hidden)
    total, norm = wanted(x, residual, weight)
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    before, total_of_part, norm_of_part = (t.chunk(ranks)[rank] for t in (residual, total, norm))
    whole, quantized = (gathered[:nbytes].view(t).view(rows, hidden) for t, nbytes in _sizes(rows * hidden))
    scale, own = torch.full((1,), 0.25, device=x.device), before.clone()
    out = reduce_scatter_add_rmsnorm(x, own, weight, EPS)
    right, errors = torch.equal(own, total_of_part), {"scattered": away(out, norm_of_part)}
    rmsnorm_all_gather(own, weight, EPS, out=whole)  # of the sum, which was rounded
    errors["gathered"] = away(whole, norm) / 2
    own.copy_(before)
    reduce_scatter_add_rmsnorm_all_gather(x, own, weight, EPS, out=whole)
    same, right = alike(whole), right and torch.equal(own, total_of_part)
    errors["both"] = away(whole, norm)
    own.copy_(before)
    reduce_scatter_add_rmsnorm_all_gather(x, own, weight, EPS, out=quantized, scale=scale)
    same, right = alike(quantized) and same, right and torch.equal(own, total_of_part)
    error = away(quantized, norm, 4, 0.1)
    right = right and same and max(errors.values()) < TOLERANCE and error < FP8_TOLERANCE
    found = {"rows": rows, "hidden": hidden, "right": right, "same bits on all ranks": same}
    found |= {f"error, {one}": round(e, 6) for one, e in errors.items()}
    return found | {"error of FP8": round(error, 6)}


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what a function does."""
    call()
    torch.cuda.synchronize()
    distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    torch.cuda.synchronize()
    distributed.barrier()
    return graph


def replays(memory: torch.Tensor, rows: int, hidden: int, dtype: torch.dtype, count: int) -> dict[str, object]:
    """Two graphs with inputs of their own, which the graph writes before its call: replayed in any order, the bits of
    the first replay every time."""
    x, residual, weight = given(memory, rows, hidden)
    out = torch.empty(rows, hidden, dtype=dtype, device=x.device)
    before, graphs, kept, wrong = residual.clone(), [], [], torch.zeros((), dtype=torch.int64, device=x.device)
    scale = None if dtype is BF16 else torch.full((1,), 0.25, device=x.device)
    for seed in (1, 2):
        given(memory, rows, hidden, seed)
        content = x.clone()

        def call(content: torch.Tensor = content) -> None:
            x.copy_(content)
            residual.copy_(before)
            all_reduce_add_rmsnorm(x, residual, weight, EPS, out=out, scale=scale)

        call()
        wanted = out.clone(), residual.clone()

        def checked(call: Callable[[], None] = call, wanted: tuple[torch.Tensor, ...] = wanted) -> None:
            call()
            for t, right in zip((out, residual), wanted, strict=True):
                wrong.add_((t.view(torch.uint8) != right.view(torch.uint8)).any())

        kept += [content, *wanted]  # graphs have their addresses alone
        graphs.append(captured(checked))
    chance = random.Random(0)
    for _ in range(count):
        graphs[chance.random() < 0.5].replay()
    torch.cuda.synchronize()
    found = {"rows": rows, "hidden": hidden, "type": str(dtype), "replays": count}
    return found | {"wrong": int(wrong.item()), "same bits on all ranks": alike(out) and alike(residual)}


def _sizes(count: int) -> tuple[tuple[torch.dtype, int], ...]:
    return (BF16, 2 * count), (FP8, count)


def times(memory: torch.Tensor, gathered: torch.Tensor, rows: int, hidden: int, rounds: int) -> dict[str, object]:
    """Microseconds of ours and of peers: medians, of the slowest rank in each round."""
    x, residual, weight = given(memory, rows, hidden)
    x.zero_()  # what is added up in place stays finite
    name = distributed.group.WORLD.group_name
    out, scaled = torch.empty_like(residual), torch.empty(rows, hidden, dtype=FP8, device=x.device)
    scale, ops, local = torch.full((1,), 0.25, device=x.device), torch.ops.symm_mem, torch.zeros_like(residual)

    def nccl() -> None:
        distributed.all_reduce(local)
        fused_add_rmsnorm(local, residual, weight, EPS, out=out)

    def nccl_fp8() -> None:
        distributed.all_reduce(local)
        fused_add_rmsnorm_quant(scaled, local, residual, weight, scale, EPS)

    def one_shot() -> None:
        fused_add_rmsnorm(ops.one_shot_all_reduce(x, "sum", name), residual, weight, EPS, out=out)

    def two_shot() -> None:
        ops.two_shot_all_reduce_(x, "sum", name)
        fused_add_rmsnorm(x, residual, weight, EPS, out=out)

    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    parted, own = rows % ranks == 0, residual.chunk(ranks)[rank].clone() if rows % ranks == 0 else residual
    whole, quantized = (gathered[:nbytes].view(t).view(rows, hidden) for t, nbytes in _sizes(rows * hidden))

    def two_steps() -> None:
        reduce_scatter_add_rmsnorm_all_gather(x, own, weight, EPS, out=whole)

    def two_steps_fp8() -> None:
        reduce_scatter_add_rmsnorm_all_gather(x, own, weight, EPS, out=quantized, scale=scale)

    calls = {
        OURS: lambda: all_reduce_add_rmsnorm(x, residual, weight, EPS, out=out),
        f"{OURS}, FP8": lambda: all_reduce_add_rmsnorm(x, residual, weight, EPS, out=scaled, scale=scale),
        PARTS: two_steps,
        f"{PARTS}, FP8": two_steps_fp8,
        NORM: lambda: fused_add_rmsnorm(local, residual, weight, EPS, out=out),
        "NCCL": nccl,
        "NCCL, FP8": nccl_fp8,
        "torch one-shot": one_shot,
        "torch two-shot": two_shot,
    }
    if not parted:
        del calls[PARTS], calls[f"{PARTS}, FP8"]
    if rows * hidden > 1 << 21:
        del calls["torch one-shot"]
    count = CALLS if rows * hidden <= 1 << 21 else 4
    samplers = {}
    for peer, call in calls.items():
        graph = captured(lambda call=call: [call() for _ in range(count)])
        samplers[peer] = functools.partial(sample, graph, count)
    found = turns.take(samplers, rounds)
    medians = {peer: round(statistics.median(samples), 2) for peer, samples in found.items()}
    quickest = {peer: round(min(samples), 2) for peer, samples in found.items()}
    return {"rows": rows, "hidden": hidden, "us": medians, "least us": quickest}


def sample(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of a call, on the slowest rank."""
    distributed.barrier()
    graph.replay()
    ms = turns.between_events(lambda: [graph.replay() for _ in range(5)])
    slowest = torch.tensor(ms * 1000 / (5 * calls), device="cuda")
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    main()
