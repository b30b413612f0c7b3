"""Other leading extents of a graph's tensors: override_uids, override_shapes and override_strides of execute.

`given` reads the three lists, `shapes` checks them against the graph, `overridden` infers the resulting graph.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import GraphValidationError, VariantPackError, VariantPackTypeError
from graphfuse.base.wording import counted, with_article
from graphfuse.op_graph import ir
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.graph_record import GraphRecord, NodeRecord
from graphfuse.op_graph.ir import packed_stride
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import EXPANSIONS

Shape = tuple[int, ...]
Placed = tuple[Shape, Shape]
"""Extents and strides of a tensor, in elements."""

_SHAPED = frozenset({"reshape"})
"""Ops whose output shape the user sets, as it does not follow from the inputs. The output may be virtual."""


Overrides = tuple[tuple[int, Shape, Shape | None], ...]
"""Uid, extents and strides of each overridden tensor. Strides are None if they follow from the built graph's."""


def given(uids: object, dims: object, strides: object) -> Overrides:
    """The three lists of a call as one value. Raises VariantPackTypeError or VariantPackError for wrong lists.

    strides: may be None. Each of its entries may be None or empty.
    """
    if uids is None or dims is None:
        missing, there = ("override_uids", "override_shapes")[:: 1 if uids is None else -1]
        if uids is None and dims is None:
            missing, there = "override_uids and override_shapes", "override_strides"
        raise VariantPackError(f"{there} is given without {missing}; accepted: lists of one length, or none of them")
    uids, dims = _list("override_uids", uids), _list("override_shapes", dims)
    strides = (None,) * len(uids) if strides is None else _list("override_strides", strides)
    if not len(uids) == len(dims) == len(strides):
        raise VariantPackError(
            f"override_uids has {counted(len(uids), 'entry', 'entries')}, override_shapes {len(dims)}, "
            f"override_strides {len(strides)}; accepted: one of each for each tensor"
        )
    for uid in uids:
        if type(uid) is not int:
            raise VariantPackTypeError(f"override_uids has {uid!r}; accepted: uids of tensors, int")
    if len(set(uids)) != len(uids):
        twice = next(uid for n, uid in enumerate(uids) if uid in uids[:n])
        raise VariantPackError(f"override_uids has {twice} twice; accepted: each uid once")
    return tuple(
        (
            uid,
            _extents("override_shapes", uid, dim),
            None if stride is None else _extents("override_strides", uid, stride) or None,
        )
        for uid, dim, stride in zip(uids, dims, strides, strict=True)
    )


