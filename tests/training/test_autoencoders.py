"""fuse(vae) of diffusers' AutoencoderKLWan: all that is computed is what its classes compute, in any chunks and tiles;
what is not known keeps its own forward."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional

from graphfuse import VariantPackError
from graphfuse.emulator import kernel
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.convolutional import fault, roles
from graphfuse.torch.convolutional.kernels import biased_rmsnorm_silu
from graphfuse.torch.convolutional.wan import FORWARDS
from graphfuse.torch.operators.convolution import measured_plans
from support.video_autoencoders import CONFIGS, Calls, Copies, distance, drawn, lists, own, wan

pytestmark = pytest.mark.torch

pytest.importorskip("diffusers", minversion="0.35")

CLOSE = 1e-5
"""Accepted in float32, over the largest value: another order of sums in some twenty convolutions."""


def every_call(vae):
    """Results of all that users call, by name."""
    video, latents = drawn(2, 3, 9, 16, 32), drawn(2, 4, 3, 2, 3)
    with torch.no_grad():
        yield "encode", vae.encode(video).latent_dist.parameters
        yield "decode", vae.decode(latents).sample
        yield "an image", vae.decode(latents[:, :, :1]).sample
        vae.enable_slicing()
        yield "encode slices", vae.encode(video).latent_dist.parameters
        yield "decode slices", vae.decode(latents).sample
        vae.disable_slicing()
        vae.enable_tiling(32, 32, 16, 16)
        yield "encode tiles", vae.encode(drawn(1, 3, 5, 32, 48)).latent_dist.parameters
        yield "decode tiles", vae.decode(drawn(1, 4, 2, 4, 6)).sample
        vae.disable_tiling()


@pytest.fixture(scope="module")
def fused():
    vae = wan()
    fuse(vae)
    return vae


@pytest.fixture
def one():
    """A model of one's own."""
    return wan()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_models_compute_what_they_did(config):
    vae = wan(**config)
    wanted = dict(every_call(vae))
    report = fuse(vae)
    assert {e.name for e in report.replaced} >= {"encoder", "decoder", "encoder.mid_block", "decoder.up_blocks.0"}
    for name, made in every_call(vae):
        assert distance(made, wanted[name]) < CLOSE, name
        assert made.stride() == wanted[name].stride(), name
    unfuse(vae)
    assert all(torch.equal(made, wanted[name]) for name, made in every_call(vae))


PARTS = {
    "decoder.mid_block.resnets.0": (1, 32, 1, 4, 6),
    "decoder.up_blocks.1.resnets.0": (2, 16, 2, 4, 6),  # has a convolution as its shortcut
    "decoder.mid_block.attentions.0": (2, 32, 2, 4, 6),
    "decoder.mid_block": (1, 32, 2, 4, 6),
    "decoder.up_blocks.0": (1, 32, 1, 4, 6),
    "decoder.up_blocks.0.upsamplers.0": (2, 32, 2, 4, 6),
    "decoder.up_blocks.2.upsamplers.0": (1, 16, 4, 4, 6),
    "encoder.down_blocks.1": (1, 8, 4, 8, 12),
    "encoder.down_blocks.3": (2, 16, 4, 8, 12),
    "encoder.down_blocks.5": (1, 32, 4, 7, 9),
}


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("name", PARTS)
def test_each_module_in_chunks_of_frames(fused, name, frames):
    """One after the other, and whatever is kept between them."""
    part, (n, c, _, h, w) = fused.get_submodule(name), PARTS[name]
    if getattr(part, "mode", "") == "downsample3d":  # makes one frame of two
        frames = max(frames, 2)
    kept, theirs = [None] * 40, [None] * 40
    with torch.no_grad():
        for chunk in range(3):
            x = drawn(n, c, 1 if chunk == 0 else frames, h, w, seed=chunk)
            if roles.role(part) == roles.ATTENTION:
                made, wanted = part(x), own(part, x)
            else:
                made, wanted = part(x, kept, [0]), own(part, x, theirs, [0])
            assert distance(made, wanted) < CLOSE
    for ours, other in zip(kept, theirs, strict=True):
        assert type(ours) is type(other)
        if isinstance(ours, torch.Tensor):  # resampling in time reads the last frame alone
            assert distance(ours, other[:, :, -ours.shape[2] :]) < CLOSE


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_module_in_every_call(config):
    """What each module that is replaced is given in an encode and a decode, and the frames that it keeps then."""
    vae = wan(**config)
    with Calls(m for m in vae.modules() if roles.role(m) in FORWARDS) as calls, torch.no_grad():
        vae.encode(drawn(1, 3, 9, 32, 48))
        vae.decode(drawn(1, 4, 3, 4, 6))
    report = fuse(vae)
    assert {e.name for e in report.replaced} >= {name for name, m in vae.named_modules() if m in calls.modules}
    with torch.no_grad():
        for call in calls:
            given, named = call.given
            assert distance(call.module(*given, **named), call.made) < CLOSE
            for kept, theirs in zip(lists(call.given), lists(call.left), strict=True):
                for ours, other in zip(kept, theirs, strict=True):
                    assert type(ours) is type(other)
                    if isinstance(ours, torch.Tensor):
                        assert distance(ours, other[:, :, -ours.shape[2] :]) < CLOSE
                    else:
                        assert ours == other


