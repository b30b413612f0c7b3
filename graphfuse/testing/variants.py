"""Variants of a frozen graph: other sizes, layouts, types, roundings, compute types and scalars, one function each.

A function returns None if a graph has no such variant. Variants are well formed (``verify.check_ir``). Engines may
still decline them.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from graphfuse.base.dtypes import SIXTEEN_BITS, data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import GraphValidationError
from graphfuse.op_graph import verify
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, TensorId, packed_stride
from graphfuse.ops.layouts import packed_like
from graphfuse.testing.sample_graphs import SampleGraph

Variation = Callable[[FrozenGraph], "FrozenGraph | None"]

PLAIN, SIZES, LAYOUT, TYPES, ROUNDING, COMPUTE, SCALARS = (
    "as given",
    "sizes",
    "layouts",
    "types",
    "rounding",
    "compute types",
    "scalar operands",
)
ASPECTS = (PLAIN, SIZES, LAYOUT, TYPES, ROUNDING, COMPUTE, SCALARS)
"""Kinds of variation; a random variant has several."""

_SMALL = (3, 37)
_SIZES = (_SMALL, (7, 129), (2, 1031), (1, 1), (1, 65), (33, 1), (5, 32), (17, 100), (2, 257), (100, 3), (129, 31))
_STORED = (*SIXTEEN_BITS, data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.DOUBLE)
_PAD = 8  # elements between rows, a multiple that allows 16-byte
MOST_ELEMENTS = 1 << 15
"""Most elements of a variant's largest tensor: the emulator runs each thread as a fiber."""


@dataclass(frozen=True)
class CheckCase:
    """A problem to check. aspects: those of ASPECTS that it varies."""

    name: str
    graph: FrozenGraph
    aspects: tuple[str, ...]


def cases(sample: SampleGraph, count: int, seed: int) -> Iterator[CheckCase]:
    """One variant of each kind, then `count` that combine kinds at random."""
    kinds = _kinds(sample.graph)
    small = resized(sample.graph, _SMALL)
    for aspect, choices in kinds.items():
        for name, vary in choices.items():
            start = sample.graph if aspect in (PLAIN, SIZES) or small is None else small
            yield from _case(sample, start, {aspect: (name, vary)})
    draw = random.Random(seed)
    for _ in range(count):
        chosen = {}
        for aspect in ASPECTS[1:]:
            if kinds[aspect] and (aspect == SIZES or draw.random() < 0.4):
                chosen[aspect] = draw.choice(list(kinds[aspect].items()))
        yield from _case(sample, sample.graph, chosen)


def _case(sample: SampleGraph, graph: FrozenGraph, chosen: Mapping[str, tuple[str, Variation]]) -> Iterator[CheckCase]:
    varied: FrozenGraph | None = graph
    for _, vary in chosen.values():
        varied = None if varied is None else vary(varied)
    if varied is None or max(t.span for t in varied.tensors) > MOST_ELEMENTS:
        return
    try:
        verify.check_ir(varied)
    except GraphValidationError:
        return
    shapes = ", ".join(f"{t.name} {t.dtype.name} {list(t.dim)}" for t in varied.bound)
    how = "; ".join(name for name, _ in chosen.values())
    yield CheckCase(f"{sample.name}: {how} [{shapes}]", varied, tuple(chosen))


def _kinds(graph: FrozenGraph) -> Mapping[str, Mapping[str, Variation]]:
    """Variations of this graph by name, by aspect."""
    arrays = [t for t in graph.bound if not t.by_value]
    wide = [t for t in arrays if t.elements > 1 and t.reordering is tensor_reordering.NONE]
    floats = [t for t in arrays if t.dtype.is_float and _may_be_retyped(graph, t)]
    single = [t for t in graph.bound if t.elements == 1 and t.id not in graph.producer and t.dtype.is_float]
    virtual = [t for t in graph.tensors if t.virtual and t.id in graph.producer]
    layouts = {
        f"{how} {t.name}" if t else f"{how} all": partial(
            _relaid, which=frozenset([t.id] if t else [w.id for w in wide]), how=how
        )
        for how in _LAYOUTS
        for t in (None, *(wide if len(wide) > 1 else ()))
    }
    everywhere = (*SIXTEEN_BITS, data_type.DOUBLE)
    types = {f"all {d.name}": partial(_retyped, to={t.id: d for t in floats}) for d in everywhere}
    types |= {
        f"{t.name} {d.name}": partial(_retyped, to={t.id: d})
        for t in floats
        for d in (_STORED if t.id in graph.producer else SIXTEEN_BITS)
    }
    return {
        PLAIN: {"as given": lambda g: g},
        SIZES: {f"sizes {list(e)}": partial(resized, extents=e) for e in _SIZES},
        LAYOUT: layouts if wide else {},
        TYPES: types if floats else {},
        ROUNDING: {f"rounded to {d.name}": partial(_rounded, to=d) for d in SIXTEEN_BITS} if virtual else {},
        COMPUTE: {"computed in DOUBLE": partial(_computing, to=data_type.DOUBLE)},
        SCALARS: {f"{t.name} {how}": partial(_scalar, which=t.id, how=how) for t in single for how in _SCALARS},
    }


