"""Which convolutions `fuse` replaces where cuDNN's engine is, and that calls which it does not run stay torch's."""

import contextlib
import copy
import pickle

import pytest
import torch

from graphfuse.functional.prepared import PreparedCall
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.convolutional import convolution_layer
from graphfuse.torch.operators import convolution

pytestmark = pytest.mark.torch

KINDS = {
    "plain": (lambda: torch.nn.Conv2d(4, 6, 3, padding=1), True),
    "frames": (lambda: torch.nn.Conv3d(4, 6, (1, 3, 3), stride=(1, 2, 2), dilation=2), True),
    "no bias": (lambda: torch.nn.Conv2d(4, 6, 3, bias=False), False),
    "groups": (lambda: torch.nn.Conv2d(4, 6, 3, groups=2), False),
    "padding by name": (lambda: torch.nn.Conv2d(4, 6, 3, padding="same"), False),
    "padding of values": (lambda: torch.nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), False),
    "one dimension": (lambda: torch.nn.Conv1d(4, 6, 3), False),
    "transposed": (lambda: torch.nn.ConvTranspose2d(4, 6, 3), False),
    "another class": (lambda: type("Mine", (torch.nn.Conv2d,), {})(4, 6, 3), False),
}


@pytest.fixture
def engine(monkeypatch):
    """As if cuDNN's engine were there."""
    for module in (convolution, convolution_layer):
        monkeypatch.setattr(module, "why_not_engine", lambda: "")


def given(conv: torch.nn.Module, dtype=torch.bfloat16) -> torch.Tensor:
    x = torch.randn(2, 4, *[9] * (conv.weight.dim() - 2)).to(dtype)
    return x.contiguous(memory_format=convolution.FORMATS[x.dim()]) if x.dim() in convolution.FORMATS else x


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, engine):
    make, is_replaced = KINDS[kind]
    conv = make().bfloat16()
    x = given(conv)
    want = conv(x)
    report = fuse(conv)
    assert bool(report.replaced) == ("forward" in vars(conv)) == is_replaced
    assert torch.equal(conv(x), want)  # the CPU has no engine
    conv(x).float().sum().backward()
    assert conv.weight.grad is not None
    assert [*unfuse(conv)] == ([""] if is_replaced else []) and "forward" not in vars(conv)


def test_nothing_is_replaced_without_the_engine(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_CUDNN", "off")
    assert convolution.why_not_engine() == "GRAPHFUSE_CUDNN is off"
    conv = torch.nn.Conv2d(4, 6, 3)
    assert not fuse(conv).entries


def test_copies_and_wrong_calls(engine):
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.ReLU())
    fuse(model)
    x = given(model[0], torch.float32)
    twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(x), model(x)) and torch.equal(stored(x), model(x))
    assert twin[0].forward.__self__ is twin[0]
    with pytest.raises(RuntimeError, match="channels"):
        model(x[:, :3])
    with pytest.raises(TypeError):
        model[0](None)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


@pytest.fixture
def planned(engine, monkeypatch):
    """Plans made since, in place of cuDNN's, as if tensors of the CPU were a GPU's."""
    made = []
    monkeypatch.setattr(convolution, "_plans", {})

    def fastest(*given):
        made.append(given)
        return PreparedCall(lambda *tensors, number=len(made): number, [t for t in given[:3] if t is not None])

    monkeypatch.setattr(convolution, "_fastest", fastest)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(made.append(device)))
    return made


def test_a_plan_is_for_one_layout_and_type(planned):
    x, weight, many = given(torch.nn.Conv2d(4, 6, 3)), torch.randn(6, 4, 3, 3).bfloat16(), torch.randn(64).bfloat16()

    @torch.no_grad()
    def of(*tensors, stride=1):
        kept = convolution.planned(*tensors, stride, 0, 1)
        made = convolution._first(*tensors, stride, 0, 1)
        assert kept in (None, made) and convolution.planned(*tensors, stride, 0, 1) == made
        return made

    first = of(x, weight, many[:6])
    assert planned == [x.device, (x, weight, planned[1][2], 1, 0, 1)] and of(x, weight, many[8:14]) == first
    assert of(x, weight, many[:12:2]) not in (None, first)
    assert of(x, weight, None) not in (None, first)
    assert of(x, weight, many[:5]) is of(x, weight, many[:1]) is None  # torch raises an error
    assert of(x, weight.float(), many[:6]) is of(x, weight, many[:6].float()) is None
    assert of(x, weight, many[:6], stride=[1, 1]) is None
    weight.requires_grad_()
    assert convolution.planned(x, weight, many[:6], 1, 0, 1) is None
    weight.requires_grad_(False)
    with torch.no_grad():
        assert convolution.planned(x, weight, many[:6], 1, 0, 1) == first
        assert convolution.planned(x, weight.float(), many[:6], 1, 0, 1) is None
        assert convolution.planned(x, weight, many[:6].float(), 1, 0, 1) is None
        with torch.autocast("cpu"):
            assert convolution.planned(x, weight, many[:6], 1, 0, 1) is None


