"""Convolutions by cuDNN's engine: values, the choice of plans, and when torch's kernels run instead."""

import pytest
import torch
from torch.nn import functional

from graphfuse.runtime import timing
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.operators import convolution
from support.video_autoencoders import drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why := convolution.why_not_engine()), reason=f"cuDNN's engine: {why}"),
]

CASES = {  # shapes of x and of the weight, options
    "image": ((2, 64, 20, 36), (96, 64, 3, 3), {"padding": 1}),
    "image, no padding": ((1, 64, 20, 36), (32, 64, 1, 1), {}),
    "stride and dilation": ((1, 32, 33, 40), (64, 32, 3, 3), {"stride": (2, 1), "padding": (2, 3), "dilation": (1, 2)}),
    "three channels": ((1, 96, 24, 24), (3, 96, 3, 3), {"padding": 1}),
    "frames": ((1, 64, 5, 12, 20), (64, 64, 3, 3, 3), {"padding": (0, 1, 1)}),
    "frames mixed": ((1, 64, 6, 12, 20), (128, 64, 3, 1, 1), {"stride": (2, 1, 1)}),
}


@pytest.fixture(autouse=True)
def nothing_known(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(convolution, "_plans", {})
    return tmp_path


def channels_last(t: torch.Tensor, dtype=torch.bfloat16) -> torch.Tensor:
    return t.to("cuda", dtype).contiguous(memory_format=convolution.FORMATS[t.dim()])


def of(case: str, dtype=torch.bfloat16) -> tuple[tuple[torch.Tensor, ...], dict]:
    x, weight, options = CASES[case]
    return (
        channels_last(drawn(*x), dtype),
        channels_last(drawn(*weight) / 24, dtype),
        drawn(weight[0]).to("cuda", dtype),
    ), options


def exact(x, weight, bias, **options) -> torch.Tensor:
    convolved = functional.conv2d if x.dim() == 4 else functional.conv3d
    return convolved(x.double(), weight.double(), None if bias is None else bias.double(), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_values_and_layout(case, has_bias, dtype):
    (x, weight, bias), options = of(case, dtype)
    bias = bias if has_bias else None
    got, again = (convolution.convolution(x, weight, bias, **options) for _ in range(2))
    want = exact(x, weight, bias, **options)
    assert got.dtype is dtype and got.is_contiguous(memory_format=convolution.FORMATS[x.dim()])
    assert float((got.double() - want).norm() / want.norm()) < torch.finfo(dtype).eps and torch.equal(got, again)
    (planned,) = convolution._plans.values()
    assert planned is not None or case == "three channels"


def test_the_fastest_plan_is_kept_for_other_processes(nothing_known, monkeypatch):
    (x, weight, bias), options = of("image")
    want = convolution.convolution(x, weight, bias, **options)
    (kept,) = nothing_known.glob("*.json")
    assert '"cudnn"' in kept.read_text()
    convolution._plans.clear()
    monkeypatch.setattr(timing, "_between", lambda *_: pytest.fail("it was timed before"))
    assert torch.equal(convolution.convolution(x, weight, bias, **options), want)


def test_nothing_is_timed_while_a_graph_is_captured():
    (x, weight, bias), options = of("image")
    functional.conv2d(x, weight, bias, **options)  # torch loads its kernels
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        made = convolution.convolution(x, weight, bias, **options)
    assert not convolution._plans
    captured.replay()
    want = convolution.convolution(x, weight, bias, **options)  # by the engine
    assert len(convolution._plans) == 1
    assert float((made.double() - want.double()).norm() / want.double().norm()) < 2**-7
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        made = convolution.convolution(x, weight, bias, **options)
    captured.replay()
    assert torch.equal(made, want)


@pytest.mark.parametrize("how", ["deterministic", "off", "not aligned", "other layout", "float32"])
def test_torchs_kernels_run(how, monkeypatch):
    (x, weight, bias), options = of("image", torch.float32 if how == "float32" else torch.bfloat16)
    if how == "deterministic":
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    elif how == "off":
        monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    elif how == "not aligned":
        storage = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:]
        x = torch.as_strided(storage, x.shape, x.stride()).copy_(x)
    elif how == "other layout":
        x = x.contiguous()
    got = convolution.convolution(x, weight, bias, **options)
    assert torch.equal(got, functional.conv2d(x, weight, bias, **options))


def test_torchs_errors_are_raised():
    (x, weight, bias), _ = of("image")
    with pytest.raises(RuntimeError, match="[Kk]ernel size"):
        convolution.convolution(x[:, :, :2, :2].contiguous(memory_format=torch.channels_last), weight, bias)
    with pytest.raises(RuntimeError, match="channels"):
        convolution.convolution(x[:, :32].contiguous(memory_format=torch.channels_last), weight, bias)


class Model(torch.nn.Module):
    """Convolutions that the engine takes, and some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(32, 64, 3, padding=1)
        self.grouped = torch.nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.same = torch.nn.Conv2d(64, 64, 3, padding="same")
        self.reflected = torch.nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect")
        self.no_bias = torch.nn.Conv2d(64, 64, 3, bias=False)
        self.last = torch.nn.Conv2d(64, 16, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.no_bias(self.reflected(self.same(self.grouped(self.first(x))))))


def test_modules():
    torch.manual_seed(1)
    model = Model().to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    x = channels_last(drawn(1, 32, 40, 40))
    with torch.no_grad():
        want, plain = model.double()(x.double()), model.bfloat16().first(x.contiguous())
        report = fuse(model)
        assert {e.name for e in report.replaced} == {"first", "last"}
        got = model(x)
        assert float((got.double() - want).norm() / want.norm()) < 2**-6 and len(convolution._plans) == 2
        assert torch.equal(model.first(x.contiguous()), plain)
    loss = model(x).float().sum()  # with gradients: torch's
    loss.backward()
    assert model.first.weight.grad is not None and len(convolution._plans) == 2
    assert set(unfuse(model)) == {"first", "last"}
