"""A layer's forward in which a norm and the operations around it are one kernel, across the borders of modules.

Such operations are residual sums, other norms and activations. The layer's own forward is traced (`layer_trace.py`) and
written again as Python. What the trace read besides its arguments is compared at each call. If it has changed, or a
module must be called itself, the layer's own forward runs.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import FunctionType

import torch
from torch.fx import Graph, Node

from graphfuse.runtime.fastcall import text, written
from graphfuse.torch.analysis import branches, inductor
from graphfuse.torch.analysis.meaning import PARTS, called_name, is_op, writes
from graphfuse.torch.analysis.reads import is_plain, watched
from graphfuse.torch.analysis.source import syntax_tree
from graphfuse.torch.analysis.symbols import ForwardDeclined
from graphfuse.torch.analysis.trace import CallOperand, CallSequence, TracedCall
from graphfuse.torch.analysis.unwrapped_forward import UnwrappedForward, unwrapped_forward
from graphfuse.torch.whole_models.forward import joint_call
from graphfuse.torch.whole_models.fused_calls import FusedCalls, fused
from graphfuse.torch.whole_models.layer_trace import (
    REST,
    ArgumentAssumptions,
    LayerTrace,
    parts_of,
    side_by_side,
    traces,
)
from graphfuse.torch.whole_models.stretch import stretch


@dataclass(frozen=True)
class FusedLayer:
    """A layer's new forward. units: what each of its kernels computes, in order. kept: why other sums are not fused."""

    function: FunctionType | None
    units: tuple[str, ...]
    kept: tuple[str, ...]


def fused_layer(layer: torch.nn.Module, norms: Mapping[str, FusedCalls]) -> FusedLayer:
    """The layer's forward with everything fused that can be. norms: those of its own modules that kernels compute, by
    name. Raises ForwardDeclined if the layer's forward cannot be traced."""
    own, whys = unwrapped_forward(type(layer)), list[ForwardDeclined]()
    found = [*traces(layer, own.function, ArgumentAssumptions(), whys)]
    if not found:
        raise whys[0]
    made = [(trace, _fused(layer, norms, own, trace)) for trace in found]
    variants = [(trace, variant) for trace, variant in made if variant.function is not None]
    if not variants or not found[0].conditions:
        return made[0][1]
    # The first of several variants is the usual one, and fuses most.
    functions = [(trace.conditions, variant.function) for trace, variant in variants]
    return replace(variants[0][1], function=_by_arguments(own.function, functions))


def _fused(
    layer: torch.nn.Module, norms: Mapping[str, FusedCalls], own: UnwrappedForward, trace: LayerTrace
) -> FusedLayer:
    graph, whys = trace.graph, dict[Node, str]()
    stretches = list(_stretches(graph, layer, norms))
    within = {node for nodes in stretches for node in nodes}
    parts = [part for run in _runs(graph, layer, norms, within) for part in _parts(layer, norms, run, whys)]
    fused_nodes = within | {node for part in parts for node in part.nodes}
    sums = (node for node in graph.nodes if _is_sum(node) and node not in fused_nodes)
    kept = tuple(dict.fromkeys(why for total in sums if (why := _why_kept(total, norms, whys))))
    if not parts and not stretches:
        return FusedLayer(None, (), kept)
    units = (*(_put_part(graph, part) for part in parts), *(_put_stretch(graph, layer, nodes) for nodes in stretches))
    graph.lint()
    return FusedLayer(own.replaced(_written(graph), watched(trace.reads)), units, kept)


@dataclass(frozen=True, eq=False)
class _Part:
    """Nodes that one kernel computes."""

    nodes: tuple[Node, ...]
    of: FusedCalls


def _runs(
    graph: Graph, layer: torch.nn.Module, norms: Mapping[str, FusedCalls], without: Container[Node]
) -> list[list[Node]]:
    """Sequences of consecutive nodes that a kernel may compute. Reading a parameter is nothing in between."""

    def is_one(node: Node) -> bool:
        is_known = _is_sum(node) or _is_of_one(node) and (node.target in norms or _is_activation(node, layer))
        return is_known and node not in without

    computed = (node for node in graph.nodes if node.op != "get_attr")
    return [run for is_run, nodes in groupby(computed, is_one) if is_run and len(run := [*nodes]) > 1]


def _stretches(graph: Graph, layer: torch.nn.Module, norms: Mapping[str, FusedCalls]) -> Iterator[list[Node]]:
    """Sequences of consecutive operations and norms whose regions depend on the shapes of a call. Such a sequence has a
    norm and either a product of two tensors, one of which may be a scale or gate per sample, or channels that are moved
    to the last dimension and back."""
    runs: list[list[Node]] = [[]]
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.target in norms or _is_of_stretch(node, layer, runs[-1]):
            runs[-1].append(node)
        else:
            runs.append([])
    for run in runs:
        computed = [n for n in run if n.target in norms or _is_activation(n, layer) or is_op(n, "add", "sub", "mul")]
        moves = any(called_name(n) == "movedim" or is_op(n, "permute") for n in run)
        depends_on_shapes = moves or any(is_op(n, "mul") and _is_of_two(n) for n in run)
        if any(n.target in norms for n in run) and len(computed) > 1 and depends_on_shapes:
            yield run