@pytest.mark.parametrize("name", PARTS)
def test_each_module_without_frames_that_are_kept(fused, name):
    part, x = fused.get_submodule(name), drawn(*PARTS[name])
    before = x.clone()
    with torch.no_grad():
        assert distance(part(x), own(part, x)) < CLOSE
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["decoder.mid_block.attentions.0", "decoder.up_blocks.2.upsamplers.0"])
def test_a_compiler_sees_the_own_forward_without_a_graph_break(fused, name):
    part, x = fused.get_submodule(name), drawn(*PARTS[name])
    with torch.no_grad():
        assert distance(torch.compile(part, backend="eager", fullgraph=True)(x), own(part, x)) < CLOSE


def test_a_decode_moves_no_activations_but_frames_that_are_kept(fused):
    """Of two samples, as torch keeps channels last on CPUs of more than one. The convolutions of a residual
    block have no padding, concatenation or layout change around them: what is left is one copy each of frames
    that are kept, into the buffer and out of it."""
    block, x = fused.decoder.up_blocks[1].resnets[0], drawn(2, 16, 4, 4, 6)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    with torch.no_grad():
        kept = [None] * 4
        block(x, kept, [0])
        least = x.nbytes // 2
        with Copies(least) as ours:
            block(x, kept, [0])
        with Copies(least) as theirs:
            own(block, x, kept, [0])
    assert ours.found == {"copy_": 2, "clone": 2}
    assert theirs.found["cat"] == 2 and theirs.found["constant_pad_nd"] == 3


def test_a_block_without_kept_frames_moves_nothing(fused):
    block, x = fused.decoder.up_blocks[1].resnets[0], drawn(2, 16, 4, 4, 6)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    with torch.no_grad(), Copies(1) as ours:
        made = block(x)
    assert not ours.found and made.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("time", [False, True], ids=["2d", "3d"])
def test_upsampling_is_one_copy(fused, time):
    block = fused.decoder.up_blocks[0 if time else 2].upsamplers[0]
    x = drawn(1, block.dim, 2, 4, 6).contiguous(memory_format=torch.channels_last_3d)
    kept = [x] if time else [None]
    with torch.no_grad(), Copies(4 * x.nbytes) as ours:
        block(x, kept, [0])
    assert ours.found == {"copy_": 1}


@pytest.mark.emulate
def test_other_frames_and_as_many_places_compile_nothing_again(one, plan_on, monkeypatch):
    """More places are another class of row counts at most, whose kernels may have other knobs."""
    plan_on("emulator")
    sources, build = set(), kernel.build
    monkeypatch.setattr(kernel, "build", lambda source, *what: sources.add(source) or build(source, *what))
    kernel.load.cache_clear()
    fuse(one)
    found = []
    for frames, height, width in ((2, 4, 6), (4, 4, 6), (2, 6, 4), (2, 8, 12)):
        with torch.no_grad():
            one.decode(drawn(1, 4, frames, height, width))
        found.append(len(sources))
    first, *same, more = found
    assert first > 0 and same == [first, first] and more <= 2 * first


