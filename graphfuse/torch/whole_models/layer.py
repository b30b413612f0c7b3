"""The forward of a layer in which what stands around a norm is one kernel with it, across the borders of modules:
residual sums, other norms, activations.

The layer's own forward is run by the `interpreter`, on proxies, with its modules as they are called, and written again
as Python. What it reads of the layer and of the world is compared at each call, and where something differs, or a
module is not to be gone around, the layer's own forward runs.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from types import FunctionType

import torch
from torch.fx import Graph, Node, Proxy, Tracer

from graphfuse.torch.fusion import generated, interpreter
from graphfuse.torch.fusion.meaning import PARTS, called, is_op, name_of, number_of_pairs, writes
from graphfuse.torch.fusion.own_forward import OwnForward, own_forward
from graphfuse.torch.fusion.reads import SELF, Read, is_plain, watched
from graphfuse.torch.fusion.source import syntax_tree
from graphfuse.torch.fusion.symbols import Child, Domain, ForwardDeclined, Named, TensorMethod, why_left
from graphfuse.torch.fusion.traced import CallOperand, CallSequence, TracedCall
from graphfuse.torch.whole_models.forward import together
from graphfuse.torch.whole_models.fused_calls import FusedCalls, fused
from graphfuse.torch.whole_models.stretch import stretch

_REST = "_graphfuse_rest"
_RANKS = (3, 4)
"""Ranks of arguments that decide which way a forward goes: the usual one first. Others run the class's own."""
_MOST_ASKED = 3
"""Arguments at most that may be None, by which a forward goes one way or another."""


@dataclass(frozen=True)
class FusedLayer:
    """A layer's new forward. units: what is one kernel now, in order. kept: sums that are not, and why."""

    function: FunctionType | None
    units: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class _TakenArguments:
    """Arguments as a trace takes them to be. rank: of those that it asks for theirs; 0 where it may not ask.
    there, absent: those that are not None, and those that are."""

    rank: int = 0
    there: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()


class _Undecided(ForwardDeclined):
    """Forward that goes by whether an argument is None, of which nothing was taken to be known."""

    def __init__(self, said: str, argument: str) -> None:
        super().__init__(said)
        self.argument = argument


class _Proxies(Domain):
    """Symbols are proxies: what is done with them is done again in each call, so that anything may be."""

    symbols = Proxy

    def __init__(self, module: torch.nn.Module, tracer: Tracer, taken: _TakenArguments) -> None:
        super().__init__(module)
        self.tracer, self.taken, self.ranked = tracer, taken, dict[str, None]()
        self.undecided, self.is_alone = "", False
        self._filled = dict[Node, dict[int, Proxy]]()
        self._parts = dict[tuple[Node, int], Sequence[object]]()

    def member(self, name: str, tensor: torch.Tensor) -> object:
        return self.tracer.create_proxy("get_attr", name, (), {})

    def is_none(self, symbol: Proxy) -> bool:
        if symbol.node.op == "get_attr":  # a tensor that the module has, as long as it has it
            self.record(SELF, (name := symbol.node.target, "__class__"), type(getattr(self.module, name)))
            return False
        if symbol.node.op == "placeholder" and not symbol.node.target.startswith("**"):
            if symbol.node.target in self.taken.there:
                return False
            self.undecided = self.undecided or symbol.node.target
        return super().is_none(symbol)

    def attribute(self, symbol: Proxy, name: str) -> object:
        if name.endswith("_") and not name.endswith("__"):
            raise ForwardDeclined("changes a tensor in place")
        if self.taken.rank and name == "ndim" and symbol.node.op == "placeholder":
            self.ranked[symbol.node.target] = None
            return self.taken.rank
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
        if symbol.node.op != "placeholder":
            return self._unpacked(symbol, count)
        # Once, before all else, so that it does not stand between what is one kernel.
        first = next((node for node in self.tracer.graph.nodes if node.op != "placeholder"), None)
        if (symbol.node, count) not in self._parts:
            with nullcontext() if first is None else self.tracer.graph.inserting_before(first):
                self._parts[symbol.node, count] = self._unpacked(symbol, count)
        return self._parts[symbol.node, count]

    def _unpacked(self, symbol: object, count: int) -> Sequence[object]:
        parts = self.tracer.create_proxy("call_function", parts_of, (symbol, count), {})
        return [parts[i] for i in range(count)]

    def store(self, symbol: Proxy, index: object, value: object) -> bool:
        """True for every second column of an empty tensor. The others must be written, too, before anybody reads it."""
        empty, number = symbol.node, number_of_pairs(index)
        if empty.target is not torch.empty_like or len(empty.args) != 1 or empty.kwargs or empty.users:
            return False
        columns = self._filled.setdefault(empty, {})
        if number is None or number in columns or not isinstance(value, Proxy):
            return False
        columns[number] = value
        if len(columns) == 2:
            of = (columns[0], columns[1], Proxy(empty.args[0], self.tracer))
            symbol.node = self.tracer.create_proxy("call_function", side_by_side, of, {}).node
            del self._filled[empty]
            self.tracer.graph.erase_node(empty)
        return True

    def check_filled(self) -> None:
        """ForwardDeclined where a part of a tensor alone was written."""
        if self._filled:
            raise ForwardDeclined("changes a tensor in place")

    def passed_on(self, function: FunctionType, named: Mapping[str, object]) -> Mapping[str, object]:
        """Without the rest of the arguments where a function takes none: then there must be none."""
        if _REST not in named or function.__code__.co_flags & inspect.CO_VARKEYWORDS:
            return named
        self.is_alone = True
        return {name: v for name, v in named.items() if name != _REST}

    def item(self, child: Child, index: int) -> Child:
        modules = self.module.get_submodule(child.name)
        if type(modules) not in (torch.nn.ModuleList, torch.nn.Sequential) or not 0 <= index < len(modules):
            return super().item(child, index)
        self.record(SELF, (*child.name.split("."), "__class__"), type(modules))
        return Child(f"{child.name}.{index}")

    def call_plain(
        self, function: FunctionType, args: Sequence[object], named: Mapping[str, object], run: Callable[[], object]
    ) -> object:
        """The function is called as it is, in each call again, where it cannot be run here."""
        nodes, reads = len(self.tracer.graph.nodes), len(self.reads)
        try:
            return run()
        except Exception:  # of what a stranger's function does with symbols, too
            if not self._can_call(function, args, named):
                raise
        for node in reversed([*self.tracer.graph.nodes][nodes:]):
            self.tracer.graph.erase_node(node)
        for key in [*self.reads][reads:]:
            del self.reads[key]
        return self.tracer.create_proxy("call_function", function, tuple(args), dict(named))

    def _can_call(self, function: FunctionType, args: Sequence[object], named: Mapping[str, object]) -> bool:
        try:
            given = _passed([*args, *named.values()])
        except ForwardDeclined:
            return False
        known = all(isinstance(v, Proxy) or is_plain(v) for v in given)
        return known and not self.undecided and "<locals>" not in function.__qualname__ and _REST not in named

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


