"""RMSNorm between tensor-parallel products, with the sequence split over ranks in between.

The first product leaves partial sums, of which each rank adds up its part (reduce-scatter). The second reads all parts
(all-gather). One kernel does this if ranks can read and write each other's memory.
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
from graphfuse.functional.rank_functions import check_call, declare, eager, group_of, rank_part

_PACKED = torch.contiguous_format
_SCATTER = "reduce_scatter_add_rmsnorm"
_GATHER = "rmsnorm_all_gather"
_BOTH = "reduce_scatter_add_rmsnorm_all_gather"
_ADDED = declare(_SCATTER, "x", "residual", "weight")
_NORMED = declare(_GATHER, "x", "weight")
_after, _before = eager(_ADDED), eager(_NORMED)
_scatters = eager(declare(_SCATTER, "x", "residual", "weight", "peers"))
_gathers = eager(declare(_GATHER, "x", "weight", "out_peers"))
_does_both = eager(declare(_BOTH, "x", "residual", "weight", "peers", "out_peers"))


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

    x: as for ``all_reduce_add_rmsnorm``, with one part per rank along `dim`, in the order of ranks. dim: any but the
    last. residual, out: of the shape of a part, this rank's own. Otherwise as for ``all_reduce_add_rmsnorm``, including
    symmetric memory; other tensors are added up in float32 by ``torch.distributed.reduce_scatter``.
    """
    if is_dynamo_compiling():
        return rank_operators.traced(_SCATTER, group, out, x, residual, weight, eps, dim, scale)
    group = group_of(group)
    mine = rank_part("x", x, dim, group)
    _fits("residual", residual, mine.shape, x)
    peers = symmetric.peers(x, group)
    if peers is not None:
        given = mine, residual, weight, peers.numbers, peers.rank, eps, out, scale, enable_pdl
        return peers.call(_SCATTER, _scatters, *given)
    check_call(_ADDED, mine, residual, weight, eps, out, scale, enable_pdl)
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
    """out becomes RMSNorm of the parts of all ranks of a group, concatenated along `dim`, on all ranks.

    x: (..., hidden), bfloat16, float16 or float32, of one layout and type on all ranks. weight: (hidden,), of any of
    these types. out: of x's shape, with the extent along `dim` times the number of ranks; of these types, or
    float8_e4m3fn or float8_e5m2, saturating: FP8 is gathered as FP8. dim: any but the last. scale, group, enable_pdl:
    as for ``all_reduce_add_rmsnorm``.

    If out lies in torch's symmetric memory, at the same offset on each rank, one kernel writes to the memory of all.
    Then calls of a group are ordered as in ``all_reduce_add_rmsnorm``. The kernel begins after all earlier work on the
    streams of all ranks; after the call, on its stream, out is complete. Other tensors are gathered by
    ``torch.distributed.all_gather``.

    Returns out. Raises VariantPackError, and VariantPackTypeError for wrong types, naming the argument. Shapes that
    differ between ranks are not detected.
    """
    if is_dynamo_compiling():
        return rank_operators.traced(_GATHER, group, out, x, weight, eps, dim, scale)
    group = group_of(group)
    mine = rank_part("out", out, dim, group)
    _fits("x", x, mine.shape, out, "out")
    peers = symmetric.peers(out, group)
    if peers is not None:
        peers.call(_GATHER, _gathers, x, weight, peers.numbers, peers.rank, eps, mine, scale, enable_pdl)
        return out
    check_call(_NORMED, x, weight, eps, mine, scale, enable_pdl)
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
    """``reduce_scatter_add_rmsnorm``, with the result on all ranks: an all-reduce in two steps, with a sharded
    residual.

    out: of x's shape, otherwise as for ``rmsnorm_all_gather``. residual: of the shape of a part, this rank's own. One
    kernel does it if x and out lie in symmetric memory, the same or another: each rank reads and writes 1 / ranks of
    the bytes that ``all_reduce_add_rmsnorm`` reads. For large sizes, and above all with FP8, this takes less time.
    Returns out.
    """
    if is_dynamo_compiling():
        return rank_operators.traced(_BOTH, group, out, x, residual, weight, eps, dim, scale)
    group = group_of(group)
    mine, its = rank_part("x", x, dim, group), rank_part("out", out, dim, group)
    _fits("residual", residual, mine.shape, x)
    _fits("out", out, x.shape, x)
    peers, out_peers = symmetric.peers(x, group), symmetric.peers(out, group)
    if peers is not None and out_peers is not None:
        tables = peers.numbers, out_peers.numbers, peers.rank
        peers.call(_BOTH, _does_both, mine, residual, weight, *tables, eps, its, scale, enable_pdl)
        return out
    check_call(_ADDED, mine, residual, weight, eps, its, scale, enable_pdl)
    own = torch.empty(its.shape, dtype=out.dtype, device=out.device)
    return _gathered(_after(_scattered(x, dim, group), residual, weight, eps, own, scale, enable_pdl), out, dim, group)


def _fits(name: str, t: object, shape: torch.Size, other: torch.Tensor, whose: str = "x") -> None:
    """Raises VariantPackError for a tensor of another shape than `shape`, which depends on that of `other`."""
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
    """out, gathered from the parts of all ranks."""
    ranks = group.size()
    parts = torch.empty(ranks, *own.shape, dtype=own.dtype, device=own.device)
    # Gathered as bytes, which all backends support. Parts are views.
    distributed.all_gather([t.view(torch.uint8) for t in parts], own.view(torch.uint8), group=group)
    for to, made in zip(out.chunk(ranks, dim), parts, strict=True):
        to.copy_(made)
    return out


def _made(f: Function, group: distributed.ProcessGroup, dim: int, **given: object) -> torch.Tensor:
    """The fake result of a call. f: the function of a rank's part."""
    scattered, gathered = "residual" in given, given["out"] is not None and f.name != _SCATTER
    mine = {"x": rank_part("x", given["x"], dim, group)} if scattered else {}
    if gathered:
        mine["out"] = rank_part("out", given["out"], dim, group)
    return fake_tensors(f, f.defaults | given | mine)["out"]


_ADDED_BOTH = replace(_ADDED, name=_BOTH)
for _one, _call, _new in (
    (_ADDED, reduce_scatter_add_rmsnorm, True),
    (_NORMED, rmsnorm_all_gather, False),
    (_ADDED_BOTH, reduce_scatter_add_rmsnorm_all_gather, False),
):
    rank_operators.define(_one, _call, partial(_made, _one), takes_dim=True, new=_new)
