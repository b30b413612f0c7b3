"""Operators without gradients: what models compute in inference, rounded where they round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.functional.declaration import Variant
from graphfuse.runtime import torch_private
from graphfuse.torch.step import defined

_observed = torch_private.observed()


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
    function, operator = step.function, step.operator

    def run(*values: torch.Tensor | float | None) -> object:
        return operator(*values) if is_dynamo_compiling() or _observed() else function(*values)

    return ForwardOnly(tuple(a.name for a in variant.arguments if not a.written), run)
