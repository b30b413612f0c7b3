"""Comparison of a kernel's result with the reference, within the precision of the data type. On torch tensors of any
device."""

from graphfuse.base import reordering
from graphfuse.base.dtypes import SMALL_INTEGERS, data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.op_graph.ir import FrozenTensor, Subgraph
from graphfuse.runtime.storage import storage

STEPS = 1
"""Steps between representable values that an element may be off, for types of up to 16 bits."""
FURTHER = 2
"""Additional steps for each intermediate value that is rounded to such a type: one step there may be two later."""
EXACT_SHARE = 0.9
"""Share of elements of such a type that must be equal: float32 errors rarely cross a rounding boundary."""
RELATIVE = 1e-4
"""Error of wider floats, relative to the element,"""
ROUNDED = 2**-7
"""or this for each additional step: the step of bfloat16, by which one intermediate value may be off."""
CANCELLED = 1e-5
"""Error of any float, relative to the largest element: two large terms that nearly cancel leave float32's error."""
FEW, FAR = 1e-6, 2**-5
"""Share of elements whose error may be `ROUNDED` of the largest for each additional step, at most `FAR` of it. An error
of one step in an intermediate value grows where a function falls off, as GELU does below zero."""

_CHUNK = 1 << 24  # elements compared at once, which bounds the memory for it
_STEPPED = (
    data_type.HALF,
    data_type.BFLOAT16,
    data_type.FP8_E4M3,
    data_type.FP8_E5M2,
    data_type.FP4_E2M1,
    *SMALL_INTEGERS,
)


def rounded_between(subgraph: Subgraph) -> int:
    """Number of values that are rounded to types of up to 16 bits and read again within a subgraph."""
    graph, inside = subgraph.graph, set(subgraph.node_ids)
    made = (graph.tensors[t] for node in subgraph.nodes for _, t in node.outputs)
    return sum(t.dtype in _STEPPED and bool(inside & set(graph.consumers.get(t.id, ()))) for t in made)


def difference(torch, tensor: FrozenTensor, got, want, rounded: int = 0) -> str | None:
    """Description of a fault of `got`; None if there is none. got, want: the bytes of the tensor (uint8, one axis), as
    far as its strides reach. rounded: number of rounded intermediate values, see `rounded_between`."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    stored = storage(tensor)

    def elements(memory):
        if tensor.reordering is not tensor_reordering.NONE:  # gaps are not written
            return memory[reordering.offsets(torch, tensor.dim, memory.device, tensor.blocks)].reshape(-1)
        return memory.view(kinds[stored.itemsize]).as_strided(stored.dim, stored.stride).reshape(-1)

    got, want = elements(got), elements(want)
    largest = _largest(torch, tensor.dtype, want)
    count, wrong, far, equal = 0, 0, 0, 0
    for start in range(0, got.numel(), _CHUNK):
        one, two = (_codes(torch, tensor.dtype, v[start : start + _CHUNK]) for v in (got, want))
        same, close, near = _judge(torch, tensor.dtype, one, two, largest, STEPS + FURTHER * rounded)
        count, equal = count + one.numel(), equal + int(same.sum())
        wrong, far = wrong + int((~close).sum()), far + int((~close & ~near).sum())
    if far or wrong > FEW * count:
        return f"{tensor}: {wrong} of {count} elements are off"
    if tensor.dtype in _STEPPED and equal < EXACT_SHARE * count:
        return f"{tensor}: only {equal} of {count} elements are equal"
    return None


def _judge(torch, dtype: data_type, got, want, largest: float, steps: int):
    """Elementwise (equal, close enough, close enough for a few elements)."""
    same = got == want
    if dtype in SMALL_INTEGERS:
        one, two = (v.view(getattr(torch, dtype.facts.torch)).int() for v in (got, want))
        close = (one - two).abs() <= steps
        return same, close, close
    if not dtype.is_float or dtype is data_type.FP8_E8M0:
        return same, same, same
    if dtype is data_type.FP4_E2M1:
        close = (_ordered(torch, got, 4) - _ordered(torch, want, 4)).abs() <= steps
        return same, close, close
    a, b = (v.view(getattr(torch, dtype.facts.torch)).double() for v in (got, want))
    same |= (a == b) | (a.isnan() & b.isnan())
    error = (a - b).abs()
    close, of_roundings = same | (error <= CANCELLED * largest), ROUNDED * (steps - STEPS)
    near = error <= min(of_roundings, FAR) * largest
    if dtype in _STEPPED:
        stepped = (_ordered(torch, got, dtype.bits) - _ordered(torch, want, dtype.bits)).abs() <= steps
        return same, close | (stepped & ~a.isnan() & ~b.isnan()), near
    return same, close | (error <= max(RELATIVE, of_roundings) * b.abs()), near


def _codes(torch, dtype: data_type, stored):
    """Codes of the stored elements, one each."""
    if dtype is data_type.FP4_E2M1:
        return torch.stack((stored & 15, stored >> 4), dim=-1).flatten()
    return stored


def _ordered(torch, codes, bits: int):
    """Sign and magnitude codes as integers in the order of the values; 0 and -0 are equal."""
    magnitude = codes.int() & ((1 << (bits - 1)) - 1)
    return torch.where((codes.int() >> (bits - 1)) & 1 == 1, -magnitude, magnitude)


def _largest(torch, dtype: data_type, stored) -> float:
    """The largest finite magnitude; 0 for types without a relative tolerance."""
    if not dtype.is_float or dtype in (data_type.FP4_E2M1, data_type.FP8_E8M0):
        return 0.0
    found = 0.0
    for start in range(0, stored.numel(), _CHUNK):
        values = stored[start : start + _CHUNK].view(getattr(torch, dtype.facts.torch)).double().abs()
        found = max(found, values.nan_to_num(0.0, 0.0).max().item())
    return found
