"""A pass that finds attention with sinks in an FX graph and replaces it by the operator.

Such attention is the softmax of a row of logits and one more, the head's sink; without the sink's probability, it is
multiplied by values. It is recognized by what its nodes compute, as in models of transformers, with or without the
largest logit subtracted. The operator rounds its result alone; such a graph rounds every logit and every probability.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.base.wording import with_article
from graphfuse.torch.analysis import inductor, surroundings
from graphfuse.torch.analysis.meaning import (
    called_name,
    concatenated,
    dtype,
    is_changed,
    is_last,
    is_op,
    number,
    operands,
    permutation,
    same,
    slice_of_last_dim,
    value,
    without_casts,
    without_views,
    writes,
)
from graphfuse.torch.analysis.new_nodes import copy_records, insert
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.analysis.traversal import reachable
from graphfuse.torch.attention.constants import Constants
from graphfuse.torch.attention.mask import MaskKind
from graphfuse.torch.attention.mask_pass import erase
from graphfuse.torch.attention.operator import Options, is_wrapper, kernel_of
from graphfuse.torch.attention.repeated_heads import repeated_heads
from graphfuse.torch.attention.sinks import NAME, TYPES

_aten = torch.ops.aten


@dataclass(frozen=True)
class Mask:
    """A mask. node: a summand, or boolean: True for keys that are attended to; if it is inverted, for those that are
    not."""

    node: Node
    is_inverted: bool = False


@dataclass(frozen=True)
class Attention:
    """Nodes of attention with sinks.

    out: the result.
    inner: the nodes from inputs to the result, in order. No other node may read them.
    is_k_transposed: whether k has columns before keys.
    sinks: one element for each head, in any shape.
    """

    out: Node
    inner: tuple[Node, ...]
    q: Node
    k: Node
    is_k_transposed: bool
    v: Node
    sinks: Node
    mask: Mask | None
    scale: float


class _No(Exception):
    """The reason why an attention is not replaced."""


def replace(module: GraphModule, place: Callable[[Node], tuple[str, str]]) -> list[Entry]:
    """Replaces each attention with sinks in a graph by the operator. Returns the report's entries. place: the name and
    the class of the module that a node comes from."""
    regions, constants = surroundings.graph_parts(module.graph), Constants()
    entries, new, dead = [], dict[Node, Node](), set[Node]()
    for softmax, found, allowed in [(n, found, _mask_kind(found, constants)) for n, found in find(module, regions)]:
        if isinstance(found, str):
            entries.append(Entry(*place(softmax), why=found))
            continue
        entries.append(Entry(*place(softmax), NAME, f"{allowed}: no mask" if allowed else ""))
        if allowed:
            dead.update(constants.steps(found.mask.node))
        new[found.out] = _put(module.graph, found, allowed, new)
    erase(module.graph, dead)
    return entries


def _mask_kind(found: Attention | str, constants: Constants) -> MaskKind | None:
    """The keys that a constant mask allows, if arguments of the operator can express them; None otherwise."""
    if isinstance(found, str) or found.mask is None:
        return None
    tokens = value(found.q).shape[2], value(found.v).shape[2]
    allowed, _ = constants.mask_kind(found.mask.node, found.out, *tokens, found.mask.is_inverted)
    if allowed is None or allowed.is_causal and not found.scale > 0:
        return None
    return allowed if allowed.window is None or _has_window(found, allowed.window) else None


def _has_window(found: Attention, window: int) -> bool:
    """True if a kernel supports the window itself. Others get it as a mask."""
    q, k, v = (value(t) for t in (found.q, found.k, found.v))
    k = k.mT if found.is_k_transposed else k
    return kernel_of(q, k, v, False, Options(found.scale, True, window)).has_window


def find(module: GraphModule, regions: surroundings.GraphParts) -> Iterator[tuple[Node, Attention | str]]:
    """Each softmax of logits and a sink, with its attention or the reason why the operator does not replace it. The
    softmax's place in the model is the attention's."""
    for node in module.graph.nodes:
        joined = _joined(node)
        if joined is None:
            continue
        try:
            found = _attention(node, *joined)
            _allow(found, regions)
        except _No as why:
            yield node, str(why)
        else:
            yield node, found


def _joined(node: Node) -> tuple[Node, Node, list[Node]] | None:
    """The logits and the additional logit of each row that a node is the softmax of, and the nodes between."""
    found = is_op(node, "softmax")
    if found is None or not is_last(found.get(1, "dim"), node):
        return None
    source, inner = _cast_of(found.get(0, "input"))
    less = is_op(source, "sub")
    if less is not None:
        whole = less.get(0, "input")
        largest = _largest_of(less.get(1, "other"))
        if largest is None or largest[0] is not whole:
            return None
        source, casts = _cast_of(whole)
        inner = [*inner, *casts, *largest[1]]
    parts = concatenated(source)
    if len(parts) != 2 or any(value(t) is None or value(t).dim() != 4 for t in parts):
        return None
    return (*parts, [*inner, source]) if same(value(parts[1]).shape[-1], 1) else None


def _cast_of(node: object) -> tuple[object, list[Node]]:
    """The source that a node is cast or copied from, in floating-point types, and the nodes on the way to it."""
    nodes = []
    while (found := is_op(node, "cast", "same")) and dtype(found.args[0]) is not None:
        if dtype(node) not in TYPES or dtype(found.args[0]) not in TYPES:
            break
        nodes.append(node)
        node = found.args[0]
    return node, [*nodes, *([node] if isinstance(node, Node) else [])]


def _largest_of(node: object) -> tuple[Node, list[Node]] | None:
    """The tensor whose largest element of each row a node holds, and the nodes that compute it."""
    nodes = [node]
    if isinstance(node, Node) and node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]
        unread = [user for user in node.users if user.target is operator.getitem and not user.users]  # the indices
        nodes += [node, *unread]
    found = is_op(node, "max")
    if found is None or found.get(2, "keepdim") is not True:
        return None
    source, dim = found.get(0, "input"), found.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    return (source, nodes) if is_last(dim, source) else None


def _attention(softmax: Node, logits: Node, sink: Node, before: list[Node]) -> Attention:
    out, after = _following(softmax)
    product, mask, scale, between = _product(logits)
    multiplied, v = is_op(product, "matmul"), is_op(out, "matmul").get(1, "other")
    q, right = multiplied.get(0, "input"), multiplied.get(1, "other")
    if any(value(t) is None or value(t).dim() != 4 for t in (q, right, v)):
        raise _No("what it multiplies has other dimensions than batch, heads, rows and columns")
    full = (*value(q).shape[:3], value(right).shape[3])
    given = ((logits, full), (right, (*full[:2], value(q).shape[3], full[3])), (v, (*full[:2], full[3], None)))
    if not all(n is None or same(m, n) for t, shape in given for m, n in zip(value(t).shape, shape, strict=True)):
        raise _No("queries, keys, values or logits of it are broadcast")
    kind = dtype(out)
    q, v, keys_first = _narrow(q, kind), _narrow(v, kind), swapped(right, 2, 3)
    k = _narrow(right if keys_first is None else keys_first, kind)
    fewer = None if keys_first is None else (_ungrouped(k), _ungrouped(v))
    if fewer is not None and None not in fewer and same(*(value(t).shape[1] for t in fewer)):
        k, v = (_narrow(t, kind) for t in fewer)
    if dtype(product) is not kind and any(dtype(t) is not kind for t in (q, k, v)):
        raise _No("its logits are computed in another type than its result")
    inner = dict.fromkeys((softmax, *before, *between, *after))
    inner.pop(out, None)
    sinks, mask = _sinks(sink, full[1]), None if mask is None else _fitting(mask, full, kind)
    return Attention(out, tuple(inner), q, k, keys_first is None, v, sinks, mask, scale)


def _following(softmax: Node) -> tuple[Node, list[Node]]:
    """The product of probabilities and values, and the nodes from the softmax to there."""
    node, nodes, is_without_sink = softmax, list[Node](), False
    while True:
        if len(node.users) != 1 or any(user.op == "output" for user in node.users):
            raise _No("its probabilities are read elsewhere, too")
        (user,) = node.users
        nodes.append(user)
        if not is_without_sink and _drops_last(user, node):
            is_without_sink = True
        elif called_name(user) == "dropout":
            if not inductor.is_free(user) or writes(user):
                raise _No("dropout follows its probabilities")
        elif is_op(user, "matmul") and is_without_sink and user.args[:1] == (node,):
            return user, nodes
        elif not is_op(user, "cast", "same") or dtype(user) not in TYPES:
            raise _No("its probabilities are not multiplied by values, or not without the sink's")
        node = user


def _drops_last(node: Node, of: Node) -> bool:
    """True if a node is another one without the last element of its last dimension."""
    source, part = slice_of_last_dim(node) or (None, slice(None))
    if source is not of or part.start not in (None, 0) or part.step not in (None, 1):
        return False
    extent = value(of).shape[-1]
    return part.stop == -1 or isinstance(extent, int) and part.stop == extent - 1


def _product(logits: Node) -> tuple[Node, Mask | None, float, list[Node]]:
    """The product of queries and keys before the logits, the mask, the scale, and the nodes from product to logits."""
    node, mask, scale, nodes = logits, None, 1.0, list[Node]()
    while True:
        node, casts = _cast_of(node)
        nodes += casts
        if is_op(node, "matmul"):
            return node, mask, scale, nodes
        one = _scaled(node)
        if one is not None:
            node, factor = one
            scale *= factor
            continue
        masked = _masked(node)
        if masked is None:
            raise _No("its logits are no product of queries and keys with a scale and a mask")
        if mask is not None or scale != 1:
            raise _No("its logits have more than one mask, or one that is scaled")
        node, mask = masked


def _scaled(node: object) -> tuple[object, float] | None:
    found = is_op(node, "mul", "div")
    if found is None:
        return None
    for a, b in operands(found):
        factor = number(b)
        if factor is not None and factor != 0 and value(a) is not None and not isinstance(factor, bool):
            return a, float(factor) if found.meaning == "mul" else 1 / float(factor)
        if found.meaning == "div":
            break
    return None


def _masked(node: object) -> tuple[object, Mask] | None:
    """Logits before a mask, and the mask."""
    if found := is_op(node, "add"):
        for a, b in operands(found):
            if value(b) is not None and dtype(b) is not torch.bool and _leads_to_product(a):
                return a, Mask(b)
    if (found := is_op(node, "where")) and _is_lowest(found.get(2, "other"), dtype(node)):
        return found.get(1, "input"), Mask(found.get(0, "condition"))
    if (found := is_op(node, "masked_fill")) and _is_lowest(found.get(2, "value"), dtype(node)):
        return found.get(0, "input"), Mask(found.get(1, "mask"), is_inverted=True)
    return None


def _leads_to_product(node: object) -> bool:
    node, _ = _cast_of(node)
    one = _scaled(node)
    return bool(is_op(node, "matmul")) or one is not None and _leads_to_product(one[0])


def _is_lowest(given: object, kind: torch.dtype | None) -> bool:
    """True if a number excludes a logit: minus infinity, or the lowest number of the type."""
    is_number = isinstance(given, int | float) and kind is not None and kind.is_floating_point
    return is_number and given <= torch.finfo(kind).min


def _fitting(mask: Mask, full: Sequence[object], kind: torch.dtype) -> Mask:
    """The mask in a form that the operator supports."""
    node, found = mask.node, value(mask.node)
    if found is None or found.dim() > 4 or found.requires_grad:
        raise _No("its mask is no tensor without a gradient")
    if not all(same(m, 1) or same(m, n) for m, n in zip(found.shape[::-1], full[::-1], strict=False)):
        raise _No("its mask has another shape than its logits")
    if found.dtype is torch.bool or found.dtype is kind:
        return mask
    node = _narrow(node, kind)
    if dtype(node) is kind:
        return Mask(node)
    condition = _condition(node)
    if condition is None:
        raise _No("its mask is of another type than its result")
    return Mask(condition)


def _condition(node: object) -> Node | None:
    """The condition of a mask that adds 0 where it is True, and excludes logits elsewhere."""
    found = is_op(_cast_of(node)[0], "where")
    if found is None or not _is_lowest(found.get(2, "other"), dtype(node)):
        return None
    condition, zero = found.get(0, "condition"), found.get(1, "input")
    is_zero = called_name(zero) in ("zeros", "zeros_like", "new_zeros") if isinstance(zero, Node) else zero == 0
    return condition if is_zero and dtype(condition) is torch.bool else None


def _sinks(node: object, heads: object) -> Node:
    """The tensor with one element per head that a node expands to all rows."""
    while (found := is_op(node, "expand", "cast", "same")) and value(found.args[0]) is not None:
        node = found.args[0]
    shape = (*((1,) * (4 - value(node).dim())), *value(node).shape)
    if not all(map(same, shape, (1, heads, 1, 1))):
        raise _No("its sinks are not one number for each head")
    return without_views(node)


def _narrow(node: Node, kind: torch.dtype | None) -> Node:
    """The node of this type that a node is cast from, if there is one; the node otherwise. A cast to a tensor's own
    type is the tensor."""
    while (cast := is_op(node, "cast")) and dtype(cast.args[0]) is dtype(node):
        if value(cast.args[0]).device != value(node).device:
            break
        node = cast.args[0]
    found = node if dtype(node) is kind else without_casts(node)
    return found if dtype(found) is kind else node


def swapped(node: object, one: int, other: int) -> Node | None:
    """The source of a node of four dimensions that exchanges two of them; None for other nodes."""
    found, exchanged = is_op(node, "permute"), [*range(4)]
    exchanged[one], exchanged[other] = other, one
    return found.args[0] if found and permutation(found, 4) == tuple(exchanged) else None


def _ungrouped(node: Node) -> Node | None:
    """The source whose heads a node repeats consecutively, without permuting dimensions; None for other nodes."""
    found = repeated_heads(node)
    return found.source if found is not None and found.order == (0, 1, 2, 3) else None


def whole(node: object) -> object:
    """The source of a node that slices all of it. Several such slices are skipped."""
    while (found := is_op(node, "slice")) and value(found.args[0]) is not None:
        if not all(map(same, value(node).shape, value(found.args[0]).shape)):
            break
        node = found.args[0]
    return node


def _allow(found: Attention, regions: surroundings.GraphParts) -> None:
    ends = (found.q, found.k, found.v, found.sinks, *([found.mask.node] if found.mask else []))
    nodes = {*found.inner, found.out}

    def read(node: Node) -> Sequence[Node]:
        return [t for t in node.all_input_nodes if t not in ends and t.op not in ("placeholder", "get_attr")]

    within = {*reachable([found.out], read)}
    if dtype(found.out) not in TYPES:
        raise _No(f"its result is {dtype(found.out)}")
    for node in found.inner:
        if not nodes.issuperset(node.users):
            raise _No(f"{node.name} of it is read elsewhere, too")
    if any(surroundings.has_side_effect(user) for node in within - {found.out} for user in node.users):
        raise _No("something of it is changed, or has a hook")
    if within & regions.nested:
        raise _No("it is in a transform of torch.func")
    if len({regions.number[node] for node in within}) > 1:
        raise _No("the mode of gradients, autocast or torch.func changes within it")
    first = min(within)
    if any(writes(node) and first < node < found.out for node in found.out.graph.nodes):
        raise _No("something is changed in place within it")
    if any(map(is_changed, (found.out, *ends))):
        raise _No("its result, or what it is computed from, is changed in place")
    given = [*map(value, ends)]
    for t in given:
        if is_wrapper(t):
            raise _No(f"it computes with {with_article(type(t).__name__)}")
    if len({t.device for t in given}) > 1:
        raise _No("its tensors are on several devices")


def _put(graph: Graph, found: Attention, allowed: MaskKind | None, new: Mapping[Node, Node]) -> Node:
    """Puts the operator in place of an attention. Returns the node with the result. allowed: see `_mask_kind`. new:
    replacements of nodes that other attentions still refer to."""
    out, kind = found.out, dtype(found.out)
    q, k, v = (new.get(t, t) for t in (found.q, found.k, found.v))
    with graph.inserting_before(out):
        k = insert(graph, _aten.transpose.int, k, 2, 3) if found.is_k_transposed else k
        tensors = [t if dtype(t) is kind else insert(graph, _aten.to.dtype, t, kind) for t in (q, k, v)]
        sinks = (
            found.sinks if value(found.sinks).dim() == 1 else insert(graph, _aten.reshape.default, found.sinks, [-1])
        )
        mask = found.mask.node if found.mask and allowed is None else None
        mask = insert(graph, _aten.logical_not.default, mask) if mask and found.mask.is_inverted else mask
        call: Callable[..., object] = getattr(torch.ops.graphfuse, NAME).default
        options = (
            (mask, False, found.scale) if allowed is None else (None, allowed.is_causal, found.scale, allowed.window)
        )
        made = graph.call_function(call, (*tensors, sinks, *options))
        copy_records(made, out)
        if not all(is_op(user, "permute") for user in out.users):  # other readers may require the rows contiguous
            made = graph.call_function(_aten.contiguous.default, (made,))
            copy_records(made, out)
    out.replace_all_uses_with(made)
    for node in sorted((out, *found.inner), reverse=True):
        graph.erase_node(node)
    return made
