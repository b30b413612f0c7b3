"""Conversions between a tensor's values and its bytes in memory, including gaps."""

from graphfuse.base import reordering, rounding
from graphfuse.base.enums import tensor_reordering
from graphfuse.op_graph.ir import FrozenTensor
from graphfuse.runtime.storage import storage

POISON = 0xFF
"""Content of unwritten bytes: NaN in every type that has one."""


def stored(torch, t: FrozenTensor, values: object | None) -> bytes:
    """The bytes of `t` with these values (float64), or without any yet. Gaps are POISON."""
    memory = torch.full((t.nbytes,), POISON, dtype=torch.uint8)
    if values is not None and t.elements:
        if t.reordering is not tensor_reordering.NONE:
            coded = rounding.encode(torch, values, t.dtype)
            memory[reordering.offsets(torch, t.dim, "cpu", t.blocks)] = coded.view(torch.uint8)
        else:
            axis = _axis(t)
            _view(torch, t, memory).copy_(rounding.encode(torch, values.movedim(axis, -1), t.dtype).movedim(-1, axis))
    return memory.numpy().tobytes()


def loaded(torch, t: FrozenTensor, content: bytes) -> object:
    """The values of `t` in float64."""
    if not t.elements:
        return torch.empty(t.dim, dtype=torch.float64)
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if t.reordering is not tensor_reordering.NONE:
        coded = memory[reordering.offsets(torch, t.dim, "cpu", t.blocks)].view(getattr(torch, t.dtype.facts.torch))
        return rounding.decode(torch, coded, t.dtype, torch.float64)
    axis = _axis(t)
    coded = _view(torch, t, memory).movedim(axis, -1)
    return rounding.decode(torch, coded, t.dtype, torch.float64).movedim(-1, axis)


def written_between(torch, t: FrozenTensor, content: bytes) -> int:
    """Number of bytes that were written and belong to no element of `t`."""
    if not t.elements or t.reordering is not tensor_reordering.NONE or t.dtype.bits < 8:
        return 0
    gap = torch.ones(t.span, dtype=torch.bool)
    gap.as_strided(t.dim, t.stride).fill_(False)
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(t.span, -1)
    return int((memory[gap] != POISON).sum())


def _axis(t: FrozenTensor) -> int:
    """The axis along which elements share bytes; the last if none do."""
    return t.packed_axis if t.dtype.bits < 8 else -1


def _view(torch, t: FrozenTensor, memory: object) -> object:
    """A torch tensor over the bytes, with pairs as elements for FP4."""
    stored = storage(t)
    whole = memory if t.dtype.bits < 8 else memory.view(getattr(torch, t.dtype.facts.torch))
    return whole.as_strided(stored.dim, stored.stride)
