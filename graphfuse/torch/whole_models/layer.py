"""The forward of a layer in which what stands around a norm is one kernel with it, across the borders of modules:
residual sums, other norms, activations.

The layer's own forward is run by the `interpreter`, on proxies, with its modules as they are called, and written again
as Python. What it reads of the layer and of the world is compared at each call, and where something differs, or a
module is not to be gone around, the layer's own forward runs.
"""

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType

import torch
from torch.fx import Graph, Node, Proxy, Tracer

from graphfuse.torch.fusion import generated, interpreter
from graphfuse.torch.fusion.meaning import is_op, name_of, writes
from graphfuse.torch.fusion.own_forward import own_forward
from graphfuse.torch.fusion.reads import SELF, Read, is_plain, watched
from graphfuse.torch.fusion.source import syntax_tree
from graphfuse.torch.fusion.symbols import Child, Domain, ForwardDeclined, Named, TensorMethod
from graphfuse.torch.fusion.traced import CallOperand, CallSequence, TracedCall
from graphfuse.torch.whole_models.forward import together
from graphfuse.torch.whole_models.fused_calls import FusedCalls, fused

_REST = "_graphfuse_rest"


@dataclass(frozen=True)
class FusedLayer:
    """A layer's new forward. units: what is one kernel now, in order. kept: sums that are not, and why."""

    function: FunctionType | None
    units: tuple[str, ...]
    kept: tuple[str, ...]


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
        return bool(name_of(function))


def _passed(values: Sequence[object]) -> Sequence[object]:
    """Values that are given to an operation or a module, those in sequences, too."""
    found: list[object] = []
    for v in values:
        if isinstance(v, tuple | list):
            found += _passed(v)
        elif isinstance(v, Named | TensorMethod | Child):
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


def fused_layer(layer: torch.nn.Module, norms: Mapping[str, FusedCalls]) -> FusedLayer:
    """The layer's forward with what can be one. norms: those of its own modules that kernels take the place of, by
    name. Raises Declined where its forward cannot be traced."""
    own = own_forward(type(layer))
    graph, reads = _trace(layer, own.function)
    whys: dict[Node, str] = {}
    parts = [part for run in _runs(graph, layer, norms) for part in _parts(layer, norms, run, whys)]
    taken = {node for part in parts for node in part.nodes}
    sums = (node for node in graph.nodes if _is_sum(node) and node not in taken)
    kept = tuple(dict.fromkeys(why for total in sums if (why := _why_kept(total, norms, whys))))
    if not parts:
        return FusedLayer(None, (), kept)
    units = tuple(_make_one(graph, part) for part in parts)
    graph.lint()
    return FusedLayer(own.replaced(_written(graph), watched(reads)), units, kept)


@dataclass(frozen=True, eq=False)
class _Part:
    """Nodes that one kernel computes."""

    nodes: tuple[Node, ...]
    of: FusedCalls


def _runs(graph: Graph, layer: torch.nn.Module, norms: Mapping[str, FusedCalls]) -> list[list[Node]]:
    """Nodes that follow one another, and that a kernel may compute."""
    runs: list[list[Node]] = [[]]
    for node in graph.nodes:
        if _is_sum(node) or _is_of_one(node) and (node.target in norms or _is_activation(node, layer)):
            runs[-1].append(node)
        else:
            runs.append([])
    return [run for run in runs if len(run) > 1]


def _is_sum(node: Node) -> bool:
    """True for the sum of two tensors; of other operations of two nobody knows whether the second has all rows."""
    return is_op(node, "add", "sub") is not None and not node.kwargs and [*map(type, node.args)] == [Node, Node]


def _is_of_one(node: Node) -> bool:
    """True if a node computes something of one other, and of numbers."""
    others = [v for v in (*node.args[1:], *node.kwargs.values()) if not is_plain(v)]
    return bool(node.args) and isinstance(node.args[0], Node) and not others


def _is_activation(node: Node, layer: torch.nn.Module) -> bool:
    if node.op != "call_module":
        return generated.is_pointwise(node) and not writes(node)
    module = layer.get_submodule(str(node.target))
    return type(module).__module__ == "torch.nn.modules.activation" and next(module.parameters(), None) is None


