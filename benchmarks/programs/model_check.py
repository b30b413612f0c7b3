"""Whether a model run another way computes what it did: outputs, and in a training step the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FACTOR, SLACK = 1.25, 2.0**-8
"""A result may be FACTOR times as far from float32's as the unmodified model's, and SLACK of its size more: one
rounding to bfloat16. Farness is the norm of the difference."""

Values = dict[str, "torch.Tensor"]


def upstream(output: torch.Tensor) -> torch.Tensor:
    """The gradient that a step begins with, as a loss would have it: the same values each time."""
    import torch

    generator = torch.Generator(output.device).manual_seed(9)
    drawn = torch.randn(output.shape, device=output.device, generator=generator)
    return drawn.bfloat16().to(output.dtype)


def values(
    call: Callable[..., torch.Tensor], module: torch.nn.Module, inputs: Sequence[torch.Tensor], gradients: bool
) -> Values:
    """What a call makes, by name. module: whose parameters the call computes with."""
    import torch

    with torch.set_grad_enabled(gradients):
        output = call(*inputs)
    found = {"output": output.detach().clone()}
    if gradients:
        output.backward(upstream(output))
        found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
        module.zero_grad(set_to_none=True)
    return found


def exact(module: torch.nn.Module, inputs: Sequence[torch.Tensor], gradients: bool) -> Values:
    """The same in float32, by a copy of the unmodified module."""
    import copy

    import torch

    wide = copy.deepcopy(module).float()
    with torch.backends.cudnn.flags(allow_tf32=False):
        return values(wide, wide, [x.float() for x in inputs], gradients)


def distances(found: Values, exact: Values) -> dict[str, float]:
    """From the exact ones, over their size."""
    return {
        name: float((found[name].float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
        for name, wanted in exact.items()
    }


def wrong(found: Values, exact: Values, own: Mapping[str, float]) -> str | None:
    """Why values are wrong; None if they are not. own: the distances of the unmodified model's."""
    if found.keys() != exact.keys():
        return f"{', '.join(sorted(found.keys() ^ exact.keys()))}: only one of it and the unmodified model has that"
    if shapes := [name for name in exact if found[name].shape != exact[name].shape]:
        name = shapes[0]
        return f"{name} has shape {(*found[name].shape,)}; expected: {(*exact[name].shape,)}"
    far = {name: d for name, d in distances(found, exact).items() if not d <= accepted(own[name])}  # NaN is too far
    if not far:
        return None
    name = max(far, key=lambda n: far[n] / accepted(own[n]) if far[n] == far[n] else float("inf"))
    return (
        f"wrong {name}: {far[name]:.3g} of its size away from float32's, the unmodified model's {own[name]:.3g}; "
        f"accepted: {accepted(own[name]):.3g} ({len(far)} of {len(exact)} values are wrong)"
    )


def accepted(own: float) -> float:
    return FACTOR * own + SLACK
