"""Values of a graph's tensors by the op table's reference, and tolerances for a kernel's results."""

from collections.abc import Mapping

from graphfuse.base import rounding
from graphfuse.base.dtypes import SMALL_INTEGERS, data_type
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, TensorId

_PLACE = {
    data_type.FLOAT: 2.0**-23,
    data_type.HALF: 2.0**-10,
    data_type.BFLOAT16: 2.0**-7,
    data_type.FP8_E4M3: 2.0**-3,
    data_type.FP8_E5M2: 2.0**-2,
}
"""The distance of neighbouring numbers, relative to the number."""
_SMALLEST = {data_type.HALF: 2.0**-14, data_type.FP8_E4M3: 2.0**-6, data_type.FP8_E5M2: 2.0**-14}
_IN_DOUBLE = 1e-12
"""The tolerance of results computed in DOUBLE."""
_NEIGHBOURS = 0.02
"""Share of elements that may be rounded to the neighbour of the reference's result: those that lie between the two."""


def inputs(torch, graph: FrozenGraph, seed: int) -> dict[TensorId, object]:
    """A value for each input, representable in its type, in float64."""
    made: dict[TensorId, object] = {}
    generator = torch.Generator().manual_seed(seed)
    for t in graph.tensors:
        if t.id in graph.producer:
            continue
        if t.value is not None:
            made[t.id] = torch.full(t.dim, t.value, dtype=torch.float64)
        elif t.dtype.facts.integers is not None:
            high = 2 if t.dtype is data_type.BOOLEAN else _classes(graph, t)
            made[t.id] = torch.randint(0, high, t.dim, generator=generator).double()
        else:
            drawn = torch.randn(t.dim, generator=generator, dtype=torch.float64)
            if t.elements == 1:  # an epsilon or a factor: not zero, not negative
                drawn = drawn.abs() * 0.5 + 0.25
            made[t.id] = rounding.round_to(torch, drawn, data_type.FLOAT if t.by_value else t.dtype)
    return made


def _classes(graph: FrozenGraph, t: FrozenTensor) -> int:
    """Number of values of an integer tensor: its elements are indices into rows of a tensor that the same node
    reads."""
    beside = [graph.tensors[o] for i in graph.consumers.get(t.id, ()) for _, o in graph.nodes[i].inputs if o != t.id]
    return max(1, min((o.dim[-1] for o in beside if o.dim[-1] > 1), default=2))


def evaluated(torch, graph: FrozenGraph, given: Mapping[TensorId, object], wide: bool) -> dict[TensorId, object]:
    """Every tensor's value in float64. wide: whether nodes compute in float64 instead of their compute types. Stored
    and declared values are rounded, except for the graph's outputs, which stay as computed."""
    values = dict(given)
    computed = dict(given)
    for node in graph.nodes:
        compute = torch.float64 if wide else getattr(torch, node.compute.facts.torch)
        read = {port: values[t].to(compute) for port, t in node.inputs}
        for port in (p.name for p in node.op.outputs if p.kept):  # its content is unknown
            read[port] = torch.full(graph.tensors[node.output(port)].dim, float("nan"), dtype=compute)
        results = node.op.reference(torch, read, dict(node.attributes))
        for port, t in node.outputs:
            tensor, value = graph.tensors[t], results[port].double()
            computed[t] = value
            kept = tensor.virtual and tensor.dtype is node.compute
            values[t] = value if kept else rounding.round_to(torch, value, tensor.dtype)
    return {t: computed[t] if t in graph.producer else values[t] for t in computed}


def difference(
    torch, graph: FrozenGraph, t: FrozenTensor, found: object, wide: object, near: object, tolerance: float
) -> str | None:
    """Description of how `found` differs from the tensor's value; None if it does not.

    wide, near: as computed in float64 and in the nodes' types. A float32 value may be off by `tolerance`, relative to
    it and to the tensor's mean magnitude, plus four times the error of `near`. A value of a narrower type is such a
    value rounded: close to the middle of two neighbours, it may be either.
    """
    stored = rounding.round_to(torch, near if _in_steps(graph, t) else wide, t.dtype)
    same = (found == stored) | (found.isnan() & stored.isnan())
    made_by = graph.nodes[graph.producer[t.id]]
    if t.dtype in SMALL_INTEGERS and made_by.compute.is_float and not made_by.op.moved:
        return _mismatch(torch, t, found, stored, ~((found - stored).abs() <= 1), 0) or _mismatch(
            torch, t, found, stored, ~same, _NEIGHBOURS
        )
    if t.dtype.facts.integers is not None or _in_steps(graph, t):
        return _mismatch(torch, t, found, stored, ~same, 0 if t.dtype.facts.integers is not None else _NEIGHBOURS)
    finite = torch.where(wide.isfinite(), wide.abs(), 0.0)
    scale = torch.maximum(finite, finite.mean()) if finite.numel() else finite
    if all(node.compute is data_type.DOUBLE for node in graph.nodes):
        tolerance = min(tolerance, _IN_DOUBLE)
    slack = tolerance * scale + 4 * (near - wide).abs().nan_to_num(0.0)
    error = (found - stored).abs()
    off = ~same & ~(error <= slack)
    place = torch.maximum(finite, torch.tensor(_SMALLEST.get(t.dtype, 0.0), dtype=torch.float64))
    place = place * _PLACE.get(t.dtype, 0.0)
    pointwise = all(node.op.pointwise for node in graph.nodes)
    flips = [n.compute is not graph.tensors[o].dtype for n in graph.nodes for _, o in n.outputs]
    rounded = any(f and o in graph.consumers for f, (_, o) in zip(flips, _made(graph), strict=True))
    if rounded:  # an element of a rounded value may be its neighbour, which affects a whole row that is reduced
        place = place + 0.05 * scale
    beyond = ~same & ~(error <= slack + place)
    return _mismatch(torch, t, found, stored, beyond, 0) or _mismatch(
        torch, t, found, stored, off, _NEIGHBOURS if pointwise or not rounded else 1.0
    )


def _made(graph: FrozenGraph) -> list[tuple[str, TensorId]]:
    return [output for node in graph.nodes for output in node.outputs]


def _in_steps(graph: FrozenGraph, t: FrozenTensor) -> bool:
    """True if values are so coarse that only equality can be checked: FP4, scales, and values divided by these."""
    quantized = graph.nodes[graph.producer[t.id]].op_name == "block_scale_quantize"
    return quantized or t.dtype.bits < 8 or t.dtype is data_type.FP8_E8M0


def _mismatch(torch, t: FrozenTensor, found: object, stored: object, wrong: object, share: float) -> str | None:
    count = int(wrong.sum())
    if count <= max(share * t.elements, 1 if share else 0):
        return None
    at = torch.nonzero(wrong)[0]
    place = tuple(int(i) for i in at)
    unwritten = int((found.isnan() & wrong).sum())
    also = f"; {unwritten} of them are NaN, as memory is before it is written" if unwritten else ""
    return (
        f"{t}: {count} of {t.elements} elements are wrong{also}; at {list(place)} it is {float(found[place]):.9g}, "
        f"expected {float(stored[place]):.9g}"
    )
