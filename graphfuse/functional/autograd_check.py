"""Check for written tensors whose changes autograd would have to record."""

from collections.abc import Mapping

import torch

from graphfuse.base.errors import VariantPackError


def check_written(written: Mapping[str, object]) -> None:
    """Raises VariantPackError for a tensor that requires a gradient, while gradients are on. written: tensors by
    argument."""
    if not torch.is_grad_enabled():
        return
    for name, t in written.items():
        if isinstance(t, torch.Tensor) and t.requires_grad:
            raise VariantPackError(
                f"{name} requires a gradient and would be written, which autograd does not see; accepted: tensors that "
                "require none, or all under torch.no_grad(); graphfuse.torch has functions with gradients"
            )
