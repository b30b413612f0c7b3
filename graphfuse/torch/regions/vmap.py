"""vmap of operators that take lists of tensors: a call for each sample. torch's own loop supports no lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphfuse.base.errors import VariantPackError
from graphfuse.functional.operator import LIBRARY
from graphfuse.runtime import torch_private

Tensors = Sequence[torch.Tensor | None]


def register(operator: torch._ops.OpOverload) -> None:
    """Registers how an operator (tensors, *others), which returns a list, runs under vmap, and under autograd's own
    vmap for ``is_grads_batched``."""

    def rule(info, in_dims, tensors, *others):
        dims = in_dims[0] or (None,) * len(tensors)
        made = _each(lambda one: operator(one, *others), tensors, dims, info.batch_size)
        return made, [0] * len(made)

    torch.library.register_vmap(operator, rule, lib=LIBRARY)
    batches = torch_private.batches_of_gradients()
    if batches is None:
        return
    split, join = batches

    def kernel(tensors, *others):
        whole = [split(t) for t in tensors]
        dims = [None if one is t else 0 for one, t in zip(whole, tensors, strict=True)]
        count = next(t.shape[0] for t, dim in zip(whole, dims, strict=True) if dim == 0)
        return [join(t) for t in _each(lambda one: operator(one, *others), whole, dims, count)]

    LIBRARY.impl(operator, kernel, "Batched")


def _each(
    call: Callable[[Tensors], Sequence[torch.Tensor]], tensors: Tensors, dims: Sequence[int | None], count: int
) -> list[torch.Tensor]:
    """Tensors that a call returns for each sample, stacked. dims: the sample dimension of each tensor, or None."""
    if not count:
        raise VariantPackError("an operator is mapped over 0 samples; accepted: 1 or more")
    pairs = [*zip(tensors, dims, strict=True)]
    made = [call([t if dim is None else t.select(dim, n) for t, dim in pairs]) for n in range(count)]
    return [torch.stack(each) for each in zip(*made, strict=True)]