def test_weights_are_turned_and_states_are_not(one, tmp_path):
    state = {name: t.clone() for name, t in one.state_dict().items()}
    strides = {name: t.stride() for name, t in one.named_parameters()}
    fuse(one)
    weight = one.decoder.up_blocks[0].resnets[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous()
    assert list(one.state_dict()) == list(state)
    assert all(torch.equal(t, state[name]) for name, t in one.state_dict().items())
    one.load_state_dict({name: 2 * t for name, t in state.items()})
    assert torch.equal(weight, 2 * state["decoder.up_blocks.0.resnets.0.conv1.weight"])
    assert weight.is_contiguous(memory_format=torch.channels_last_3d)
    one.save_pretrained(tmp_path)
    again = type(one).from_pretrained(tmp_path)
    assert all(torch.equal(t, 2 * state[name]) for name, t in again.state_dict().items())
    unfuse(one)
    assert {name: t.stride() for name, t in one.named_parameters()} == strides


def test_copies_and_pickles(one):
    fuse(one)
    block, x = one.decoder.mid_block, drawn(1, 32, 1, 4, 6)
    with torch.no_grad():
        wanted = block(x)
        assert torch.equal(copy.deepcopy(block)(x), wanted)
        assert distance(pickle.loads(pickle.dumps(block))(x), wanted) < CLOSE


def test_bfloat16_is_as_close_to_float32_as_the_model(one):
    latents = drawn(1, 4, 2, 4, 6)
    with torch.no_grad():
        exact = one.decoder(latents, [None] * 40, [0], True)
        half, given = one.bfloat16(), latents.bfloat16()
        theirs = half.decoder(given, [None] * 40, [0], True).float()
        fuse(half)
        ours = half.decoder(given, [None] * 40, [0], True).float()
    assert (ours - exact).norm() <= 1.05 * (theirs - exact).norm()


BLOCK = "decoder.mid_block.resnets.0"


def _hook(block):
    block.conv1.register_forward_hook(lambda module, given, made: made * 2)


def _stride(block):
    block.conv2.stride = (1, 1, 1) if block.conv2.stride != (1, 1, 1) else (1, 2, 2)
    block.conv_shortcut = torch.nn.AvgPool3d(1, (1, 2, 2))


def _drop(block):
    block.dropout.p = 0.5
    block.train()


def _norm(block):
    block.norm1.scale = 1.0


def _activation(block):
    block.nonlinearity = torch.nn.GELU()


def _double(block):
    block.conv1.double()


CHANGES = {
    _hook: "a convolution is of another class, or has hooks",
    _stride: "a convolution of (3, 3, 3) has another stride, padding or groups",
    _drop: "it drops values out",
    _norm: "a norm has a bias, another scale, or other axes",
    _activation: "its activation is another",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "behind"])
def test_what_is_otherwise_runs_its_own_forward(one, change, when):
    """Also if it becomes so after fuse, and within a module that is replaced."""
    block, x = one.get_submodule(BLOCK), drawn(1, 32, 1, 4, 6)
    if when == "before":
        change(block)
        entry = next(e for e in fuse(one).left if e.name == BLOCK)
        assert entry.why == CHANGES[change]
    else:
        fuse(one)
        change(block)
    with torch.no_grad():
        torch.manual_seed(3)
        wanted = own(block, x)
        torch.manual_seed(3)
        assert distance(block(x), wanted) < CLOSE  # its norms are replaced when it first runs its own forward
        if change is not _stride:
            torch.manual_seed(3)
            wanted = own(one.decoder.mid_block, x)
            torch.manual_seed(3)
            assert distance(one.decoder.mid_block(x), wanted) < CLOSE


def test_an_attention_with_hooks_within_a_decoder_that_keeps_frames(one):
    one.decoder.mid_block.attentions[0].proj.register_forward_hook(lambda module, given, made: made * 2)
    latents = drawn(1, 4, 2, 4, 6)
    with torch.no_grad():
        wanted = one.decoder(latents, [None] * 40, [0], True)
        fuse(one)
        assert distance(one.decoder(latents, [None] * 40, [0], True), wanted) < CLOSE


def test_parameters_of_another_type_run_the_own_forward(one):
    fuse(one)
    block = one.get_submodule(BLOCK)
    block.conv1.double()
    with pytest.raises(RuntimeError, match="should be the same|type"):
        block(drawn(1, 32, 1, 4, 6))


def test_gradients_are_the_models_own(one):
    x = drawn(1, 32, 1, 4, 6)
    block = one.get_submodule(BLOCK)
    block(x).sum().backward()
    wanted = block.conv1.weight.grad.clone()
    block.zero_grad()
    fuse(one)
    block(x).sum().backward()
    assert distance(block.conv1.weight.grad, wanted) < CLOSE
    one.requires_grad_(False)
    x.requires_grad_()
    assert block(x).requires_grad


