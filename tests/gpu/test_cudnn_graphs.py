"""Whole graphs by cuDNN's engine on a GPU, beside our kernels and the reference.

Skipped where nvidia-cudnn-frontend or libcudnn is missing.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from graphfuse import heur_mode
from graphfuse.planning import registry as plugins
from support import graphs, whole
from support.on_cudnn import ENGINES, INFERENCE, new, run, takes, values

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cudnn")]


@st.composite
def layers(draw):
    """Some of: a product with an epilogue, a norm, softmax, on [2, 64, 128] in bfloat16."""
    kinds = st.sampled_from(["product", "norm", "softmax"])
    middle = draw(st.lists(kinds, max_size=3))
    return [
        (kind, tuple(draw(st.lists(st.sampled_from(["bias", "relu", "swish", "add"]), max_size=3))))
        for kind in ["product", *middle]
    ]


def layered(found, engines, modes=(heur_mode.A,)):
    """Each layer's result is stored as bfloat16, as the next one's input. -> the results, the engines of the nodes"""
    case = new()
    x = values([2, 64, 128])
    t, stored = case.tensor(x, "x"), []
    for n, (kind, after) in enumerate(found):
        if kind == "product":
            t = case.g.matmul(t, case.tensor((values([1, 128, 128], seed=n) * 0.09).bfloat16(), f"w{n}"))
        elif kind == "norm":
            t = case.g.rmsnorm(
                t, case.tensor(values([1, 1, 128], seed=n), f"s{n}"), 1e-3, norm_forward_phase=INFERENCE
            )[0]
        else:
            t = case.g.softmax(t)
        for m, name in enumerate(after):
            if name in ("bias", "add"):
                shape = [1, 1, 128] if name == "bias" else [2, 64, 128]
                t = getattr(case.g, name)(t, case.tensor(values(shape, seed=20 * n + m), f"{name}{n}_{m}"))
            else:
                t = getattr(case.g, name)(t)
        case.output(t, x, f"out{n}")
        stored.append(f"out{n}")
    run(case, modes, engines)
    return case, [case.pack[name] for name in stored]


def exactly(found, case):
    """Each layer in float64, from what the one before it stored."""
    t = case.pack["x"].double()
    for n, (kind, after) in enumerate(found):
        p = {name: data.double() for name, data in case.pack.items()}
        if kind == "product":
            t = t @ p[f"w{n}"]
        elif kind == "norm":
            t = t * (t.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * p[f"s{n}"]
        else:
            t = t.softmax(-1)
        for m, name in enumerate(after):
            t = {"relu": torch.relu, "swish": F.silu}[name](t) if name in ("relu", "swish") else t + p[f"{name}{n}_{m}"]
        yield t
        t = p[f"out{n}"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(found=layers())
def test_random_layers_by_cudnn_by_kernels_and_by_the_reference(found):
    for engines in (ENGINES, ["rows", *ENGINES], ["rows", "reference"], ["reference"]):
        case, results = layered(found, engines)
        products = {e for name, e in takes(case.g).items() if name.startswith("matmul")}
        assert products == {"cudnn" if "cudnn" in engines else "reference"}, case.g.explain()
        for got, exact in zip(results, exactly(found, case), strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graph=whole.drawn(max_ops=8), mode=st.sampled_from([heur_mode.A, heur_mode.B, heur_mode.FALLBACK]))
def test_any_graph_in_float32(graph, mode):
    """Products are the reference engine's; convolutions and norms cuDNN's, where it has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHFUSE_CUDNN", "on")
        plugins.forget()
        graphs.check_drawn(graph, [mode], "cuda")
    plugins.forget()
