"""``TorchCall``: a call of torch that replaces some nodes, as data that planning makes."""

from collections.abc import Callable
from dataclasses import dataclass

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.op_graph.ir import FrozenTensor, TensorId

MULTIPLIED = (data_type.BFLOAT16, data_type.HALF, data_type.FLOAT)
"""Data types that torch multiplies with sums in float32."""


@dataclass(frozen=True)
class TorchView:
    """View of a graph's tensor that a call uses, possibly with other axes. dim, stride: in elements."""

    tensor: TensorId
    dtype: data_type
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int

    @staticmethod
    def of(t: FrozenTensor, dim: tuple[int, ...] | None = None, stride: tuple[int, ...] | None = None) -> "TorchView":
        return TorchView(t.id, t.dtype, t.dim if dim is None else dim, t.stride if stride is None else stride, t.nbytes)


@dataclass(frozen=True, eq=False)
class TorchCall:
    """A call of torch that does the work of some nodes.

    views: its tensors, written ones last.
    numbers: scalars whose value execute gives. They are passed as floats.
    bind: makes a function of the module torch and the tensors, which does the work, given the numbers. Tensors are
        bound once for all calls with the same addresses.
    settings: torch's settings and their values during the call (``settings``).
    """

    views: tuple[TorchView, ...]
    bind: Callable[..., Callable[..., object]]
    numbers: tuple[TensorId, ...] = ()
    settings: tuple[tuple[tuple[str, str], object], ...] = ()


def unfit(t: FrozenTensor) -> str | None:
    """Why torch cannot have a view of a tensor; None if it can."""
    if t.by_value or t.value is not None:
        return f"{t} is passed by value; accepted: tensors in memory"
    if t.reordering is not tensor_reordering.NONE:
        return f"{t} is reordered as {t.reordering.name}; accepted: as dim and stride say"
    if t.ragged is not None:
        return f"{t} has batches at ragged offsets; accepted: where stride says"
    if t.dtype.bits < 8:
        return f"{t} has several elements a byte; accepted: types of 8 bits or more"
    return None


def multiplied(*read: FrozenTensor) -> str | None:
    """Why torch cannot multiply these tensors with each other; None if it can."""
    for t in read:
        if why := unfit(t):
            return why
        if t.dtype not in MULTIPLIED:
            return f"{t} is not of a type that is multiplied here; accepted: {', '.join(d.name for d in MULTIPLIED)}"
        if t.dtype is not read[0].dtype:
            return f"{t} is multiplied with {read[0]}; accepted: one type"
    return None