def test_autocast_runs_the_own_forward(one):
    x = drawn(1, 32, 1, 4, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = one.get_submodule(BLOCK)(x)
        fuse(one)
        assert one.get_submodule(BLOCK)(x).dtype is wanted.dtype


def test_a_class_with_another_forward_is_not_known(one):
    block = one.get_submodule(BLOCK)

    class Twice(type(block)):
        def forward(self, x, feat_cache=None, feat_idx=(0,)):
            return super().forward(x, feat_cache, feat_idx) * 2

    class Other(type(block)):
        """Another name, and the same forward."""

    block.__class__ = Twice
    became = {e.became for e in fuse(one).replaced if e.name == BLOCK}
    assert roles.role(block) == "" and became == {"region"}  # its norms with SiLU, each by itself
    block.__class__ = Other
    assert roles.role(block) == roles.RESIDUAL


def test_frames_of_other_extents_are_refused(fused):
    block = fused.get_submodule(BLOCK)
    with torch.no_grad(), pytest.raises(VariantPackError, match=r"kept frames are \(1, 32, 2, 4, 5\); accepted: "):
        block(drawn(1, 32, 1, 4, 6), [drawn(1, 32, 2, 4, 5), None], [0])


def test_the_report_says_what_changes_layout(one):
    report = fuse(one)
    (decoder,) = [e for e in report.replaced if e.name == "decoder"]
    assert "copies its input into channels-last" in decoder.why
    assert not report.left


class Bare:
    def forward(self, x, other=None):
        return self.weight * x


class Told:
    def forward(self, x: torch.Tensor, other: int | None = None) -> torch.Tensor:
        """Says something."""
        return self.weight * x  # and more


class Another:
    def forward(self, x, other=None):
        return self.weight + x


def test_digests_leave_out_what_does_nothing():
    assert roles.digest(Bare.forward) == roles.digest(Told.forward) != roles.digest(Another.forward)


@pytest.mark.parametrize("forms", [(False, False), (False, True), (True, True)], ids=["bias", "kept", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["reference", pytest.param("emulator", marks=pytest.mark.emulate)])
def test_the_kernel_with_bias_and_sum(plan_on, engine, dtype, forms):
    if engine == "emulator":
        plan_on("emulator")
    has_residual, has_total = forms
    x, residual = (drawn(12, 96, seed=s).to(dtype) for s in (1, 2))
    bias, weight = (drawn(96, seed=s).to(dtype) for s in (3, 4))
    total = x.double() + bias.double() + (residual.double() if has_residual else 0)
    wanted = functional.silu(functional.normalize(total, dim=-1) * 96**0.5 * weight.double())
    buffer = torch.full((16, 96), 7.0, dtype=dtype)
    given = x.clone()
    biased_rmsnorm_silu(
        given, bias, weight, residual if has_residual else None, given if has_total else None, 1e-24, buffer[4:]
    )
    error = 2**-8 if dtype is torch.bfloat16 else 1e-6
    assert torch.allclose(buffer[4:].double(), wanted, rtol=error, atol=error)
    assert (buffer[:4] == 7).all()
    if has_total:
        assert torch.allclose(given.double(), total, rtol=error, atol=error)
    else:
        assert torch.equal(given, x)


def test_faults_are_of_modules_that_are_known(fused):
    assert fault.of_module(torch.nn.Linear(2, 2), "") == "its class is not known"
    assert not fault.is_fit(fused.decoder, roles.DECODER, None)
    assert not fault.is_fit(fused.decoder, roles.DECODER, drawn(1, 4, 1, 4, 6).double())


def test_norms_are_fused_once_a_module_runs_its_own_forward(one):
    """As in training: until then they are computed with what stands around them, and are not looked at."""
    one = one.bfloat16()
    fuse(one)
    block, x = one.get_submodule(BLOCK), drawn(1, 32, 1, 4, 6).bfloat16()
    with torch.no_grad():
        block(x)
    assert not set_forward.is_set_on(block.norm1)
    block(x)
    assert set_forward.is_set_on(block.norm1) and set_forward.is_set_on(block.norm2)
    assert f"{BLOCK}.norm1" in unfuse(one) and not set_forward.is_set_on(block.norm1)


def test_what_cudnn_measures_is_set_for_a_call_alone():
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    with pytest.raises(KeyError), measured_plans():
        assert (cudnn.benchmark, cudnn.benchmark_limit) == (True, 3)
        raise KeyError
    assert (cudnn.benchmark, cudnn.benchmark_limit) == before
