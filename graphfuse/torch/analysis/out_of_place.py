"""In-place operations of a graph as out-of-place ones, where nothing else refers to the memory that they write.

In a graph without in-place operations, edges say which values an operation reads. So what follows need not know when a
tensor is written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphfuse.torch.analysis.aten_calls import fake_context
from graphfuse.torch.analysis.meaning import (
    IN_PLACE,
    KEYS,
    OWNERS,
    called_name,
    has_gradient,
    place_of_inplace,
    recorded_result,
    same,
    tensors,
    value,
    writes,
)
from graphfuse.torch.analysis.new_nodes import copy_records
from graphfuse.torch.analysis.surroundings import graph_parts

Memory = frozenset[int]
"""Numbers of the storages of the tensors that a node makes."""


@dataclass(frozen=True)
class _Operation:
    """Call of a node."""

    op: str
    target: object
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    def result(self, autocast: AbstractContextManager[object]) -> torch.Tensor | None:
        """The result for the recorded results of its arguments; None if it is no tensor, or an error."""
        given, named = map_arg((self.args, dict(self.kwargs)), recorded_result)
        call = self.target if callable(self.target) else getattr(given[0], str(self.target), None)
        try:
            with torch.no_grad(), autocast, fake_context(tensors((given, named))):
                made = call(*(given if call is self.target else given[1:]), **named)
        except Exception:  # there is no such form, or not for such arguments
            return None
        return made if isinstance(made, torch.Tensor) else None


def write_out_of_place(graph: Graph) -> None:
    """Replaces in-place operations by out-of-place ones. Later nodes read these instead of the tensor that was written.

    An operation stays if an input of the graph has the memory that is written, if a later node or backward reads that
    through another tensor, if modes have changed since the tensor was made, or if it has no out-of-place form with the
    same result and gradients. All stay in a graph with transforms of torch.func, or with tensors that have others
    within.

    New nodes are recorded with the memory that was written, so that views which are recorded later share it, also when
    this runs again.
    """
    if not any(map(writes, graph.nodes)) or not all(map(_tells_memory, graph.nodes)):
        return
    around = graph_parts(graph)
    if around.nested:  # tensors of a transform show no storage
        return
    memory = dict[Node, Memory]()
    for node in graph.nodes:
        memory[node] = _memory(recorded_result(node))
        if "dropout" in called_name(node):  # it may return its argument, which the record does not tell
            memory[node] = memory[node].union(*(memory[read] for read in node.all_input_nodes))
    has_autocast = any(_name(node) == "_enter_autocast" for node in graph.nodes)
    before, later = list[Node](), dict.fromkeys(graph.nodes)
    for node in [*graph.nodes]:
        del later[node]
        written = node.args[0] if writes(node) and node.args else None
        if isinstance(written, Node) and around.number[written] == around.number[node]:
            is_shared = _is_shared(written, before, later, memory)
            if not is_shared and (made := _replaced(graph, node, written, has_autocast)) is not None:
                written.replace_all_uses_with(made, lambda user: user in later)
                memory[made], around.number[made] = memory.pop(node), around.number[node]
                node = made
        before.append(node)


def _tells_memory(node: Node) -> bool:
    """True if the tensors that a node makes share memory only where their storages are the same."""
    made = tensors(recorded_result(node))
    return all(t.layout is torch.strided and not hasattr(type(t), "__tensor_flatten__") for t in made)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _memory(made: object) -> Memory:
    return frozenset(t.untyped_storage()._cdata for t in tensors(made))


def _is_shared(written: Node, before: Sequence[Node], later: Collection[Node], memory: Mapping[Node, Memory]) -> bool:
    """True if an input has memory of the tensor that is written, or a later node reads that through another tensor, or
    backward may, which ``Tensor.data`` hides from torch's own check."""
    sharing = [node for node in before if not memory[node].isdisjoint(memory[written])]
    if any(node.op in ("placeholder", "get_attr") or _name(node) == "_get_data_attr" for node in sharing):
        return True
    return any(user in later for node in sharing if node is not written for user in node.users)


