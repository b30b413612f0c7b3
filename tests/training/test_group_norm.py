"""fuse of group norms: three kernels make what torch makes, with SiLU where that is the next statement of a forward."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F

from graphfuse.emulator.kernel import EmulatedLauncher
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.planning import kernels
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.operators.channel_kernels import channel_factors, joined_moments
from graphfuse.torch.whole_models import group_norm

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("error::graphfuse.ReferenceEngineWarning")]

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(group_norm, "LEAST", 0)
    monkeypatch.setattr(group_norm, "LEAST_CHANNELS_LAST", 0)


@pytest.fixture
def ran(monkeypatch):
    """Moments that kernels have made since."""
    calls, own = [], group_norm.row_moments
    monkeypatch.setattr(group_norm, "row_moments", lambda *given: calls.append(given) or own(*given))
    return calls


def drawn(*shape, dtype=torch.float32, last=False, seed=1):
    """Far from zero, as what is normalized may be."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 9
    return x.to(dtype).movedim(1, -1).contiguous().movedim(-1, 1) if last else x.to(dtype)


def norm(groups=4, channels=16, dtype=torch.float32):
    torch.manual_seed(0)
    made = torch.nn.GroupNorm(groups, channels, eps=1e-3)
    with torch.no_grad():
        made.weight.normal_()
        made.bias.normal_()
    return made.to(dtype).requires_grad_(False)


def exact(of, x):
    return F.group_norm(x.double(), of.num_groups, of.weight.double(), of.bias.double(), of.eps)


def check(of, x):
    """Twice each: in full, and by the fast paths, in memory that has other numbers behind the moments."""
    wanted = exact(of, x)
    for silu in (False, True, False, True):
        made = group_norm.group_norm(x, of, silu)
        full = F.silu(wanted.to(x.dtype).double()) if silu else wanted
        assert made.dtype is x.dtype and made.stride() == x.stride()
        assert (made - full).abs().max() <= CLOSE[x.dtype] * full.abs().max()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
@pytest.mark.parametrize(
    "shape", [(2, 16, 8, 12), (1, 16, 3, 4, 12), (3, 16, 96), (1, 12, 4, 4), (2, 16, 32, 56)], ids=str
)
def test_exact_in_any_shape_and_layout(shape, last, dtype):
    check(norm(4, shape[1], dtype), drawn(*shape, dtype=dtype, last=last))


@pytest.fixture(params=["of pieces", "of channels"])
def moments_read(request, monkeypatch):
    """What the rows of a group are: the moments of all pieces, or of whole channels, which are combined first."""
    if request.param == "of channels":
        monkeypatch.setattr(group_norm, "_MOST_READ", 0)
    group_norm._views.cache_clear()
    yield request.param
    group_norm._views.cache_clear()


@pytest.fixture
def launched(monkeypatch, plan_on):
    """Launches on the emulator since. None is the reference engine's."""
    plan_on("emulator")
    calls, own = [], EmulatedLauncher.launch
    monkeypatch.setattr(EmulatedLauncher, "launch", lambda *given: calls.append(given) or own(*given))
    monkeypatch.setattr(ReferenceEngine, "run", None)
    return calls


@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 16, 8, 12), 1),
        ((2, 16, 8, 12), 4),
        ((2, 16, 8, 12), 16),
        ((3, 15, 16), 5),
        ((1, 15, 7, 16), 3),
        ((1, 14, 3, 16, 16), 2),
        ((2, 24, 32, 32), 3),
    ],
    ids=str,
)
def test_on_kernels(shape, groups, last, launched, moments_read):
    of, x = norm(groups, shape[1], torch.bfloat16), drawn(*shape, dtype=torch.bfloat16, last=last)
    check(of, x)
    launched.clear()
    group_norm.group_norm(x, of)
    assert len(launched) == (3 if moments_read == "of pieces" else 4)


