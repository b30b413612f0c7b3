"""The graph of a module's own forward, in aten's operations, and what in the world it depends on.

Forward is run by the `interpreter`, on tensors of one type and shape on the CPU. In half types a graph shows where
values are rounded, which float32 would hide. What forward may ask of a tensor is in `Tensors`; it declines the rest.
"""

import inspect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from graphfuse.runtime import torch_private
from graphfuse.torch.fusion.interpreter import Domain, ForwardDeclined, TensorMethod, run
from graphfuse.torch.fusion.meaning import MEANING, is_known
from graphfuse.torch.fusion.reads import SELF, Read, is_plain

HALF_TYPES = (torch.bfloat16, torch.float16)
_SAME_UNDER_AUTOCAST = frozenset("cast same view expand permute slice mul add sub neg silu sigmoid".split())
"""Operations that autocast leaves in the types that they are given."""
_DISPATCH_MODE = torch_private.dispatch_mode()
_ANY_COLUMNS = 64
_BESIDE = (3, 4, 5, 6)
"""Extents behind channels, for a module whose parameters have extents of 1 there."""
_ROWS = ((5, 7, 3, 11), (7, 3, 5, 2), (3, 11, 2, 5))
"""Extents before columns. A forward that has one of them as a number is not traced with the others."""


@dataclass(frozen=True)
class Probe:
    """Arguments that a module's forward is called with.

    columns: the extent that would be normalized. behind: how many dimensions come after channels. is_fixed: whether a
    parameter says how many columns there are.
    """

    columns: int
    behind: int
    is_fixed: bool

    @property
    def rank(self) -> int:
        return 2 + self.behind if self.behind else 3

    def shape(self, rank: int, variant: int) -> tuple[int, ...]:
        rows = [n + self.columns if n == self.columns else n for n in _ROWS[variant % len(_ROWS)]]
        if self.behind:
            return (rows[0], self.columns, *(n + (n == self.columns) * 7 for n in _BESIDE[: self.behind]))
        return (*rows[: rank - 1], self.columns)


def probe(module: torch.nn.Module) -> Probe | None:
    """Probe by the parameters and buffers of a module without children: vectors, along the last dimension, or with
    extents of 1 behind them, along channels. None where they are something else. Where there are none, the extent is
    what the module says, as torch's norms do, or any."""
    own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    shapes = {tuple(t.shape) for t in own if t.is_floating_point()}
    is_fixed = bool(shapes)
    if not shapes:
        said = getattr(module, "normalized_shape", None)
        shapes = {said if isinstance(said, tuple) else (said if isinstance(said, int) else _ANY_COLUMNS,)}
    if len(shapes) > 1 or shapes == {()}:
        return None
    ((columns, *behind),) = shapes
    if not isinstance(columns, int) or any(n != 1 for n in behind) or len(behind) > len(_BESIDE):
        return None
    return Probe(columns, len(behind), is_fixed)


def required(module: torch.nn.Module) -> list[str]:
    """The arguments that forward is called with: those without a default, and a gate."""
    found = inspect.signature(type(module).forward).parameters.values()
    named = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    return [p.name for p in named if p.default is p.empty or p.name == "gate"]


@dataclass(frozen=True)
class Traced:
    """Trace of a module's forward with full tensors of one type and shape.

    graph: with placeholders by the names of arguments and parameters.
    reads: of everything else.
    members: the parameters and buffers that it reads.
    decided: what branches or numbers depend on: "dtype", "rank", "epsilon".
    autocasts: whether autocast may compute a step of it in another type.
    """

    graph: GraphModule
    reads: tuple[Read, ...]
    members: frozenset[str]
    decided: frozenset[str]
    autocasts: bool


@dataclass(frozen=True)
class Fact:
    """Fact about a tensor in one trace alone. kind: "dtype", "device" or "extent"."""

    value: object
    kind: str


class Shape(tuple):
    """The extents of a tensor: numbers where they are the same in every call, else facts."""


class Free(float):
    """A number that may be another one in another call."""