def _is_of_stretch(node: Node, layer: torch.nn.Module, before: Container[Node]) -> bool:
    """True if a node is pointwise, a view or a part of a tensor. before: nodes of which it may select one of several
    results."""
    first = node.args[0] if node.args else None
    direct = {v for v in (*node.args, *node.kwargs.values()) if isinstance(v, Node)}
    if not isinstance(first, Node | int | float) or direct != {*node.all_input_nodes}:
        return False
    if node.target is side_by_side:
        return True
    if node.target is parts_of or node.target is operator.getitem and isinstance(node.args[1], int):
        return first in before
    if node.op == "call_module":
        return _is_activation(node, layer)
    is_move = (
        called_name(node) in PARTS or is_op(node, "cast", "same", "view", "expand", "permute", "slice") is not None
    )
    return not writes(node) and (is_move or inductor.is_pointwise(node))


def _is_of_two(node: Node) -> bool:
    return not node.kwargs and [*map(type, node.args)] == [Node, Node]


def _is_sum(node: Node) -> bool:
    """True for the sum of two tensors. In other binary operations the second operand may not have all rows."""
    return is_op(node, "add", "sub") is not None and _is_of_two(node) and not writes(node)


def _is_of_one(node: Node) -> bool:
    """True if a node has one node and constants as operands."""
    others = [v for v in (*node.args[1:], *node.kwargs.values()) if not is_plain(v)]
    return bool(node.args) and isinstance(node.args[0], Node) and not others


def _is_activation(node: Node, layer: torch.nn.Module) -> bool:
    if node.op != "call_module":
        return inductor.is_pointwise(node) and not writes(node)
    module = layer.get_submodule(str(node.target))
    return type(module).__module__ == "torch.nn.modules.activation" and next(module.parameters(), None) is None


def _parts(
    layer: torch.nn.Module, norms: Mapping[str, FusedCalls], run: Sequence[Node], whys: dict[Node, str]
) -> Iterator[_Part]:
    """The longest parts of a run that are one kernel each. whys: receives the reasons why others are not, by their
    first node."""
    for count in range(len(run), 1, -1):
        for start in range(len(run) - count + 1):
            nodes = tuple(run[start : start + count])
            if not any(node.target in norms for node in nodes) or _is_apart(nodes):
                continue
            calls, names, _ = _calls(nodes)
            found = fused(calls, [*map(layer.get_submodule, names)])
            if isinstance(found, FusedCalls):
                yield from _parts(layer, norms, run[:start], whys)
                yield _Part(nodes, found)
                yield from _parts(layer, norms, run[start + count :], whys)
                return
            whys[nodes[0]] = found


def _is_apart(part: Sequence[Node]) -> bool:
    """True if some node neither reads another node of the part nor is read by one."""
    return any({*part}.isdisjoint((*node.all_input_nodes, *node.users)) for node in part)


def _calls(part: Sequence[Node]) -> tuple[CallSequence, list[str], list[Node]]:
    """Nodes as a sequence of calls, with the names of the modules and the nodes of the arguments."""
    names = [*dict.fromkeys(str(node.target) for node in part if node.op == "call_module")]
    given = [*dict.fromkeys(t for node in part for t in node.all_input_nodes if t not in part)]
    numbers = {node: n for n, node in enumerate((*given, *part))}

    def placed(v: object) -> object:
        return CallOperand(numbers[v]) if isinstance(v, Node) else v

    def function(node: Node) -> Callable[..., object] | int:
        if node.op == "call_module":
            return names.index(str(node.target))
        if not isinstance(node.target, str):
            return node.target
        method = getattr(torch.Tensor, node.target)
        # Dynamo does not support methods written in Python, but the functions of the same name.
        return getattr(torch, node.target, method) if isinstance(method, FunctionType) else method

    made = tuple(
        TracedCall(function(node), tuple(map(placed, node.args)), {n: placed(v) for n, v in node.kwargs.items()})
        for node in part
    )
    read = tuple(numbers[node] for node in part if any(user not in part for user in node.users))
    return CallSequence(len(given), made, read), names, given


def _put_part(graph: Graph, part: _Part) -> str:
    """Replaces a part by one call, and returns its description."""
    calls, names, given = _calls(part.nodes)
    _put_call(graph, part.nodes, calls, joint_call(part.of), names, given)
    return f"{part.of.first.program.operations}; with {' and '.join(names)}"