@pytest.mark.parametrize("shape", [(2, 16, 3, 15), (1, 24, 3, 9, 25), (1, 16, 2, 17)], ids=str)
def test_places_without_a_power_of_two(shape, launched):
    of = norm(4, shape[1], torch.bfloat16)
    check(of, drawn(*shape, dtype=torch.bfloat16, last=True))
    assert launched and group_norm.group_norm(drawn(*shape, dtype=torch.bfloat16), of) is None
    prime = drawn(1, 16, 1, 257, dtype=torch.bfloat16, last=True)
    assert group_norm.group_norm(prime, of) is None


@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
def test_torch_allocates_and_views_and_does_nothing_else(last, launched):
    of, act, x = norm(), torch.nn.SiLU(), drawn(1, 16, 8, 16, last=last)
    group_norm.followed(of, act, x)
    with torch.profiler.profile() as profiled:
        group_norm.followed(of, act, x)
    names = [e.name for e in profiled.events() if e.name.startswith("aten::")]
    assert {*names} == {"aten::as_strided", "aten::empty", "aten::empty_strided"}
    assert len(names) <= 11


@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
def test_no_kernel_is_made_for_another_resolution(last, plan_on, monkeypatch, moments_read):
    sources, own = set(), kernels.compiled

    def compiled(source, *more):
        sources.add(source)
        return own(source, *more)

    plan_on("emulator")
    monkeypatch.setattr(kernels, "compiled", compiled)
    counts = []
    for width in (24, 40, 56):
        group_norm.group_norm(drawn(2, 16, 8, width, last=last), norm(), silu=True)
        counts.append(len(sources))
    if moments_read == "of pieces":
        assert counts == [3, 3, 3]
    else:
        assert counts == [4, 4, 4]


@pytest.mark.parametrize(
    ("places", "channels", "first", "then"),
    [(1 << 18, 128, 4096, None), (1 << 14, 512, 1024, None), (1 << 18, 4096, 1024, 128), (1 << 8, 64, 1024, None)],
)
def test_rows_of_moments_are_short(places, channels, first, then):
    """Of 32 groups. Where a group has many, they are those of a channel, and then of the group's channels."""
    views = group_norm._views((1, channels, places), (channels * places, places, 1), 32)
    assert views.rows[0][-1] == first and (views.channels and views.channels[0][-1]) == then