def _list(what: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise VariantPackTypeError(f"{what} is {with_article(type(values).__name__)}; accepted: a list or tuple")
    return tuple(values)


def _extents(what: str, uid: int, values: Any) -> Shape:
    accepted = f"{what}, tensor with uid {uid}: {values!r} is given; accepted: a sequence of int, 0 and above"
    try:
        numbers = tuple(-1 if isinstance(v, bool) else v.__index__() for v in values)
    except (TypeError, AttributeError):
        raise VariantPackTypeError(accepted) from None
    if any(n < 0 for n in numbers):
        raise VariantPackError(accepted)
    return numbers


def shapes(graph: ir.FrozenGraph, overrides: Overrides) -> dict[int, Placed]:
    """Extents and strides by uid, checked against the built graph.

    Only tensors that execute gets memory for and outputs of a reshape may be overridden. A tensor keeps its rank and
    the extent of its last axis. Raises VariantPackError, which names the tensor.
    """
    by_uid = {t.uid: t for t in graph.tensors}
    bound = {t.uid for t in graph.bound if not t.by_value}
    shaped = {graph.tensors[t].uid for node in graph.nodes if node.op_name in _SHAPED for _, t in node.outputs}
    found: dict[int, Placed] = {}
    for uid, dim, stride in overrides:
        t = by_uid.get(uid)
        if t is None or uid not in bound | shaped:
            why = "is of no tensor of the graph" if t is None else f"is {t}, {_why_not(t)}"
            names = ", ".join(f"{t.name!r} ({t.uid})" for t in graph.tensors if t.uid in bound | shaped)
            kinds = "inputs and outputs in memory" + (", what a reshape makes" if shaped - bound else "")
            raise VariantPackError(f"override_uids: {uid} {why}; accepted: {kinds}, {names}")
        if len(dim) != len(t.dim):
            raise VariantPackError(f"{t}: override_shapes has {list(dim)}; accepted: {counted(len(t.dim), 'extent')}")
        if dim[-1] != t.dim[-1]:
            raise VariantPackError(
                f"{t}: override_shapes has {list(dim)}; accepted: other extents of leading axes, that of the last "
                f"stays {t.dim[-1]}"
            )
        if stride is not None and len(stride) != len(dim):
            raise VariantPackError(f"{t}: override_strides has {list(stride)}; accepted: {counted(len(dim), 'stride')}")
        found[uid] = dim, _strides(t, dim) if stride is None else stride
    return found


def _why_not(t: ir.FrozenTensor) -> str:
    if t.virtual:
        return "whose shape follows from others, as it is virtual"
    return "which is passed by value" if t.by_value or t.value is not None else "which no node uses"


def _strides(t: ir.FrozenTensor, dim: Shape) -> Shape:
    """Strides for other extents. Axes that are contiguous in the built tensor stay so; other strides do not change."""
    if t.reordering is not tensor_reordering.NONE:
        return packed_stride(dim)
    order = sorted(range(len(dim)), key=lambda axis: (t.stride[axis], -axis))
    strides = list(t.stride)
    for inner, outer in zip(order, order[1:], strict=False):
        if t.stride[outer] == t.stride[inner] * t.dim[inner]:
            strides[outer] = strides[inner] * max(dim[inner], 1)
    return tuple(strides)


def overridden(recorded: GraphRecord, built: ir.FrozenGraph, found: Mapping[int, Placed]) -> ir.FrozenGraph:
    """The frozen graph with other shapes of the tensors with these uids, from which all other shapes are inferred.

    built: the frozen graph of `recorded`. Tensors and nodes have the same numbers in both.

    Raises VariantPackError, which names the tensor or node, for shapes that do not fit each other, tensors whose shape
    changes without being overridden, other extents along a row of a norm, and illegal strides.
    """
    dims = _inferred(recorded, found)
    copies = {}
    for t in recorded.tensors:
        dim, stride = found.get(t.current_uid, (dims.get(id(t), ()), ()))
        changed = dim and tuple(t.get_dim()) != dim
        copies[id(t)] = t.detached(dim, stride) if changed or t.current_uid in found else t.detached()

    for copy in copies.values():
        offsets = copy.get_ragged_offset()
        copy.set_ragged_offset(offsets if offsets is None else copies.get(id(offsets), offsets))

    def copied(ports: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {port: copies[id(t)] for port, t in ports.items()}

    settings = {f.name: getattr(recorded, f.name) for f in fields(GraphRecord)}
    nodes = [replace(node, inputs=copied(node.inputs), outputs=copied(node.outputs)) for node in recorded.nodes]
    try:
        made = freeze(GraphRecord(**settings | {"tensors": [*copies.values()], "nodes": nodes}))
    except GraphValidationError as error:
        raise VariantPackError(f"override_shapes and override_strides: {error}") from None
    _check_columns(built, made)
    return made


def _inferred(recorded: GraphRecord, found: Mapping[int, Placed]) -> dict[int, Shape]:
    """Extents of all tensors that nodes read or write, by the tensor's id()."""
    dims: dict[int, Shape] = {}

    def known(t: Tensor) -> Shape:
        placed = found.get(t.current_uid)
        return dims.setdefault(id(t), tuple(t.get_dim()) if placed is None else placed[0])

    for node in recorded.nodes:
        before = {port: known(t) for port, t in node.inputs.items()}
        written = {port: t for port, t in node.outputs.items() if port not in node.absent}
        wanted = {
            port: found[t.current_uid][0] if t.current_uid in found else _following(node, tuple(t.get_dim()), before)
            for port, t in written.items()
        }
        try:
            after = node.op.infer(before, node.attributes, wanted)
        except GraphValidationError as error:
            left = [t for t in written.values() if node.op.name in _SHAPED and t.current_uid not in found]
            hint = "".join(f"; accepted: override {t.get_name()!r}, uid {t.current_uid}, too" for t in left)
            raise VariantPackError(f"override_shapes: node {node.name!r} ({node.op.name}): {error}{hint}") from None
        for port, t in written.items():
            dims[id(t)] = shape = tuple(after[port])
            if t.current_uid in found and found[t.current_uid][0] != shape:
                raise VariantPackError(
                    f"tensor {t.get_name()!r}: override_shapes has {list(found[t.current_uid][0])}; accepted: "
                    f"{list(shape)}, which node {node.name!r} ({node.op.name}) makes of the shapes of its inputs"
                )
            if t.current_uid not in found and not t.get_is_virtual() and tuple(t.get_dim()) != shape:
                raise VariantPackError(
                    f"tensor {t.get_name()!r}, uid {t.current_uid}, is not overridden and has dim {t.get_dim()}; "
                    f"accepted: override it, too, with {list(shape)}, which node {node.name!r} ({node.op.name}) makes"
                )
    return dims


def _following(node: NodeRecord, dim: Shape, before: Mapping[str, Shape]) -> Shape:
    """New extents of an output whose shape the user sets, such as that of a reduction.

    Axes whose extent was that of the first input get its new extent; others keep theirs."""
    port, first = next(iter(node.inputs.items()))
    was, now = first.get_dim(), before[port]
    if len(was) != len(dim):
        return dim
    return tuple(new if extent == old else extent for extent, old, new in zip(dim, was, now, strict=True))


def _check_columns(built: ir.FrozenGraph, made: ir.FrozenGraph) -> None:
    """Raises VariantPackError if rows of a norm would run along other axes or have another length."""
    for node in built.nodes:
        if node.op_name not in EXPANSIONS:
            continue
        ports = dict(node.inputs)
        t = ports.get("input", next(iter(ports.values())))
        was, now = (_row_extents(graph, node, t) for graph in (built, made))
        if was != now:
            raise VariantPackError(
                f"{built.tensors[t]}: with override_shapes {node} works along {_named(now)} of "
                f"{list(made.tensors[t].dim)}; accepted: along {_named(was)}, as in the graph that was built"
            )


def _row_extents(graph: ir.FrozenGraph, node: ir.Node, rows: ir.TensorId) -> dict[int, int]:
    """Extents of the axes that a row runs along, by axis."""
    shapes = {port: graph.tensors[t].dim for port, t in node.inputs}
    axes = EXPANSIONS[node.op_name].columns(shapes, dict(node.attributes))
    return {axis: graph.tensors[rows].dim[axis] for axis in axes}


def _named(extents: Mapping[int, int]) -> str:
    return " and ".join(f"axis {axis} (extent {extent})" for axis, extent in extents.items()) or "no axis"