@pytest.mark.parametrize("options", [{"stride": (2,)}, {"stride": 0}, {"dilation": 0}, {"padding": -1}])
def test_options_that_torch_repeats_or_refuses(options, engine, monkeypatch):
    monkeypatch.setattr(convolution, "build_fastest", lambda *_: pytest.fail("a plan was asked for"))
    x, weight = given(torch.nn.Conv2d(4, 6, 3)), torch.randn(6, 4, 3, 3).bfloat16()
    options = {"stride": 1, "padding": 0, "dilation": 1} | options
    assert convolution._fastest(x, weight, None, *options.values()) is None


SHAPES = [  # x, weight, stride, padding, dilation
    ((2, 4, 9, 8), (6, 4, 3, 3), 1, 1, 1),
    ((1, 4, 9, 8), (6, 4, 3, 2), (2, 1), (2, 0), (1, 2)),
    ((1, 1, 5, 5), (1, 1, 3, 3), 1, 0, 1),
    ((1, 4, 1, 1), (6, 4, 1, 1), 1, 0, 1),
    ((1, 4, 5, 6, 7), (8, 4, 3, 3, 3), 1, (0, 1, 1), 1),
    ((1, 4, 3, 1, 7), (8, 4, 3, 1, 1), (2, 1, 1), 0, 1),
]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("shape", "filters", "stride", "padding", "dilation"), SHAPES)
def test_the_result_is_torchs_in_shape_and_channels_last(
    shape, filters, stride, padding, dilation, has_bias, engine, monkeypatch
):
    packs = []
    monkeypatch.setattr(convolution, "build_fastest", lambda planner, engine, pack: packs.append((planner, pack)))
    x, weight = (
        torch.randn(s).bfloat16().contiguous(memory_format=convolution.FORMATS[len(s)]) for s in (shape, filters)
    )
    bias = torch.randn(filters[0]).bfloat16() if has_bias else None
    assert convolution._fastest(x, weight, bias, stride, padding, dilation) is None
    convolved = torch.nn.functional.conv2d if x.dim() == 4 else torch.nn.functional.conv3d
    want = convolved(x, weight, bias, stride, padding, dilation)
    ((planner, pack),) = packs
    assert set(pack) == {"x", "weight", "result"} | ({"bias"} if has_bias else set())
    (drawn,) = (t for t in planner.graph.tensors if t.name == "result")
    stride = torch.empty(want.shape, memory_format=convolution.FORMATS[x.dim()]).stride()
    assert (drawn.dim, drawn.stride) == (tuple(want.shape), stride) == (tuple(pack["result"].shape), drawn.stride)
    assert pack["result"].stride() == stride


@pytest.mark.parametrize("how", ["deterministic", "captured"])
def test_torch_measures_nothing_when_the_choice_is_not_free(how, planned, monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(convolution, "why_not_engine", lambda: "it is not there")
    monkeypatch.setattr(convolution, "_LARGE", 0)
    x, weight = given(torch.nn.Conv2d(4, 6, 3)).as_subclass(OnDevice), torch.randn(6, 4, 3, 3).bfloat16()
    measured, own = [], convolution.measured_plans
    monkeypatch.setattr(convolution, "measured_plans", lambda: measured.append(1) or own())
    convolution.convolution(x, weight)
    assert measured
    measured.clear()
    if how == "captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    convolution.convolution(x, weight)
    assert not measured


@pytest.mark.parametrize("is_large", [False, True])
def test_a_convolution_of_parts_runs_its_own_code_for_inputs_that_it_splits(is_large, engine, monkeypatch):
    cogvideox = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_cogvideox")
    conv = cogvideox.CogVideoXSafeConv3d(4, 6, 3).bfloat16().eval()
    x, ran = given(conv), []
    monkeypatch.setattr(convolution_layer, "_is_supported", lambda *_: True)
    monkeypatch.setattr(convolution_layer, "_SPLIT_FROM", x.numel() * 2 + (0 if is_large else 1))
    monkeypatch.setattr(convolution_layer, "searched", lambda *given: ran.append(given) or "the engine's")
    with torch.no_grad():
        want = conv(x)
        assert [e.became for e in fuse(conv).entries] == ["convolution"]
        got = conv(x)
    assert (got == "the engine's" and len(ran) == 1) if not is_large else (torch.equal(got, want) and not ran)
