"""A computation of two tensors of rows that differ in an extent, as of the heads of queries and of keys.

Forward is one graph for both. Backward has the gradients of either, by the computation that it has alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.layout import Layout
from graphfuse.functional.tensor_parameter import Rule, TensorParameter
from graphfuse.op_graph.tensor import Tensor
from graphfuse.torch.operators.computation import Computation

T = TypeVar("T")


class Both(Computation):
    """Computation of both, whose tensors are those of either in turn.

    one: that of either. names: of its tensors where they are the first's, and where they are the second's. What both
    read has one name. rows: shapes that the second's tensor of rows may have.
    """

    one: Computation
    names: Sequence[Mapping[str, str]]
    rows: Rule

    @cached_property
    def tensors(self) -> tuple[TensorParameter, ...]:
        return self._both(self.one.tensors)

    @cached_property
    def results(self) -> tuple[TensorParameter, ...]:
        return self._both(self.one.results)

    @cached_property
    def statistics(self) -> tuple[TensorParameter, ...]:
        return self._both(self.one.statistics)

    @cached_property
    def read_backward(self) -> tuple[TensorParameter, ...]:
        return self._both(self.one.read_backward)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name(kept) for kept in self.one.kept for name in self.named))

    @cached_property
    def gradients(self) -> tuple[TensorParameter | None, ...]:
        pairs = zip(self.one.tensors, self.one.gradients, strict=True)
        return tuple(
            {
                name(a.name): None if grad is None or self.is_shared(a.name) else self._of(grad, name)
                for a, grad in pairs
                for name in self.named
            }.values()
        )

    @cached_property
    def incoming(self) -> tuple[str | None, ...]:
        return tuple(grad and name(grad) for grad in self.one.incoming for name in self.named)

    @cached_property
    def sources(self) -> Mapping[str, Sequence[str]]:
        own = {out: [a for a in of if not self.is_shared(a)] for out, of in self.one.sources.items()}
        return {name(out): tuple(map(name, of)) for out, of in own.items() for name in self.named}

    @cached_property
    def named(self) -> Sequence[Callable[[str], str]]:
        """Functions that name what is the first's, and the second's, by what `one` calls it: also gradients, and
        whether they are asked for."""

        def function(names: Mapping[str, str]) -> Callable[[str], str]:
            known = {prefix + a: prefix + b for prefix in ("", "d", "needs_d") for a, b in names.items()}
            return lambda name: known.get(name, name)

        return tuple(map(function, self.names))

    def is_shared(self, name: str) -> bool:
        """True for a tensor of `one` that both read."""
        first, second = self.named
        return first(name) == second(name)

    def _both(self, parameters: Iterable[TensorParameter]) -> tuple[TensorParameter, ...]:
        made = {name(a.name): self._of(a, name) for a in parameters for name in self.named}
        return tuple(made.values())

    def _of(self, a: TensorParameter, name: Callable[[str], str]) -> TensorParameter:
        shape, new = a.shape, a.new
        is_second_of_rows = shape is None and name is self.named[1]
        return replace(
            a,
            name=name(a.name),
            asked=a.asked and name(a.asked),
            shape=self.rows if is_second_of_rows else shape and (lambda shapes: shape(Renamed(shapes, name))),
            new=(lambda tensors: new(Renamed(tensors, name))) if callable(new) else new,
            free=a.free or is_second_of_rows,
        )

    def _backward(self, d: DrawnGraph) -> None:
        self.draw_gradients(d, self.one)

    def draw_gradients(self, d: DrawnGraph, one: Computation) -> None:
        """Draws the gradients that are asked for, of the first and of the second."""
        for name in self.named:
            if any(a is not None and name(a.name) in d for a in one.gradients):
                one.backward.draw(RenamedDrawing(d, name, [a.name for a in one.backward.arguments]))


@dataclass(frozen=True)
class Renamed(Mapping[str, T]):
    """A mapping by other names."""

    of: Mapping[str, T]
    name: Callable[[str], str]

    def __getitem__(self, name: str) -> T:
        return self.of[self.name(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.of)

    def __len__(self) -> int:
        return len(self.of)

    def values(self):
        return self.of.values()


class RenamedDrawing:
    """A drawing whose arguments, of which some have these names, are those of another by other names."""

    def __init__(self, d: DrawnGraph, name: Callable[[str], str], names: Iterable[str]):
        self._d, self._name, self.graph, self.number = d, name, d.graph, d.number
        self.layouts: Mapping[str, Layout] = {one: d.layouts[name(one)] for one in names if name(one) in d}

    def __contains__(self, name: str) -> bool:
        return name in self.layouts

    def like(self, name: str, t: Tensor) -> Tensor:
        return self._d.like(self._name(name), t)

    def store(self, name: str, t: Tensor, of_rows: bool = False) -> None:
        self._d.store(self._name(name), t, of_rows=of_rows)
