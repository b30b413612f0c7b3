"""RMSNorm between products that are split over ranks, where each rank has a part of the sequence in between.

A product leaves sums, of which a rank adds up its part (reduce-scatter); the next one reads all parts (all-gather). One
kernel does so where ranks can read each other's memory, and write it.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import distributed
from torch.compiler import is_dynamo_compiling

from graphfuse.base.errors import VariantPackError
from graphfuse.functional import rank_operators, symmetric
from graphfuse.functional.declaration import Function
from graphfuse.functional.operator import fake_tensors
from graphfuse.functional.over_ranks import accepted, declared, eager, group_of, part

_PACKED = torch.contiguous_format
_SCATTER = "reduce_scatter_add_rmsnorm"
_GATHER = "rmsnorm_all_gather"
_BOTH = "reduce_scatter_add_rmsnorm_all_gather"
_ADDED = declared(_SCATTER, "x", "residual", "weight")
_NORMED = declared(_GATHER, "x", "weight")
_after, _before = eager(_ADDED), eager(_NORMED)
_scatters = eager(declared(_SCATTER, "x", "residual", "weight", "peers"))
_gathers = eager(declared(_GATHER, "x", "weight", "out_peers"))
_does_both = eager(declared(_BOTH, "x", "residual", "weight", "peers", "out_peers"))


def reduce_scatter_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    dim: int = 0,
    group: distributed.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """residual becomes the sum of this rank's part of x over the ranks of a group + residual; out becomes RMSNorm of
    that sum.

    x: as for ``all_reduce_add_rmsnorm``, with as many parts along `dim` as there are ranks, in their order. dim: any
    but the last. residual, out: of the shape of a part, this rank's own. Else as for ``all_reduce_add_rmsnorm``, also
    what it says of symmetric memory; other tensors are added up in float32 by ``torch.distributed.reduce_scatter``.
    """
    if is_dynamo_compiling():
        return rank_operators.traced(_SCATTER, group, out, x, residual, weight, eps, dim, scale)
    group = group_of(group)
    mine = part("x", x, dim, group)
    _fits("residual", residual, mine.shape, x)
    peers = symmetric.peers(x, group)
    if peers is not None:
        given = mine, residual, weight, peers.numbers, peers.rank, eps, out, scale, enable_pdl
        return peers.call(_SCATTER, _scatters, *given)
    accepted(_ADDED, mine, residual, weight, eps, out, scale, enable_pdl)
    out = torch.empty(mine.shape, dtype=x.dtype, device=x.device) if out is None else out
    return _after(_scattered(x, dim, group), residual, weight, eps, out, scale, enable_pdl)


def rmsnorm_all_gather(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor,
    dim: int = 0,
    group: distributed.ProcessGroup | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """out becomes RMSNorm of what each rank of a group has, one part after the other along `dim`, on all ranks.

    x: (..., hidden), bfloat16, float16 or float32, of one layout and type on all ranks. weight: (hidden,), of any of
    these types. out: of x's shape, but along `dim` as many times as long as there are ranks; of these types, or
    float8_e4m3fn or float8_e5m2, saturating: FP8 is gathered as FP8. dim: any but the last. scale, group, enable_pdl:
    as for ``all_reduce_add_rmsnorm``.

    Where out lies in torch's symmetric memory, equally far into it on each rank, one kernel writes to the memory of
    all. Then calls of a group are ordered as those of ``all_reduce_add_rmsnorm``. It begins when all that stands before
    the call on the streams of all ranks has been done; behind the call, on its stream, out is complete. Other tensors
    are gathered by ``torch.distributed.all_gather``.

    Returns out. Raises VariantPackError, and VariantPackTypeError for wrong types, naming the argument. Shapes that
    differ between ranks are not seen.
    """
    if is_dynamo_compiling():
        return rank_operators.traced(_GATHER, group, out, x, weight, eps, dim, scale)
    group = group_of(group)
    mine = part("out", out, dim, group)
    _fits("x", x, mine.shape, out, "out")
    peers = symmetric.peers(out, group)
    if peers is not None:
        peers.call(_GATHER, _gathers, x, weight, peers.numbers, peers.rank, eps, mine, scale, enable_pdl)
        return out
    accepted(_NORMED, x, weight, eps, mine, scale, enable_pdl)
    own = torch.empty(mine.shape, dtype=out.dtype, device=out.device)
    return _gathered(_before(x, weight, eps, own, scale, enable_pdl), out, dim, group)


def reduce_scatter_add_rmsnorm_all_gather(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor,
    dim: int = 0,
    group: distributed.ProcessGroup | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``reduce_scatter_add_rmsnorm``, whose result all ranks get: an all-reduce in two steps, with a sharded residual.

    out: of x's shape, else as for ``rmsnorm_all_gather``. residual: of the shape of a part, this rank's own. One kernel
    does it where x and out lie in symmetric memory, the same or another: each rank reads and writes 1 / ranks of what
    ``all_reduce_add_rmsnorm`` reads. For large sizes, and above all with FP8, this takes less time. Returns out.
    """
    if is_dynamo_compiling():
        return rank_operators.traced(_BOTH, group, out, x, residual, weight, eps, dim, scale)
    group = group_of(group)
    mine, its = part("x", x, dim, group), part("out", out, dim, group)
    _fits("residual", residual, mine.shape, x)
    _fits("out", out, x.shape, x)
    peers, out_peers = symmetric.peers(x, group), symmetric.peers(out, group)
    if peers is not None and out_peers is not None:
        tables = peers.numbers, out_peers.numbers, peers.rank
        peers.call(_BOTH, _does_both, mine, residual, weight, *tables, eps, its, scale, enable_pdl)
        return out
    accepted(_ADDED, mine, residual, weight, eps, its, scale, enable_pdl)
    own = torch.empty(its.shape, dtype=out.dtype, device=out.device)
    return _gathered(_after(_scattered(x, dim, group), residual, weight, eps, own, scale, enable_pdl), out, dim, group)


