"""Padding, upsampling and joining in channels-last, against torch's own functions."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from graphfuse.torch.convolutional import spatial
from graphfuse.torch.convolutional.layout_mode import LayoutMode, outside_mode

pytestmark = pytest.mark.torch

TYPES = (torch.bfloat16, torch.float32)


def views(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(shape).to(dtype)
    last = x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()])
    rows_fastest = x.transpose(1, -2).contiguous().transpose(1, -2)
    return [x, last, x[:, :, 1:], last[:, :, 1:, 1:], last[:, 1:], last.transpose(-1, -2), rows_fastest]


def is_last(t: torch.Tensor) -> bool:
    return t.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "pad",
    [
        (1, 1, 1, 1, 2, 0),
        (0, 1, 2, 0, 0, 0),
        (0,) * 6,
        (3, 2, 1, 0, 1, 4),
        (0, 0, 0, 0, 1, 2),
        (1, 1, 1, 1),
        (0, 3, 2, 0),
    ],
)
def test_edge_padded(pad, dtype, channels):
    for x in views((2, channels, 3, 4, 5)[: len(pad) // 2 + 2], dtype):
        got = spatial.edge_padded(x, pad)
        assert torch.equal(got, functional.pad(x, pad, mode="replicate")) and is_last(got)


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("by", [(1, 2, 2), (2, 2, 2), (4, 1, 8), (2, 4)])
def test_nearest(by, dtype, channels):
    for x in views((2, channels, 3, 4, 5)[: len(by) + 2], dtype):
        got = spatial.nearest(x, by)
        assert torch.equal(got, functional.interpolate(x.contiguous(), scale_factor=by)) and is_last(got)


@pytest.mark.parametrize("dim", [2, 3, 4])
@pytest.mark.parametrize("channels", [3, 16])
def test_joined(dim, channels):
    parts = views((2, channels, 3, 4, 4), torch.float16)
    for a, b in itertools.product(parts, parts):
        if all(m == n for axis, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if axis != dim):
            got = spatial.joined([a, b, a], dim)
            assert torch.equal(got, torch.cat([a, b, a], dim)) and is_last(got)


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_joined_with_what_is_first(dim):
    for x in views((2, 16, 3, 4, 4), torch.float16):
        first = x.narrow(dim, 0, 1)
        for before in ([first] * 2, [first], [first.clone(), first], [x.narrow(dim, 1, 1)]):
            got = spatial.joined([*before, x], dim)
            assert torch.equal(got, torch.cat([*before, x], dim)) and is_last(got)


@pytest.mark.parametrize("dtype", TYPES)
def test_channels_and_pixels(dtype):
    for x in views((2, 16, 6, 4, 8), dtype):
        got = spatial.channels_repeated(x, 3)
        assert torch.equal(got, x.repeat_interleave(3, 1)) and is_last(got)
        weight = torch.randn(x.shape[1], 1, 2, 1, 3).to(dtype)
        got, want = spatial.outer_product(x, weight), functional.conv_transpose3d
        assert torch.equal(got, want(x, weight, stride=(2, 1, 3), groups=x.shape[1])) and is_last(got)
    for x in views((2, 16, 6, 4), dtype):
        if x.shape[1] == 16:
            got = spatial.shuffled(x, 2)
            assert torch.equal(got, functional.pixel_shuffle(x, 2)) and is_last(got)
        for factor in (1, 2):
            if all(n % factor == 0 for n in x.shape[2:]):
                got = spatial.unshuffled(x, factor)
                assert torch.equal(got, functional.pixel_unshuffle(x, factor)) and is_last(got)


@pytest.mark.parametrize("dtype", TYPES)
def test_group_products(dtype):
    x = torch.randn(2, 12, 3, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last_3d)
    weight = torch.randn(6, 4, 1, 1, 1).to(dtype)
    for t, of in ((x, weight), (x[:, :, 0].contiguous(memory_format=torch.channels_last), weight[..., 0])):
        got, convolve = spatial.group_products(t, of, 3), functional.conv2d if t.dim() == 4 else functional.conv3d
        torch.testing.assert_close(got, convolve(t, of, groups=3))
        assert is_last(got)


def test_dimensions_that_are_joined():
    x = torch.randn(2, 3, 1, 4, 5, 2)
    for order in ((0, 1, 2, 3, 4, 5), (0, 5, 1, 3, 2, 4), (1, 4, 0, 3, 5, 2)):
        t = x.permute(order)
        for shape in itertools.product((1, 2, 3, 4, 6, 8, 10, 12), repeat=3):
            last, rest = divmod(t.numel(), shape[0] * shape[1] * shape[2])
            if not rest and (got := spatial.joined_dims(t, (*shape, last))) is not None:
                assert torch.equal(got, t.reshape(*shape, last))
                assert is_last(got) or got.data_ptr() == t.data_ptr()  # a view
    assert spatial.joined_dims(x, (2, 3, 4, 10)).shape == (2, 3, 4, 10)
    assert spatial.joined_dims(x, (6, 4, 5, 2)).shape == (6, 4, 5, 2)
    for shape in ((3, 2, 4, 10), (2, 3, 4, 5), (4, 3, 2, 10), (2, 3, 4, 20)):
        assert spatial.joined_dims(x, shape) is None


def test_scales():
    x = torch.zeros(1, 2, 3, 4, 5)
    assert spatial.scales(x, None, 2) == (2, 2, 2) == spatial.scales(x, (6, 8, 10), None)
    assert spatial.scales(x, None, (1.0, 2.0, 4.0)) == (1, 2, 4)
    for size, factor in ((None, 3), (None, 1.5), (7, None), ((6, 8), None), (None, None), (8, 2)):
        assert spatial.scales(x, size, factor) is None


def split(x: torch.Tensor) -> torch.Tensor:
    """Frames whose channels become pixels, as views."""
    n, c, *extents = x.shape
    return x.reshape(n, c // 8, 2, 2, 2, *extents).permute(0, 1, 5, 2, 6, 3, 7, 4)


SPLIT = [
    lambda x: split(x).flatten(6, 7).flatten(4, 5).flatten(2, 3),
    lambda x: split(x).contiguous().view(2, 2, 6, 8, 10),
]


@pytest.mark.parametrize("call", SPLIT, ids=["flatten", "view"])
@pytest.mark.parametrize("dtype", TYPES)
def test_channels_that_become_pixels(call, dtype):
    for x in views((2, 16, 3, 4, 5), dtype)[:2]:
        with torch.no_grad(), LayoutMode():
            got = call(x)
        assert torch.equal(got, call(x)) and is_last(got)


SEED = torch.Generator()
PIXELS = torch.randn(8, 4, 1, 1, 1)
KERNEL = torch.randn(16, 1, 2, 2, 2)
LAST = torch.randn(2, 16, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: functional.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"),
        lambda x: functional.pad(x, (1, 1, 1, 1, 2, 0)),
        lambda x: functional.pad(x, (1, -1, 1, 1, 2, 0), mode="replicate"),
        lambda x: functional.pad(x, (1, 1, 1, 1, 2, 1), "reflect"),
        lambda x: functional.pad(x, (1, 2, 3, 0, 0, 0), "reflect"),
        lambda x: functional.pad(x[:, :, 1], (1, 2, 3, 0), "reflect"),
        lambda x: functional.pad(x.to(torch.int32), (1,) * 6, "replicate"),
        lambda x: functional.interpolate(x, scale_factor=2.0),
        lambda x: x.repeat(1, 1, 2, 1, 1),
        lambda x: x[:, :, :1].repeat((2, 3, 2, 1, 2)),
        lambda x: x.repeat(1, 1, 0, 1, 1),
        lambda x: x.repeat(2, 1, 1, 1, 1, 1),
        lambda x: split(x).permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4),
        lambda x: split(x).flatten(1, 4),
        lambda x: split(x).flatten(1, 3),
        lambda x: functional.interpolate(x, (6, 8, 10), None, "nearest"),
        lambda x: functional.interpolate(x, (7, 9, 10)),
        lambda x: functional.interpolate(x, scale_factor=2, mode="trilinear"),
        lambda x: torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], 2),
        lambda x: x.repeat_interleave(2, dim=3).repeat_interleave(3, 4),
        lambda x: x.repeat_interleave(2, -3),
        lambda x: x.repeat_interleave(1, dim=2),
        lambda x: x.repeat_interleave(0, dim=2),
        lambda x: x.repeat_interleave(2, dim=1),
        lambda x: x.repeat_interleave(2),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 0]), 2),
        lambda x: x.repeat_interleave(2, dim=2, output_size=6),
        lambda x: x.repeat_interleave(2, 1, output_size=32),
        lambda x: x[:, :, 0].repeat_interleave(3, dim=-3),
        lambda x: functional.pixel_shuffle(x[:, :, 0], 2),
        lambda x: torch.nn.PixelShuffle(4)(x[:, :, 1]),
        lambda x: functional.pixel_unshuffle(x[:, :, 0, :, :4], 2),
        lambda x: functional.pixel_unshuffle(x[:, :, 0, :, :0], 2),
        lambda x: torch.nn.PixelUnshuffle(1)(x[:, :, 0]),
        lambda x: functional.conv_transpose2d(x[:, :, 0], KERNEL[:, :, 0], None, 2, 0, 0, 16),
        lambda x: functional.conv_transpose3d(x, KERNEL, stride=2, groups=16),
        lambda x: functional.conv_transpose3d(x, KERNEL[..., :1], None, (2, 2, 1), groups=16, padding=(0, 0, 0)),
        lambda x: functional.conv_transpose3d(x, KERNEL, torch.ones(16), 2, groups=16),
        lambda x: functional.conv_transpose3d(x, KERNEL, None, (2, 1, 2), groups=16),
        lambda x: functional.conv_transpose3d(x, KERNEL, None, 2, 1, groups=16),
        lambda x: functional.conv_transpose3d(x, KERNEL, None, 2, 0, 1, 16),
        lambda x: functional.conv_transpose3d(x, KERNEL, None, 2, 0, 0, 16, 2),
        lambda x: functional.conv_transpose3d(x, KERNEL, None, 2),
        lambda x: functional.conv_transpose3d(x, KERNEL.repeat(1, 3, 1, 1, 1), None, 2, groups=16),
        lambda x: functional.conv_transpose3d(x[0], KERNEL, None, 2, groups=16),
        lambda x: torch.cat([x.movedim(1, -1), x.movedim(1, -1)], 3),
        lambda x: functional.conv3d(x, PIXELS, groups=4),
        lambda x: functional.conv2d(x[:, :, 1], PIXELS[..., 0], None, (1, 1), (0, 0), 1, 4),
        lambda x: functional.conv3d(x, PIXELS, torch.ones(8), groups=4),
        lambda x: functional.conv3d(x, PIXELS, None, 1, 1, groups=4),
        lambda x: functional.conv3d(x, PIXELS, None, (1, 2, 1), groups=4),
        lambda x: functional.conv3d(x, PIXELS, None, 1, "same", groups=4),
        lambda x: functional.conv3d(x, torch.randn(16, 1, 1, 1, 1, generator=SEED.manual_seed(1)), groups=16),
        lambda x: functional.conv3d(x, torch.ones(8, 4, 1, 2, 1), groups=4),
        lambda x: functional.conv3d(x[0], PIXELS, groups=4),
        lambda x: split(x).reshape(2, 2, 6, 8, 10),
        lambda x: split(x).reshape((2, 2, 6, 8, -1)),
        lambda x: split(x).reshape(2, 4, 3, 8, 10),
        lambda x: torch.cat([x, x], dim=-4),
        lambda x: torch.concat((x, x)),
        lambda x: torch.concatenate([x, x.double()], dim=-1),
        lambda x: functional.linear(x.movedim(1, -1), torch.eye(16)[:3], torch.ones(3)),
        lambda x: functional.linear(x, torch.eye(5)),
        lambda x: functional.linear(x, torch.ones(5), torch.tensor(1.0)),
        lambda x: functional.linear(x, torch.ones(6, 5), torch.ones(4, 6)),
        lambda x: torch.cat([x[:, :, :0]], 2),
        lambda x: torch.cat([x[:, :, :1] > 0, x > 0], axis=2),
        lambda x: torch.cat([x.to(torch.float8_e4m3fn)[:, :, :1], x.to(torch.float8_e4m3fn)], 2).float(),
        lambda x: torch.cat([torch.complex(x, x).conj()[:, :, :1], torch.complex(x, x)], 2),
        lambda x: x.contiguous().view(2, 16, -1),
        lambda x: x.contiguous().view(2, 3, -1),
        lambda x: split(x).contiguous().view(-1),
        lambda x: split(x).flatten(1, 2),
        lambda x: split(x).flatten(2),
        lambda x: split(x).flatten(-2, -1),
        lambda x: split(x).movedim(1, 2).contiguous().view(2, 3, -1),
        lambda x: x.contiguous().view(torch.int32),
        lambda x: x.contiguous().view(size=(2, 16, 60)) if x.is_contiguous() else x,
        lambda x: x[:, :0].repeat_interleave(2, 2),
        lambda x: x.contiguous(memory_format=torch.contiguous_format).repeat_interleave(2, 1)[:, :4].flatten(1),
        lambda x: functional.conv_transpose3d(
            x.contiguous(memory_format=torch.contiguous_format), KERNEL, None, 2, groups=16
        ),
        lambda x: torch.cat([x.movedim(1, -1).contiguous(), x.movedim(1, -1).contiguous()], 3).view(2, -1),
        lambda x: x.contiguous(memory_format=torch.contiguous_format) + x,
    ],
)
def test_calls_give_what_torch_gives(call):
    with torch.no_grad(), LayoutMode():
        got = call(LAST)
    torch.testing.assert_close(got, call(LAST), rtol=1e-6, atol=1e-6)  # sums of products are in another order


@pytest.mark.parametrize(
    "call",
    [
        lambda x: functional.pad(x, (1, 1), mode="replicate", value=None),
        lambda x: functional.pad(x, (1, 1, 1), mode="replicate"),
        lambda x: functional.pad(x, (5, 1, 0, 0, 0, 0), mode="reflect"),
        lambda x: x.repeat(2, 2),
        lambda x: x.repeat(1, 1, -1, 1, 1),
        lambda x: functional.pad(x, (1,) * 6, "replicate", 1.0),
        lambda x: functional.pad(x[:, :, :0], (1,) * 6, "replicate"),
        lambda x: functional.interpolate(x, (6, 8)),
        lambda x: torch.cat([x, x[:, :, :, :2]], 2),
        lambda x: torch.cat([x, x], 5),
        lambda x: x.repeat_interleave(2, 5),
        lambda x: x.repeat_interleave(-1, 2),
        lambda x: x.contiguous().view(7, -1),
        lambda x: functional.conv2d(x, PIXELS, groups=4),
        lambda x: functional.conv3d(x[:, :, 0], PIXELS[..., 0], groups=4),
        lambda x: functional.conv3d(x, PIXELS, None, (1, 1, 1, 1), groups=4),
        lambda x: functional.conv3d(x, PIXELS, None, 1, 0, 0, 4),
        lambda x: functional.conv3d(x, PIXELS[:0], groups=4),
        lambda x: functional.conv_transpose2d(x, KERNEL, stride=2, groups=16),
        lambda x: functional.conv_transpose3d(x, KERNEL, None, 2, (), 0, 16),
        lambda x: functional.conv_transpose3d(x, KERNEL[:, :, :0], None, (0, 2, 2), groups=16),
        lambda x: functional.conv_transpose3d(x[0, 0, 0, 0], KERNEL, None, 2, 0, 0, 16),
        lambda x: functional.interpolate(x, scale_factor=2, align_corners=False),
        lambda x: functional.interpolate(x, (6.0, 8.0, 10.0)),
        lambda x: functional.pad(x, None, "replicate"),
        lambda x: functional.pixel_shuffle(x[:, :, 0].to(torch.float8_e4m3fn), 2),
        lambda x: x.repeat_interleave(2, 1, output_size=31),
        lambda x: split(x).reshape(2, 2, 6, 8, 11),
        lambda x: functional.conv3d(x, PIXELS, groups=3),
        lambda x: functional.conv3d(x, PIXELS, groups=2),
        lambda x: functional.conv3d(x, PIXELS.double(), groups=4),
        lambda x: functional.conv3d(x, PIXELS, None, 0, groups=4),
        lambda x: functional.pixel_shuffle(x[:, :, 0], 3),
        lambda x: functional.pixel_shuffle(x[:, :, 0], 0),
        lambda x: functional.pixel_shuffle(x[:, :, 0], 2.0),
        lambda x: functional.pixel_shuffle(x, 2),
        lambda x: functional.pixel_unshuffle(x, 2),
        lambda x: functional.pixel_unshuffle(x[:, :, 0], 2),
        lambda x: functional.conv_transpose3d(x, KERNEL[:8], stride=2, groups=16),
        lambda x: functional.conv_transpose3d(x, KERNEL.double(), stride=2, groups=16),
        lambda x: functional.conv_transpose3d(x, KERNEL, stride=(2, 2), groups=16),
        lambda x: functional.conv_transpose3d(x, KERNEL, stride="2", groups=16),
        lambda x: functional.linear(x.movedim(1, -1), torch.ones(3, 15), torch.ones(3)),
        lambda x: torch.cat([x, x], 2, axis=2),
        lambda x: torch.cat([x, x], 2.0),
        lambda x: torch.cat([]),
        lambda x: torch.cat([1]),
        lambda x: torch.cat([x, 1], 2),
    ],
)
def test_errors_are_torchs(call):
    errors = []
    for mode in (nullcontext(), LayoutMode()):
        with torch.no_grad(), mode, pytest.raises(Exception, match=".") as found:
            call(LAST)
        errors.append((found.type, str(found.value)))
    assert errors[0] == errors[1]


def test_a_subclass_of_tensors_is_left_to_torch(monkeypatch):
    class Mine(torch.Tensor):
        pass

    monkeypatch.setattr(spatial, "edge_padded", None)
    with torch.no_grad(), LayoutMode():
        made = functional.pad(LAST.as_subclass(Mine), (1,) * 6, mode="replicate")
    assert type(made) is Mine


def test_operators_run_outside_of_the_mode():
    seen = []

    @outside_mode
    def operator(x, *, fails=False):
        seen.append(torch._C._len_torch_function_stack())
        if fails:
            raise ValueError("as asked")
        return functional.pad(x, (1,) * 6, mode="replicate")

    with torch.no_grad(), LayoutMode() as mode:
        operator(LAST)
        with pytest.raises(ValueError, match="as asked"):
            operator(LAST, fails=True)
        assert is_last(functional.pad(LAST, (1,) * 6, mode="replicate"))
        with torch.device("cpu"):  # a mode of the user in it
            operator(LAST)
        assert torch._C._get_function_stack_at(0) is mode
    operator(LAST)
    assert seen == [0, 0, 2, 0]


def test_convolutions_in_groups_are_products(monkeypatch):
    ran = []
    for name in ("outer_product", "group_products"):
        own = getattr(spatial, name)
        monkeypatch.setattr(spatial, name, lambda *given, name=name, own=own: ran.append(name) or own(*given))
    with torch.no_grad(), LayoutMode():
        functional.conv_transpose3d(LAST, KERNEL, None, (2, 2, 2), groups=16)
        functional.conv_transpose2d(LAST[:, :, 0], KERNEL[:, :, 0], None, 2, 0, 0, 16)
        functional.conv3d(LAST, PIXELS, groups=4)
        images = LAST[:, :, 0].contiguous(memory_format=torch.channels_last)
        functional.conv2d(images, PIXELS[..., 0], stride=[1, 1], groups=4)
    assert ran == ["outer_product", "outer_product", "group_products", "group_products"]


def test_a_view_is_a_view():
    y = torch.zeros(4, 4, 4, 2, 2, 1).permute(0, 1, 4, 5, 2, 3)
    with torch.no_grad(), LayoutMode():
        y.flatten(3, 4).add_(1)
    assert y.sum() == y.numel()


def test_other_devices_and_quantized_tensors_are_left_to_torch():
    x = LAST[:, :, 0].contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), LayoutMode():
        made = functional.conv2d(x.to("meta"), PIXELS[..., 0].to("meta"), groups=4)
        quantized = functional.interpolate(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), scale_factor=2)
    assert made.shape == (2, 8, 4, 5) and quantized.shape == (2, 16, 8, 10)


def test_gradients_within_the_mode_are_torchs():
    x = LAST.clone().requires_grad_(True)
    with torch.no_grad(), LayoutMode(), torch.enable_grad():
        functional.pad(x, (1,) * 6, mode="replicate").sum().backward()
    assert x.grad.sum() == 2 * 16 * 5 * 6 * 7


@pytest.mark.parametrize("by", ["vmap", "jvp", "trace"])
def test_transforms_within_the_mode_see_torchs_functions(by):
    def call(x):
        return functional.pad(x, (1,) * 6, mode="replicate")

    with torch.no_grad(), LayoutMode():
        if by == "vmap":
            assert torch.equal(torch.func.vmap(call)(torch.stack([LAST, LAST]))[0], call(LAST))
        elif by == "jvp":
            assert torch.equal(torch.func.jvp(call, (LAST,), (LAST,))[1], call(LAST))
        else:
            assert torch.equal(torch.jit.trace(call, (LAST,))(LAST + 1), call(LAST + 1))


REPLACED = {
    "interpolate": (lambda x: functional.interpolate(x, scale_factor=2, mode="nearest"), "upsample_nearest3d"),
    "interpolate by size": (lambda x: functional.interpolate(x, (6, 8, 10)), "upsample_nearest3d"),
    "pad": (lambda x: functional.pad(x, (1, 1, 1, 1, 1, 0), mode="replicate"), "pad"),
    "cat": (lambda x: torch.cat([x, x], dim=2), "cat"),
    "contiguous": (lambda x: x.contiguous(), "contiguous"),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=3), "repeat_interleave"),
    "pixel_shuffle": (lambda x: functional.pixel_shuffle(x[:, :, 0], 2), "pixel_shuffle"),
    "pixel_unshuffle": (lambda x: functional.pixel_unshuffle(x[:, :, 0, :, :4], 2), "pixel_unshuffle"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_the_mode_calls_no_function_that_loses_the_layout(name):
    call, operator = REPLACED[name]
    x = torch.randn(1, 16, 3, 4, 5).bfloat16().contiguous(memory_format=torch.channels_last_3d)
    want = call(x)
    with torch.no_grad(), LayoutMode(), torch.profiler.profile() as profiled:
        made = call(x)
    assert torch.equal(made, want) and (is_last(made) or made is x)
    assert f"aten::{operator}" not in {e.name for e in profiled.events()}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_elements_of_16_bytes_begin_at_multiples_of_16_bytes(dtype):
    memory, size = torch.zeros(256, dtype=dtype), 16 // dtype.itemsize
    for offset in range(48):
        t = memory[offset:].as_strided((2, 2, 16), (32, 16, 1))
        assert (spatial.wide(t).dtype is torch.complex128) == (offset % size == 0)