def _replaced(graph: Graph, node: Node, written: Node, has_autocast: bool) -> Node | None:
    """The out-of-place operation that has replaced an in-place one; None if there is none with its result.
    has_autocast: whether a part of the graph is under autocast."""
    old, operation = value(written), _out_of_place(node, written)
    made = None if old is None or operation is None else _result(operation, old.device.type, has_autocast)
    if made is None or made.dim() != old.dim() or _memory(made) & _memory(old):
        return None
    if has_gradient(node) and not made.is_floating_point():  # z.ne_(y), whose gradient is zeros
        return None
    if made.is_conj() != old.is_conj() or made.is_neg() != old.is_neg():
        return None
    lies = zip(made.shape, old.shape, made.stride(), old.stride(), strict=True)
    if not all(same(n, m) and same(a, b) for n, m, a, b in lies):
        return None
    with graph.inserting_before(node):
        new = graph.create_node(operation.op, operation.target, operation.args, dict(operation.kwargs))
        if made.dtype is not old.dtype:
            _record(new, node, made)
            new = graph.call_method("to", (new, old.dtype))
    _record(new, node, recorded_result(node).detach())
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _result(operation: _Operation, device: str, has_autocast: bool) -> torch.Tensor | None:
    """The result of an operation; None if it is of another type under autocast, which leaves in-place forms alone."""
    if device not in ("cpu", "cuda"):
        return operation.result(nullcontext())
    made = operation.result(torch.autocast(device, enabled=False))
    for dtype in (torch.bfloat16, torch.float16) if has_autocast or torch.is_autocast_enabled(device) else ():
        other = operation.result(torch.autocast(device, dtype))
        if made is None or other is None or other.dtype is not made.dtype:
            return None
    return made


def _record(new: Node, of: Node, made: torch.Tensor) -> None:
    """Records a tensor of its own for a node: the record of an in-place operation is that of what it has written."""
    copy_records(new, of)
    made = made.requires_grad_(has_gradient(of))
    new.meta |= {key: made for key in KEYS if key in of.meta}


def _out_of_place(node: Node, written: Node) -> _Operation | None:
    """The out-of-place form of an in-place operation; None if there is none."""
    if "out" in node.kwargs or _is_random(called_name(node)):
        return None
    same_call = _Operation(node.op, node.target, node.args, node.kwargs)
    if called_name(node) == "copy_":
        return None if has_gradient(node) else _copy(node, written)  # what was there has a gradient of zeros
    if isinstance(node.target, torch._ops.OpOverload):
        target = _overload(node.target)
    elif node.op == "call_method":
        target = str(node.target).removesuffix("_")
    elif (place := place_of_inplace(node.target)) is not None:
        args = tuple(False if number == place else a for number, a in enumerate(node.args))
        named = {name: False if name == "inplace" else a for name, a in node.kwargs.items()}
        return replace(same_call, args=args, kwargs=named)
    else:
        target = _function(node.target)
    return None if target is None else replace(same_call, target=target)


def _is_random(name: str) -> bool:
    """True for operations such as ``bernoulli_``, whose forms of one name draw from different distributions."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)


def _copy(node: Node, written: Node) -> _Operation | None:
    """A copy of a whole tensor into another. None if its elements are repeated, or on another device."""
    of = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    t, old = value(of), value(written)
    if t is None or old is None or t.shape != old.shape or t.device != old.device:
        return None
    return _Operation("call_method", "to", (of, old.dtype), {"copy": True})


def _overload(of: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    written = [a.alias_info is not None and a.alias_info.is_write for a in of._schema.arguments]
    if of.namespace != "aten" or [*filter(None, written)] != written[:1]:
        return None
    packet = getattr(torch.ops.aten, of._schema.name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, of._overloadname, None)


def _function(of: Callable[..., object]) -> Callable[..., object] | None:
    """The out-of-place form of a function: of Python's operators, or by torch's names."""
    name = getattr(of, "__name__", "")
    if of in IN_PLACE:
        return IN_PLACE[of]
    owner = next((owner for owner in OWNERS if getattr(owner, name, None) is of), None)
    return getattr(owner, name.removesuffix("_"), None) if owner is not operator and name.endswith("_") else None
