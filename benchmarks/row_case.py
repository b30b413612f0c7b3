"""A case of rows as data: its buffers, the graph between them, and what its outputs are exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.benchmarks import judge
from graphfuse.benchmarks.judge import Accuracy, Tolerance

if TYPE_CHECKING:
    import torch

    from graphfuse.op_graph.tensor import Tensor

TYPES = {
    "bf16": data_type.BFLOAT16,
    "fp16": data_type.HALF,
    "fp32": data_type.FLOAT,
    "fp8_e4m3": data_type.FP8_E4M3,
}
_JUDGED = 1 << 26  # elements whose exact values are in memory at the same time
_SUMMED = 1024  # rows whose gradients of columns are in memory at the same time

Values = Callable[..., "torch.Tensor"]
"""Values(*shape, dtype=, device=) of a new input."""
Exact = Iterator[tuple[str, "torch.Tensor", Callable[[bool, "torch.Tensor"], "torch.Tensor"]]]
"""Outputs by name: what they are in float64, and how near to it they must be, as an Accuracy has it."""
Terms = Iterator[tuple[str, "torch.Tensor", Accuracy]]


def normal(scale: float = 1, mean: float = 0) -> Values:
    """Random numbers with this deviation and mean."""

    def values(*shape: int, **like) -> torch.Tensor:
        import torch

        return torch.randn(*shape, **like).mul_(scale).add_(mean)

    return values


def around_one(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random weights from 0.5 to 1.5."""
    import torch

    return (torch.rand(*shape, device=device) + 0.5).to(dtype)


def full(number: float) -> Values:
    """The same number everywhere."""

    def values(*shape: int, **like) -> torch.Tensor:
        import torch

        return torch.full(shape, number, **like)

    return values


def unset(*shape: int, **like) -> torch.Tensor:
    """Memory that the case or a kernel writes."""
    import torch

    return torch.empty(*shape, **like)


@dataclass(frozen=True)
class Buffer:
    """A tensor of a case, of which a graph has one of the same name.

    type: of its elements.
    dim, stride: in the graph, the stride where the tensor is not packed.
    values: what makes it, of an input; None of an output.
    shared: one tensor is in all buffer sets.
    own: the tensor's shape, where the graph's has another; it is a view, or broadcast.
    alignment: in bytes, in the graph.
    drawn: whether the graph has it.
    filled: whether the case's `fill` makes it, as a view of another or in another type.
    """

    type: data_type
    dim: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    values: Values | None = None
    shared: bool = False
    own: tuple[int, ...] | None = None
    alignment: int = 16
    drawn: bool = True
    filled: bool = False

    @property
    def moved(self) -> int:
        """Bytes that are read or written once."""
        return self.type.nbytes(math.prod(self.own or self.dim)) if self.drawn else 0

    def of_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the graph has it."""
        if self.own is None:
            return tensor
        return tensor.view(self.dim) if tensor.numel() == math.prod(self.dim) else tensor.expand(self.dim)

    def made(self, device: str) -> torch.Tensor | None:
        if self.filled:
            return None
        import torch

        like = {"dtype": getattr(torch, self.type.facts.torch), "device": device}
        shape = self.own or self.dim
        if self.stride is None or self.own:
            return (self.values or unset)(*shape, **like)
        made = torch.empty_strided(shape, self.stride, **like)
        return made if self.values in (None, unset) else made.copy_(self.values(*shape, **like))


class BufferSet:
    """The tensors of one call as attributes; None is one that the case does not have."""

    def __init__(self, case: BufferCase, tensors: Mapping[str, torch.Tensor | None]) -> None:
        self.case, self.eps = case, case.eps
        vars(self).update(tensors)

    def pack(self, *names: str) -> dict[str, torch.Tensor]:
        """Tensors by the names of the case's graph, all unless some are named."""
        return {
            name: buffer.of_graph(getattr(self, name))
            for name, buffer in self.case.drawn.items()
            if getattr(self, name) is not None and (not names or name in names)
        }


