"""Tracing of calls of modules and of torch's operations as a graph of aten's operations, with all else that the graph
depends on.

A module's forward is run by the `interpreter`, on tensors of one type and shape on the CPU. `Tensors` defines what it
may read of a tensor, and declines the rest.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from graphfuse.base.wording import with_article
from graphfuse.torch.analysis.inductor import is_repeatable
from graphfuse.torch.analysis.interpreter import run
from graphfuse.torch.analysis.meaning import MEANING, called_name, name_of, writes
from graphfuse.torch.analysis.out_of_place import write_out_of_place
from graphfuse.torch.analysis.reads import SELF, Read, is_plain
from graphfuse.torch.analysis.recording import graph_of
from graphfuse.torch.analysis.symbols import Domain, ForwardDeclined, TensorMethod

HALF_TYPES = (torch.bfloat16, torch.float16)
_SAME_UNDER_AUTOCAST = frozenset("cast same view expand permute slice mul add sub neg silu sigmoid".split())
"""Operations that autocast leaves in the types of their arguments."""
_ANY_COLUMNS = 64
_RANKS = (3, 2, 4, 1, 5)
_RANKS_OF_IMAGES = (4, 5)
"""Ranks for forwards that run with no smaller one."""
_BEHIND_CHANNELS = (2, 3, 1)
"""Numbers of dimensions after the channels: of images, videos and sequences."""
_ROWS = (7, 5, 11, 3, 2)
"""Extents of rows. A forward that has one of them as a constant in a view is declined."""

Source = int | tuple[int, str]
"""The number of a full tensor (one with rows and columns), or the number of a module and the name of its tensor."""


@dataclass(frozen=True)
class CallOperand:
    """The number of a value: the arguments of a sequence come first, then the results of its calls."""

    number: int


class TracedCall(NamedTuple):
    """A call. function: an operation of torch, or the number of a module. args, named: operands and constants. It is a
    tuple, as Dynamo of torch 2.10 does not know the types of a frozen dataclass's fields."""

    function: Callable[..., object] | int
    args: tuple[object, ...]
    named: Mapping[str, object]


@dataclass(frozen=True)
class CallSequence:
    """Calls one after the other. given: number of tensors that are their arguments. made: numbers of the values that
    they return."""

    given: int
    calls: tuple[TracedCall, ...]
    made: tuple[int, ...]

    def run(self, given: Sequence[object], called: Callable[..., object]) -> list[object]:
        """Values that the sequence returns. called: calls a module, given its number and the arguments."""
        values = [*given]
        for call in self.calls:
            args = [values[v.number] if isinstance(v, CallOperand) else v for v in call.args]
            named = {name: values[v.number] if isinstance(v, CallOperand) else v for name, v in call.named.items()}
            is_module = isinstance(call.function, int)
            values.append(called(call.function, args, named) if is_module else call.function(*args, **named))
        return [values[number] for number in self.made]

    def of_modules(self, modules: Sequence[torch.nn.Module], given: Sequence[object]) -> list[object]:
        """Values that the sequence returns if it calls these modules."""
        return self.run(given, lambda number, args, named: modules[number](*args, **named))


@dataclass(frozen=True)
class Probe:
    """Shapes of the tensors that calls are traced with.

    columns: extent of the columns. extents: shape of the parameters. behind: number of dimensions after that of the
    columns. ranks: of full tensors, the usual one first. is_fixed: whether a parameter fixes the number of columns.
    """

    columns: int
    extents: tuple[int, ...]
    behind: int
    ranks: tuple[int, ...]
    is_fixed: bool

    @property
    def place(self) -> int:
        """The dimension of the columns: the last, or that of channels."""
        return 1 if self.behind else -1

    def shape(self, rank: int) -> tuple[int, ...]:
        rows = [n + self.columns if n == self.columns else n for n in _ROWS]
        if self.behind:
            return rows[0], self.columns, *rows[1 : 1 + self.behind]
        return *rows[: rank - 1], self.columns

    def fits(self, shape: Sequence[int]) -> bool:
        """True if full tensors may have this shape."""
        return len(shape) in self.ranks and (shape[self.place] == self.columns or not self.is_fixed)


