"""Two computations of one kind as one, of tensors of rows that differ in an extent: the heads of queries and of keys."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.tensor_parameter import Rule, TensorParameter
from graphfuse.torch.operators.computation import Computation


class Both(Computation):
    """Computation whose tensors are those of `each` in turn. Forward is drawn for both at once; gradients of either are
    drawn by the computation that it has alone.

    each: both, whose tensors have different names, but for what both read. That has no gradient.
    rows: shapes that the second's tensor of rows may have.
    """

    each: tuple[Computation, Computation]
    rows: Rule

    @cached_property
    def tensors(self) -> tuple[TensorParameter, ...]:
        return self._united(one.tensors for one in self.each)

    @cached_property
    def results(self) -> tuple[TensorParameter, ...]:
        return self._united(one.results for one in self.each)

    @cached_property
    def statistics(self) -> tuple[TensorParameter, ...]:
        return self._united(one.statistics for one in self.each)

    @cached_property
    def read_backward(self) -> tuple[TensorParameter, ...]:
        return self._united(one.read_backward for one in self.each)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(name for names in zip(*(one.kept for one in self.each), strict=True) for name in names)
        )

    @cached_property
    def gradients(self) -> tuple[TensorParameter | None, ...]:
        made = {a.name: grad for one in self.each for a, grad in zip(one.tensors, one.gradients, strict=True)}
        return tuple(None if a.name in self.shared_names else made[a.name] for a in self.tensors)

    @cached_property
    def incoming(self) -> tuple[str | None, ...]:
        return tuple(name for names in zip(*(one.incoming for one in self.each), strict=True) for name in names)

    @cached_property
    def sources(self) -> Mapping[str, Collection[str]]:
        found = {out: names for one in self.each for out, names in one.sources.items()}
        return {out: [name for name in names if name not in self.shared_names] for out, names in found.items()}

    @cached_property
    def shared_names(self) -> set[str]:
        """Names of what both read."""
        first, second = ({a.name for a in one.tensors} for one in self.each)
        return first & second

    def _united(self, each: Iterable[Iterable[TensorParameter]]) -> tuple[TensorParameter, ...]:
        (first, second), *others = zip(*each, strict=True)
        second = second if second.shape else replace(second, shape=self.rows, free=True)
        return tuple({a.name: a for a in (first, second, *(a for pair in others for a in pair))}.values())

    def _backward(self, d: DrawnGraph) -> None:
        draw_gradients(d, self.each)


def draw_gradients(d: DrawnGraph, each: Iterable[Computation]) -> None:
    """Draws the gradients that are asked for, by those computations that have some of them."""
    for one in each:
        if any(a is not None and a.name in d for a in one.gradients):
            one.backward.draw(d)
