"""Values of graph nodes that depend on constants alone: on no input, parameter or buffer.

Such a node is evaluated on the CPU, whichever steps produce it in the graph. Only operations whose result is the same
on every device and in every run are evaluated. In-place changes of the nodes are evaluated with them, in the graph's
order.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from graphfuse.base.wording import with_article
from graphfuse.runtime import torch_private
from graphfuse.torch.analysis.meaning import called_name, input_name, is_op, may_write, value, writes
from graphfuse.torch.analysis.traversal import reachable
from graphfuse.torch.attention.mask import MaskKind, mask_kind

LARGEST = 1 << 31
"""Largest size in bytes of an evaluated tensor. A boolean mask of 32,768 x 32,768 takes half of it."""

_MAKING = "arange eye full ones scalar_tensor tensor tril_indices triu_indices zeros"
_NEW = """
    abs add all and_ any bitwise_and bitwise_not bitwise_or bitwise_xor cat clamp clone concat concatenate cumsum diff
    eq full_like ge greater greater_equal gt index invert le less less_equal logical_and logical_not logical_or
    logical_xor lt masked_fill maximum minimum mul multiply ne neg negative new_full new_ones new_zeros not_equal
    ones_like or_ repeat repeat_interleave rsub stack sub subtract tril triu where xor zeros_like __add__ __and__
    __eq__ __ge__ __gt__ __invert__ __le__ __lt__ __mul__ __ne__ __or__ __sub__ __xor__
"""
_MAY_BE_VIEWS = """
    _to_copy alias bfloat16 bool broadcast_to contiguous detach double expand expand_as flatten float getitem half int
    lift_fresh_copy long movedim narrow permute reshape reshape_as select slice squeeze swapaxes swapdims t to transpose
    type type_as unflatten unsqueeze view view_as
"""
_IN_PLACE = "copy_ fill_ iadd iand imul ior isub ixor setitem zero_"
_KNOWN = frozenset(" ".join((_MAKING, _NEW, _MAY_BE_VIEWS, _IN_PLACE)).split())
_FRESH = frozenset(f"{_MAKING} {_NEW}".split())
"""Names of operations whose result has its own memory."""
_ARITHMETIC = "add sub mul div pow square sqrt rsqrt reciprocal neg cos sin mean sum cat silu sigmoid".split()
_OTHERWISE_SUMMED = frozenset({"cumsum"})
"""Names of operations that another device may round differently."""


class Constants:
    """Values of nodes of a graph. Each is evaluated once."""

    def __init__(self) -> None:
        self._found: dict[Node, tuple[torch.Tensor | str, Sequence[Node]]] = {}
        self._kinds: dict[object, MaskKind | None] = {}

    def value(self, node: Node, reader: Node) -> torch.Tensor | str:
        """The node's value at the time when `reader` reads it, or the reason why it is unknown."""
        found, steps = self._of(node)
        late = (step for step in steps if writes(step) and step > reader)
        return f"{step.name} changes it later" if (step := next(late, None)) else found

    def mask_kind(
        self, mask: Node, reader: Node, queries: object, keys: object, is_inverted: bool = False
    ) -> tuple[MaskKind | None, str]:
        """The keys that a mask lets queries attend to; or None, with the reason why the mask stays. queries, keys:
        numbers of tokens. is_inverted: whether the mask is True for the keys that are not attended to."""
        if not isinstance(queries, int) or not isinstance(keys, int):
            return None, "its mask stays: numbers of tokens vary"
        found = self.value(mask, reader)
        if isinstance(found, str):
            return None, f"its mask stays: {found}"
        key = mask, queries, keys, is_inverted
        if key not in self._kinds:
            self._kinds[key] = mask_kind(~found if is_inverted else found, queries, keys)
        kind = self._kinds[key]
        return kind, "" if kind else "its mask is neither causal, nor a window of the last keys, nor all true"

    def steps(self, node: Node) -> Sequence[Node]:
        """The nodes that compute a node with a known value, in order; it is the last."""
        return self._of(node)[1]

    def _of(self, node: Node) -> tuple[torch.Tensor | str, Sequence[Node]]:
        if node not in self._found:
            steps = self._steps(node)
            self._found[node] = (steps, ()) if isinstance(steps, str) else (_computed(node, steps), steps)
        return self._found[node]

    def _steps(self, node: Node) -> Sequence[Node] | str:
        steps = list[Node]()
        for step in reachable([node], lambda step: (*step.all_input_nodes, *_changing(step))):
            if why := _why_not(step):
                return why
            steps.append(step)
        return sorted(steps)


