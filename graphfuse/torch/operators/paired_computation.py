"""Two computations of one kind in one, for row tensors that differ in an extent, such as queries and keys in number of
heads."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import Rule, TensorParameter
from graphfuse.torch.operators.computation import Computation

T = TypeVar("T")


class PairedComputation(Computation):
    """Computation with the tensors of `each` in turn. Forward is drawn for both at once, the gradients of each by its
    own computation.

    each: the two computations. Their tensors have different names, except tensors that both read; these have no
    gradient.
    rows: shapes that the row tensor of the second may have.
    """

    each: tuple[Computation, Computation]
    rows: Rule

    tensors = cached_property(lambda self: self._united(one.tensors for one in self.each))
    results = cached_property(lambda self: self._united(one.results for one in self.each))
    statistics = cached_property(lambda self: self._united(one.statistics for one in self.each))
    read_backward = cached_property(lambda self: self._united(one.read_backward for one in self.each))
    kept = cached_property(lambda self: tuple(dict.fromkeys(self._in_turn(one.kept for one in self.each))))
    incoming = cached_property(lambda self: tuple(self._in_turn(one.incoming for one in self.each)))

    @cached_property
    def gradients(self) -> tuple[TensorParameter | None, ...]:
        made = {a.name: grad for one in self.each for a, grad in zip(one.tensors, one.gradients, strict=True)}
        return tuple(None if a.name in self.shared_names else made[a.name] for a in self.tensors)

    @cached_property
    def sources(self) -> Mapping[str, Collection[str]]:
        found = {out: names for one in self.each for out, names in one.sources.items()}
        return {out: [name for name in names if name not in self.shared_names] for out, names in found.items()}

    @cached_property
    def shared_names(self) -> set[str]:
        """Names of tensors that both read."""
        first, second = ({a.name for a in one.tensors} for one in self.each)
        return first & second

    @staticmethod
    def _in_turn(each: Iterable[Iterable[T]]) -> Iterable[T]:
        return (one for pair in zip(*each, strict=True) for one in pair)

    def _united(self, each: Iterable[Iterable[TensorParameter]]) -> tuple[TensorParameter, ...]:
        first, second, *others = self._in_turn(each)
        second = second if second.shape else replace(second, shape=self.rows, free=True)
        return tuple({a.name: a for a in (first, second, *others)}.values())

    def _backward(self, d: GraphBuilder) -> None:
        for one in self.each:
            if any(a is not None and a.name in d for a in one.gradients):
                one.backward.build(d)
