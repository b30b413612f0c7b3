"""Cases of ``all_reduce_add_rmsnorm`` on several ranks, which ``ranks`` runs. Tensors are of the mesh's device."""

from collections.abc import Callable

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from graphfuse import VariantPackError, VariantPackTypeError
from graphfuse.functional import all_reduce_add_rmsnorm, symmetric
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


ON_CPUS: dict[str, Callable[[DeviceMesh], None]] = {f.__name__: f for f in (values, formats, groups, refused)}
CASES = ON_CPUS | {"in_symmetric_memory": in_symmetric_memory}
