"""A function as data: its parameters, its tensors, and a graph for each choice of options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from graphfuse.base.errors import VariantPackError
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import TensorParameter

NUMBERS = frozenset({"eps", "parts", "share"})
"""Scalar parameters passed by value: calls that differ only in them share a problem."""


@dataclass(frozen=True)
class Variant:
    """Form of a function for one choice of its options. arguments: its tensors, each after those that its shape depends
    on. build: builds the graph. options: names and values, for `build`."""

    arguments: tuple[TensorParameter, ...]
    build: Callable[[GraphBuilder], None]
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, eq=False)
class RankColumns:
    """The columns of one rank, for rows that are split over ranks. mine, all: numbers of columns. sum: adds up a tensor
    over the ranks that have the other columns of the rows."""

    mine: int
    all: int
    sum: Callable[[torch.Tensor], torch.Tensor]


class Columns(Protocol):
    """Form of a function for columns that are split over ranks."""

    def __call__(self, name: str, given: Mapping[str, object], part: RankColumns) -> Mapping[str, torch.Tensor | None]:
        """The rank's parts of the results, by argument. name: the function's. given: its parameters, with the rank's
        parts of tensors."""


@dataclass(frozen=True, eq=False)
class Function:
    """One function.

    parameters: names, in order.
    defaults: of some of them.
    variants: one, built by the options named in `chosen_by`, or one for each combination of their values.
    results: names of the returned arguments; None is returned for one that was not requested. An argument that is not a
    parameter is allocated by every call.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: Mapping[str, object]
    chosen_by: tuple[str, ...]
    variants: Variant | Mapping[tuple[object, ...], Variant]
    results: tuple[str, ...]
    columns: Columns | None = None

    @property
    def arguments(self) -> tuple[TensorParameter, ...]:
        """The tensors of any variant. Their names, and which are written or optional, are the same in all variants."""
        one = self.variants if isinstance(self.variants, Variant) else next(iter(self.variants.values()))
        return one.arguments

    @property
    def numbers(self) -> tuple[str, ...]:
        """Scalar parameters, which each call may change."""
        return tuple(name for name in self.parameters if name in NUMBERS)

    @property
    def options(self) -> tuple[str, ...]:
        """Parameters that are neither tensors nor numbers."""
        tensors = [a.name for a in self.arguments]
        return tuple(name for name in self.parameters if name not in tensors and name not in NUMBERS)

    @property
    def asked(self) -> frozenset[str]:
        """The arguments that exist only if an option requests them."""
        return frozenset(a.name for a in self.arguments if a.asked is not None)

    def variant(self, values: Mapping[str, object]) -> Variant:
        """The variant for these parameters. Raises VariantPackError if there is none for the options."""
        chosen = tuple(values[name] for name in self.chosen_by)
        if isinstance(self.variants, Variant):
            return replace(self.variants, options=tuple(zip(self.chosen_by, chosen, strict=True)))
        if chosen not in self.variants:
            accepted = " or ".join(map(repr, self.variants))
            raise VariantPackError(f"({', '.join(self.chosen_by)}) is {chosen}; accepted: {accepted}")
        return self.variants[chosen]

    def returned(self, tensors: Mapping[str, torch.Tensor]) -> object:
        """Return value of a call with these tensors: a tuple, one tensor, or None."""
        found = tuple(tensors.get(name) for name in self.results if name in tensors or name in self.asked)
        return found if len(found) > 1 else found[0] if found else None