def resized(graph: FrozenGraph, extents: Sequence[int]) -> FrozenGraph | None:
    """The graph with each extent above 1 replaced: those of last axes by the last of `extents`, others by the first.
    None if the ops do not allow that, because an attribute contains an extent."""
    last = {t.dim[-1] for t in graph.tensors}
    every = {e for t in graph.tensors for e in t.dim if e > 1}
    to = {e: extents[-1] if e in last else extents[0] for e in every}
    tensors = []
    for t in graph.tensors:
        dim = tuple(to.get(e, e) for e in t.dim)
        tensors.append(replace(t, dim=dim, stride=packed_like(dim, t.dim, t.stride)))
    nodes = []
    for node in graph.nodes:
        shapes = {port: tensors[t].dim for port, t in node.inputs}
        wanted = {port: tensors[t].dim for port, t in node.outputs}
        try:
            made = node.op.infer(shapes, dict(node.attributes), wanted)
        except GraphValidationError:
            return None
        if any(tuple(made[port]) != dim for port, dim in wanted.items()):
            return None
        if node.op.moved:  # attributes of slices and shapes contain extents
            outputs = {port: (tensors[t].dim, tensors[t].dtype) for port, t in node.outputs}
            attributes = node.op.frozen(dict(node.attributes), shapes, outputs)
            node = replace(node, attributes=tuple(attributes.items()))
        nodes.append(node)
    return replace(graph, tensors=tuple(tensors), nodes=tuple(nodes))


def _padded(t: FrozenTensor) -> tuple[int, ...]:
    order = sorted(range(len(t.dim)), key=lambda axis: (-t.stride[axis], axis))
    stride, step = [0] * len(order), 1
    for number, axis in enumerate(reversed(order)):
        stride[axis] = step
        step = step * t.dim[axis] + (_PAD if number == 0 else 0)
    return tuple(stride)


_LAYOUTS: Mapping[str, Callable[[FrozenTensor], tuple[int, ...]]] = {
    "gaps between rows of": _padded,
    "column-major": lambda t: packed_stride(t.dim, list(reversed(range(len(t.dim))))),
}


def _relaid(graph: FrozenGraph, which: frozenset[TensorId], how: str) -> FrozenGraph | None:
    changed = {t: replace(graph.tensors[t], stride=_LAYOUTS[how](graph.tensors[t])) for t in which}
    if all(changed[t].stride == graph.tensors[t].stride for t in which):
        return None
    return _with(graph, changed)


def _may_be_retyped(graph: FrozenGraph, t: FrozenTensor) -> bool:
    if t.dtype.bits < 8 or t.reordering is not tensor_reordering.NONE:
        return False
    for node in graph.nodes:
        for port, made in node.outputs:
            if made == t.id and node.op.stored(dict(node.attributes)).get(port):
                return False
    return True


def _retyped(graph: FrozenGraph, to: Mapping[TensorId, data_type]) -> FrozenGraph | None:
    if all(graph.tensors[t].dtype is d for t, d in to.items()):
        return None
    return _with(graph, {t: replace(graph.tensors[t], dtype=d) for t, d in to.items()})


def _rounded(graph: FrozenGraph, to: data_type) -> FrozenGraph:
    """The graph with intermediate values rounded, like with intermediate_rounding "declared"."""
    virtual = (t for t in graph.tensors if t.virtual and t.dtype.is_float)
    return _with(graph, {t.id: replace(t, dtype=to) for t in virtual})


def _computing(graph: FrozenGraph, to: data_type) -> FrozenGraph:
    carried = {t: n.compute for n in graph.nodes for _, t in n.outputs if graph.tensors[t].virtual}
    unrounded = [t for t, compute in carried.items() if graph.tensors[t].dtype is compute]
    varied = _with(graph, {t: replace(graph.tensors[t], dtype=to) for t in unrounded})
    return replace(varied, nodes=tuple(replace(node, compute=to) for node in graph.nodes))


_SCALARS: Mapping[str, Mapping[str, object]] = {
    "in memory": {"by_value": False, "value": None},
    "given to execute": {"by_value": True, "value": None},
    "a constant": {"by_value": True, "value": 0.625},
}


def _scalar(graph: FrozenGraph, which: TensorId, how: str) -> FrozenGraph | None:
    changed = replace(graph.tensors[which], **_SCALARS[how])
    return None if changed == graph.tensors[which] else _with(graph, {which: changed})


def _with(graph: FrozenGraph, changed: Mapping[TensorId, FrozenTensor]) -> FrozenGraph:
    return replace(graph, tensors=tuple(changed.get(t.id, t) for t in graph.tensors))
