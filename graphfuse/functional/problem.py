"""A call's graph: drawn and built once for the layouts of its tensors."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphfuse.dtypes import data_type
from graphfuse.enums import heur_mode
from graphfuse.errors import GraphValidationError, VariantPackError
from graphfuse.functional.argument import Argument
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.layout import Layout, check
from graphfuse.graph import pygraph
from graphfuse.ir import TensorId
from graphfuse.runtime.executable import Executable
from graphfuse.runtime.handle import Handle, create_handle


@dataclass(frozen=True, eq=False)
class Variant:
    """What a function is for one choice of its options: its tensors, each after those its shape depends on, and its
    graph."""

    arguments: tuple[Argument, ...]
    draw: Callable[[Drawing], None]


@dataclass(frozen=True, eq=False)
class Problem:
    """A built graph. pack: name of each tensor in it -> name of the parameter."""

    graph: pygraph
    pack: Mapping[str, str]

    @property
    def executable(self) -> Executable:
        return self.graph._planner.executable()

    @property
    def workspace_bytes(self) -> int:
        return self.graph.get_workspace_size()

    def new_workspace(self) -> torch.Tensor:
        return torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.graph.handle.device.memory)

    @property
    def ids(self) -> dict[TensorId, str]:
        """The tensors that calls are frozen with -> names of parameters."""
        return {t.id: self.pack[t.name] for t in self.graph._planner.graph.bound}


@functools.lru_cache(maxsize=1024)
def plan(name: str, variant: Variant, layouts: tuple[tuple[str, Layout], ...], generation: int) -> Problem:
    """The problem of these layouts, by argument. The row count is part of it but never of a kernel.

    generation: of the tuned knobs (``tables.store``), with which problems are planned anew. VariantPackError
    where the layouts do not fit each other or the graph.
    """
    first, device = layouts[0][0], layouts[0][1].device
    if device.type not in ("cpu", "cuda"):
        raise VariantPackError(f"{first} is on {device}; accepted: cpu, cuda")
    check(variant.arguments, dict(layouts))
    drawing = draw(name, variant, dict(layouts), create_handle(str(device)))
    try:
        drawing.graph.build([heur_mode.OPENSOURCE, heur_mode.FALLBACK])
    except GraphValidationError as error:  # strides: tensors of the graph have the names of the arguments
        raise VariantPackError(str(error)) from None
    return Problem(drawing.graph, drawing.pack)


def draw(name: str, variant: Variant, layouts: Mapping[str, Layout], handle: Handle) -> Drawing:
    """The graph of these layouts, not yet built. It computes in float64 where a tensor is, elsewhere in float32."""
    double = any(t.stored is data_type.DOUBLE for t in layouts.values())
    compute = data_type.DOUBLE if double else data_type.FLOAT
    graph = pygraph(name, intermediate_data_type=compute, compute_data_type=compute, handle=handle)
    drawing = Drawing(graph, layouts)
    variant.draw(drawing)
    return drawing
