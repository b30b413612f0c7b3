"""The functional call on CPU tensors: formats, leading dimensions, defaults and refusals."""

import re

import numpy as np
import pytest
import torch

import graphfuse
import oracle
from graphfuse import VariantPackError, VariantPackTypeError, functional, fused_rmsnorm_silu


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
    fused_rmsnorm_silu(x, weight, eps=np.float32(0.5))  # the long way
    assert functional._planned.cache_info().misses == before.misses


def good(**change):
    arguments = {"input": torch.randn(4, 32), "weight": torch.randn(32)} | change
    return fused_rmsnorm_silu(**arguments)


FP4 = torch.float4_e2m1fn_x2


def nvfp4(rows=4, hidden=32, **change):
    given = {"input": torch.randn(rows, hidden), "weight": torch.randn(hidden)}
    return given | {"out": torch.empty(rows, hidden // 2, dtype=FP4)} | change


def of(dtype, *shape):
    return torch.zeros(shape or (4, 32), dtype=torch.uint8).to(dtype)


# Arguments -> (error, argument named and what was given, what is accepted).
WRONG = {
    "input type": ({"input": [1.0]}, VariantPackTypeError, "input must be a torch tensor, got list", ""),
    "weight type": ({"weight": 1.0}, VariantPackTypeError, "weight must be a torch tensor, got float", ""),
    "out type": ({"out": 3}, VariantPackTypeError, "out must be a torch tensor", ""),
    "block_scale type": ({"block_scale": 3}, VariantPackTypeError, "block_scale must be a torch tensor", ""),
    "weight shape": ({"weight": torch.randn(31)}, VariantPackError, r"weight has shape \(31,\)", r"\(32,\).*\(4, 32\)"),
    "weight rank": ({"weight": torch.randn(1, 32)}, VariantPackError, r"weight has shape \(1, 32\)", r"\(32,\)"),
    "no dimension": ({"input": torch.tensor(1.0)}, VariantPackError, r"input has shape \(\)", "1 to 8 dimensions"),
    "rank 9": ({"input": torch.ones((1,) * 8 + (32,))}, VariantPackError, "input has shape", "1 to 8 dimensions"),
    "no columns": ({"input": torch.ones(4, 0)}, VariantPackError, r"input has shape \(4, 0\)", "not empty"),
    "out shape": ({"out": torch.empty(4, 31)}, VariantPackError, r"out has shape \(4, 31\)", r"\(4, 32\)"),
    "out rank": ({"out": torch.empty(1, 4, 32)}, VariantPackError, r"out has shape \(1, 4, 32\)", r"\(4, 32\)"),
    "out overlaps itself": ({"out": torch.empty(32).expand(4, 32)}, VariantPackError, "tensor 'out'", "one address"),
    "eps": ({"eps": "small"}, VariantPackTypeError, "'eps'", "number"),
    "eps range": ({"eps": 1e300}, VariantPackError, "'eps'.*1e\\+300", "float32; accepted"),
    "aliased": ({"input": (same := torch.randn(4, 32)), "out": same}, VariantPackError, "out.*input", "of its own"),
    "odd blocks": (nvfp4(hidden=24), VariantPackError, r"input has shape \(4, 24\)", "multiple of 16"),
    "pairs shape": (
        nvfp4(out=torch.empty(4, 32, dtype=FP4)),
        VariantPackError,
        r"out has shape \(4, 32\)",
        r"\(4, 16\)",
    ),
    "pairs across rows": (
        nvfp4(out=of(torch.uint8, 16, 4).view(FP4).t()),
        VariantPackError,
        r"out has stride \(1, 4\)",
        "1 along the last",
    ),
    "scale shape": (
        nvfp4(block_scale=of(torch.float8_e4m3fn, 4, 3)),
        VariantPackError,
        r"block_scale has shape \(4, 3\)",
        r"\(4, 2\)",
    ),
    "scale dtype": (nvfp4(block_scale=torch.empty(4, 2)), VariantPackTypeError, "block_scale.*float32", "e4m3fn$"),
    "sparse": ({"input": torch.randn(4, 32).to_sparse()}, VariantPackTypeError, "input.*sparse", "strided"),
    "meta": ({"input": torch.empty(4, 32, device="meta")}, VariantPackError, "input is on meta", "cpu, cuda"),
    "meta out": ({"out": torch.empty(4, 32, device="meta")}, VariantPackError, "out is on meta", "one device"),
    "nested": (
        {"input": torch.nested.nested_tensor([torch.randn(2, 32), torch.randn(3, 32)])},
        VariantPackTypeError,
        "input.*nested",
        "strided",
    ),
}
FLOATS = "bfloat16, float16, float32"
TYPES = {
    "input": (FLOATS, ["int32", "bool", "float64", "float8_e4m3fn", "complex64"]),
    "weight": (FLOATS, ["int64", "float64", "float8_e5m2"]),
    "out": (f"{FLOATS}, float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2", ["int8", "uint8", "float64", "float8_e8m0fnu"]),
}
for name, (accepted, refused) in TYPES.items():
    for dtype in refused:
        change = {name: of(getattr(torch, dtype), *((32,) if name == "weight" else ()))}
        WRONG[f"{name} {dtype}"] = (change, VariantPackTypeError, f"{name} is of torch.{dtype}", accepted)


@pytest.mark.parametrize(("change", "error", "given", "accepted"), WRONG.values(), ids=WRONG)
def test_refused(change, error, given, accepted):
    with pytest.raises(error, match=given) as caught:
        good(**change)
    assert re.search(accepted, str(caught.value)) and isinstance(caught.value, graphfuse.GraphfuseError)


@pytest.mark.parametrize(("change", "error", "given", "accepted"), WRONG.values(), ids=WRONG)
def test_refused_after_calls_that_were_right(change, error, given, accepted):
    """What is remembered of a problem does not stand for one that differs from it."""
    for right in (good, lambda: good(out=torch.empty(4, 32)), lambda: fused_rmsnorm_silu(**nvfp4())):
        right(), right()
    with pytest.raises(error, match=given) as caught:
        good(**change)
    assert re.search(accepted, str(caught.value))


def test_repeated_calls_are_like_first_ones():
    """One problem's key with other strides, alignments, classes, gradients and numbers."""

    def variants(seed):
        torch.manual_seed(seed)
        x, weight = torch.randn(4, 32), torch.randn(32)
        yield (x, weight), {}
        yield (torch.nn.Parameter(x), torch.nn.Parameter(weight)), {}
        yield (x, torch.randn(64)[::2]), {}
        yield (x, torch.randn(33)[1:]), {}
        yield (torch.randn(129)[1:].view(4, 32), weight), {}
        yield (x, weight), {"out": torch.empty(4, 40)[:, :32]}
        yield (x, weight), {"out": torch.empty(4, 32)}
        yield (x, weight), {"out": torch.empty(129)[1:].view(4, 32)}
        for eps in (1e-6, 0.5, 0.0, -0.0, 1, np.float32(0.25)):
            yield (x, weight), {"eps": eps}

    functional._PROBLEMS.clear()
    with torch.no_grad():
        for seed in range(3):
            for arguments, options in variants(seed):
                found = fused_rmsnorm_silu(*arguments, **options).clone()
                kept, functional._PROBLEMS = functional._PROBLEMS, {}
                assert torch.equal(found, fused_rmsnorm_silu(*arguments, **options))
                functional._PROBLEMS = kept
    assert functional._PROBLEMS


def test_block_scale_is_ignored_without_nvfp4():
    x, weight = torch.randn(4, 32), torch.randn(32)
    assert torch.equal(fused_rmsnorm_silu(x, weight, block_scale=torch.empty(0)), fused_rmsnorm_silu(x, weight))


def test_the_result_has_no_gradient():
    x = torch.randn(4, 32, requires_grad=True)
    assert not fused_rmsnorm_silu(x, torch.randn(32)).requires_grad
