"""A pass that drops attention masks made of constants, if torch has a faster kernel without the mask.

A causal window becomes the operator of attention with sinks, without sinks, because torch's own function takes no
window. The trace of a model has the causal mask as a tensor. It also repeats keys and values for all heads of queries,
because torch's kernels with a mask do not support grouped heads. What a mask allows is determined from its values
(`mask`, `constant`), not from the operations that make it. Nodes that only computed the mask are erased.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from graphfuse.torch.analysis.meaning import arguments, called_name, is_changed, is_op, may_write, value
from graphfuse.torch.analysis.new_nodes import permuted
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.analysis.surroundings import GraphParts
from graphfuse.torch.analysis.traversal import reachable
from graphfuse.torch.attention.constants import Constants
from graphfuse.torch.attention.mask import MaskKind
from graphfuse.torch.attention.operator import (
    ALL_WIDTHS,
    HALVES,
    WIDEST,
    WIDEST_WITH_GRADIENTS,
    WINDOWED,
    Options,
    is_wrapper,
    kernel_of,
)
from graphfuse.torch.attention.repeated_heads import HEADS, RepeatedHeads, repeated_heads
from graphfuse.torch.attention.sinks import NAME as OPERATOR

NAME = "scaled_dot_product_attention"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


@dataclass(frozen=True)
class AttentionCall:
    """A call of torch's function. given: its arguments by name, without those that are the default."""

    node: Node
    given: dict[str, object]

    def get(self, name: str) -> object:
        return self.given.get(name, _DEFAULTS.get(name))


def rewrite(module: GraphModule, regions: GraphParts, place: Callable[[Node], tuple[str, str]]) -> list[Entry]:
    """Drops unnecessary masks from a graph, and the repeats of heads that they require. Returns the report's entries. A
    call without a mask is reported only if it changes. place: the name and the class of the module that a node comes
    from."""
    graph = module.graph
    # Whether the graph itself restricts which kernels attention may use.
    chooses = any("sdp" in getattr(n.target, "__name__", "") and not is_op(n, "attention") for n in graph.nodes)
    constants = Constants()
    entries, dead = [], set[Node]()
    for call in [call for node in graph.nodes if (call := _call(node)) is not None]:
        changes, why, mask, window = [], _why_unchanged(call, regions), call.get("attn_mask"), None
        if not why and isinstance(mask, Node):
            tokens = (value(call.get(name)).shape[-2] for name in ("query", "key"))
            kind, why = constants.mask_kind(mask, call.node, *tokens)
            if kind is not None and (needed := _why_mask_stays(call, kind, chooses)):
                why = f"its mask stays: {needed}"
            if kind is not None and not why:
                window = kind.window
                given = {name: v for name, v in call.given.items() if name != "attn_mask"}
                call = replace(call, given=given | ({"is_causal": True} if kind.is_causal else {}))
                changes = [f"{kind}: no mask"]
                dead.update(constants.steps(mask))
        if not why and not chooses and (pair := _repeats(call)):
            call, changes = _ungrouped(graph, call, pair), [*changes, "k and v not repeated"]
            dead.update(step for one in pair for step in one.steps)
        if changes:
            call.node.args = tuple(call.get(name) for name in _ARGUMENTS[:3])
            call.node.kwargs = {name: v for name, v in call.given.items() if name in _DEFAULTS}
            if window is not None:
                call.node.target = getattr(torch.ops.graphfuse, OPERATOR).default
                call.node.args += None, None, True, call.get("scale"), window
                call.node.kwargs = {}
            entries.append(Entry(*place(call.node), NAME if window is None else OPERATOR, ", ".join(changes)))
        elif isinstance(mask, Node):
            entries.append(Entry(*place(call.node), why=why))
    if dead:
        erase(graph, dead)
        graph.lint()
        module.recompile()
    return entries


def _call(node: Node) -> AttentionCall | None:
    if not is_op(node, "attention"):
        return None
    given = arguments(node, *_ARGUMENTS)
    known = {*_ARGUMENTS, *_DEFAULTS}
    if not given.keys() <= known or not all(isinstance(value(given.get(n)), torch.Tensor) for n in _ARGUMENTS[:3]):
        return None
    return AttentionCall(
        node, {name: v for name, v in given.items() if name not in _DEFAULTS or v is not _DEFAULTS[name]}
    )


def _why_unchanged(call: AttentionCall, regions: GraphParts) -> str:
    """The reason why a call is not changed; "" if it may be."""
    tensors = [value(call.get(name)) for name in _ARGUMENTS[:3]]
    if call.node in regions.nested:
        return "it is in a transform of torch.func"
    if any(is_wrapper(t) or t.is_nested for t in tensors):
        return "it computes with tensors of a class of their own"
    if call.get("attn_mask") is not None and call.get("is_causal") not in (False, 0):
        return "it has a mask and is_causal"
    viewed = _viewed(call.node)
    return f"{viewed.name} of its result needs the layout that the kernel with a mask gives it" if viewed else ""