def probes(modules: Sequence[torch.nn.Module]) -> tuple[Probe, ...]:
    """Probes for the parameters and buffers of modules without children, the usual one first; none if they are no
    vectors of one length.

    Vectors are along the last dimension or along channels, where extents of 1 may follow. Without any, the length is
    the module's `normalized_shape`, as in torch's norms, or arbitrary and along the last dimension."""
    own = itertools.chain.from_iterable(map(tensors_of, modules))
    shapes = {tuple(t.shape) for _, t in own}
    is_fixed = bool(shapes)
    if not shapes:
        said = {getattr(module, "normalized_shape", ()) for module in modules}
        shapes = {n if isinstance(n, tuple) else (n,) for n in said}
    if len(shapes) > 1 or is_fixed and shapes == {()}:
        return ()
    (extents,) = shapes
    columns, *others = extents or (_ANY_COLUMNS,)
    if not isinstance(columns, int) or any(n != 1 for n in others) or len(others) >= len(_ROWS):
        return ()
    if others:
        return (Probe(columns, extents, len(others), (2 + len(others),), is_fixed),)
    last, deep = (Probe(columns, (columns,), 0, ranks, is_fixed) for ranks in (_RANKS, _RANKS_OF_IMAGES))
    channels = [Probe(columns, (columns,), n, (2 + n,), is_fixed) for n in _BEHIND_CHANNELS]
    return (last, *channels, deep) if extents else (last,)


def tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of the floating-point parameters and buffers of a module."""
    own = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return [(name, t) for name, t in own if t.is_floating_point()]


def required(module: torch.nn.Module) -> list[str]:
    """Arguments that forward is called with: those without a default, and a gate."""
    found = inspect.signature(type(module).forward).parameters.values()
    named = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    return [p.name for p in named if p.default is p.empty or p.name == "gate"]


@dataclass(frozen=True)
class Trace:
    """Trace of calls with full tensors of one type and shape.

    sources: the source of each placeholder.
    reads: all else that was read, for each module.
    autocasts: whether autocast may compute one of its steps in another type.
    packs: whether results are contiguous if full tensors are not.
    """

    graph: Graph
    sources: Mapping[Node, Source]
    reads: tuple[tuple[Read, ...], ...]
    autocasts: bool
    packs: bool


@dataclass(frozen=True)
class Fact:
    """A fact about a tensor in one trace alone. kind: "dtype", "device" or "extent"."""

    value: object
    kind: str


class Shape(tuple):
    """Extents of a tensor: a number if it is the same in every call, otherwise a fact."""


class TracedTensors(Domain):
    """Domain whose symbols are the tensors that a trace follows. values: tensors of the module, by name. full: shape of
    full tensors."""

    symbols, facts = torch.Tensor, (Fact, Shape)

    def __init__(
        self, module: torch.nn.Module, values: Mapping[str, torch.Tensor], full: Sequence[int], of: Probe
    ) -> None:
        super().__init__(module)
        self.values, self.full, self.autocasts = values, tuple(full), False
        place = of.place % len(full)
        self.full_extents = Shape(n if i == place and of.is_fixed else Fact(n, "extent") for i, n in enumerate(full))
        rows = [n for i, n in enumerate(full) if i != place]
        self.extents = {math.prod(some) for k in range(1, len(rows) + 1) for some in itertools.combinations(rows, k)}
        self.record(SELF, ("__class__", "forward"), type(module).forward)

    def settled(self, value: object) -> object:
        """A value that may decide something. Types and ranks may, as each has its own trace."""
        if isinstance(value, Fact) and value.kind == "dtype":
            return value.value
        return value if isinstance(value, Shape) else super().settled(value)

    def is_none(self, symbol: object) -> bool:
        return False

    def member(self, name: str, tensor: torch.Tensor) -> object:
        if name not in self.values:
            raise ForwardDeclined(f"reads self.{name}, a tensor that is no parameter of floating-point numbers")
        return self.values[name]

    def attribute(self, symbol: torch.Tensor, name: str) -> object:
        match name:
            case "dtype" | "device":
                return Fact(getattr(symbol, name), name)
            case "shape":
                return self.shape(symbol)
            case "ndim":
                return len(self.shape(symbol))
        if is_repeatable(name) or name in ("size", "dim", "ndimension"):
            return TensorMethod(symbol, name)
        raise ForwardDeclined("reads what a norm does not need")

    def shape(self, symbol: torch.Tensor) -> Shape:
        if any(symbol is value for value in self.values.values()):
            return Shape(symbol.shape)
        if tuple(symbol.shape) != self.full:
            raise ForwardDeclined("reads the shape of a computed tensor")
        return self.full_extents

    def compute(
        self, function: Callable[..., object] | TensorMethod, args: Sequence[object], named: Mapping[str, object]
    ) -> object:
        if not isinstance(function, TensorMethod):
            return self.made(function, getattr(function, "__name__", ""), args, named)
        if function.name not in ("size", "dim", "ndimension"):
            return self.made(getattr(function.symbol, function.name), function.name, args, named)
        shape = self.shape(function.symbol)
        if function.name != "size":
            return len(shape)
        places = [*args, *named.values()]
        if not places:
            return shape
        if len(places) > 1 or type(places[0]) is not int:
            raise ForwardDeclined("reads an extent in an unknown way")
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
        if name == "squeeze" and (len(given) < 2 or made.dim() == given[0].dim()):
            raise ForwardDeclined("drops dimensions in some calls alone")
        return made

    def passed(self, value: object, takes_extents: bool) -> object:
        """Argument that an operation gets. Raises ForwardDeclined if it may differ in another call."""
        if isinstance(value, tuple | list):
            return tuple(self.passed(v, takes_extents) for v in value)
        if isinstance(value, Fact):
            if value.kind == "extent" and not takes_extents:
                raise ForwardDeclined("computes with an extent")
            return value.value
        if takes_extents and type(value) is int and value in self.extents:
            raise ForwardDeclined("has a number of rows as a constant")
        if is_plain(value) or isinstance(value, torch.Tensor | slice | torch.memory_format):
            return value
        raise ForwardDeclined("is given something that is no tensor and no number")

    def computes(self, function: object) -> bool:
        return is_repeatable(name_of(function))


def trace_calls(
    calls: CallSequence,
    modules: Sequence[torch.nn.Module],
    of: Probe,
    types: tuple[torch.dtype, torch.dtype],
    rank: int,
) -> Trace:
    """Trace of calls. types: of full tensors, and of parameters. Raises ForwardDeclined, and any error that forwards
    raise."""
    sources, domains = sources_of(calls, modules), dict[int, TracedTensors]()
    kinds = ((of.shape(rank), types[0]) if isinstance(source, int) else (of.extents, types[1]) for source in sources)
    given = [torch.ones(shape, dtype=kind, device="cpu") for shape, kind in kinds]
    compute = _interpreted(calls, modules, domains, of)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        graph = graph_of(compute, given)
        packs = _packs(compute, given[: calls.given], given[calls.given :])
    places = graph.find_nodes(op="placeholder")
    reads = tuple(tuple(domains[number].reads.values()) for number in range(len(modules)))
    autocasts = any(domain.autocasts for domain in domains.values())
    return Trace(without_copies(graph), dict(zip(places, sources, strict=True)), reads, autocasts, packs)


def _packs(
    compute: Callable[..., list[torch.Tensor]], full: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> bool:
    """True if calls make contiguous tensors of others."""
    spread = [t.mT.contiguous().mT if t.dim() > 1 else t for t in full]
    try:
        return all(t.is_contiguous() for t in compute(*spread, *parameters))
    except RuntimeError:  # of a view that only contiguous tensors have
        return False


def sources_of(calls: CallSequence, modules: Sequence[torch.nn.Module]) -> tuple[Source, ...]:
    """Sources of the tensors that calls read, starting with their arguments."""
    own = ((number, name) for number, module in enumerate(modules) for name, _ in tensors_of(module))
    return (*range(calls.given), *own)


def record_calls(
    calls: CallSequence,
    modules: Sequence[torch.nn.Module],
    given: Sequence[torch.Tensor],
    domains: dict[int, TracedTensors],
    of: Probe | None = None,
) -> Graph:
    """Graph of calls with given tensors, which are ordered as in `sources_of`. domains: receives the domain of each
    module, by number, also if an error is raised. of: the probe of all modules together; None if each module has its
    own."""
    return graph_of(_interpreted(calls, modules, domains, of), given)


def _interpreted(
    calls: CallSequence, modules: Sequence[torch.nn.Module], domains: dict[int, TracedTensors], of: Probe | None
) -> Callable[..., list[torch.Tensor]]:
    """Function of tensors ordered as in `sources_of` that interprets calls. domains, of: as in `record_calls`."""
    sources = sources_of(calls, modules)

    def computed(*flat: torch.Tensor) -> list[torch.Tensor]:
        def called(number: int, args: Sequence[object], named: Mapping[str, object]) -> object:
            module, full = modules[number], next(v for v in (*args, *named.values()) if isinstance(v, torch.Tensor))
            values = {s[1]: t for s, t in zip(sources, flat, strict=True) if isinstance(s, tuple) and s[0] == number}
            if number not in domains:
                found = (of,) if of else probes((module,))
                if not found:
                    raise ForwardDeclined("has parameters that are no vectors of one length")
                by = next((one for one in found if one.fits(full.shape)), found[0])
                domains[number] = TracedTensors(module, values, full.shape, by)
            return run(domains[number], type(module).forward, args, named)

        made = calls.run(flat[: calls.given], called)
        for one in made:
            if not isinstance(one, torch.Tensor):
                raise ForwardDeclined(f"returns {with_article(type(one).__name__)}, a norm returns a tensor")
        return made

    return computed


def without_copies(graph: Graph) -> Graph:
    """The graph without copies. Raises ForwardDeclined if it changes a tensor in place that others may read."""
    graph.eliminate_dead_code()
    write_out_of_place(graph)
    if any(map(writes, graph.nodes)):
        raise ForwardDeclined("changes a tensor in place")
    for node in graph.nodes:
        if called_name(node) == "clone":  # as nothing is changed in place, it equals its source
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    return graph