def _fits(name: str, t: object, shape: torch.Size, other: torch.Tensor, whose: str = "x") -> None:
    """VariantPackError for a tensor of another shape, which follows from that of `other`."""
    if isinstance(t, torch.Tensor) and t.shape != shape:
        given = f"as {whose} has shape {tuple(other.shape)}"
        raise VariantPackError(f"{name} has shape {tuple(t.shape)}; accepted: {tuple(shape)}, {given}")


def _scattered(x: torch.Tensor, dim: int, group: distributed.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sum over ranks, in float32."""
    parts = [t.to(torch.float32, copy=True, memory_format=_PACKED) for t in x.chunk(group.size(), dim)]
    made = torch.empty_like(parts[0])
    distributed.reduce_scatter(made, parts, group=group)
    return made


def _gathered(own: torch.Tensor, out: torch.Tensor, dim: int, group: distributed.ProcessGroup) -> torch.Tensor:
    """out, of which each rank has a part of its own."""
    ranks = group.size()
    parts = torch.empty(ranks, *own.shape, dtype=own.dtype, device=own.device)
    # As bytes, which backends know. Parts are views.
    distributed.all_gather([t.view(torch.uint8) for t in parts], own.view(torch.uint8), group=group)
    for to, made in zip(out.chunk(ranks, dim), parts, strict=True):
        to.copy_(made)
    return out


def _made(f: Function, group: distributed.ProcessGroup, dim: int, **given: object) -> torch.Tensor:
    """Out of a call, without memory. f: the function of a rank's part."""
    scattered, gathered = "residual" in given, given["out"] is not None and f.name != _SCATTER
    mine = {"x": part("x", given["x"], dim, group)} if scattered else {}
    if gathered:
        mine["out"] = part("out", given["out"], dim, group)
    return fake_tensors(f, f.defaults | given | mine)["out"]


_ADDED_BOTH = replace(_ADDED, name=_BOTH)
for _one, _call, _new in (
    (_ADDED, reduce_scatter_add_rmsnorm, True),
    (_NORMED, rmsnorm_all_gather, False),
    (_ADDED_BOTH, reduce_scatter_add_rmsnorm_all_gather, False),
):
    rank_operators.define(_one, _call, partial(_made, _one), takes_dim=True, new=_new)