class Tensors(Domain):
    """Symbols are tensors that a `Recorder` follows."""

    symbols, facts = torch.Tensor, (Fact, Shape)

    def __init__(self, module: torch.nn.Module, values: Mapping[str, torch.Tensor], free: Mapping[str, float]) -> None:
        super().__init__(module)
        self.values, self.free = values, free
        self.members, self.decided, self.autocasts = set[str](), set[str](), False
        self.full: tuple[int, ...] = ()
        self.place, self.is_fixed = -1, False

    def number(self, name: str, value: object) -> object:
        return Free(self.free[name]) if name in self.free else value

    def settled(self, value: object) -> object:
        kind = {Free: "epsilon", Shape: "rank"}.get(type(value))
        kind = kind or ("dtype" if isinstance(value, Fact) and value.kind == "dtype" else None)
        if kind is None:
            return super().settled(value)
        self.decided.add(kind)
        return value.value if isinstance(value, Fact) else float(value) if isinstance(value, Free) else value

    def is_none(self, symbol: object) -> bool:
        return False

    def member(self, name: str, tensor: torch.Tensor) -> object:
        if name not in self.values:
            raise ForwardDeclined(f"reads self.{name}, a tensor that is no parameter of floating-point numbers")
        self.members.add(name)
        return self.values[name]

    def attribute(self, symbol: torch.Tensor, name: str) -> object:
        match name:
            case "dtype" | "device":
                return Fact(getattr(symbol, name), name)
            case "shape":
                return self.shape(symbol)
            case "ndim":
                return len(self.settled(self.shape(symbol)))
        if name in MEANING or name in ("size", "dim", "ndimension"):
            return TensorMethod(symbol, name)
        raise ForwardDeclined("asks what a norm need not know")

    def shape(self, symbol: torch.Tensor) -> Shape:
        if any(symbol is value for value in self.values.values()):
            return Shape(symbol.shape)
        if tuple(symbol.shape) != self.full:
            raise ForwardDeclined("asks for the shape of what it computes")
        place = self.place % len(self.full)
        return Shape(n if i == place and self.is_fixed else Fact(n, "extent") for i, n in enumerate(self.full))

    def compute(self, function: Callable[..., object], args: Sequence[object], named: Mapping[str, object]) -> object:
        return self.made(function, getattr(function, "__name__", ""), args, named)

    def method(self, method: TensorMethod, args: Sequence[object], named: Mapping[str, object]) -> object:
        if method.name not in ("size", "dim", "ndimension"):
            return self.made(getattr(method.symbol, method.name), method.name, args, named)
        shape = self.shape(method.symbol)
        if method.name != "size":
            return len(self.settled(shape))
        places = [*args, *named.values()]
        if not places:
            return shape
        if len(places) > 1 or type(places[0]) is not int:
            raise ForwardDeclined("asks for an extent in a way of its own")
        return shape[places[0]]

    def made(
        self, function: Callable[..., object], name: str, args: Sequence[object], named: Mapping[str, object]
    ) -> object:
        meaning = MEANING.get(name)
        takes_extents = meaning in ("view", "expand")
        tensors = [v for v in (*args, *named.values()) if isinstance(v, torch.Tensor)]
        if meaning not in _SAME_UNDER_AUTOCAST and any(t.dtype in HALF_TYPES for t in tensors):
            self.autocasts = True
        given = [self.passed(v, takes_extents) for v in args]
        made = function(*given, **{n: self.passed(v, takes_extents) for n, v in named.items()})
        if not isinstance(made, torch.Tensor):
            raise ForwardDeclined("is not one tensor")
        return made

    def passed(self, value: object, takes_extents: bool) -> object:
        """An argument of an operation."""
        if isinstance(value, tuple | list):
            return tuple(self.passed(v, takes_extents) for v in value)
        if isinstance(value, Fact):
            if value.kind == "extent" and not takes_extents:
                raise ForwardDeclined("computes with an extent")
            return value.value
        is_number = is_plain(value) and not isinstance(value, str)
        if is_number or isinstance(value, torch.Tensor | Free | slice | torch.memory_format):
            return value
        raise ForwardDeclined("is given something that is no tensor and no number")

    def computes(self, function: object) -> bool:
        return is_known(function)


def traced(
    module: torch.nn.Module,
    of: Probe,
    types: tuple[torch.dtype, torch.dtype],
    rank: int = 0,
    variant: int = 0,
    free: Mapping[str, float] | None = None,
) -> Traced:
    """The graph of forward. types: of full tensors, and of parameters. free: numbers in place of attributes that may
    be others later. Raises Declined, and whatever forward raises."""
    if _DISPATCH_MODE is None:
        raise ForwardDeclined("this torch shows nobody what a forward calls")
    inputs, shape, cls = required(module), of.shape(rank or of.rank, variant), type(module)
    own = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_floating_point()]
    recorder, behind = Recorder(), (1,) * of.behind
    given = [recorder.symbol(n, torch.ones(shape, dtype=types[0], device="cpu")) for n in inputs]
    values = {n: recorder.symbol(n, torch.ones((of.columns, *behind), dtype=types[1], device="cpu")) for n in own}
    domain = Tensors(module, values, free or {})
    domain.full, domain.place, domain.is_fixed = shape, 1 if of.behind else -1, of.is_fixed
    domain.record(SELF, ("__class__", "forward"), cls.forward)
    with torch.no_grad(), recorder:
        made = run(domain, cls.forward, given)
    if not isinstance(made, torch.Tensor):
        raise ForwardDeclined(f"returns a {type(made).__name__}, a norm returns a tensor")
    return Traced(
        recorder.returning(made),
        tuple(domain.reads.values()),
        frozenset(domain.members),
        frozenset(domain.decided),
        domain.autocasts,
    )


class Recorder(_DISPATCH_MODE or object):
    """The graph of aten's operations that run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.nodes: dict[int, Node] = {}

    def symbol(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that the graph is given, under a name."""
        self.keep(self.graph.placeholder(name), tensor)
        return tensor

    def keep(self, node: Node, made: object) -> None:
        node.meta["val"] = made  # which also keeps the tensor, so that its id is no other's
        if isinstance(made, torch.Tensor):
            self.nodes[id(made)] = node
        elif isinstance(made, tuple | list):
            for i, part in enumerate(made):
                self.keep(self.graph.call_function(operator.getitem, (node, i)), part)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        node_of = lambda v: self.nodes[id(v)] if isinstance(v, torch.Tensor) else v  # noqa: E731
        given = map_aggregate((args, kwargs or {}), node_of)
        self.keep(self.graph.call_function(function, *given), made)
        return made

    def returning(self, made: torch.Tensor) -> GraphModule:
        self.graph.output(self.nodes[id(made)])
        self.graph.eliminate_dead_code()
        return GraphModule(torch.nn.Module(), self.graph)
