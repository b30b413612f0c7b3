"""What a function is, as data: its parameters, its tensors, its graph for each choice of options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphfuse.errors import VariantPackError
from graphfuse.functional.argument import Argument
from graphfuse.functional.drawing import Drawing

NUMBERS = frozenset({"eps"})
"""Parameters that are numbers, passed by value: they tell no problems apart."""


@dataclass(frozen=True, eq=False)
class Variant:
    """What a function is for one choice of its options: its tensors, each after those its shape depends on, and its
    graph."""

    arguments: tuple[Argument, ...]
    draw: Callable[[Drawing], None]


@dataclass(frozen=True, eq=False)
class Function:
    """One function. parameters: all, in order, some with defaults. numbers: those that each call may change.
    options: those that are neither tensors nor numbers.

    variants: by the values of the options named in `chosen_by`. results: the arguments that are returned, None for
    one that was not asked for. Arguments that are no parameters are allocated.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: Mapping[str, object]
    chosen_by: tuple[str, ...]
    variants: Mapping[tuple[object, ...], Variant]
    results: tuple[str, ...]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Those of any variant: names, and which are written and optional, are the same in all."""
        return next(iter(self.variants.values())).arguments

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(name for name in self.parameters if name in NUMBERS)

    @property
    def options(self) -> tuple[str, ...]:
        tensors = [a.name for a in self.arguments]
        return tuple(name for name in self.parameters if name not in tensors and name not in NUMBERS)

    @property
    def asked(self) -> frozenset[str]:
        """The arguments that an option asks for."""
        return frozenset(a.name for a in self.arguments if a.asked is not None)

    def variant(self, values: Mapping[str, object]) -> Variant:
        chosen = tuple(values[name] for name in self.chosen_by)
        if chosen not in self.variants:
            accepted = " or ".join(map(repr, self.variants))
            raise VariantPackError(f"({', '.join(self.chosen_by)}) is {chosen}; accepted: {accepted}")
        return self.variants[chosen]

    def returned(self, tensors: Mapping[str, torch.Tensor]) -> object:
        found = tuple(tensors.get(name) for name in self.results if name in tensors or name in self.asked)
        return found if len(found) > 1 else found[0] if found else None