def test_moments_that_kernels_cannot_number_are_torchs(monkeypatch):
    monkeypatch.setattr(group_norm, "LONGEST", 8)
    group_norm._views.cache_clear()
    assert group_norm.group_norm(drawn(1, 16, 8, 16), norm(groups=2)) is not None
    assert group_norm.group_norm(drawn(1, 16, 8, 80), norm(groups=2)) is None
    group_norm._views.cache_clear()


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_what_is_behind_the_moments_does_not_count(length, device, plan_on):
    plan_on(device)
    means, variances = drawn(2, 3, 64), drawn(2, 3, 64, seed=2).abs()
    mean, variance = means[..., :length].double(), variances[..., :length].double()
    mean, variance = mean.mean(-1, True), (mean.var(-1, correction=0, keepdim=True) + variance.mean(-1, True))
    for t in (means, variances):
        t[..., length:] = float("nan")
    for made, wanted in zip(joined_moments(means, variances, float(length)), (mean, variance), strict=True):
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-5)
    weight, bias = torch.randn(2, 24).unbind() if device == "cpu" else torch.randn(24, 2).unbind(1)
    rows = [t[:, :, None].expand(2, 3, 8, 64) for t in (means, variances)]
    for _ in range(2):  # in full, and by its fast path
        scale, shift = channel_factors(*rows, weight, bias, float(length))
        wanted = variance.rsqrt() * weight.double().view(3, 8)
        torch.testing.assert_close(scale.double(), wanted.flatten(1), rtol=1e-5, atol=1e-5)
        wanted = bias.double().view(3, 8) - mean * wanted
        torch.testing.assert_close(shift.double(), wanted.flatten(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_frames_as_images_are_read_where_they_lie(device, plan_on, ran):
    plan_on(device)
    video, of = drawn(1, 16, 3, 8, 8, dtype=torch.bfloat16), norm(dtype=torch.bfloat16)
    x = video.transpose(1, 2).flatten(0, 1)
    assert x.data_ptr() == video.data_ptr() and not x.is_contiguous()
    made = group_norm.group_norm(x, of)
    assert made.is_contiguous() and ran[0][0].data_ptr() == x.data_ptr()
    torch.testing.assert_close(made.double(), exact(of, x), rtol=2**-7, atol=1e-2)


def test_a_module_that_norms_each_frame(launched):
    mochi = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_mochi")
    of = mochi.MochiChunkedGroupNorm3D(16, num_groups=4, chunk_size=2).bfloat16().requires_grad_(False)
    of.norm_layer = norm(dtype=torch.bfloat16)
    x = drawn(2, 16, 3, 4, 8, dtype=torch.bfloat16, last=True)
    wanted = exact(of.norm_layer, x.transpose(1, 2).flatten(0, 1)).unflatten(0, (2, 3)).transpose(1, 2)
    model = torch.nn.Sequential(of)
    assert [e.became for e in fuse(model).replaced if e.name == "0"] == [group_norm.BECAME]
    with_silu = F.silu(wanted.bfloat16().double())
    for call, full in ((model, wanted), (lambda x: group_norm.followed(of, torch.nn.SiLU(), x), with_silu)):
        made = call(x)
        assert len(launched) == 3 and made.movedim(1, -1).is_contiguous()
        assert (made - full).abs().max() <= 2**-7 * full.abs().max()
        launched.clear()
    parts = []
    of.norm_layer.register_forward_hook(lambda *given: parts.append(given))
    assert (model(x) - wanted).abs().max() <= 2**-7 * wanted.abs().max() and len(parts) == 3


def test_attributes_that_torch_refuses_are_refused_by_torch():
    def groups(of):
        of.num_groups = 5

    def weight(of):
        of.weight = torch.nn.Parameter(torch.ones(8))

    x = drawn(1, 16, 4, 8, last=True)
    for change in (groups, weight):
        of = norm()
        fuse(model := torch.nn.Sequential(of))
        change(of)
        errors = []
        for call in (torch.nn.GroupNorm.forward, lambda _, x, model=model: model(x)):
            with pytest.raises(RuntimeError) as found:
                call(of, x)
            errors.append(str(found.value))
        assert errors[0] == errors[1]


def test_far_from_zero_it_is_as_exact_as_torch():
    of, x = norm(), drawn(1, 16, 32, 32) + 500
    wanted = exact(of, x)
    theirs = (of(x) - wanted).abs().max()
    assert (group_norm.group_norm(x, of) - wanted).abs().max() <= 4 * theirs


class Block(torch.nn.Module):
    """A residual block, with all that may stand around a norm."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.act, self.conv = torch.nn.SiLU(), torch.nn.Conv2d(16, 16, 3, padding=1)
        self.usual = True

    def forward(self, x, *args, scale=1.0, **more):
        before = x
        x = self.norm1(x)
        x = self.act(x)
        for conv in [self.conv]:
            x = conv(x)
        if self.usual:
            if args:
                x = x + args[0]
            x = self.norm2(x)
        else:
            x = x * scale
        x = self.act(x)
        return {"made": x + before}


def test_statements_of_any_forward(ran):
    block = Block().requires_grad_(False)
    x, more = drawn(2, 16, 8, 8), drawn(2, 16, 8, 8, seed=2)
    calls = [
        lambda: block(x)["made"],
        lambda: block(x, more)["made"],
        lambda: block(x=x, scale=2.0)["made"],
    ]
    wanted = [call() for call in calls]
    report = fuse(block)
    assert {e.name: (e.became, e.why) for e in report.replaced if e.name == ""} == {
        "": ("group_norm", "norm1 and act; norm2 and act")
    }
    for call, value in zip(calls, wanted, strict=True):
        ran.clear()
        torch.testing.assert_close(call(), value, rtol=1e-5, atol=1e-5)
        assert len(ran) == 2
    block.usual = False
    ran.clear()
    torch.testing.assert_close(block(x, scale=2.0)["made"], type(block).forward(block, x, scale=2.0)["made"])
    assert len(ran) == 2  # of its own forward's norm, too
    block.usual = True
    unfuse(block)
    ran.clear()
    assert all(torch.equal(call(), value) for call, value in zip(calls, wanted, strict=True))
    assert not ran


class Between(Block):
    def forward(self, x):
        y = self.norm1(x)
        z = self.act(y)
        x = self.norm2(x)
        del y
        x = self.act(x) + z
        return x


def test_what_is_no_pair_is_left_to_its_modules(ran):
    block = Between().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)
    report = fuse(block)
    assert [e.name for e in report.replaced] == ["norm1", "norm2"]
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 2


class Nested(Block):
    def forward(self, x, of=lambda self, x: self(x)):
        made = [self.act(self.norm1(y + 1)) for y in (x, x * 2)]
        return of(self.conv, made[0] + made[1]) + self.act(self.act(self.norm2(self.norm1(x))))


def test_calls_within_calls(ran):
    block = Nested().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)
    (said,) = [e.why for e in fuse(block).replaced if e.name == ""]
    assert {*said.split("; ")} == {"norm1 and act", "norm2 and act"}
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 4


class Other(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = self.act = torch.nn.ReLU()


class Scopes(Block):
    def forward(self, x):
        other = Other()

        def run(self, x):
            x = self.norm1(x)
            x = self.act(x)
            return x

        return self.act(self.norm1(x)) + run(other, x) + (lambda self: self.act(self.norm1(x)))(other)


def test_functions_within_a_forward_are_left(ran):
    block = Scopes().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)
    fuse(block)
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 1


class Inherited(Block):
    def forward(self, x, shift=0.0, *, twice=False):
        x = self.norm1(x)
        x = self.act(x)
        return super().forward(x + shift)["made"] * (2 if twice else 1)


def test_a_forward_keeps_its_class_and_its_defaults():
    block = Inherited().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = [block(x), block(x, 1.0, twice=True)]
    fuse(block)
    for made, value in zip((block(x), block(x, 1.0, twice=True)), wanted, strict=True):
        torch.testing.assert_close(made, value, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"^Inherited.forward\(\) .*'thrice'"):
        block(x, thrice=True)


def test_modules_in_a_row(ran):
    model = torch.nn.Sequential(
        norm(), torch.nn.SiLU(), norm(), norm(), torch.nn.SiLU(), torch.nn.Identity(), norm()
    ).requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = model(x)
    (said,) = [e.why for e in fuse(model).replaced if e.name == ""]
    assert said == "0 and 1; 3 and 4"
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 4
    model[1].register_forward_hook(lambda module, given, made: made * 0)
    assert model(x).unique().numel() <= 16
    unfuse(model)
    assert "forward" not in vars(model)


class OfRows(torch.nn.Module):
    """Not straight, with norms of rows."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = torch.nn.RMSNorm(32), torch.nn.SiLU()

    def forward(self, x):
        for _ in range(2):
            x = self.norm(x)
            x = self.act(x)
        return x


def test_norms_of_rows_and_their_activation_are_one_kernel():
    model, x = OfRows(), torch.randn(3, 32)
    wanted = model(x)
    (said,) = [e.why for e in fuse(model).replaced if e.name == ""]
    assert said == "rmsnorm, swish; with norm and act"
    torch.testing.assert_close(model(x), wanted)
    model(x).sum().backward()
    assert model.norm.weight.grad is not None


class Mangled(Block):
    def forward(self, x):
        x = self.norm1(x)
        x = self.act(x)
        return self.__own(x)

    def __own(self, x):
        return x


def test_a_forward_that_is_not_written_again_is_said():
    (said,) = [e.why for e in fuse(Mangled()).left]
    assert said == "activations after its norms: its forward reads names that its class makes its own"


@pytest.mark.parametrize("of", ["norm1", "act"])
def test_hooks_see_what_they_saw(of):
    block, seen = Block().requires_grad_(False), []
    fuse(block)
    block.get_submodule(of).register_forward_hook(lambda module, given, made: seen.append(made))
    block(drawn(1, 16, 8, 8))
    assert len(seen) == (1 if of == "norm1" else 2)


def test_what_is_exchanged_later_is_called(ran):
    block = Block().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    fuse(block)
    block.act, block.norm1 = torch.nn.ReLU(), torch.nn.Identity()
    assert torch.equal(block(x)["made"], type(block).forward(block, x)["made"])
    assert len(ran) == 2  # norm2, of each call


def test_a_class_that_is_given_another_forward_runs_it(monkeypatch):
    block = Block()
    fuse(block)
    monkeypatch.setattr(Block, "forward", lambda self, x: x)
    assert block(x := drawn(1, 16, 8, 8)) is x


@pytest.mark.parametrize(
    "call",
    {
        "gradients of x": lambda of, x: of(x.requires_grad_()),
        "gradients of parameters": lambda of, x: of.requires_grad_()(x),
        "autocast": lambda of, x: torch.autocast("cpu", torch.bfloat16)(of)(x),
        "other parameters": lambda of, x: of.double()(x.double()),
        "few places": lambda of, x: of(x[:, :, :1, :9]),
        "an odd number of places": lambda of, x: of(drawn(1, 16, 9, 13)),
        "gaps": lambda of, x: of(x[..., ::2]),
        "no places": lambda of, x: of(x[:, :, 0, 0]),
        "a transform": lambda of, x: torch.func.vmap(of)(x[None]),
    }.items(),
    ids=lambda call: call[0],
)
def test_other_calls_run_the_own_forward(call, ran):
    model = torch.nn.Sequential(norm())
    wanted = call[1](copy.deepcopy(model)[0], drawn(1, 16, 8, 32))
    fuse(model)
    assert torch.equal(call[1](model[0], drawn(1, 16, 8, 32)), wanted)
    assert not ran


def test_gradients_are_the_class_s_own():
    block, x = Block(), drawn(1, 16, 8, 8).requires_grad_()
    wanted = torch.autograd.grad(block(x)["made"].sum(), [x, *block.conv.parameters()])
    fuse(block)
    made = torch.autograd.grad(block(x)["made"].sum(), [x, *block.conv.parameters()])
    assert all(map(torch.equal, made, wanted))


def test_small_tensors_are_torch_s(monkeypatch, ran):
    monkeypatch.setattr(group_norm, "LEAST", 1 << 11)
    monkeypatch.setattr(group_norm, "LEAST_CHANNELS_LAST", 1 << 11)
    model = torch.nn.Sequential(norm())
    fuse(model)
    model(drawn(1, 16, 8, 8))
    assert not ran
    model(drawn(1, 16, 8, 16))
    assert len(ran) == 1


def test_copies_and_pickles():
    block = Block().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)["made"]
    fuse(block)
    stored = pickle.loads(pickle.dumps(block))
    assert not any(map(set_forward.is_set_on, stored.modules()))
    assert torch.equal(stored(x)["made"], wanted)
    torch.testing.assert_close(copy.deepcopy(block)(x)["made"], wanted, rtol=1e-5, atol=1e-5)


def test_compiled_it_is_the_compiler_s(ran):
    block = Block().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)["made"]
    fuse(block)
    made = torch.compile(block, backend="eager", fullgraph=True)(x)["made"]
    assert torch.equal(made, wanted) and not ran


def test_exported_it_is_torch_s_for_any_size(ran, monkeypatch):
    monkeypatch.setattr(group_norm, "LEAST", 1 << 9)
    monkeypatch.setattr(group_norm, "LEAST_CHANNELS_LAST", 1 << 9)
    model = torch.nn.Sequential(norm(), torch.nn.SiLU()).requires_grad_(False)
    fuse(model)
    sizes = {2: torch.export.Dim("height", min=1), 3: torch.export.Dim("width", min=1)}
    made = torch.export.export(model, (drawn(1, 16, 8, 8),), dynamic_shapes=({**sizes},), strict=False).module()
    x = drawn(1, 16, 2, 3)
    assert not ran
    torch.testing.assert_close(made(x), F.silu(exact(model[0], x)).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: torch.nn.GroupNorm(4, 16, affine=False), "it has no weight or no bias"),
        (lambda: type("Other", (torch.nn.GroupNorm,), {})(4, 16), "its class is not torch's"),
    ],
)
def test_other_norms_of_groups_are_left(made, why):
    assert [(e.became, e.why) for e in fuse(torch.nn.Sequential(made())).entries] == [("", why)]
