"""RMSNorm of a residual and what is added up over ranks: one kernel where ranks can read each other's memory."""

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import distributed

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.functional import symmetric
from graphfuse.functional.call import AcceptedCall
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.function import entry
from graphfuse.functional.norms import WEIGHT
from graphfuse.functional.tensor_parameter import (
    FLOAT,
    FLOATS,
    FORMATS,
    Shape,
    TensorParameter,
    like,
    one,
    type_of,
    types,
)
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops.collectives import MOST_RANKS, peers_length


def _lengths(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
    return tuple((peers_length(ranks),) for ranks in range(1, MOST_RANKS + 1))


def _variant(reduced: Callable[[DrawnGraph], Tensor], *read: TensorParameter) -> Variant:
    """reduced: draws the sum over ranks."""

    def draw(d: DrawnGraph) -> None:
        total = d.store_read("residual", d.graph.add(reduced(d), d["residual"]))
        y = d.norm(total)
        d.store("out", d.graph.mul(y, d.graph.reciprocal(d["scale"])) if "scale" in d else y)

    arguments = (
        TensorParameter("x", FLOATS),
        TensorParameter("residual", FLOATS, like("x"), written=True),
        TensorParameter(WEIGHT.name, FLOATS, lambda shapes: (shapes["x"][-1:],)),
        *read,
        TensorParameter("scale", FLOAT, one, optional=True),
        TensorParameter("out", FORMATS, like("x"), written=True, new=type_of("x")),
    )
    return Variant(arguments, draw)


_REST = ("eps", "out", "scale", "enable_pdl")
_DEFAULTS = {"eps": 1e-6, "out": None, "scale": None, "enable_pdl": None}
_ONE_KERNEL = Function(
    "all_reduce_add_rmsnorm",
    ("x", "residual", "weight", "peers", "rank", *_REST),
    _DEFAULTS,
    ("rank",),
    _variant(
        lambda d: d.graph.all_reduce(d["x"], d["peers"], **d.options),
        TensorParameter("peers", types(data_type.INT64), _lengths),
    ),
    ("out",),
)
_AFTER = Function(
    "add_rmsnorm_of_sum",
    ("x", "residual", "weight", *_REST),
    _DEFAULTS,
    (),
    _variant(lambda d: d["x"]),
    ("out",),
)


def _refused(*values: object) -> NoReturn:
    raise VariantPackTypeError(
        "all_reduce_add_rmsnorm is called under torch.compile or with tensors of a class of their own; accepted: calls "
        "in eager mode with plain tensors"
    )


_one_kernel, _after = entry(_ONE_KERNEL, _refused), entry(_AFTER, _refused)


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

    What tensor-parallel layers do behind a product: all ranks call it, with one layout and type. x: (..., hidden),
    bfloat16, float16 or float32; it is only read. residual: of x's shape, the same on all ranks; bfloat16, float16 or
    float32. weight: (hidden,), of any of these types. out: of x's shape; of these types, or float8_e4m3fn or
    float8_e5m2, saturating. Default: x's type, newly allocated. scale: float32, (1,) or (): the norm is multiplied by
    1 / scale before it is rounded. group: torch's, None for that of all ranks. enable_pdl: as for ``rmsnorm``.

    Where x lies in torch's symmetric memory (``torch.distributed._symmetric_memory.empty``) of up to 8 GPUs of a host,
    one kernel reads the memory of all ranks. x lies equally far into it on each. The sum is in float32, in the order of
    ranks, and not rounded before the norm: all ranks have the same bits, in every run. Calls of a group are on one
    stream, in one order on all ranks; captured graphs are replayed in one order on all ranks. The first call with some
    memory allocates and waits for the other ranks: it must not be captured. Behind the call, on its stream, x may be
    overwritten. Other tensors are added up in float32 by ``torch.distributed.all_reduce``, in its order.

    Returns out. Raises VariantPackError, and VariantPackTypeError for wrong types, naming the argument. Shapes that
    differ between ranks are not seen.
    """
    group = _group(group)
    peers = symmetric.peers(x, group) if isinstance(x, torch.Tensor) else None
    if peers is not None:
        return _one_kernel(x, residual, weight, peers.numbers, peers.rank, eps, out, scale, enable_pdl)
    given = dict(zip(_AFTER.parameters, (x, residual, weight, eps, out, scale, enable_pdl), strict=True))
    AcceptedCall.of(_AFTER, given)  # refuses what is wrong before anything is sent
    total = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    return _after(total, residual, weight, eps, out, scale, enable_pdl)


def _group(group: distributed.ProcessGroup | None) -> distributed.ProcessGroup:
    if not distributed.is_available() or not distributed.is_initialized():
        raise VariantPackError("group is not initialized; accepted: behind torch.distributed.init_process_group")
    found = distributed.group.WORLD if group is None else group
    if not isinstance(found, distributed.ProcessGroup):
        raise VariantPackTypeError(f"group is {type(found).__name__}; accepted: ProcessGroup, None")
    return found
