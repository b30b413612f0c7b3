"""Problems of products and attention: one graph, and the same by torch's plain calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ENGINES = ("rows", "torch", "reference")
DEVICE = "cuda"


@dataclass
class Problem:
    """One graph and the same by torch.

    name: of the problem, for the tables.
    draw: adds the nodes to a graph, given it and its tensors by name; returns the output.
    plain: the same by torch's calls, given tensors by name.
    read: inputs by name.
    out: like what is written.
    tolerance: of elements, and of the largest one.
    settings: of torch's, while it is checked.
    rounds: whether intermediates are rounded to the type of the output, as torch's are.
    """

    name: str
    draw: Callable[..., object]
    plain: Callable[..., object]
    read: dict[str, torch.Tensor]
    out: torch.Tensor
    tolerance: tuple[float, float]
    settings: dict[str, object] = field(default_factory=dict)
    rounds: bool = False

    def graph(self, **given):
        """The graph, and what it is bound to. given: for its constructor."""
        import graphfuse as gf

        own = named(self.out.dtype)
        between = {"intermediate_data_type": gf.data_type.FLOAT}
        if self.rounds:
            between = {"intermediate_data_type": own, "intermediate_rounding": "declared"}
        graph = gf.pygraph(self.name, io_data_type=own, **between, **given)
        tensors = {name: graph.tensor_like(t) for name, t in self.read.items()}
        made = self.draw(graph, **tensors)
        made.set_output().set_name("out").set_data_type(own)
        if made.get_ragged_offset() is None:  # else its memory has a layout of its own
            made.set_dim(list(self.out.shape)).set_stride(list(self.out.stride()))
        return graph, {**{tensors[name]: t for name, t in self.read.items()}, made: self.out}

    def call(self, engines: Sequence[str] = ENGINES) -> tuple[Callable[[], object], str]:
        """What runs the graph, and the name of its plan."""
        import graphfuse as gf

        graph, pack = self.graph()
        graph.build([gf.heur_mode.A], engines=list(engines))
        pack |= {t: _like(t) for t in graph.get_outputs() if t not in pack}
        space = _space(graph.get_workspace_size())
        return lambda: graph.execute(pack, space), graph.get_plan_name_at_index(0)

    def by_torch(self) -> Callable[[], object]:
        return lambda: self.plain(**self.read)

    def distance(self, got: torch.Tensor) -> float:
        """How far it is from float64, over what is accepted."""
        exact = self.plain(**{name: t.double() for name, t in self.read.items()})
        if not got.isnan().equal(exact.isnan()):
            return float("inf")
        near, floor = self.tolerance
        size = exact.abs().nan_to_num(0.0)
        accepted = near * size + floor * size.max()
        return float(((got.double() - exact).abs().nan_to_num(0.0) / accepted).max())


def _like(t) -> torch.Tensor:
    """Memory for a tensor of a graph."""
    import torch

    return torch.empty(t.get_dim(), dtype=getattr(torch, t.get_data_type().facts.torch), device=DEVICE)


def _space(size: int):
    import torch

    return torch.empty(size, dtype=torch.uint8, device=DEVICE) if size else None


def named(dtype: torch.dtype):
    from graphfuse.base.dtypes import from_foreign

    return from_foreign(dtype)


def drawn(*shape: int, dtype: str = "bfloat16", last: bool = False, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    import torch

    x = torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)) * scale
    x = x.to(getattr(torch, dtype))
    return x.contiguous(memory_format=torch.channels_last) if last else x


ONE_ROUNDING = {"bfloat16": (2.0**-8, 2.0**-15), "float16": (2.0**-11, 2.0**-15), "float32": (2.0**-16, 2.0**-16)}
"""Of a result; and what sums in float32 lose, over the largest. TF32 loses 20 times as much."""
ROUNDED_INSIDE = (2.0**-7, 2.0**-7)
"""Of attention, whose exponentials are rounded, and of graphs whose intermediates are."""
