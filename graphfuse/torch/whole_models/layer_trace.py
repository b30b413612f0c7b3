"""Traces of a layer's forward: the `interpreter` runs it on proxies, with calls of its modules as nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import FunctionType

import torch
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.proxy import Attribute

from graphfuse.torch.analysis import interpreter
from graphfuse.torch.analysis.meaning import column_of_pairs, name_of
from graphfuse.torch.analysis.reads import SELF, Read, is_plain
from graphfuse.torch.analysis.symbols import Child, Domain, ForwardDeclined, Named, NewDict, TensorMethod, why_left

REST = "_graphfuse_rest"
"""Keyword that represents `**` of a mapping in the calls of a trace."""
_RANKS = (3, 4)
"""Ranks of arguments for which a forward that depends on them is traced; the usual one first. Others run the class's
own."""
_MOST_OPTIONAL = 3
"""Most arguments for which a forward is traced with and without None."""


@dataclass(frozen=True)
class ArgumentAssumptions:
    """Assumptions of a trace about its arguments. rank: of those whose rank the forward reads; 0 if it may not read
    any. present, absent: names of those that are not None, and of those that are None."""

    rank: int = 0
    present: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()


class _Undecided(ForwardDeclined):
    """A forward depends on whether an argument is None, without an assumption about it."""

    def __init__(self, said: str, argument: str) -> None:
        super().__init__(said)
        self.argument = argument


class _ProxyDomain(Domain):
    """Interpreter domain whose symbols are proxies. Operations on them are recorded and repeated in each call, so any
    is allowed."""

    symbols = Proxy

    def __init__(self, module: torch.nn.Module, tracer: Tracer, assumed: ArgumentAssumptions) -> None:
        super().__init__(module)
        self.tracer, self.assumed, self.ranked = tracer, assumed, dict[str, None]()
        self.undecided, self.is_alone = "", False
        self._filled = dict[Node, dict[int, Proxy]]()
        self._parts = dict[tuple[Node, int], Sequence[object]]()
        self._branched, self._is_attempt = set[Node](), False

    def member(self, name: str, tensor: torch.Tensor) -> object:
        return self.tracer.create_proxy("get_attr", name, (), {})

    def is_none(self, symbol: Proxy) -> bool:
        if symbol.node.op == "get_attr":  # a tensor of the module; the trace holds as long as it exists
            self.record(SELF, (name := symbol.node.target, "__class__"), type(getattr(self.module, name)))
            return False
        if symbol.node.op == "placeholder" and not symbol.node.target.startswith("**"):
            if symbol.node.target in self.assumed.present:
                return False
            self.undecided = self.undecided or symbol.node.target
        return super().is_none(symbol)

    def attribute(self, symbol: Proxy, name: str) -> object:
        if name.endswith("_") and not name.endswith("__"):
            raise ForwardDeclined("changes a tensor in place")
        if self.assumed.rank and name == "ndim" and symbol.node.op == "placeholder":
            self.ranked[symbol.node.target] = None
            return self.assumed.rank
        return getattr(symbol, name)

    def compute(self, function: Callable[..., object], args: Sequence[object], named: Mapping[str, object]) -> object:
        given = _passed([*args, *named.values()])
        if not isinstance(function, Proxy) and not any(isinstance(v, Proxy) for v in given):
            raise ForwardDeclined("is not known to do the same each time")
        made = function(*args, **named)
        if not isinstance(made, Proxy):  # it did not ask torch.fx, as torch.is_tensor does not
            raise ForwardDeclined("is not known to do the same each time")
        return made

    def call_child(self, child: Child, args: Sequence[object], named: Mapping[str, object]) -> object:
        _passed([*args, *named.values()])
        return self.tracer.create_proxy("call_module", child.name, tuple(args), dict(named))

    def unpack(self, symbol: object, count: int) -> Sequence[object]:
        if symbol.node.op != "placeholder" or symbol.node in self._branched:
            return self._unpacked(symbol, count)
        # Unpacked once, at the start, so that it does not separate nodes of one kernel.
        first = next((node for node in self.tracer.graph.nodes if node.op != "placeholder"), None)
        if (symbol.node, count) not in self._parts:
            with nullcontext() if first is None else self.tracer.graph.inserting_before(first):
                self._parts[symbol.node, count] = self._unpacked(symbol, count)
        return self._parts[symbol.node, count]

    def _unpacked(self, symbol: object, count: int) -> Sequence[object]:
        parts = self.tracer.create_proxy("call_function", parts_of, (symbol, count), {})
        return [parts[i] for i in range(count)]

    def store(self, symbol: Proxy, index: object, value: object) -> bool:
        """True if every second column of an empty tensor is written. The others must be written, too, before any
        read."""
        empty, number = symbol.node, column_of_pairs(index)
        if (
            self._is_attempt
            or empty.target is not torch.empty_like
            or len(empty.args) != 1
            or empty.kwargs
            or empty.users
        ):
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

    def change(self, function: Callable[..., object], symbol: Proxy, value: object) -> object:
        _passed([value])
        return self.tracer.create_proxy("call_function", function, (symbol, value), {})

    def check_filled(self) -> None:
        """Raises ForwardDeclined if only a part of a tensor was written."""
        if self._filled:
            raise ForwardDeclined("changes a tensor in place")

    def passed_on(self, function: FunctionType, named: Mapping[str, object]) -> Mapping[str, object]:
        """Keywords without the forward's own `**` mapping if the function has none; the mapping must then be empty."""
        if REST not in named or function.__code__.co_flags & inspect.CO_VARKEYWORDS:
            return named
        self.is_alone = True
        return {name: v for name, v in named.items() if name != REST}

    def item(self, child: Child, index: int) -> Child:
        modules = self.module.get_submodule(child.name)
        if type(modules) not in (torch.nn.ModuleList, torch.nn.Sequential) or not 0 <= index < len(modules):
            return super().item(child, index)
        self.record(SELF, (*child.name.split("."), "__class__"), type(modules))
        return Child(f"{child.name}.{index}")

    def call_plain(
        self, function: FunctionType, args: Sequence[object], named: Mapping[str, object], run: Callable[[], object]
    ) -> object:
        """Runs a plain function on proxies. If that fails, the trace gets a call of the function itself."""
        try:
            return self.attempt(run)
        except Exception:  # a foreign function may raise anything for symbols
            if not self._can_call(function, args, named):
                raise
        return self.tracer.create_proxy("call_function", function, tuple(args), dict(named))

    def attempt(self, run: Callable[..., object], *args: object) -> object:
        nodes, reads, parts = {*self.tracer.graph.nodes}, {*self.reads}, dict(self._parts)
        before, self._is_attempt = self._is_attempt, True
        try:
            return run(*args)
        except Exception:
            for node in reversed([node for node in self.tracer.graph.nodes if node not in nodes]):
                self.tracer.graph.erase_node(node)
            self.reads = {key: read for key, read in self.reads.items() if key in reads}
            self._parts = parts
            raise
        finally:
            self._is_attempt = before

    def bound(self, value: object) -> object:
        if isinstance(value, Attribute) and not callable(getattr(torch.Tensor, value.attr, None)):
            value.node  # noqa: B018 - made at its first use, which an attempt may take back
        return value

    def may_assume_rank(self, value: object) -> bool:
        return isinstance(value, Proxy) and value.node.op == "placeholder" and not self.assumed.rank

    def branch(self, function: FunctionType, args: Sequence[object], count: int) -> Sequence[object] | None:
        if self.undecided or any(isinstance(v, Proxy) and str(v.node.target).startswith("**") for v in args):
            return None
        self._branched |= {v.node for v in args if isinstance(v, Proxy)}
        made = self.tracer.create_proxy("call_function", function, tuple(args), {})
        return [made[i] for i in range(count)]

    def _can_call(self, function: FunctionType, args: Sequence[object], named: Mapping[str, object]) -> bool:
        try:
            given = _passed([*args, *named.values()])
        except ForwardDeclined:
            return False
        known = all(isinstance(v, Proxy) or is_plain(v) for v in given)
        return known and not self.undecided and "<locals>" not in function.__qualname__ and REST not in named

    def spread(self, value: object) -> Mapping[str, object]:
        if isinstance(value, Proxy) and str(value.node.target).startswith("**"):
            return {REST: value}
        return super().spread(value)

    def computes(self, function: object) -> bool:
        return bool(name_of(function))