def _parts(
    layer: torch.nn.Module, norms: Mapping[str, FusedCalls], run: Sequence[Node], whys: dict[Node, str]
) -> Iterator[_Part]:
    """The longest parts of a run that are one kernel each. whys: gets reasons, by the first node of a part that is
    none."""
    for count in range(len(run), 1, -1):
        for start in range(len(run) - count + 1):
            nodes = tuple(run[start : start + count])
            if not any(node.target in norms for node in nodes) or _is_apart(nodes):
                continue
            calls, names, _ = _calls(nodes)
            found = fused(calls, [layer.get_submodule(name) for name in names])
            if isinstance(found, FusedCalls):
                yield from _parts(layer, norms, run[:start], whys)
                yield _Part(nodes, found)
                yield from _parts(layer, norms, run[start + count :], whys)
                return
            whys[nodes[0]] = found.reason


def _is_apart(part: Sequence[Node]) -> bool:
    """True if a node reads nothing of the others, and none of them reads it."""
    return any({*part}.isdisjoint((*node.all_input_nodes, *node.users)) for node in part)


def _calls(part: Sequence[Node]) -> tuple[CallSequence, list[str], list[Node]]:
    """Nodes as calls: with the names of the modules, and the nodes that are given to them."""
    names = [*dict.fromkeys(str(node.target) for node in part if node.op == "call_module")]
    given = [*dict.fromkeys(t for node in part for t in node.all_input_nodes if t not in part)]
    numbers = {node: n for n, node in enumerate((*given, *part))}

    def placed(v: object) -> object:
        return CallOperand(numbers[v]) if isinstance(v, Node) else v

    def function(node: Node) -> Callable[..., object] | int:
        if node.op == "call_module":
            return names.index(str(node.target))
        return getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target

    made = tuple(
        TracedCall(function(node), tuple(map(placed, node.args)), {n: placed(v) for n, v in node.kwargs.items()})
        for node in part
    )
    read = tuple(numbers[node] for node in part if any(user not in part for user in node.users))
    return CallSequence(len(given), made, read), names, given


def _make_one(graph: Graph, part: _Part) -> str:
    """Puts one call in the place of a part, and returns what is said of it."""
    _, names, given = _calls(part.nodes)
    with graph.inserting_before(part.nodes[0]):
        modules = [graph.create_node("get_attr", name) for name in names]
        made = graph.call_function(together(part.of), (*modules, *given))
        results = [graph.call_function(operator.getitem, (made, n)) for n in range(len(part.of.calls.made))]
    for number, result in zip(part.of.calls.made, results, strict=True):
        part.nodes[number - len(given)].replace_all_uses_with(result)
    for node in reversed(part.nodes):
        graph.erase_node(node)
    return f"{part.of.first.program.operations}; with {' and '.join(names)}"


def _why_kept(total: Node, norms: Mapping[str, FusedCalls], whys: Mapping[Node, str]) -> str:
    """Why a sum is none with the norm of it; "" where there is none."""
    norm = next((u for u in total.users if u.target in norms and u.all_input_nodes == [total]), None)
    if norm is None:
        is_returned = any(user.op == "output" for user in total.users)
        return "the sum that it returns, as the norm of it is another module's" if is_returned else ""
    if norm.prev is not total:
        return f"something comes between a residual sum and {norm.target}"
    return f"a residual sum and {norm.target}: {whys.get(total, 'no kernel computes them')}"


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
        made = interpreter.run(domain, own, given, {}, rest)
        _passed([made])
        tracer.graph.output(tracer.create_arg(made))
    except ForwardDeclined as why:
        raise ForwardDeclined(f"its forward is not straight: {why}") from None
    except Exception as error:  # of a stranger's forward
        said = str(error).splitlines()[0][:120] if str(error) else ""
        raise ForwardDeclined(f"its forward cannot be traced: {type(error).__name__}: {said}") from error
    return tracer.graph, tuple(domain.reads.values())


def _written(graph: Graph) -> FunctionType:
    code = graph.python_code("self")
    rest = next((n.name for n in graph.nodes if n.op == "placeholder" and n.target.startswith("**")), "")
    source, names = code.src.replace(f"{_REST} = {rest}", f"**{rest}"), dict(code.globals)
    exec(compile(source, "<graphfuse layer>", "exec"), names)
    return names["forward"]


def sums_into(function: FunctionType, called: Iterable[str]) -> bool:
    """True if a variable that is given to one of self's modules, of these names, was a sum at some time, as far as the
    source tells. For reports: nothing is done by it."""
    try:
        nodes = list(ast.walk(syntax_tree(inspect.unwrap(function))))
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