def _why_not(node: Node) -> str:
    """The reason why a node is not evaluated; "" if it is."""
    like = value(node)
    if node.op in ("placeholder", "get_attr"):
        return f"it is computed from {input_name(node)}" if like is not None else "sizes that it is computed from vary"
    name = called_name(node)
    name = name if name in _KNOWN or not writes(node) else name.removesuffix("_")
    if name not in _KNOWN or "out" in node.kwargs:
        return f"it is computed by {node.name}, of which it is not known that it is the same each time"
    if like is None:
        return ""
    if name in _OTHERWISE_SUMMED and like.is_floating_point():
        return f"it is computed by {node.name}, which another device may round otherwise"
    if like.requires_grad and not node.all_input_nodes:
        return f"{input_name(node)} has gradients"
    if not all(isinstance(n, int) for n in like.shape):
        return "sizes that it is computed from vary"
    return f"{node.name} of it is too large to be looked at" if _bytes(like) > LARGEST else ""


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, without the dimensions along which it is expanded."""
    made = tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        made *= extent if isinstance(stride, int) and stride else 1
    return made


def _changing(node: Node) -> Iterator[Node]:
    """The nodes that change a node's tensor in place, or may: directly or through a tensor that may share its
    memory."""

    def sharing(one: Node) -> Iterator[Node]:
        is_fresh = called_name(one) in _FRESH or is_op(one, *_ARITHMETIC)
        is_seen_through = one is node or may_write(one) or not is_fresh
        return (u for u in one.users if is_seen_through and u.op != "output" and not is_op(u, "attention"))

    return (one for one in reachable([node], sharing) if one is not node and may_write(one))


def _computed(wanted: Node, steps: Sequence[Node]) -> torch.Tensor | str:
    inside, made = set(steps), dict[Node, object]()
    left = {step: len(inside.intersection(step.users)) for step in steps}
    with torch_private.without_fake_tensors(), torch.no_grad():
        for step in steps:
            args, kwargs = (_on_cpu(map_arg(given, made.__getitem__), step) for given in (step.args, step.kwargs))
            if called_name(step) in _MAKING.split():
                kwargs |= {"device": "cpu"}
            call = getattr(torch.Tensor, str(step.target)) if step.op == "call_method" else step.target
            made[step] = call(*args, **kwargs)
            if _is_copied_between_devices(step):  # on the CPU, it may be the same tensor
                made[step] = made[step].clone()
            for read in step.all_input_nodes:
                left[read] -= 1
                if not left[read] and read is not wanted:
                    made[read] = None
    found = made[wanted]
    return found if type(found) is torch.Tensor else f"it is {with_article(type(found).__name__)}"


def _is_copied_between_devices(step: Node) -> bool:
    like, source = value(step), value(step.args[0]) if step.args else None
    return like is not None and source is not None and like.device != source.device


def _on_cpu(given: object, step: Node) -> object:
    """Arguments of a call, with every device replaced by the CPU."""
    if isinstance(given, dict):
        return {name: "cpu" if name == "device" and v is not None else _on_cpu(v, step) for name, v in given.items()}
    if called_name(step) == "to" and isinstance(given, tuple):  # `to` also takes names and numbers of devices
        given = tuple("cpu" if isinstance(v, str) or type(v) is int else v for v in given)
    return map_aggregate(given, lambda v: torch.device("cpu") if isinstance(v, torch.device) else v)
