"""What a compiled function makes of inputs, held against eager mode and float64."""

import torch

from support.random_functions import DOUBLE, TYPES, RandomFunction

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 1e-15}


def differences(found: RandomFunction, compiled, gradients: bool, extents, strides: bool = True) -> list[str]:
    """Whatever a compiled function does otherwise than eager mode does, for rows of each of these extents.

    Outputs that are exact are equal. Others, and gradients, have at most a multiple of the error that eager mode has
    against float64, and of the rounding of the widest type on their way. strides: whether those of outputs count.
    """
    trained = found.trained if gradients else ()
    own, wide, said = found.function(), found.function(DOUBLE), []
    for rows in extents:
        want = _Made.by(own, found.inputs(rows), trained)
        exact = _Made.by(wide, found.inputs(rows, double=True), trained)
        got = _Made.by(compiled, found.inputs(rows), trained)
        said += _described(got, want, strides)
        for number, is_exact in enumerate(found.exact):
            one, other = got.outputs[number], want.outputs[number]
            if one.shape == other.shape:
                bound = 0.0 if is_exact or not one.is_floating_point() else _rounding(found)
                said.append(_difference(f"output {number}", one, other, exact.outputs[number], bound))
        for name in want.gradients.keys() & got.gradients.keys():
            reference = exact.gradients.get(name, want.gradients[name])
            said.append(
                _difference(f"gradient {name}", got.gradients[name], want.gradients[name], reference, _rounding(found))
            )
    return [line for line in said if line]


class _Made:
    def __init__(self, outputs, gradients, requires_grad):
        self.outputs, self.gradients, self.requires_grad = outputs, gradients, requires_grad

    @staticmethod
    def by(function, given, trained):
        """Outputs, and gradients by input, of which None are left out."""
        leaves = {name: _leaf(given[name]) for name in trained}
        outputs = function(*(given | leaves).values())
        generator, pairs = torch.Generator().manual_seed(0), []
        for out in outputs if trained else ():
            grad = torch.randn(out.shape, generator=generator)
            pairs += [(out, grad.to(out.dtype))] if out.grad_fn is not None else []
        if pairs:
            torch.autograd.backward(*(list(t) for t in zip(*pairs, strict=True)))
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return _Made([out.detach() for out in outputs], found, [out.requires_grad for out in outputs])


def _leaf(t):
    """A tensor of its own with a tensor's values and strides."""
    made = t.clone() if 0 in t.stride() else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)
    return made.requires_grad_()


def _described(got, want, strides):
    kinds = [[(t.dtype, t.shape, t.stride() if strides else ()) for t in made.outputs] for made in (got, want)]
    said = [f"outputs are {kinds[0]}; eager mode: {kinds[1]}"] if kinds[0] != kinds[1] else []
    if got.requires_grad != want.requires_grad:
        said.append(f"outputs require gradients: {got.requires_grad}; eager mode: {want.requires_grad}")
    if got.gradients.keys() != want.gradients.keys():
        said.append(f"gradients are of {[*got.gradients]}; eager mode: {[*want.gradients]}")
    kinds = [{n: (g.dtype, g.shape) for n, g in made.gradients.items()} for made in (got, want)]
    return [
        *said,
        *(f"gradient {n} is {kinds[0][n]}" for n in kinds[0].keys() & kinds[1].keys() if kinds[0] != kinds[1]),
    ]


def _rounding(found):
    types = {TYPES[found.types[name]] for name in found.names} | {TYPES[t] for t in TYPES if t in found.source}
    return max(map(ROUNDING.__getitem__, types))


def _difference(what, got, want, exact, rounding):
    one, other, reference = (t.double() for t in (got, want, exact))
    if not rounding:
        return (
            ""
            if torch.equal(torch.nan_to_num(one, 7.0), torch.nan_to_num(other, 7.0))
            else f"{what}: not the same bits"
        )
    finite = other.isfinite() & reference.isfinite()
    if not torch.equal(torch.nan_to_num(one[~finite], 7.0), torch.nan_to_num(other[~finite], 7.0)):
        return f"{what}: other values where eager mode has none"
    one, other, reference = one[finite], other[finite], reference[finite]
    error, allowed = (one - reference).norm(), 3 * (other - reference).norm() + 4 * rounding * reference.norm() + 1e-6
    return "" if error <= allowed else f"{what}: error {error:.2e}; accepted: {allowed:.2e}"
