"""Cases of ``all_reduce_add_rmsnorm`` on several ranks, which ``ranks`` runs. Tensors are of the mesh's device."""

import os
import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from graphfuse import RankTimeoutError, VariantPackError, VariantPackTypeError
from graphfuse.functional import (
    all_reduce_add_rmsnorm,
    reduce_scatter_add_rmsnorm,
    reduce_scatter_add_rmsnorm_all_gather,
    rmsnorm_all_gather,
    symmetric,
)
from support import oracle

EPS = 1e-5
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def _given(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, other on each rank; residual and weight; and the residual sum in float64."""
    shared = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=shared).to(dtype) for _ in range(mesh.size())]
    residual, weight = torch.randn(shape, generator=shared).to(dtype), torch.randn(shape[-1:], generator=shared)
    total = sum(x.double() for x in values) + residual.double()
    found = values[distributed.get_rank()], residual, weight.to(dtype), total
    return tuple(t.to(mesh.device_type) for t in found)


def values(mesh: DeviceMesh) -> None:
    for dtype in TYPES:
        for shape in ((5, 64), (2, 3, 96), (17,), (0, 64)):
            x, residual, weight, total = _given(mesh, shape, dtype)
            before = x.clone()
            out = all_reduce_add_rmsnorm(x, residual, weight, EPS)
            tolerance = 1e-5 if dtype is torch.float32 else 2.0**-7
            exact = oracle.rmsnorm(total, weight, EPS)[0]
            torch.testing.assert_close(residual.double(), total, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
            assert out.dtype is dtype and out.shape == x.shape
            assert torch.equal(x, before)


def formats(mesh: DeviceMesh) -> None:
    """Types of out, and a scale."""
    x, residual, weight, total = _given(mesh, (6, 64), torch.bfloat16)
    exact = oracle.rmsnorm(total, weight, EPS)[0]
    scale = torch.full((1,), 0.25, device=x.device)
    for dtype, least in ((torch.float32, 1e-5), (torch.float8_e4m3fn, 1 / 15), (torch.float8_e5m2, 1 / 7)):
        for given, factor in ((None, 1), (scale, 4)):
            out = torch.empty(x.shape, dtype=dtype, device=x.device)
            made = all_reduce_add_rmsnorm(x, residual.clone(), weight, EPS, out=out, scale=given)
            assert made is out
            torch.testing.assert_close(out.double(), exact * factor, rtol=least, atol=0.01)


def groups(mesh: DeviceMesh) -> None:
    """A group of some of the ranks, and one of this rank alone."""
    rank = distributed.get_rank()
    pairs = [distributed.new_group([first, first + 1]) for first in range(0, mesh.size(), 2)]
    alone = [distributed.new_group([one]) for one in range(mesh.size())]
    x, residual, weight, _ = _given(mesh, (3, 64), torch.float32)
    of_all = [torch.empty_like(x) for _ in range(mesh.size())]
    distributed.all_gather(of_all, x)
    for group, members in ((pairs[rank // 2], [rank // 2 * 2, rank // 2 * 2 + 1]), (alone[rank], [rank])):
        summed = residual.clone()
        all_reduce_add_rmsnorm(x, summed, weight, EPS, group=group)
        torch.testing.assert_close(summed, sum(of_all[one] for one in members) + residual)


def refused(mesh: DeviceMesh) -> None:
    """On all ranks, before anything is sent or written."""
    x, residual, weight, _ = _given(mesh, (5, 64), torch.bfloat16)
    before = residual.clone()
    for change, said in {
        "x is of torch.float64": {"x": x.double()},
        r"residual has shape \(4, 64\); accepted: \(5, 64\)": {"residual": residual[:4]},
        r"weight has shape \(63,\); accepted: \(64,\)": {"weight": weight[:63]},
        "out is of torch.int8": {"out": torch.empty_like(x, dtype=torch.int8)},
        "scale is of torch.bfloat16; accepted: float32": {
            "scale": torch.ones(1, dtype=torch.bfloat16, device=x.device)
        },
        "group is str; accepted: ProcessGroup, None": {"group": "0"},
        "x must be a torch tensor, got list": {"x": [1.0]},
    }.items():
        given = {"x": x, "residual": residual, "weight": weight} | said
        with pytest.raises((VariantPackError, VariantPackTypeError), match=change):
            all_reduce_add_rmsnorm(**given)
    assert torch.equal(residual, before)


FP8 = torch.float8_e4m3fn


def compiled(mesh: DeviceMesh) -> None:
    """Each function in a graph without breaks, with the results of eager calls."""
    ranks = mesh.size()
    x, residual, weight, _ = _given(mesh, (2 * ranks, 64), torch.bfloat16)
    own = residual.chunk(ranks)[distributed.get_rank()].clone()
    scale = torch.full((1,), 0.5, device=x.device)

    def calls(x: torch.Tensor, residual: torch.Tensor, own: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        y = all_reduce_add_rmsnorm(x * 2, residual, weight, EPS)
        z = reduce_scatter_add_rmsnorm(x + y, own, weight, EPS, group=distributed.group.WORLD)
        rmsnorm_all_gather(z, weight, EPS, out=out)
        quantized = torch.empty_like(x, dtype=FP8)
        made = reduce_scatter_add_rmsnorm_all_gather(x, own, weight, EPS, out=quantized, scale=scale)
        return [y, z, out * 1, made.float()]

    made = []
    for call in (calls, torch.compile(calls, backend="aot_eager", fullgraph=True)):
        given = [residual.clone(), own.clone(), torch.zeros_like(x)]
        made.append([*call(x, *given), *given])
    for eager, graph in zip(*made, strict=True):
        assert torch.equal(eager, graph)
    with pytest.raises(Exception, match="weight has shape"):
        torch.compile(all_reduce_add_rmsnorm, backend="aot_eager", fullgraph=True)(x, residual, weight[1:], EPS)


def parts(mesh: DeviceMesh) -> None:
    """Sums of a part, a norm that all ranks get, and both, along each dimension of rows."""
    ranks, rank = mesh.size(), distributed.get_rank()
    for shape, dim in (((4 * ranks, 64), 0), ((2, 3 * ranks, 96), 1), ((2 * ranks, 3, 64), -3)):
        for dtype in (torch.bfloat16, torch.float32):
            x, residual, weight, total = _given(mesh, shape, dtype)
            tolerance = 1e-5 if dtype is torch.float32 else 2.0**-7
            exact = oracle.rmsnorm(total, weight, EPS)[0]
            own, total, its = (t.chunk(ranks, dim)[rank] for t in (residual, total, exact))
            summed, before = own.clone(), x.clone()
            out = reduce_scatter_add_rmsnorm(x, summed, weight, EPS, dim=dim)
            for made, wanted in ((summed, total), (out, its)):
                torch.testing.assert_close(made.double(), wanted, rtol=tolerance, atol=tolerance)
            assert torch.equal(x, before) and out.dtype is dtype

            gathered = torch.empty_like(x)
            assert rmsnorm_all_gather(total.to(dtype), weight, EPS, out=gathered, dim=dim) is gathered
            torch.testing.assert_close(gathered.double(), exact, rtol=tolerance, atol=2 * tolerance)

            again, quantized = own.clone(), torch.empty_like(x, dtype=FP8)
            scale = torch.full((1,), 0.5, device=x.device)
            both = reduce_scatter_add_rmsnorm_all_gather(x, again, weight, EPS, out=quantized, dim=dim, scale=scale)
            assert both is quantized and torch.equal(again, summed)
            torch.testing.assert_close(both.double(), 2 * exact, rtol=1 / 15, atol=0.02)


def parts_refused(mesh: DeviceMesh) -> None:
    """On all ranks, before anything is sent or written."""
    ranks = mesh.size()
    x, residual, weight, _ = _given(mesh, (2 * ranks, 64), torch.bfloat16)
    own, out = residual[:2].clone(), torch.empty_like(x)
    before = own.clone()
    for said, name, change in (
        (f"x has shape .*; accepted: a multiple of {ranks} along dim 0", "scatter", {"x": x[:-1]}),
        (r"dim is -1; accepted: -2 to 0 but for -1, as x has 2 dimensions", "scatter", {"dim": -1}),
        (r"dim is 1; accepted: -2 to 0 but for -1", "gather", {"dim": 1}),
        (r"residual has shape .*; accepted: \(2, 64\), as x has shape", "scatter", {"residual": residual[:1]}),
        ("residual is of torch.int32", "both", {"residual": own.int()}),
        ("weight has shape", "gather", {"weight": weight[1:]}),
        (r"x has shape \(1, 64\); accepted: \(2, 64\), as out has shape", "gather", {"x": x[:1]}),
        ("out must be a torch tensor, got NoneType", "gather", {"out": None}),
        (r"out has shape .*; accepted: .*, as x has shape", "both", {"out": out[:ranks]}),
        ("out is of torch.int8", "both", {"out": out.to(torch.int8)}),
        ("group is str", "gather", {"group": "0"}),
    ):
        call, given = {
            "scatter": (reduce_scatter_add_rmsnorm, {"x": x, "residual": own, "weight": weight}),
            "gather": (rmsnorm_all_gather, {"x": own, "weight": weight, "out": out}),
            "both": (reduce_scatter_add_rmsnorm_all_gather, {"x": x, "residual": own, "weight": weight, "out": out}),
        }[name]
        with pytest.raises((VariantPackError, VariantPackTypeError), match=said):
            call(**(given | change))
    assert torch.equal(own, before)


def in_symmetric_memory(mesh: DeviceMesh) -> None:
    """One kernel, with the bits of float32 sums in the order of ranks; input overwritten behind each call."""
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(8192, dtype=torch.bfloat16, device="cuda")
    for shape in 3 * ((5, 64), (2, 3, 96), (17,), (1, 4096)):
        given, residual, weight, total = _given(mesh, shape, torch.bfloat16)
        x = memory[64 : 64 + given.numel()].view(shape)
        x.copy_(given)
        assert symmetric.peers(x, distributed.group.WORLD) is not None
        before = residual.clone()
        out = all_reduce_add_rmsnorm(x, residual, weight, EPS)
        x.fill_(float("nan"))
        of_all = [torch.empty_like(given) for _ in range(mesh.size())]
        distributed.all_gather(of_all, given)
        assert torch.equal(residual, (sum(one.float() for one in of_all) + before.float()).to(torch.bfloat16))
        torch.testing.assert_close(out.double(), oracle.rmsnorm(total, weight, EPS)[0], rtol=2.0**-7, atol=2.0**-7)
        distributed.all_gather(of_all, out)
        assert all(torch.equal(one, out) for one in of_all)


def parts_in_symmetric_memory(mesh: DeviceMesh) -> None:
    """One kernel each, of one memory and of two, with the bits of float32 sums in the order of ranks."""
    from torch.distributed import _symmetric_memory

    ranks, rank = mesh.size(), distributed.get_rank()
    memory = _symmetric_memory.empty(1 << 15, dtype=torch.bfloat16, device="cuda")
    other = _symmetric_memory.empty(1 << 15, dtype=torch.uint8, device="cuda")
    scale = torch.full((1,), 0.5, device="cuda")
    for shape, dim in 3 * (((4 * ranks, 64), 0), ((2, 3 * ranks, 96), 1), ((ranks, 4096), 0)):
        given, residual, weight, total = _given(mesh, shape, torch.bfloat16)
        count = given.numel()
        x, out = (memory[at : at + count].view(shape) for at in (64, 64 + count))
        quantized = other[128 : 128 + count].view(FP8).view(shape)
        own = residual.chunk(ranks, dim)[rank]
        of_all = [torch.empty_like(given) for _ in range(ranks)]
        distributed.all_gather(of_all, given)
        mine = [t.chunk(ranks, dim)[rank].float() for t in of_all]
        wanted, exact = (sum(mine) + own.float()).to(torch.bfloat16), oracle.rmsnorm(total, weight, EPS)[0]
        for to, factor, least in ((None, 1, 2.0**-7), (out, 1, 2.0**-7), (quantized, 2, 1 / 15)):
            x.copy_(given)
            summed = own.clone()
            if to is None:
                made = reduce_scatter_add_rmsnorm(x, summed, weight, EPS, dim=dim)
            else:
                by = None if factor == 1 else scale
                made = reduce_scatter_add_rmsnorm_all_gather(x, summed, weight, EPS, out=to, dim=dim, scale=by)
            x.fill_(float("nan"))
            assert torch.equal(summed, wanted)
            right = exact.chunk(ranks, dim)[rank] if to is None else exact
            torch.testing.assert_close(made.double(), factor * right, rtol=least, atol=0.02)
            if to is not None:
                _same_on_all(made)
        rmsnorm_all_gather(wanted, weight, EPS, out=out, dim=dim)
        _same_on_all(out)
        torch.testing.assert_close(out.double(), exact, rtol=2.0**-6, atol=0.02)


def a_rank_that_does_not_come(mesh: DeviceMesh) -> None:
    """The others end, and say who it is."""
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(4, 64, dtype=torch.bfloat16, device="cuda").fill_(1)
    residual, weight = torch.zeros_like(memory), torch.ones(64, dtype=torch.bfloat16, device="cuda")
    with mock.patch.dict(os.environ, {"GRAPHFUSE_RANKS_TIMEOUT": "2"}):
        all_reduce_add_rmsnorm(memory, residual, weight, EPS)
        torch.cuda.synchronize()
        distributed.barrier()
        if distributed.get_rank():
            with pytest.raises(RankTimeoutError, match="have not begun it: 0.*; its kernel was ended without"):
                all_reduce_add_rmsnorm(memory, residual, weight, EPS)
            with pytest.raises(RankTimeoutError, match="an earlier call with this memory did not wait"):
                all_reduce_add_rmsnorm(memory, residual, weight, EPS)
        torch.cuda.synchronize()
    distributed.barrier()


REPLAYS = 10_000


def replays(mesh: DeviceMesh) -> None:
    """CUDA graphs with inputs of their own, replayed in any order: the bits of the first call, on all ranks."""
    from torch.distributed import _symmetric_memory

    shape = 12 * mesh.size(), 2048
    memory = _symmetric_memory.empty(2 * shape[0] * shape[1], dtype=torch.bfloat16, device="cuda")
    x, out = memory.view(2, *shape)
    quantized = _symmetric_memory.empty(*shape, dtype=torch.uint8, device="cuda").view(FP8)
    _, residual, weight, _ = _given(mesh, shape, torch.bfloat16)
    part = residual.chunk(mesh.size())[distributed.get_rank()]
    local, scale = torch.empty_like(x), torch.full((1,), 0.25, device="cuda")
    calls = {
        "whole rows": (residual, local, lambda r: all_reduce_add_rmsnorm(x, r, weight, EPS, out=local)),
        "parts": (part, out, lambda r: reduce_scatter_add_rmsnorm_all_gather(x, r, weight, EPS, out=out)),
        "FP8": (
            part,
            quantized,
            lambda r: reduce_scatter_add_rmsnorm_all_gather(x, r, weight, EPS, out=quantized, scale=scale),
        ),
    }
    wrong, graphs, kept = torch.zeros((), dtype=torch.int64, device="cuda"), [], []
    for seed in range(2):
        content = torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + distributed.get_rank()))
        content = content.to("cuda", torch.bfloat16)
        for before, made, call in calls.values():
            own = before.clone()

            def step(before=before, made=made, call=call, own=own, content=content) -> tuple[torch.Tensor, ...]:
                x.copy_(content)
                own.copy_(before)
                call(own)
                return own, made

            wanted = [t.clone() for t in step()]
            _same_on_all(wanted[1])
            torch.cuda.synchronize()
            distributed.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for t, right in zip(step(), wanted, strict=True):
                    wrong += (t.view(torch.uint8) != right.view(torch.uint8)).any()
            graphs.append(graph)
            kept += [content, own, *wanted]  # graphs have their addresses alone
    chance = random.Random(0)
    for _ in range(REPLAYS):
        chance.choice(graphs).replay()
    torch.cuda.synchronize()
    assert wrong.item() == 0
    distributed.barrier()


def _same_on_all(t: torch.Tensor) -> None:
    own = t.contiguous().view(torch.uint8)
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, own)
    assert all(torch.equal(one, own) for one in found)


ON_CPUS: dict[str, Callable[[DeviceMesh], None]] = {
    f.__name__: f for f in (values, formats, groups, refused, parts, parts_refused, compiled)
}
_ON_GPUS = (in_symmetric_memory, parts_in_symmetric_memory, replays, a_rank_that_does_not_come)
CASES = ON_CPUS | {f.__name__: f for f in _ON_GPUS}