def _passed(values: Sequence[object]) -> Sequence[object]:
    """Arguments of an operation or a module, with nested sequences flattened."""
    found: list[object] = []
    for v in values:
        if isinstance(v, list) and not v:
            raise ForwardDeclined("is given a list that it may fill")
        if isinstance(v, tuple | list):
            found += _passed(v)
        elif isinstance(v, Named | TensorMethod | Child | NewDict):
            raise ForwardDeclined("is given something that is no tensor and no number")
        else:
            found.append(v)
    return found


def side_by_side(even: torch.Tensor, odd: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Even and odd columns interleaved in one tensor, of the shape and type of `like`."""
    *rows, columns = like.shape
    half = (*rows, columns // 2)
    if all(isinstance(part, torch.Tensor) and tuple(part.shape) == half for part in (even, odd)) and columns % 2 == 0:
        return torch.stack((even, odd), dim=-1).flatten(-2).type_as(like)
    made = torch.empty_like(like)
    made[..., 0::2], made[..., 1::2] = even, odd
    return made


def parts_of(values: Sequence[object], count: int) -> tuple[object, ...]:
    """Parts of a value that is unpacked into `count` variables."""
    parts = tuple(values)
    if len(parts) != count:
        raise ValueError(f"{len(parts)} values to unpack (expected {count})")
    return parts


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """Trace of a layer's forward. graph: its modules are nodes. reads: everything read besides its arguments. assumed:
    assumptions about its arguments. ranked: arguments whose rank it reads. alone: names of the `*` parameter and of the
    `**` parameter, if these must be empty."""

    graph: Graph
    reads: tuple[Read, ...]
    assumed: ArgumentAssumptions
    ranked: tuple[str, ...]
    alone: tuple[str, ...]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Conditions on arguments under which this trace holds, as Python expressions that use `_rank`."""
        return (
            *(f"_rank({name}) == {self.assumed.rank}" for name in self.ranked),
            *(f"{name} is not None" for name in sorted(self.assumed.present)),
            *(f"{name} is None" for name in sorted(self.assumed.absent)),
            *(f"not {name}" for name in self.alone),
        )


def _trace(layer: torch.nn.Module, own: FunctionType, assumed: ArgumentAssumptions) -> LayerTrace:
    tracer = Tracer()
    tracer.root, tracer.graph = layer, Graph()
    domain, given, rest, alone = _ProxyDomain(layer, tracer, assumed), [], {}, []
    domain.record(SELF, ("__class__", "forward"), type(layer).forward)
    for p in list(inspect.signature(own).parameters.values())[1:]:
        if p.kind is p.VAR_POSITIONAL:
            alone.append(p.name)
        elif p.kind is p.VAR_KEYWORD:
            rest[p.name] = tracer.create_proxy("placeholder", f"**{p.name}", (), {})
        elif p.kind is p.POSITIONAL_OR_KEYWORD and (p.default is p.empty or is_plain(p.default)):
            default = () if p.default is p.empty else (p.default,)
            proxy = tracer.create_proxy("placeholder", p.name, default, {})
            given.append(None if p.name in assumed.absent else proxy)
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
    alone += rest if domain.is_alone else ()
    return LayerTrace(tracer.graph, tuple(domain.reads.values()), assumed, tuple(domain.ranked), tuple(alone))


def traces(
    layer: torch.nn.Module, function: FunctionType, assumed: ArgumentAssumptions, whys: list[ForwardDeclined]
) -> Iterator[LayerTrace]:
    """Traces of a forward: one for all arguments, or one for each branch that depends on an argument's rank or on None.
    whys: receives the reasons why branches cannot be traced."""
    try:
        yield _trace(layer, function, assumed)
        return
    except _Undecided as why:
        whys.append(why)
        argument = why.argument
    except ForwardDeclined as why:
        whys.append(why)
        argument = ""
    if argument and len(assumed.present) + len(assumed.absent) < _MOST_OPTIONAL:
        yield from traces(layer, function, replace(assumed, present=assumed.present | {argument}), whys)
        yield from traces(layer, function, replace(assumed, absent=assumed.absent | {argument}), whys)
    elif not argument and not assumed.rank:
        for rank in _RANKS:
            yield from (t for t in traces(layer, function, replace(assumed, rank=rank), whys) if t.ranked)
