"""Graphs of functions as make_fx and Dynamo record them, and what the functions are called with."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

HIDDEN = 64
FULL = torch.float32


def full(dtype, seed=0):
    return torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vector(dtype, seed=5):
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def samples(seed):
    return torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(seed))


def given(names, dtype):
    """x, r: full tensors. w, b: vectors of the same type; W: one of float32. s, t: of samples, float32."""
    make = {
        "x": lambda: full(dtype),
        "r": lambda: full(dtype, 1),
        "w": lambda: vector(dtype),
        "b": lambda: vector(dtype, 6),
        "W": lambda: vector(FULL),
        "s": lambda: samples(2),
        "t": lambda: samples(3),
    }
    return [make[n]() for n in names]


def recorded(function, tensors, how="aten"):
    """The graph of a function, and what it is called with: Dynamo takes arguments in the order of their use."""
    if how == "aten":
        with torch.no_grad():
            return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors), tensors
    found = []

    def backend(graph, given):
        found.append((graph, given))
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    return found[0]


def as_tuple(made):
    return made if isinstance(made, tuple | list) else (made,)


def _below():
    x = torch.zeros(1, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.clamp(min=0), x)
    return "cmp_lt" if gradient else "cmp_le"


BELOW = _below()
"""The op by which regions clamp: a value that equals its limit has a gradient before torch 2.15."""
ABOVE = BELOW.replace("l", "g")
