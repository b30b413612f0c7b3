"""The forward of a layer in which residual sums, the norms of them, and norms or activations beside these are one
operator each, across the borders of modules.

The layer's own forward is traced with its modules as they are called, and written again as Python. Only a straight
forward is (`straight`): what it does depends on nothing but what the trace shows. What it reads of the layer is
compared at each call, and where something differs, or a norm is not to be gone around, the layer's own forward runs.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType

import torch
from torch.fx import Graph, Node, Proxy, Tracer

from graphfuse.torch.fusion import forward, straight
from graphfuse.torch.fusion.module import Norm
from graphfuse.torch.fusion.straight import Crooked

_REST = "_graphfuse_rest"
_ADDS = (operator.add, torch.add)
_CHECKPOINTING = "transformers.modeling_layers"


@dataclass(frozen=True)
class Unit:
    """Modules that an operator takes together. note: what is said of them beside the operator's name."""

    operator: str
    note: str


@dataclass(frozen=True)
class Fused:
    """A layer's new forward. units: what is one now, in order. kept: sums that are not, and why."""

    function: FunctionType | None
    units: tuple[Unit, ...]
    kept: tuple[str, ...]


class _Leaves(Tracer):
    """Traces a forward with every module as one node. ``**kwargs`` that are passed on stay what they are."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True

    def keys(self, obj: Proxy) -> Iterator[str]:
        if not str(obj.node.target).startswith("**"):
            raise Crooked("its forward passes on a mapping that it computes")
        return iter((_REST,))


def fused(layer: torch.nn.Module, norms: Mapping[str, Norm]) -> Fused:
    """The layer's forward with what can be one. norms: those of its own modules that are norms, by name. Raises Crooked
    where its forward cannot be traced."""
    own, checkpoints = own_forward(type(layer))
    constants = straight.constants(layer, own)
    graph = _trace(layer, own)
    taken, kept = [], []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _ADDS or node.kwargs:
            continue
        if len(node.args) != 2 or not all(isinstance(a, Node) for a in node.args):
            continue
        norm = _norm_of(node, norms)
        if norm is None:
            if any(user.op == "output" for user in node.users):
                kept.append("the sum that it returns, as the norm of it is another module's")
        elif forward.of_sum(norms[norm.target]) is None:
            kept.append(f"no operator computes a residual sum and {norms[norm.target].form}")
        elif norm.prev is not node:
            kept.append(f"something comes between a residual sum and {norm.target}")
        else:
            taken.append(_make_one(graph, node, norm, norms))
    taken += _activated(graph, layer, norms)
    if not taken:
        return Fused(None, (), tuple(dict.fromkeys(kept)))
    graph.lint()
    function = _guarded(own, _written(graph), constants, checkpoints)
    return Fused(function, tuple(taken), tuple(dict.fromkeys(kept)))


def own_forward(cls: type) -> tuple[FunctionType, bool]:
    """The class's forward as it was written, and whether it is wrapped for checkpointing."""
    found, checkpoints = cls.forward, False
    while hasattr(found, "__wrapped__"):
        if found.__globals__.get("__name__") != _CHECKPOINTING:
            raise Crooked(f"its forward is wrapped by {found.__globals__.get('__name__')}.{found.__code__.co_name}")
        found, checkpoints = found.__wrapped__, True
    return found, checkpoints


def _trace(layer: torch.nn.Module, own: FunctionType) -> Graph:
    # An object of the layer's attributes whose forward is the one that was written, as tracers take it of the class.
    cls = type(type(layer).__name__, (type(layer),), {})
    cls.forward = own
    stand_in = cls.__new__(cls)
    stand_in.__dict__ = {n: v for n, v in vars(layer).items() if n != "forward"}
    try:
        graph = _Leaves().trace(stand_in)
    except Crooked:
        raise
    except Exception as error:  # of a stranger's forward
        said = str(error).splitlines()[0][:120] if str(error) else ""
        raise Crooked(f"its forward cannot be traced: {type(error).__name__}: {said}") from error
    rest = {n.target.removeprefix("**"): n for n in graph.nodes if n.op == "placeholder" and n.target.startswith("**")}
    for node in list(graph.nodes):
        if _REST in node.kwargs:
            source = node.kwargs[_REST]
            node.kwargs = {n: v for n, v in node.kwargs.items() if n != _REST} | {_REST: next(iter(rest.values()))}
            if not source.users:
                graph.erase_node(source)
    return graph


