"""cuDNN's engine on a GPU: each kind of node and epilogue against float64.

Skipped where nvidia-cudnn-frontend or libcudnn is missing.
"""

import pytest
import torch
from torch.nn import functional as F

from graphfuse import heur_mode
from support.graphs import BF16, FLOAT, HALF
from support.on_cudnn import (
    ENGINES,
    EPILOGUES,
    INFERENCE,
    TRAINING,
    all_by_cudnn,
    epilogue,
    hold,
    new,
    run,
    takes,
    values,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cudnn")]


@pytest.mark.parametrize("mode", [heur_mode.A, heur_mode.B, heur_mode.FALLBACK])
@pytest.mark.parametrize("dtype", [BF16, HALF], ids=lambda d: d.name)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["plain", "batched"])
def test_matmul(dtype, batch, mode):
    case = new()
    a, b = values([*batch, 128, 256], dtype), values([*batch, 256, 64], dtype, 1) * 0.0625
    y = case.g.matmul(case.tensor(a, "a", dtype), case.tensor(b, "b", dtype))
    want = case.output(y, a.double() @ b.double(), dtype=dtype)
    run(case, [mode])
    hold(case, want)
    assert mode is not heur_mode.A or takes(case.g) == {"matmul.0": "cudnn"}, case.g.explain()


@pytest.mark.parametrize(("names", "exact"), EPILOGUES.values(), ids=EPILOGUES)
def test_matmul_with_its_epilogue(names, exact):
    case = new()
    a, b = values([2, 128, 256]), values([2, 256, 64], seed=1) * 0.0625
    y = case.g.matmul(case.tensor(a, "a"), case.tensor(b, "b"))
    y, read = epilogue(case, y, names, [2, 128, 64])
    want = case.output(y, exact(a.double() @ b.double(), read))
    run(case)
    hold(case, want)
    all_by_cudnn(case)


@pytest.mark.parametrize("names", [[], ["bias"], ["bias", "relu"], ["bias", "residual"]], ids=" ".join)
@pytest.mark.parametrize("axes", [2, 3])
def test_convolution_with_its_epilogue(axes, names):
    case = new()
    x = values([2, 32, 6, 8, 8][: axes + 2], last=True)
    w = (values([64, 32, *[3] * axes], seed=1, last=True).double() * 0.0625).bfloat16()
    w = w.contiguous(memory_format=torch.channels_last if axes == 2 else torch.channels_last_3d)
    y = case.g.conv_fprop(case.tensor(x, "x"), case.tensor(w, "w"), padding=[1] * axes)
    exact = (F.conv2d if axes == 2 else F.conv3d)(x.double(), w.double(), padding=1)
    y, read = epilogue(case, y, names, list(exact.shape), channels=True)
    exact = exact + read.get("bias", 0) + read.get("residual", 0)
    exact = exact.relu() if "relu" in names else exact
    want = case.output(y, exact, like=values(exact.shape, last=True))
    run(case)
    hold(case, want)
    assert takes(case.g)["conv_fprop.0"] == "cudnn", case.g.explain()


@pytest.mark.parametrize("axes", [2, 3])
def test_terms_of_a_convolutions_sum_are_told_in_one_order(axes):
    """cuDNN has ready-made kernels for one order alone; in any other it would compile some."""
    plans = {}
    for names in (["bias", "residual"], ["residual", "bias"]):
        case = new()
        x = values([2, 64, 6, 8, 8][: axes + 2], last=True)
        w = values([64, 64, *[3] * axes], seed=1, last=True) * 0.0625
        y = case.g.conv_fprop(case.tensor(x, "x"), case.tensor(w, "w"), padding=[1] * axes)
        exact = (F.conv2d if axes == 2 else F.conv3d)(x.double(), w.double(), padding=1)
        y, read = epilogue(case, y, names, list(exact.shape), channels=True)
        want = case.output(y, exact + read["bias"] + read["residual"], like=x)
        run(case)
        hold(case, want)
        all_by_cudnn(case)
        plans[names[0]] = case.g.get_engine_and_knobs_at_index(case.g._planner.selected())
    assert plans["bias"] == plans["residual"]


