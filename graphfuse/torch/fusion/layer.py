"""The forward of a layer in which residual sums, the norms of them, and norms or activations beside these are one
operator each, across the borders of modules.

The layer's own forward is run by the `interpreter`, on proxies, with its modules as they are called, and written again
as Python. What it reads of the layer and of the world is compared at each call, and where something differs, or a norm
is not to be gone around, the layer's own forward runs.
"""

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType

import torch
from torch.fx import Graph, Node, Proxy, Tracer

from graphfuse.torch.fusion import forward, interpreter
from graphfuse.torch.fusion.interpreter import Child, Domain, ForwardDeclined, Named, TensorMethod
from graphfuse.torch.fusion.meaning import is_operation
from graphfuse.torch.fusion.module import NormModule
from graphfuse.torch.fusion.reads import SELF, Read, is_plain, watched

_REST = "_graphfuse_rest"
_ADDS = (operator.add, torch.add)
_CHECKPOINTING = "transformers.modeling_layers"
_DEPRECATION = "transformers.utils.deprecation"


@dataclass(frozen=True)
class Unit:
    """Modules that an operator takes together. note: what is said of them beside the operator's name."""

    operator: str
    note: str


@dataclass(frozen=True)
class FusedLayer:
    """A layer's new forward. units: what is one now, in order. kept: sums that are not, and why."""

    function: FunctionType | None
    units: tuple[Unit, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class OwnForward:
    """A class's forward as it was written, and what its wrappers do beside calling it. checkpoints: whether one is for
    checkpointing. renamed: arguments that others warn of, or give by another name."""

    function: FunctionType
    checkpoints: bool
    renamed: tuple[str, ...]

    def is_changed(self, module: torch.nn.Module, named: Mapping[str, object]) -> bool:
        """True if the wrappers do not just pass on a call with these named arguments."""
        if self.checkpoints and module.gradient_checkpointing and module.training:
            return True
        return any(name in named for name in self.renamed)


class _Proxies(Domain):
    """Symbols are proxies: what is done with them is done again in each call, so that anything may be."""

    symbols = Proxy

    def __init__(self, module: torch.nn.Module, tracer: Tracer) -> None:
        super().__init__(module)
        self.tracer = tracer

    def member(self, name: str, tensor: torch.Tensor) -> object:
        return self.tracer.create_proxy("get_attr", name, (), {})

    def attribute(self, symbol: Proxy, name: str) -> object:
        if name.endswith("_") and not name.endswith("__"):
            raise ForwardDeclined("changes a tensor in place")
        return getattr(symbol, name)

    def compute(self, function: Callable[..., object], args: Sequence[object], named: Mapping[str, object]) -> object:
        given = _passed([*args, *named.values()])
        if not isinstance(function, Proxy) and not any(isinstance(v, Proxy) for v in given):
            raise ForwardDeclined("is not known to do the same each time")
        return function(*args, **named)

    def call_child(self, child: Child, args: Sequence[object], named: Mapping[str, object]) -> object:
        _passed([*args, *named.values()])
        return self.tracer.create_proxy("call_module", child.name, tuple(args), dict(named))

    def unpack(self, symbol: object, count: int) -> Sequence[object]:
        parts = self.tracer.create_proxy("call_function", parts_of, (symbol, count), {})
        return [parts[i] for i in range(count)]

    def spread(self, value: object) -> Mapping[str, object]:
        if isinstance(value, Proxy) and str(value.node.target).startswith("**"):
            return {_REST: value}
        return super().spread(value)

    def computes(self, function: object) -> bool:
        return is_operation(function)


def _passed(values: Sequence[object]) -> Sequence[object]:
    """Values that are given to an operation or a module, those in sequences, too."""
    found: list[object] = []
    for v in values:
        if isinstance(v, tuple | list):
            found += _passed(v)
        elif isinstance(v, Named | TensorMethod | Child | interpreter.Method):
            raise ForwardDeclined("is given something that is no tensor and no number")
        else:
            found.append(v)
    return found


def parts_of(values: Sequence[object], count: int) -> tuple[object, ...]:
    """Parts of a value that is assigned to `count` variables."""
    parts = tuple(values)
    if len(parts) != count:
        raise ValueError(f"{len(parts)} values to unpack (expected {count})")
    return parts


def fused(layer: torch.nn.Module, norms: Mapping[str, NormModule]) -> FusedLayer:
    """The layer's forward with what can be one. norms: those of its own modules that are norms, by name. Raises
    Declined where its forward cannot be traced."""
    own = own_forward(type(layer))
    graph, reads = _trace(layer, own.function)
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
        return FusedLayer(None, (), tuple(dict.fromkeys(kept)))
    graph.lint()
    function = _guarded(own, _written(graph), reads)
    return FusedLayer(function, tuple(taken), tuple(dict.fromkeys(kept)))


def own_forward(cls: type) -> OwnForward:
    """The class's forward without its wrappers. Raises Declined where one is not known."""
    found, checkpoints, renamed = cls.forward, False, list[str]()
    while hasattr(found, "__wrapped__"):
        owner = found.__globals__.get("__name__")
        names = inspect.getclosurevars(found).nonlocals if owner == _DEPRECATION else {}
        if owner == _CHECKPOINTING:
            checkpoints = True
        elif names.get("func") is found.__wrapped__ and "old_name" in names:
            renamed.append(names["old_name"])
        else:
            raise ForwardDeclined(f"its forward is wrapped by {owner}.{found.__code__.co_name}")
        found = found.__wrapped__
    return OwnForward(found, checkpoints, tuple(renamed))


def _trace(layer: torch.nn.Module, own: FunctionType) -> tuple[Graph, tuple[Read, ...]]:
    """The graph of a layer's forward, with its modules as nodes, and what it reads beside its arguments."""
    tracer = Tracer()
    tracer.root, tracer.graph = layer, Graph()
    domain, given, rest = _Proxies(layer, tracer), [], {}
    domain.record(SELF, ("__class__", "forward"), type(layer).forward)
    for p in list(inspect.signature(own).parameters.values())[1:]:
        if p.kind is p.VAR_KEYWORD:
            rest[p.name] = tracer.create_proxy("placeholder", f"**{p.name}", (), {})
        elif p.kind is p.POSITIONAL_OR_KEYWORD and (p.default is p.empty or is_plain(p.default)):
            default = () if p.default is p.empty else (p.default,)
            given.append(tracer.create_proxy("placeholder", p.name, default, {}))
        else:
            raise ForwardDeclined(f"its forward has the argument {p}")
    try:
        made = interpreter.run(domain, own, given, rest)
        _passed([made])
        tracer.graph.output(tracer.create_arg(made))
    except ForwardDeclined as why:
        raise ForwardDeclined(f"its forward is not straight: {why}") from None
    except Exception as error:  # of a stranger's forward
        said = str(error).splitlines()[0][:120] if str(error) else ""
        raise ForwardDeclined(f"its forward cannot be traced: {type(error).__name__}: {said}") from error
    return tracer.graph, tuple(domain.reads.values())


def _norm_of(total: Node, norms: Mapping[str, NormModule]) -> Node | None:
    """The call of a norm's module that gets a sum and nothing else."""
    for user in total.users:
        given = (*user.args, *user.kwargs.values())
        if user.op == "call_module" and user.target in norms and given == (total,):
            return user
    return None


def _make_one(graph: Graph, total: Node, norm: Node, norms: Mapping[str, NormModule]) -> Unit:
    """The norm and the sum, and the norm that is a term of the sum, if it is."""
    following, inner = norms[norm.target], _inner_of(total, norms)
    names, first = ((norm.target,), None) if inner is None else ((inner.target, norm.target), norms[inner.target])
    together = forward.of_norm_add_norm(first, following) if first is not None else None
    if together is None:
        function, given, gone = forward.add_norm_of(following), total.args, (norm, total)
        names, unit = names[-1:], Unit(forward.of_sum(following).name, f"with {norm.target}")
    else:
        residual = total.args[0] if total.args[1] is inner else total.args[1]
        function, given = forward.norm_add_norm_of(first, following), (residual, *inner.args)
        gone, unit = (norm, total, inner), Unit(together.name, f"with {' and '.join(names)}")
    with graph.inserting_before(total):
        modules = (graph.create_node("get_attr", name) for name in names)
        made = graph.call_function(function, (*modules, *given))
        y, summed = (graph.call_function(operator.getitem, (made, i)) for i in (0, 1))
    total.replace_all_uses_with(summed)
    norm.replace_all_uses_with(y)
    for node in gone:
        graph.erase_node(node)
    return unit


def _inner_of(total: Node, norms: Mapping[str, NormModule]) -> Node | None:
    """The call of a norm's module right before a sum, of which its result is a term and nothing else."""
    node = total.prev
    if node.op != "call_module" or node.target not in norms or len(node.args) != 1 or node.kwargs:
        return None
    return node if list(node.users) == [total] and total.args.count(node) == 1 else None


def _activated(graph: Graph, layer: torch.nn.Module, norms: Mapping[str, NormModule]) -> Iterator[Unit]:
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


def _guarded(own: OwnForward, function: FunctionType, reads: tuple[Read, ...]) -> FunctionType:
    watch = watched(reads)

    def forward(self, *given, **named):
        if own.is_changed(self, named) or not watch(self):
            return type(self).forward(self, *given, **named)
        return function(self, *given, **named)

    forward.__wrapped__ = own.function  # whose arguments inspect.signature tells
    return forward


def sums_into(function: FunctionType, called: Iterable[str]) -> bool:
    """True if a variable that is given to one of self's modules, of these names, was a sum at some time, as far as the
    source tells. For reports: nothing is done by it."""
    try:
        nodes = list(ast.walk(interpreter.body(inspect.unwrap(function))))
    except ForwardDeclined:
        return False
    assigned = [n for n in nodes if isinstance(n, ast.Assign | ast.AugAssign)]
    sums = {_target(n) for n in assigned if isinstance(n.op if isinstance(n, ast.AugAssign) else _operator(n), ast.Add)}
    calls = (
        n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in set(called)
    )
    return any(isinstance(a, ast.Name) and a.id in sums for call in calls for a in call.args)


def _operator(assigned: ast.Assign) -> ast.operator | None:
    return assigned.value.op if isinstance(assigned.value, ast.BinOp) else None


def _target(assigned: ast.Assign | ast.AugAssign) -> str:
    target = assigned.targets[0] if isinstance(assigned, ast.Assign) else assigned.target
    return target.id if isinstance(target, ast.Name) else ""