def _norm_of(total: Node, norms: Mapping[str, Norm]) -> Node | None:
    """The call of a norm's module that gets a sum and nothing else."""
    for user in total.users:
        given = (*user.args, *user.kwargs.values())
        if user.op == "call_module" and user.target in norms and given == (total,):
            return user
    return None


def _make_one(graph: Graph, total: Node, norm: Node, norms: Mapping[str, Norm]) -> Unit:
    """The norm and the sum, and the norm that is a term of the sum, if it is."""
    following, inner = norms[norm.target], _inner_of(total, norms)
    names, first = ((norm.target,), None) if inner is None else ((inner.target, norm.target), norms[inner.target])
    together = forward.of_sandwich(first, following) if first is not None else None
    if together is None:
        function, given, gone = forward.add_norm_of(following), total.args, (norm, total)
        names, unit = names[-1:], Unit(forward.of_sum(following).name, f"with {norm.target}")
    else:
        residual = total.args[0] if total.args[1] is inner else total.args[1]
        function, given = forward.norm_add_norm_of(first, following), (residual, *inner.args)
        gone, note = (norm, total, inner), f"with {' and '.join(names)} in inference, else {{}}"
        unit = Unit(together.name, note.format(forward.of_sum(following).name))
    with graph.inserting_before(total):
        modules = (graph.create_node("get_attr", name) for name in names)
        made = graph.call_function(function, (*modules, *given))
        y, summed = (graph.call_function(operator.getitem, (made, i)) for i in (0, 1))
    total.replace_all_uses_with(summed)
    norm.replace_all_uses_with(y)
    for node in gone:
        graph.erase_node(node)
    return unit


def _inner_of(total: Node, norms: Mapping[str, Norm]) -> Node | None:
    """The call of a norm's module right before a sum, of which its result is a term and nothing else."""
    node = total.prev
    if node.op != "call_module" or node.target not in norms or len(node.args) != 1 or node.kwargs:
        return None
    return node if list(node.users) == [total] and total.args.count(node) == 1 else None


def _activated(graph: Graph, layer: torch.nn.Module, norms: Mapping[str, Norm]) -> Iterator[Unit]:
    """Makes norms and the SiLU of them one, where the norm is rounded before."""
    for node in list(graph.nodes):
        if node.op != "call_module" or node.target not in norms or len(node.args) != 1 or node.kwargs:
            continue
        serving, user = forward.of_silu(norms[node.target]), next(iter(node.users), None)
        if serving is None or len(node.users) != 1 or user.args != (node,) or user.prev is not node:
            continue
        if user.kwargs not in ({}, {"inplace": False}):
            continue
        is_module = user.op == "call_module" and type(layer.get_submodule(str(user.target))) is torch.nn.SiLU
        if not is_module and (user.op != "call_function" or user.target is not torch.nn.functional.silu):
            continue
        with graph.inserting_before(node):
            module = graph.create_node("get_attr", node.target)
            activation = graph.create_node("get_attr", user.target) if is_module else None
            made = graph.call_function(forward.silu_of(norms[node.target]), (module, activation, *node.args))
        user.replace_all_uses_with(made)
        graph.erase_node(user)
        graph.erase_node(node)
        yield Unit(serving.name, f"with {node.target}")


def _written(graph: Graph) -> FunctionType:
    code = graph.python_code("self")
    rest = next((n.name for n in graph.nodes if n.op == "placeholder" and n.target.startswith("**")), "")
    source, names = code.src.replace(f"{_REST} = {rest}", f"**{rest}"), dict(code.globals)
    exec(compile(source, "<graphfuse layer>", "exec"), names)
    return names["forward"]


def _guarded(
    own: FunctionType, function: FunctionType, constants: Mapping[str, object], checkpoints: bool
) -> FunctionType:
    expected = tuple(constants.items())

    def forward(self, *given, **named):
        is_checkpointed = checkpoints and self.gradient_checkpointing and self.training
        if is_checkpointed or any(getattr(self, name) != value for name, value in expected):
            return type(self).forward(self, *given, **named)
        return function(self, *given, **named)

    forward.__wrapped__ = own  # whose arguments inspect.signature tells
    return forward
