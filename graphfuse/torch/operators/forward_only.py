"""Operators without gradients: what models compute in inference, rounded where they round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphfuse.functional.declaration import Variant
from graphfuse.torch.operators.step import called, defined


@dataclass(frozen=True)
class ForwardOnly:
    """An operator that autograd takes no notice of: results have no gradient.

    tensors: names of what it takes before its numbers. run: calls it.
    """

    tensors: tuple[str, ...]
    run: Callable[..., object]


def forward_only(name: str, variant: Variant, numbers: Sequence[str]) -> ForwardOnly:
    """The operator ``graphfuse::NAME`` of the tensors that a variant reads, and of numbers."""
    step = defined(name, variant, numbers)
    names = tuple(a.name for a in variant.arguments if not a.written)
    return ForwardOnly(names, called(step.operator, step.function))
