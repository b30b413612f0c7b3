"""An operator on DTensors and on whole tensors, side by side."""

import torch

from support.sharded.placed import dtensor
from support.training_calls import OPERATORS, SCALES, grads


def tensors(mesh, name, shape, dtype=torch.float32, heads=None):
    made, generator = {}, torch.Generator().manual_seed(3)
    for argument in OPERATORS[name].tensors:
        of = (heads or shape[-1:]) if argument in SCALES else shape
        t = torch.randn(of, generator=generator).to(mesh.device_type, dtype)
        made[argument] = t.requires_grad_()
    return made


def both(mesh, name, shape, placement, scales=None, dtype=torch.float32, heads=None):
    """Results and gradients of a call on DTensors, and of the same on whole tensors, by name. placement: of tensors
    with rows. scales: of weight and bias."""
    operator, found = OPERATORS[name], []
    whole = tensors(mesh, name, shape, dtype, heads)
    placed = {
        n: dtensor(mesh, t, *([scales] if n in SCALES and scales else [] if n in SCALES else [placement]))
        for n, t in whole.items()
    }
    outer = grads(operator.run(whole))
    for given, of in ((placed, [dtensor(mesh, g, placement) for g in outer]), (whole, outer)):
        made = operator.run(given)
        found.append(dict(zip(("y", "total"), made, strict=False)) | gradients_of(made, given, of))
    return found


def gradients_of(made, given, outer):
    """As the operators return them: torch 2.11 gathers one that it keeps for two tensors."""
    return {f"d{n}": t for n, t in zip(given, torch.autograd.grad(made, [*given.values()], outer), strict=True)}
