"""The functional call on CPU tensors: formats, leading dimensions, defaults and refusals."""

import oracle
import pytest
import torch

import graphfuse
from graphfuse import VariantPackError, VariantPackTypeError, fused_rmsnorm_silu, functional


def exact(x, weight, eps=1e-6):
    return oracle.swish(oracle.rmsnorm(x, weight, eps)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 1, 3, 7)])
def test_any_leading_dimensions(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    out = fused_rmsnorm_silu(x, weight)
    assert out.shape == x.shape and out.dtype == dtype
    want = oracle.rounded(exact(x, weight), dtype)
    assert ((oracle.ulps(out, want) <= (32 if dtype is torch.float32 else 1)) | ((out - want).abs() < 1e-7)).all()


def test_out_selects_the_format():
    x, weight = torch.randn(6, 64).bfloat16(), torch.randn(64)
    for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        out = torch.empty(6, 64, dtype=dtype)
        assert fused_rmsnorm_silu(x, weight, out=out) is out
        apart = oracle.ulps(out, oracle.rounded(exact(x, weight), dtype))
        assert (apart <= (64 if dtype is torch.float32 else 1)).all()


@pytest.mark.parametrize("given", [False, True])
def test_nvfp4(given):
    x, weight = torch.randn(2, 6, 64).bfloat16(), torch.randn(64).bfloat16()
    values = fused_rmsnorm_silu(x, weight, out=torch.empty(2, 6, 64))
    out = torch.empty(2, 6, 32, dtype=torch.float4_e2m1fn_x2)
    scale = torch.empty(2, 6, 4, dtype=torch.float8_e4m3fn) if given else None
    made, scales = fused_rmsnorm_silu(x, weight, out=out, block_scale=scale)
    assert made is out and (not given or scales is scale) and scales.shape == (2, 6, 4)
    codes, want = oracle.nvfp4(values.numpy())
    assert torch.equal(scales.view(torch.uint8), torch.from_numpy(want))
    assert torch.equal(out.view(torch.uint8), torch.from_numpy(codes))


def test_row_strides_and_slices():
    x, weight = torch.randn(6, 80).bfloat16()[:, 3:67], torch.randn(130).bfloat16()[1:65]
    out = torch.empty(6, 70, dtype=torch.bfloat16)[:, 1:65]
    fused_rmsnorm_silu(x, weight, 1e-3, out=out)
    assert (oracle.ulps(out.contiguous(), oracle.rounded(exact(x, weight, 1e-3), torch.bfloat16)) <= 1).all()


def test_a_problem_is_planned_once():
    x, weight = torch.randn(11, 48), torch.randn(48)
    fused_rmsnorm_silu(x, weight)
    before = functional._planned.cache_info()
    fused_rmsnorm_silu(torch.randn(11, 48), weight, eps=0.5)
    after = functional._planned.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def good(**change):
    arguments = {"input": torch.randn(4, 32), "weight": torch.randn(32)} | change
    return fused_rmsnorm_silu(**arguments)


WRONG = {
    "input type": ({"input": [1.0]}, VariantPackTypeError, "input must be a torch tensor, got list"),
    "weight type": ({"weight": 1.0}, VariantPackTypeError, "weight must be a torch tensor, got float"),
    "weight shape": ({"weight": torch.randn(31)}, VariantPackError, r"weight.*\(31,\).*\(4, 32\)"),
    "weight rank": ({"weight": torch.randn(1, 32)}, VariantPackError, r"weight.*\(1, 32\)"),
    "no dimension": ({"input": torch.tensor(1.0)}, VariantPackError, "weight must have shape"),
    "out shape": ({"out": torch.empty(4, 31)}, ValueError, r"out.*\[4, 31\]|\[4, 31\].*out"),
    "out type": ({"out": 3}, VariantPackTypeError, "out must be a torch tensor"),
    "out dtype": ({"out": torch.empty(4, 32, dtype=torch.complex64)}, TypeError, "complex64"),
    "integers": ({"input": torch.zeros(4, 32, dtype=torch.int32)}, (TypeError, ValueError), "input"),
    "eps": ({"eps": "small"}, VariantPackTypeError, "epsilon"),
    "aliased": ({"input": (same := torch.randn(4, 32)), "out": same}, VariantPackError, "out.*input"),
    "odd blocks": (
        {
            "input": torch.randn(4, 24),
            "weight": torch.randn(24),
            "out": torch.empty(4, 12, dtype=torch.float4_e2m1fn_x2),
        },
        ValueError,
        "16",
    ),
    "scale shape": (
        {
            "out": torch.empty(4, 16, dtype=torch.float4_e2m1fn_x2),
            "block_scale": torch.empty(4, 3, dtype=torch.float8_e4m3fn),
        },
        ValueError,
        r"\[4, 3\]",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_refused(change, error, message):
    with pytest.raises(error, match=message) as caught:
        good(**change)
    assert isinstance(caught.value, (graphfuse.GraphfuseError, TypeError))