def test_a_float32_convolution_is_not_rounded():
    case = new()
    x, w = values([2, 16, 8, 8], FLOAT, last=True), values([32, 16, 3, 3], FLOAT, 1, last=True)
    y = case.g.conv_fprop(case.tensor(x, "x", FLOAT), case.tensor(w, "w", FLOAT), padding=[1, 1])
    exact = F.conv2d(x.double(), w.double(), padding=1)
    want = case.output(y, exact, dtype=FLOAT, like=values(exact.shape, FLOAT, last=True))
    run(case)
    hold(case, want, rtol=1e-5, atol=1e-4)


def test_a_float32_product_goes_to_the_reference_engine():
    case = new()
    a, b = values([64, 64], FLOAT), values([64, 64], FLOAT, 1)
    want = case.output(
        case.g.matmul(case.tensor(a, "a", FLOAT), case.tensor(b, "b", FLOAT)), a.double() @ b.double(), dtype=FLOAT
    )
    run(case)
    hold(case, want, rtol=1e-5, atol=1e-4)
    assert takes(case.g) == {"matmul.0": "reference"}
    assert "float32 would be read as TF32" in case.g.explain()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("stats", [False, True], ids=["", "stats"])
def test_sdpa(causal, stats):
    case = new()
    q, k, v = (values([2, 4, 128, 64], HALF, n) for n in range(3))
    o, s = case.g.sdpa(
        *(case.tensor(t, n, HALF) for t, n in ((q, "q"), (k, "k"), (v, "v"))),
        attn_scale=0.125,
        use_causal_mask=causal,
        generate_stats=stats,
    )
    scores = 0.125 * q.double() @ k.double().mT
    if causal:
        scores.masked_fill_(torch.ones(128, 128, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    wanted = [case.output(o, scores.softmax(-1) @ v.double(), dtype=HALF)]
    if stats:
        wanted.append(case.output(s, scores.logsumexp(-1, keepdim=True), "stats", FLOAT))
    run(case)
    hold(case, *wanted)
    all_by_cudnn(case)


@pytest.mark.parametrize("phase", [INFERENCE, TRAINING], ids=lambda p: p.name)
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_norms_of_rows(op, phase):
    case = new()
    x, scale, bias = values([256, 1024]), values([1, 1024], seed=1), values([1, 1024], seed=2)
    exact, wanted = x.double(), []
    given_bias = case.tensor(bias, "bias")
    args = case.tensor(x, "x"), case.tensor(scale, "scale")
    if op == "rmsnorm":
        y, *rest = case.g.rmsnorm(*args, 1e-5, given_bias, norm_forward_phase=phase)
        statistics = []
    else:
        y, *rest = case.g.layernorm(*args, given_bias, 1e-5, norm_forward_phase=phase)
        statistics = [exact.mean(-1, keepdim=True)]
        exact = exact - statistics[0]
    inverse = (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    wanted.append(case.output(y, exact * inverse * scale.double() + bias.double()))
    if phase is TRAINING:
        for n, (t, s) in enumerate(zip(rest, [*statistics, inverse], strict=True)):
            wanted.append(case.output(t, s, f"statistic{n}", FLOAT))
    run(case)
    hold(case, *wanted, atol=2e-2)
    all_by_cudnn(case)


def test_a_norm_is_a_kernels_where_both_are_there():
    case = new()
    x, scale = values([256, 1024]), values([1, 1024], seed=1)
    y = case.g.rmsnorm(case.tensor(x, "x"), case.tensor(scale, "scale"), 1e-5, norm_forward_phase=INFERENCE)[0]
    inverse = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = case.output(y, x.double() * inverse * scale.double())
    run(case, engines=["rows", *ENGINES])
    hold(case, want, atol=2e-2)
    assert takes(case.g) == {"rmsnorm.0": "rows"}
