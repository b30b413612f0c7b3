"""The op layernorm: values on every engine, what it makes in each phase, what it refuses."""

import pytest
import torch

from graphfuse import GraphValidationError, heur_mode, norm_forward_phase
from support import graphs
from support.graphs import BF16, FLOAT

EPS = 1e-5
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE


def exact(x, scale, bias, axes):
    """(Y, mean, inverse standard deviation) in float64, by torch's own variance."""
    x = x.double()
    mean = x.mean(axes, keepdim=True)
    inverse = (x.var(axes, unbiased=False, keepdim=True) + EPS) ** -0.5
    y = (x - mean) * inverse
    y = y if scale is None else y * scale.double()
    return y if bias is None else y + bias.double(), mean, inverse


@pytest.mark.emulate
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("scaled, biased", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape, weight", [((5, 96), (1, 96)), ((1, 1000), (1000,)), ((2, 3, 4, 16), (1, 1, 4, 16))])
def test_values(shape, weight, scaled, biased, device):
    weight = weight if scaled else (*(1,) * (len(shape) - 1), shape[-1])
    axes = tuple(a - len(weight) for a, e in enumerate(weight) if e != 1)
    g, source = graphs.new(device=device), graphs.generator("cpu", sum(shape))
    given = {"x": (torch.randn(shape, generator=source) * 3 + 40).bfloat16()}
    given |= {"scale": torch.randn(weight, generator=source).bfloat16()} if scaled else {}
    given |= {"bias": torch.randn(weight, generator=source).bfloat16()} if biased else {}
    tensors = {name: g.tensor_like(t, name=name) for name, t in given.items()}
    made = g.layernorm(
        tensors["x"], tensors.get("scale"), tensors.get("bias"), EPS, norm_forward_phase=TRAINING, name="norm"
    )
    assert [t.get_name() for t in made] == ["norm::Y", "norm::MEAN", "norm::INV_VARIANCE"]
    for t in made:
        t.set_output().set_data_type(FLOAT)
    g.build([heur_mode.FALLBACK if device == "cpu" else heur_mode.OPENSOURCE])
    wanted = exact(given["x"], given.get("scale"), given.get("bias"), axes)
    outputs = {t: torch.empty(e.shape) for t, e in zip(made, wanted, strict=True)}
    g.execute({tensors[name]: t for name, t in given.items()} | outputs)
    for t, e in zip(made, wanted, strict=True):
        torch.testing.assert_close(outputs[t].double(), e, rtol=2e-6, atol=1e-5, msg=lambda m, t=t: f"{t}: {m}")


def test_a_large_mean_costs_the_variance_nothing():
    """The sum of squares less the square of the sum would have no digit left."""
    g = graphs.new(device="emulator")
    x = torch.randn(4, 256, generator=graphs.generator("cpu", 1)) + 4096.0
    X = g.tensor_like(x, name="x")
    y = g.layernorm(X, epsilon=0.0, norm_forward_phase=INFERENCE)[0].set_output()
    g.build([heur_mode.OPENSOURCE])
    out = torch.empty(4, 256)
    g.execute({X: x, y: out})
    torch.testing.assert_close(out.double(), exact(x, None, None, (1,))[0], rtol=0, atol=2e-3)


def test_inference_makes_no_statistics():
    g = graphs.new()
    x = g.tensor([4, 64], data_type=BF16)
    assert g.layernorm(x, epsilon=EPS, norm_forward_phase=INFERENCE)[1:] == [None, None]


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(epsilon=EPS), "norm_forward_phase"),
        (dict(epsilon=EPS, norm_forward_phase=norm_forward_phase.NOT_SET), "NOT_SET; accepted: INFERENCE, TRAINING"),
        (dict(scale=[1, 32], epsilon=EPS, norm_forward_phase=INFERENCE), "scale must have the rank of input"),
        (dict(bias=[1, 32], epsilon=EPS, norm_forward_phase=INFERENCE), "bias must have the last axis' shape"),
        (dict(norm_forward_phase=INFERENCE), "epsilon"),
    ],
)
def test_what_is_refused(given, said):
    g = graphs.new()
    x = g.tensor([4, 64], data_type=BF16, name="x")
    given = {k: g.tensor(v, data_type=BF16) if isinstance(v, list) else v for k, v in given.items()}
    with pytest.raises((GraphValidationError, TypeError), match=said):
        g.layernorm(x, **given)[0].set_output()
        g.validate()
