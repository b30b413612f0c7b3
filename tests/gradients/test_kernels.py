"""Fused blocks differentiated and run as kernels on the emulator, against torch.autograd in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from graphfuse import data_type, differentiate, heur_mode, norm_forward_phase, reduction_mode
from support import differentiated, graphs
from support.graphs import BF16, FLOAT

pytestmark = pytest.mark.emulate

ROWS, COLUMNS, EPS = 6, 64, 1e-5
INFERENCE = norm_forward_phase.INFERENCE
WHOLE, WEIGHT, COLUMN = (ROWS, COLUMNS), (1, COLUMNS), (ROWS, 1)


@dataclass(frozen=True)
class Block:
    """tensors: shapes of what it reads; those with a gradient in `wrt`. draw(graph, tensors) -> outputs.

    exact(values in float64) -> outputs. backward: how many kernels make the gradients.
    """

    tensors: Mapping[str, tuple[int, ...]]
    draw: Callable
    exact: Callable
    wrt: tuple[str, ...]
    backward: int = 1


def _norm_silu(g, t):
    y, _ = g.rmsnorm(t["x"], t["w"], EPS, norm_forward_phase=INFERENCE)
    return [g.swish(y)]


def _layernorm_gelu(g, t):
    y, _, _ = g.layernorm(t["x"], t["w"], t["b"], EPS, norm_forward_phase=INFERENCE)
    return [g.gelu(y)]


def _softmax(g, t):
    return [g.softmax(g.add(g.mul(t["x"], 0.125), t["mask"]))]


def _l2(g, t):
    length = g.reduction(t["x"], mode=reduction_mode.NORM2).set_dim(list(COLUMN))
    return [g.mul(g.div(t["x"], g.max(length, 1e-12)), t["w"])]


def _cross_entropy(g, t):
    return [g.cross_entropy(t["x"], t["target"], label_smoothing=0.1)[0]]


def _add_norm(g, t):
    total = g.add(t["x"], t["residual"])
    y, _ = g.rmsnorm(total, t["w"], EPS, norm_forward_phase=INFERENCE)
    return [y, total]


def _adaptive(g, t):
    return [g.adalayernorm(t["x"], t["w"], t["b"], EPS, norm_forward_phase=INFERENCE)[0]]


def _exact_loss(x, target):
    loss = functional.cross_entropy(x, target.flatten().long(), reduction="none", label_smoothing=0.1)
    return (loss.unsqueeze(1),)


def _exact_adaptive(x, w, b):
    return (functional.layer_norm(x, (COLUMNS,), eps=EPS) * w + b,)


def _exact_add_norm(x, residual, w):
    return functional.rms_norm(x + residual, (COLUMNS,), eps=EPS) * w, x + residual


BLOCKS = {
    "rmsnorm, silu": Block(
        {"x": WHOLE, "w": WEIGHT},
        _norm_silu,
        lambda x, w: (functional.silu(functional.rms_norm(x, (COLUMNS,), eps=EPS) * w),),
        ("x", "w"),
    ),
    "layernorm, gelu": Block(
        {"x": WHOLE, "w": WEIGHT, "b": WEIGHT},
        _layernorm_gelu,
        lambda x, w, b: (functional.gelu(functional.layer_norm(x, (COLUMNS,), eps=EPS) * w + b),),
        ("x", "w", "b"),
    ),
    "masked softmax": Block(
        {"x": WHOLE, "mask": WHOLE}, _softmax, lambda x, mask: ((x * 0.125 + mask).softmax(1),), ("x",)
    ),
    "L2": Block(
        {"x": WHOLE, "w": WEIGHT},
        _l2,
        lambda x, w: (functional.normalize(x, dim=1, eps=1e-12) * w,),
        ("x", "w"),
    ),
    "cross entropy": Block({"x": WHOLE, "target": COLUMN}, _cross_entropy, _exact_loss, ("x",)),
    "add, rmsnorm": Block(
        {"x": WHOLE, "residual": WHOLE, "w": WEIGHT}, _add_norm, _exact_add_norm, ("x", "residual", "w")
    ),
    "softmax of a norm, gated": Block(
        {"x": WHOLE, "w": WEIGHT},
        lambda g, t: [g.mul(g.softmax(g.rmsnorm(t["x"], t["w"], EPS, norm_forward_phase=INFERENCE)[0]), t["x"])],
        lambda x, w: ((functional.rms_norm(x, (COLUMNS,), eps=EPS) * w).softmax(1) * x,),
        ("x", "w"),
        backward=2,
    ),
    "adalayernorm": Block(
        {"x": (3, 5, COLUMNS), "w": (3, 1, COLUMNS), "b": (3, 1, COLUMNS)},
        _adaptive,
        _exact_adaptive,
        ("x", "w", "b"),
        backward=2,
    ),
    "adalayernorm of one sample": Block(
        {"x": (1, 5, COLUMNS), "w": (1, 1, COLUMNS), "b": (1, 1, COLUMNS)}, _adaptive, _exact_adaptive, ("x", "w", "b")
    ),
    "adalayernorm of rows": Block({"x": WHOLE, "w": WHOLE, "b": WHOLE}, _adaptive, _exact_adaptive, ("x", "w", "b")),
}


def planned(graph) -> list[str]:
    """Engines of a built graph's parts."""
    return [part.engine.name for part in graph._planner.at(0).parts]


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=lambda d: d.name)
@pytest.mark.parametrize("name", BLOCKS)
def test_against_float64(name, dtype):
    block = BLOCKS[name]
    g = graphs.new(device="emulator", io_data_type=dtype)
    kinds = {"target": data_type.INT64, "w": FLOAT, "b": FLOAT}
    t = {n: g.tensor(list(dim), data_type=kinds.get(n, dtype), name=n) for n, dim in block.tensors.items()}
    outputs = [o.set_output().set_name(f"out{n}") for n, o in enumerate(block.draw(g, t))]
    for out in outputs:
        out.set_data_type(FLOAT if name == "cross entropy" else dtype)
    made = differentiate(g, outputs, list(block.wrt))

    source = graphs.generator("cpu", 5)
    values = {
        n: torch.randn(dim, generator=source).to(graphs.TORCH.get(kinds.get(n, dtype)))
        for n, dim in block.tensors.items()
    }
    if "target" in values:
        values["target"] = torch.randint(0, COLUMNS, COLUMN, generator=source)
    if "mask" in values:
        values["mask"] = torch.where(values["mask"] > 1, -torch.inf, 0.0).to(values["mask"].dtype)
    given = [values[n].clone().requires_grad_() for n in block.wrt]
    fixed = {n: v for n, v in values.items() if n not in block.wrt}
    got = differentiated.function(made, fixed, [heur_mode.A])(*given)
    assert planned(made.forward) == ["rows"], made.forward.explain()
    assert planned(made.backward) == ["rows"] * block.backward, made.backward.explain()

    wide = {n: v.double().requires_grad_(n in block.wrt) for n, v in values.items()}
    want = block.exact(*wide.values())
    grads = [torch.randn(o.shape, generator=source).to(o.dtype) for o in got]
    torch.autograd.backward(got, grads)
    torch.autograd.backward(want, [grad.double() for grad in grads])
    rounded = dtype is BF16 and any(out.get_name() in made.kept for out in outputs)
    for one, other in zip((*got, *(v.grad for v in given)), (*want, *(wide[n].grad for n in block.wrt)), strict=True):
        close = 2.0**-7 if one.dtype is torch.bfloat16 or rounded else 4e-6
        torch.testing.assert_close(one.double(), other, rtol=close, atol=close * other.detach().abs().mean().item())