class BufferCase:
    """A case made of its buffers; it has rows, columns and output, which names the type of what is made."""

    rows: int
    columns: int
    output: str
    eps: ClassVar[float] = 1e-6

    def buffers(self) -> dict[str, Buffer | None]:
        """By name: inputs in the order in which `draw` takes them, and outputs. None is one that this case does not
        have, and others of its class do."""
        raise NotImplementedError

    def draw(self, graph: pygraph, **given: Tensor) -> dict[str, Tensor]:
        """The graph's outputs by name, from its inputs."""
        raise NotImplementedError

    def fill(self, operands: BufferSet) -> None:
        """Inputs that are made of others."""

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        """Some rows of outputs, in the order in which they are judged."""
        raise NotImplementedError

    def terms(self, operands: BufferSet, rows: torch.Tensor) -> Terms:
        """What some rows add to outputs that are sums over all. The absolute tolerance is for one term; it grows with
        the root of their number."""
        return iter(())

    def found(self, operands: BufferSet, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of an output."""
        return self.of_rows(getattr(operands, name), rows)

    def of_rows(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of a buffer."""
        return tensor[rows] if tensor.itemsize > 1 else judge.taken(tensor, rows)

    @property
    def drawn(self) -> dict[str, Buffer]:
        """Buffers that the graph has."""
        return {name: buffer for name, buffer in self.buffers().items() if buffer and buffer.drawn}

    @property
    def moved(self) -> int:
        """Bytes: each input read once, each output written once."""
        return sum(buffer.moved for buffer in self.drawn.values())

    def graph(self, handle=None) -> pygraph:
        return self.graph_of(self.draw, handle)

    def graph_of(self, draw: Callable[..., dict[str, Tensor]], handle=None, *names: str) -> pygraph:
        """What `draw` makes of the case's inputs, or of those buffers that are named, as a graph."""
        graph, buffers = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle), self.drawn
        given = {
            name: graph.tensor(
                list(b.dim), b.stride and list(b.stride), data_type=b.type, byte_alignment=b.alignment, name=name
            )
            for name, b in buffers.items()
            if (name in names if names else b.values)
        }
        for name, made in draw(graph, **given).items():
            buffer = buffers[name]
            made.set_output().set_name(name).set_data_type(buffer.type).set_byte_alignment(buffer.alignment)
            if buffer.stride:
                made.set_dim(list(buffer.dim)).set_stride(list(buffer.stride))
        return graph

    def sets(self, count: int, device: str) -> list[BufferSet]:
        """Sets of random numbers of their own, but for what is shared."""
        buffers = self.buffers()
        shared = {name: buffer.made(device) for name, buffer in buffers.items() if buffer and buffer.shared}

        def one() -> BufferSet:
            own = {name: b and b.made(device) for name, b in buffers.items() if name not in shared}
            made = BufferSet(self, shared | own)
            self.fill(made)
            return made

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: BufferSet) -> None:
        """NaN, which no result is."""
        import torch

        for name, buffer in self.drawn.items():
            tensor = getattr(operands, name)
            if buffer.values is None and tensor is not None:
                _ = tensor.fill_(math.nan) if tensor.itemsize > 1 else tensor.view(torch.uint8).fill_(0xFF)

    def wrong(self, operands: BufferSet, tight: bool) -> str | None:
        """Why the outputs are wrong: those of rows on some rows, sums over rows in all columns."""
        import torch

        device = operands.x.device
        rows = judge.checked_rows(self.rows, device)
        for part in rows.split(max(1, _JUDGED // self.columns)):
            for name, exact, accuracy in self.exact(operands, part):
                found = self.found(operands, name, part).double().view(exact.shape)
                if complaint := judge.wrong(found, exact, accuracy(tight, exact), part, name):
                    return complaint
        sums: dict[str, tuple[torch.Tensor, int, Accuracy]] = {}
        for part in torch.arange(self.rows, device=device).split(_SUMMED):
            for name, terms, accuracy in self.terms(operands, part):
                before, count, _ = sums.get(name, (0, 0, None))
                sums[name] = before + terms.sum(0, keepdim=True), count + len(terms), accuracy
        for name, (exact, count, accuracy) in sums.items():
            tolerance = accuracy.of(tight)
            accepted = Tolerance(tolerance.relative, tolerance.absolute * math.sqrt(count)).around(exact)
            if complaint := judge.wrong(getattr(operands, name)[None].double(), exact, accepted, rows[:1], name):
                return complaint
        return None


@dataclass(frozen=True)
class RowCase(BufferCase):
    """rows x columns."""

    rows: int
    columns: int
    output: str = "bf16"

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    def whole(self, type: data_type, values: Values | None = None) -> Buffer:
        """A tensor of rows and columns."""
        return Buffer(type, (self.rows, self.columns), values=values)

    def by_column(self, type: data_type, values: Values | None = None, **more: bool) -> Buffer:
        """An element for each column; an input is the same in all sets."""
        shared = values is not None
        return Buffer(type, (1, self.columns), values=values, shared=shared, own=(self.columns,), **more)

    def by_row(self, type: data_type, values: Values | None = None, alignment: int | None = None) -> Buffer:
        """An element for each row."""
        return Buffer(type, (self.rows, 1), values=values, own=(self.rows,), alignment=alignment or type.nbytes(1))


def by_parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Some rows of all of them, then the next."""
    return zip(*(tensor.split(_SUMMED) for tensor in tensors), strict=True)


def rms_normal(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows over their root mean square."""
    return x * (x.square().mean(1, keepdim=True) + eps).rsqrt()
