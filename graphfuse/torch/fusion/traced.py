"""The graph of a module's own forward, in aten's operations.

Parameters and inputs are on the CPU, in bfloat16: in that type a graph shows where values are rounded, which float32
would hide.
"""

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

TYPE = torch.bfloat16
_ANY_COLUMNS = 64
_BESIDE = (3, 4, 5, 6)
"""Extents behind channels, for a module whose parameters have extents of 1 there."""


@dataclass(frozen=True)
class Probe:
    """What a module's forward is called with. shape: of full tensors. columns: the extent that would be normalized."""

    shape: tuple[int, ...]
    columns: int


def probe(module: torch.nn.Module) -> Probe | None:
    """By the parameters and buffers of a module without children: vectors, along the last dimension, or with extents of
    1 behind them, along channels. None where they are something else. Where there are none, the extent is what the
    module says, as torch's norms do, or any."""
    own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    shapes = {tuple(t.shape) for t in own if t.is_floating_point()}
    if not shapes:
        said = getattr(module, "normalized_shape", None)
        shapes = {said if isinstance(said, tuple) else (said if isinstance(said, int) else _ANY_COLUMNS,)}
    if len(shapes) > 1 or shapes == {()}:
        return None
    ((columns, *behind),) = shapes
    if any(n != 1 for n in behind) or len(behind) > len(_BESIDE):
        return None
    return Probe((2, columns, *_BESIDE[: len(behind)]) if behind else (2, 3, columns), columns)


def required(module: torch.nn.Module) -> list[str]:
    """The arguments that forward is called with: those without a default, and a gate."""
    found = inspect.signature(type(module).forward).parameters.values()
    named = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    return [p.name for p in named if p.default is p.empty or p.name == "gate"]


@dataclass(frozen=True)
class Traced:
    """names: of arguments and parameters, by those of the graph's placeholders. autocasts: whether forward calls a
    function of torch that computes in float32 under autocast, and returns it."""

    graph: GraphModule
    names: Mapping[str, str]
    autocasts: bool


_AUTOCAST = (
    torch.nn.functional.layer_norm,
    torch.nn.functional.rms_norm,
    torch.nn.functional.normalize,
    torch.layer_norm,
    torch.rms_norm,
    torch.linalg.vector_norm,
    torch.Tensor.norm,
    torch.norm,
)


class _Calls(TorchFunctionMode):
    """The functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[object] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.found.add(function)
        return function(*args, **(kwargs or {}))


def traced(module: torch.nn.Module, shape: tuple[int, ...]) -> Traced:
    """The graph of forward for full tensors of this shape. Raises whatever forward raises."""
    inputs, cls = required(module), type(module)
    own = {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_floating_point()}

    def forward(given: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        # An object of the module's attributes, with other tensors and without hooks or a forward of its own.
        stand_in, tensors = cls.__new__(cls), dict(zip(own, values, strict=True))
        stand_in.__dict__ = {n: v for n, v in vars(module).items() if n != "forward"}
        for kind in ("_parameters", "_buffers"):
            stand_in.__dict__[kind] = {n: tensors.get(n, t) for n, t in vars(module)[kind].items()}
        made = cls.forward(stand_in, *given)
        if not isinstance(made, torch.Tensor):
            raise TypeError(f"it returns a {type(made).__name__}, a norm returns a tensor")
        return made

    calls = _Calls()
    with torch.no_grad(), calls:
        full = [torch.ones(shape, dtype=TYPE) for _ in inputs]
        values = [torch.ones(t.shape, dtype=TYPE) for t in own.values()]
        graph = make_fx(forward)(full, values)
    names = [*inputs, *own]
    graph.graph.output_node().args = (*graph.graph.output_node().args[0],)  # of a list of one
    places = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    return Traced(graph, dict(zip(places, names, strict=True)), not calls.found.isdisjoint(_AUTOCAST))
