"""Converts between a tensor's values and its bytes in memory, gaps included."""

from graphfuse import reordering, rounding
from graphfuse.enums import tensor_reordering
from graphfuse.ir import Tensor

POISON = 0xFF
"""A byte of memory that nobody wrote: NaN in every type that has one."""


def stored(torch, t: Tensor, values: object | None) -> bytes:
    """The bytes of `t` with these values (float64), or none yet. Gaps are POISON."""
    memory = torch.full((t.nbytes,), POISON, dtype=torch.uint8)
    if values is not None and t.elements:
        if t.reordering is not tensor_reordering.NONE:
            coded = rounding.encode(torch, values, t.dtype)
            memory[reordering.offsets(torch, t.dim, "cpu")] = coded.view(torch.uint8)
        else:
            values = values.movedim(t.packed_axis, -1) if t.dtype.bits < 8 else values
            _view(torch, t, memory).copy_(rounding.encode(torch, values, t.dtype))
    return memory.numpy().tobytes()


def loaded(torch, t: Tensor, content: bytes) -> object:
    """The values of `t` in float64."""
    if not t.elements:
        return torch.empty(t.dim, dtype=torch.float64)
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if t.reordering is not tensor_reordering.NONE:
        coded = memory[reordering.offsets(torch, t.dim, "cpu")].view(getattr(torch, t.dtype.facts.torch))
        return rounding.decode(torch, coded, t.dtype, torch.float64)
    values = rounding.decode(torch, _view(torch, t, memory), t.dtype, torch.float64)
    return values.movedim(-1, t.packed_axis) if t.dtype.bits < 8 else values


def written_between(torch, t: Tensor, content: bytes) -> int:
    """How many bytes that belong to no element of `t` were written."""
    if not t.elements or t.reordering is not tensor_reordering.NONE or t.dtype.bits < 8:
        return 0
    gap = torch.ones(t.span, dtype=torch.bool)
    gap.as_strided(t.dim, t.stride).fill_(False)
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(t.span, -1)
    return int((memory[gap] != POISON).sum())


def _view(torch, t: Tensor, memory: object) -> object:
    """A torch tensor over the bytes; of FP4 pairs, the packed axis last and halved."""
    if t.dtype.bits >= 8:
        return memory.view(getattr(torch, t.dtype.facts.torch)).as_strided(t.dim, t.stride)
    order = [axis for axis in range(len(t.dim)) if axis != t.packed_axis]
    dim = (*(t.dim[a] for a in order), t.dim[t.packed_axis] // 2)
    return memory.as_strided(dim, (*(t.stride[a] // 2 for a in order), 1))