def _viewed(out: Node) -> Node | None:
    """A view of a result that requires a particular layout, if there is one. Kernels with a mask and without one return
    different layouts."""

    def readers(node: Node) -> Iterable[Node]:
        is_moved = is_op(node, "view", "expand", "permute", "slice", "cast") or called_name(node) in (
            "t",
            "detach",
            "alias",
        )
        return node.users if node is out or is_moved else ()

    of_one_layout = ("view", "view_as", "as_strided", "unflatten", "_unsafe_view")
    return next((one for one in reachable([out], readers) if called_name(one) in of_one_layout), None)


def _why_mask_stays(call: AttentionCall, kind: MaskKind, chooses: bool) -> str:
    """The reason why a mask of a known kind stays; "" if it can be dropped."""
    scale = call.get("scale")
    is_positive = scale is None or isinstance(scale, int | float) and scale > 0
    if kind.is_causal and not is_positive:  # torch's CPU kernel does not support others
        return "kernels for causal attention take a positive scale"
    if kind.window is None:
        return ""
    if chooses or value(call.get("query")).is_cuda and not torch.backends.cuda.flash_sdp_enabled():
        return "which kernels attention may take is set"
    if is_changed(call.node):  # the operator's backward reads the result; not all of torch's kernels do
        return "its result is changed in place"
    return "" if _supports_window(call, kind.window) else f"there is no faster kernel for {kind}"


def _supports_window(call: AttentionCall, window: int) -> bool:
    """True if the operator accepts a call and would run flash attention with a window."""
    q, k, v = (value(call.get(name)) for name in _ARGUMENTS[:3])
    scale, out = call.get("scale"), value(call.node)
    if out is None or any(t.dim() != 4 or t.dtype is not q.dtype or t.device != q.device for t in (k, v, out)):
        return False
    if not all(isinstance(n, int) for t in (q, k, v) for n in t.shape[1:]) or call.get("dropout_p") not in (0, 0.0):
        return False
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return False
    return kernel_of(q, k, v, False, Options(1.0 if scale is None else scale, True, window)) is WINDOWED


def _repeats(call: AttentionCall) -> tuple[RepeatedHeads, RepeatedHeads] | None:
    """The sources of repeated keys and values, if torch is as fast with grouped heads; None otherwise."""
    q, k, v = (call.get(name) for name in _ARGUMENTS[:3])
    if call.get("attn_mask") is not None or call.get("enable_gqa") or value(q).dim() != 4 or k is v:
        return None
    if any(set(t.users) != {call.node} for t in (k, v)):
        return None
    pair = repeated_heads(k), repeated_heads(v)
    if any(one is not None and is_changed(one.source) for one in pair):  # backward would read the changed values
        return None
    if None in pair or pair[0].times != pair[1].times:
        return None
    heads = [value(one.source).shape[one.order[HEADS]] for one in pair]
    if heads[0] != heads[1] or value(q).shape[HEADS] != heads[0] * pair[0].times:
        return None
    tensors = [value(q), *(value(one.source).permute(one.order) for one in pair)]
    return pair if _is_steady(call, pair) and _supports_groups(*tensors) else None


def _is_steady(call: AttentionCall, pair: tuple[RepeatedHeads, RepeatedHeads]) -> bool:
    """True if nothing is changed in place between the repeats and the call, so that the sources still hold the same
    values."""
    own, node = {step for one in pair for step in one.steps}, call.node
    while own:
        if may_write(node):
            return False
        own.discard(node)
        node = node.prev
    return True


def _supports_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    on = q.device
    if on.type == "cuda" and not (torch.cuda.is_available() and torch.backends.cuda.flash_sdp_enabled()):
        return False
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        return False
    chip = torch.cuda.get_device_capability(on) if on.type == "cuda" else None
    gradients = any(t.requires_grad for t in (q, k, v))
    return has_grouped_kernel(on.type, q.dtype, {t.shape[-1] for t in (q, k, v)}, gradients, chip)


def has_grouped_kernel(
    device: str, dtype: torch.dtype, widths: set[int], gradients: bool, chip: tuple[int, int] | None
) -> bool:
    """True if torch has a fast kernel for grouped heads without a mask: flash attention. Where flash attention
    declines, torch would run its slowest kernel, and another kernel with repeated heads is faster. device: device type.
    widths: columns of a head of queries, keys and values. chip: compute capability of the GPU."""
    if device == "cpu":
        return True
    if device != "cuda" or chip is None or chip < (8, 0) or dtype not in HALVES or len(widths) > 1:
        return False
    widest = WIDEST_WITH_GRADIENTS if gradients and chip not in ALL_WIDTHS else WIDEST
    return all(isinstance(width, int) and width <= widest for width in widths)


def _ungrouped(graph: Graph, call: AttentionCall, pair: Sequence[RepeatedHeads]) -> AttentionCall:
    """The call with grouped heads: its keys and values are not repeated."""
    given = call.given | {"enable_gqa": True}
    with graph.inserting_before(call.node):
        for name, one in zip(("key", "value"), pair, strict=True):
            given[name] = permuted(graph, one.source, one.order)
    return replace(call, given=given)


def erase(graph: Graph, dead: set[Node]) -> None:
    """Erases the dead nodes that have no users. Nodes that change a tensor in place stay, with the nodes that they
    change."""
    for node in reversed(graph.nodes):
        if node in dead and not node.users and not may_write(node):
            graph.erase_node(node)