def side_by_side(even: torch.Tensor, odd: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Columns of even and of odd numbers in one tensor, like another."""
    *rows, columns = like.shape
    half = (*rows, columns // 2)
    if all(isinstance(part, torch.Tensor) and tuple(part.shape) == half for part in (even, odd)) and columns % 2 == 0:
        return torch.stack((even, odd), dim=-1).flatten(-2).type_as(like)
    made = torch.empty_like(like)
    made[..., 0::2], made[..., 1::2] = even, odd
    return made


def parts_of(values: Sequence[object], count: int) -> tuple[object, ...]:
    """Parts of a value that is assigned to `count` variables."""
    parts = tuple(values)
    if len(parts) != count:
        raise ValueError(f"{len(parts)} values to unpack (expected {count})")
    return parts


def fused_layer(layer: torch.nn.Module, norms: Mapping[str, FusedCalls]) -> FusedLayer:
    """The layer's forward with what can be one. norms: those of its own modules that kernels take the place of, by
    name. Raises Declined where its forward cannot be traced."""
    own, whys = own_forward(type(layer)), list[ForwardDeclined]()
    traces = [*_traces(layer, own.function, _TakenArguments(), whys)]
    if not traces:
        raise whys[0]
    found = [(trace, _fused(layer, norms, own, trace)) for trace in traces]
    ways = [(trace, way) for trace, way in found if way.function is not None]
    if not ways or not traces[0].conditions:
        return found[0][1]
    # Of several ways the first is the usual one, and has most.
    functions = [(trace.conditions, way.function) for trace, way in ways]
    return replace(ways[0][1], function=_by_arguments(own.function, functions))


def _traces(
    layer: torch.nn.Module, function: FunctionType, taken: _TakenArguments, whys: list[ForwardDeclined]
) -> Iterator[_Trace]:
    """Traces of a forward, one for all arguments, or of each way that it goes by their ranks, and by which are None.
    whys: gets reasons of ways that cannot be traced."""
    try:
        yield _trace(layer, function, taken)
        return
    except _Undecided as why:
        whys.append(why)
        asked = why.argument
    except ForwardDeclined as why:
        whys.append(why)
        asked = ""
    if asked and len(taken.there) + len(taken.absent) < _MOST_ASKED:
        yield from _traces(layer, function, replace(taken, there=taken.there | {asked}), whys)
        yield from _traces(layer, function, replace(taken, absent=taken.absent | {asked}), whys)
    elif not asked and not taken.rank:
        for rank in _RANKS:
            yield from (t for t in _traces(layer, function, replace(taken, rank=rank), whys) if t.ranked)


def _fused(layer: torch.nn.Module, norms: Mapping[str, FusedCalls], own: OwnForward, trace: _Trace) -> FusedLayer:
    graph, whys = trace.graph, dict[Node, str]()
    stretches = list(_stretches(graph, layer, norms))
    within = {node for nodes in stretches for node in nodes}
    parts = [part for run in _runs(graph, layer, norms, within) for part in _parts(layer, norms, run, whys)]
    taken = within | {node for part in parts for node in part.nodes}
    sums = (node for node in graph.nodes if _is_sum(node) and node not in taken)
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
    """Nodes that follow one another, and that a kernel may compute."""

    def is_one(node: Node) -> bool:
        is_known = _is_sum(node) or _is_of_one(node) and (node.target in norms or _is_activation(node, layer))
        return is_known and node not in without

    return [run for is_run, nodes in groupby(graph.nodes, is_one) if is_run and len(run := [*nodes]) > 1]


def _stretches(graph: Graph, layer: torch.nn.Module, norms: Mapping[str, FusedCalls]) -> Iterator[list[Node]]:
    """Operations and norms that follow one another, where a norm is among them and what a call alone tells more of: a
    product of two tensors, one of which may be a scale or a gate of each sample, or channels that are moved to the
    last dimension and back."""
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
        moves = any(called(n) == "movedim" or is_op(n, "permute") for n in run)
        is_told = moves or any(is_op(n, "mul") and _is_of_two(n) for n in run)
        if any(n.target in norms for n in run) and len(computed) > 1 and is_told:
            yield run


def _is_of_stretch(node: Node, layer: torch.nn.Module, before: Container[Node]) -> bool:
    """True if a node computes each element by itself, or is a view or a part of a tensor. before: nodes of which
    several results may be taken."""
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
    is_move = called(node) in PARTS or is_op(node, "cast", "same", "view", "expand", "permute", "slice") is not None
    return not writes(node) and (is_move or generated.is_pointwise(node))


def _is_of_two(node: Node) -> bool:
    return not node.kwargs and [*map(type, node.args)] == [Node, Node]


def _is_sum(node: Node) -> bool:
    """True for the sum of two tensors; of other operations of two nobody knows whether the second has all rows."""
    return is_op(node, "add", "sub") is not None and _is_of_two(node)


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
            found = fused(calls, [*map(layer.get_submodule, names)])
            if isinstance(found, FusedCalls):
                yield from _parts(layer, norms, run[:start], whys)
                yield _Part(nodes, found)
                yield from _parts(layer, norms, run[start + count :], whys)
                return
            whys[nodes[0]] = found


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
        if not isinstance(node.target, str):
            return node.target
        method = getattr(torch.Tensor, node.target)
        # Of methods that are Python, Dynamo takes the function of the same name alone.
        return getattr(torch, node.target, method) if isinstance(method, FunctionType) else method

    made = tuple(
        TracedCall(function(node), tuple(map(placed, node.args)), {n: placed(v) for n, v in node.kwargs.items()})
        for node in part
    )
    read = tuple(numbers[node] for node in part if any(user not in part for user in node.users))
    return CallSequence(len(given), made, read), names, given


def _put_part(graph: Graph, part: _Part) -> str:
    """Puts one call in the place of a part, and returns what is said of it."""
    calls, names, given = _calls(part.nodes)
    _put_call(graph, part.nodes, calls, together(part.of), names, given)
    return f"{part.of.first.program.operations}; with {' and '.join(names)}"


def _put_stretch(graph: Graph, layer: torch.nn.Module, nodes: Sequence[Node]) -> str:
    """Puts one call in the place of a stretch, and returns what is said of it."""
    calls, names, given = _calls(nodes)
    done = dict.fromkeys(generated.title(n) for n in nodes if n.op != "call_module" and generated.is_pointwise(n))
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
    """Puts a call of the modules of these names, and of what is given to them, in the place of nodes."""
    with graph.inserting_before(nodes[-1].next):
        modules = [graph.create_node("get_attr", name) for name in names]
        made = graph.call_function(function, (*modules, *given))
        results = [graph.call_function(operator.getitem, (made, n)) for n in range(len(calls.made))]
    for number, result in zip(calls.made, results, strict=True):
        nodes[number - calls.given].replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)


def _why_kept(total: Node, norms: Mapping[str, FusedCalls], whys: Mapping[Node, str]) -> str:
    """Why a sum is none with the norm of it; "" where there is none."""
    norm = next((u for u in total.users if u.target in norms and u.all_input_nodes == [total]), None)
    if norm is None:
        is_returned = any(user.op == "output" for user in _beneath_casts(total).users)
        return "the sum that it returns, as the norm of it is another module's" if is_returned else ""
    if norm.prev is not total:
        return f"something comes between a residual sum and {norm.target}"
    return f"a residual sum and {norm.target}: {whys.get(total, 'no kernel computes them')}"


def _beneath_casts(node: Node) -> Node:
    """The last cast of a node that alone reads it, and so on; or the node."""
    while len(node.users) == 1 and is_op(user := next(iter(node.users)), "cast"):
        node = user
    return node


@dataclass(frozen=True, eq=False)
class _Trace:
    """Trace of a layer's forward.

    graph: has its modules as nodes. reads: of everything beside its arguments. taken: what arguments were taken to be.
    ranked: those that it asks for their rank. alone: names of what has no more arguments.
    """

    graph: Graph
    reads: tuple[Read, ...]
    taken: _TakenArguments
    ranked: tuple[str, ...]
    alone: tuple[str, ...]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Conditions on arguments under which a forward goes this way, as Python that knows `_rank`."""
        return (
            *(f"_rank({name}) == {self.taken.rank}" for name in self.ranked),
            *(f"{name} is not None" for name in sorted(self.taken.there)),
            *(f"{name} is None" for name in sorted(self.taken.absent)),
            *(f"not {name}" for name in self.alone),
        )


def _trace(layer: torch.nn.Module, own: FunctionType, taken: _TakenArguments) -> _Trace:
    tracer = Tracer()
    tracer.root, tracer.graph = layer, Graph()
    domain, given, rest = _Proxies(layer, tracer, taken), [], {}
    domain.record(SELF, ("__class__", "forward"), type(layer).forward)
    for p in list(inspect.signature(own).parameters.values())[1:]:
        if p.kind is p.VAR_KEYWORD:
            rest[p.name] = tracer.create_proxy("placeholder", f"**{p.name}", (), {})
        elif p.kind is p.POSITIONAL_OR_KEYWORD and (p.default is p.empty or is_plain(p.default)):
            default = () if p.default is p.empty else (p.default,)
            proxy = tracer.create_proxy("placeholder", p.name, default, {})
            given.append(None if p.name in taken.absent else proxy)
        else:
            raise ForwardDeclined(f"its forward has the argument {p}")
    try:
        made = interpreter.run(domain, own, given, {}, rest)
        domain.check_filled()
        _passed([made])
        tracer.graph.output(tracer.create_arg(made))
    except Exception as error:
        if isinstance(error, ForwardDeclined) and domain.undecided:
            raise _Undecided(why_left(error), domain.undecided) from error
        raise ForwardDeclined(why_left(error)) from error
    alone = tuple(rest) if domain.is_alone else ()
    return _Trace(tracer.graph, tuple(domain.reads.values()), taken, tuple(domain.ranked), alone)


def _written(graph: Graph) -> FunctionType:
    code = graph.python_code("self")
    rest = next((n.name for n in graph.nodes if n.op == "placeholder" and n.target.startswith("**")), "")
    source, names = code.src.replace(f"{_REST} = {rest}", f"**{rest}"), dict(code.globals)
    exec(compile(source, "<graphfuse layer>", "exec"), names)
    return names["forward"]


def _by_arguments(own: FunctionType, ways: Sequence[tuple[Sequence[str], FunctionType]]) -> FunctionType:
    """Function of a layer's arguments that calls the way for these, and the class's own forward for others. ways: of
    (conditions, function)."""
    names: dict[str, object] = {"_rank": lambda t: getattr(t, "ndim", None)}
    given = []
    for p in inspect.signature(own).parameters.values():
        if p.default is not p.empty:
            names[f"_default_{p.name}"] = p.default
        star = "**" if p.kind is p.VAR_KEYWORD else ""
        given.append(f"{star}{p.name}" + (f"=_default_{p.name}" if p.default is not p.empty else ""))
    lines = (f"    if {' and '.join(conditions)}:\n        return {n}" for n, (conditions, _) in enumerate(ways))
    exec(compile("\n".join((f"def way({', '.join(given)}):", *lines)), "<graphfuse layer>", "exec"), names)
    way, functions = names["way"], tuple(function for _, function in ways)

    def forward(self_, *given, **named):
        try:
            number = way(self_, *given, **named)
        except TypeError:  # which the class's own raises
            number = None
        return (type(self_).forward if number is None else functions[number])(self_, *given, **named)

    return forward


def sums_into(function: FunctionType, called: Container[str]) -> bool:
    """True if a variable that is given to one of self's modules, of these names, was a sum at some time, as far as the
    source tells. For reports: nothing is done by it."""
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
