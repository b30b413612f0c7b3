"""RMSNorm of a residual plus a sum over ranks: one kernel if ranks can read each other's memory."""

import torch
from torch import distributed
from torch.compiler import is_dynamo_compiling

from graphfuse.functional import rank_operators, symmetric
from graphfuse.functional.operator import fake_tensors
from graphfuse.functional.rank_functions import check_call, declare, eager, group_of

_AFTER = declare("all_reduce_add_rmsnorm", "x", "residual", "weight")
_one_kernel = eager(declare("all_reduce_add_rmsnorm", "x", "residual", "weight", "peers"))
_after = eager(_AFTER)


def all_reduce_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    group: distributed.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """residual becomes the sum of x over the ranks of a group + residual; out becomes RMSNorm of that sum.

    Tensor-parallel layers do this after a product. All ranks call it, with the same layout and type. x: (..., hidden),
    bfloat16, float16 or float32; it is only read. residual: of x's shape, the same on all ranks; bfloat16, float16 or
    float32. weight: (hidden,), of any of these types. out: of x's shape; of these types, or float8_e4m3fn or
    float8_e5m2, saturating. Default: x's type, newly allocated. scale: float32, (1,) or (): the norm is multiplied by
    1 / scale before it is rounded. group: torch's, None for that of all ranks. enable_pdl: as for ``rmsnorm``.

    If x lies in torch's symmetric memory (``torch.distributed._symmetric_memory.empty``) of up to 8 GPUs of a host, one
    kernel reads the memory of all ranks. x has the same offset in it on each. The sum is computed in float32, in the
    order of ranks, and not rounded before the norm: all ranks have the same bits, in every run. Calls of a group are on
    one stream, in one order on all ranks; captured graphs are replayed in one order on all ranks. The first call with
    some memory allocates and waits for the other ranks: it must not be captured. After the call, on its stream, x may
    be overwritten. Other tensors are added up in float32 by ``torch.distributed.all_reduce``, in its order.

    Returns out. Raises VariantPackError, and VariantPackTypeError for wrong types, naming the argument. Shapes that
    differ between ranks are not detected.
    """
    if is_dynamo_compiling():
        return rank_operators.traced("all_reduce_add_rmsnorm", group, out, x, residual, weight, eps, scale)
    group = group_of(group)
    peers = symmetric.peers(x, group) if isinstance(x, torch.Tensor) else None
    if peers is not None:
        given = x, residual, weight, peers.numbers, peers.rank, eps, out, scale, enable_pdl
        return peers.call(_AFTER.name, _one_kernel, *given)
    check_call(_AFTER, x, residual, weight, eps, out, scale, enable_pdl)
    total = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    return _after(total, residual, weight, eps, out, scale, enable_pdl)


def _made(group: object, **given: object) -> torch.Tensor:
    return fake_tensors(_AFTER, _AFTER.defaults | given)["out"]


rank_operators.define(_AFTER, all_reduce_add_rmsnorm, _made, takes_dim=False, new=True)