def _put_stretch(graph: Graph, layer: torch.nn.Module, nodes: Sequence[Node]) -> str:
    """Replaces a stretch by one call, and returns its description."""
    calls, names, given = _calls(nodes)
    done = dict.fromkeys(inductor.title(n) for n in nodes if n.op != "call_module" and inductor.is_pointwise(n))
    _put_call(graph, nodes, calls, stretch(calls, [*map(layer.get_submodule, names)]).function, names, given)
    return "; ".join(filter(None, (", ".join(done), f"with {' and '.join(names)}, by the shapes of a call")))


def _put_call(
    graph: Graph,
    nodes: Sequence[Node],
    calls: CallSequence,
    function: Callable[..., object],
    names: Sequence[str],
    given: Sequence[Node],
) -> None:
    """Replaces nodes by one call of the modules of these names with the given arguments."""
    with graph.inserting_before(nodes[-1].next):
        modules = [graph.create_node("get_attr", name) for name in names]
        made = graph.call_function(function, (*modules, *given))
        results = [graph.call_function(operator.getitem, (made, n)) for n in range(len(calls.made))]
    for number, result in zip(calls.made, results, strict=True):
        nodes[number - calls.given].replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)


def _why_kept(total: Node, norms: Mapping[str, FusedCalls], whys: Mapping[Node, str]) -> str:
    """The reason why a sum is not one kernel with its norm; "" if it has no norm."""
    norm = next((u for u in total.users if u.target in norms and u.all_input_nodes == [total]), None)
    if norm is None:
        if any(map(_is_branch, total.users)):
            return "a residual sum, which a branch reads that each call decides"
        is_returned = any(user.op == "output" for user in _beneath_casts(total).users)
        return "the returned sum, whose norm is in another module" if is_returned else ""
    between = next(node for node in _backwards(norm) if node.op != "get_attr")
    if between is not total:
        is_of_branch = any(map(_is_branch, (between, *between.all_input_nodes)))
        title = "a branch" if is_of_branch else inductor.title(between)
        return f"{title} comes between a residual sum and {norm.target}"
    return f"a residual sum and {norm.target}: {whys.get(total, 'no kernel computes them')}"


def _is_branch(node: Node) -> bool:
    """True for a branch that each call decides."""
    return getattr(node.target, "__name__", "") == branches.NAME


def _backwards(node: Node) -> Iterator[Node]:
    """Nodes before a node of a graph, the last one first."""
    while (node := node.prev).op != "root":
        yield node


def _beneath_casts(node: Node) -> Node:
    """The last of the casts that follow a node as its only readers; the node if there are none."""
    while len(node.users) == 1 and is_op(user := next(iter(node.users)), "cast"):
        node = user
    return node


def _written(graph: Graph) -> FunctionType:
    code = graph.python_code("self")
    rest = next((n.name for n in graph.nodes if n.op == "placeholder" and n.target.startswith("**")), "")
    return written("layer", "forward", code.src.replace(f"{REST} = {rest}", f"**{rest}"), code.globals)


def _by_arguments(own: FunctionType, variants: Sequence[tuple[Sequence[str], FunctionType]]) -> FunctionType:
    """Function of a layer's arguments that runs the first variant whose conditions hold; the class's own forward if
    none does. variants: (conditions, function) each."""
    names: dict[str, object] = {"_rank": lambda t: getattr(t, "ndim", None)}
    given = []
    for p in inspect.signature(own).parameters.values():
        if p.default is not p.empty:
            names[f"_default_{p.name}"] = p.default
        star = {p.VAR_KEYWORD: "**", p.VAR_POSITIONAL: "*"}.get(p.kind, "")
        given.append(f"{star}{p.name}" + (f"=_default_{p.name}" if p.default is not p.empty else ""))
    lines = [f"if {' and '.join(conditions)}: return {n}" for n, (conditions, _) in enumerate(variants)]
    choose, functions = (
        written("layer", "choose", text("choose", given, lines), names),
        [function for _, function in variants],
    )

    def forward(self_, *given, **named):
        try:
            number = choose(self_, *given, **named)
        except TypeError:  # the class's own forward raises it again
            number = None
        return (type(self_).forward if number is None else functions[number])(self_, *given, **named)

    return forward


def sums_into(function: FunctionType, called: Container[str]) -> bool:
    """True if a variable passed to one of self's modules of these names was assigned a sum, as far as the source shows.
    Only reports depend on it."""
    try:
        nodes = ast.walk(syntax_tree(inspect.unwrap(function)))
    except ForwardDeclined:
        return False
    sums, given = set[str](), set[str]()
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.BinOp(op=ast.Add())):
                sums.add(name)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
                sums.add(name)
            case ast.Call(func=ast.Attribute(attr=module), args=args) if module in called:
                given.update(a.id for a in args if isinstance(a, ast.Name))
    return not sums.isdisjoint(given)
