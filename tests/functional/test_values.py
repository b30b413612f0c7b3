"""What each function computes, against float64, and quantized bytes against the quantizers of the oracle."""

import numpy as np
import pytest
import torch

from graphfuse import VariantPackError, VariantPackTypeError, functional
from support import functional_calls, oracle
from support.functional_calls import F8, F8_WIDE, FP4, NAMES, call, check

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(64,), (5, 64), (2, 3, 64), (2, 1, 3, 96), (0, 64)]


@pytest.mark.torch
@pytest.mark.parametrize("weight", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_types(name, dtype, weight):
    made = call(name, (33, 64), dtype, weight)
    check(made.run(), made.exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, shape):
    made = call(name, shape)
    results = made.run()
    check(results, made.exact)
    for name in made.returned:
        assert results[name].is_contiguous()


@pytest.mark.parametrize("hidden", [1, 17, 111])
@pytest.mark.parametrize("name", [name for name in NAMES if "fp4" not in name])
def test_odd_rows(name, hidden):
    made = call(name, (7, hidden))
    check(made.run(), made.exact)


@pytest.mark.torch
@pytest.mark.parametrize("kind", [*FLOATS, F8, F8_WIDE])
@pytest.mark.parametrize(
    "name",
    [
        "rmsnorm",
        "gemma_rmsnorm",
        "fused_add_rmsnorm",
        "gemma_fused_add_rmsnorm",
        "qk_rmsnorm",
        "fused_rmsnorm_silu",
        "rmsnorm_silu_gate",
        "layernorm",
        "fused_add_layernorm",
        "softmax",
        "log_softmax",
        "normalize",
    ],
)
def test_out_selects_the_format(name, kind):
    made = call(name, (4, 3, 64))
    outs = made.returned or ("out",)
    exact = made.exact if made.returned else made.exact | {"out": made.exact["input"]}
    before = made.tensors["input"].clone() if "input" in made.tensors else None
    shapes = [exact[out].shape for out in outs]
    results = made.run(**{out: torch.empty(shape, dtype=kind) for out, shape in zip(outs, shapes, strict=True)})
    assert all(results[out].dtype is kind for out in outs)
    check(results, {n: e for n, e in exact.items() if n != "input"})
    assert before is None or torch.equal(before, made.tensors["input"])


def test_between_two_norms_nothing_is_rounded():
    """A sum of 1 and 2^-9 is not 1, and a norm of 1 + 2^-9 is not one of 1; bfloat16 tells neither apart."""
    x, r = torch.ones(2, 64).bfloat16(), torch.ones(2, 64).bfloat16()
    weight = torch.full((64,), 2.0**-9)
    weight[1:] = 0
    out, total = functional.sandwich_rmsnorm(x, r, weight, torch.ones(64), 0.0, torch.empty(2, 64))
    exact = torch.ones(64, dtype=torch.float64)
    exact[0] += 2.0**-9
    assert total.dtype is torch.bfloat16 and (total == 1).all() and (x == 1).all() and (r == 1).all()
    torch.testing.assert_close(out[0].double(), exact / exact.square().mean().sqrt(), rtol=1e-7, atol=0)


def test_the_sum_is_normalized_unrounded():
    """Of 1 + 2^-9 bfloat16 keeps 1; the norm of rows of it and of 1 tells them apart in float32."""
    x, r = torch.full((2, 64), 2.0**-9).bfloat16(), torch.ones(2, 64).bfloat16()
    x[:, 1:] = 0
    out = torch.empty(2, 64)
    functional.fused_add_rmsnorm(x, r, torch.ones(64), 0.0, out=out)
    total = torch.ones(64, dtype=torch.float64)
    total[0] += 2.0**-9
    assert (r == 1).all() and (x[:, 0] == 2.0**-9).all()
    torch.testing.assert_close(out[0].double(), total / total.square().mean().sqrt(), rtol=1e-7, atol=0)


def values(made) -> np.ndarray:
    """The float32 values that a quantizing call rounds: those of the function that stores them."""
    given = {name: made.tensors[name].clone() for name in ("input", "residual", "weight") if name in made.tensors}
    out = torch.empty(given["input"].shape)
    norm = functional.fused_add_rmsnorm if "residual" in given else functional.rmsnorm
    norm(**given, eps=functional_calls.EPS, out=out)
    return out.numpy()


@pytest.mark.parametrize("kind", [F8, F8_WIDE])
@pytest.mark.parametrize("factor", [0.05, 3e-4])  # the second one saturates
@pytest.mark.parametrize("name", ["rmsnorm_quant", "fused_add_rmsnorm_quant"])
def test_static_bytes(name, factor, kind):
    made = call(name, (9, 160))
    y = values(made) * (1 / np.float32(factor))
    results = made.run(out=torch.empty(9, 160, dtype=kind), scale=torch.tensor(factor))
    want = oracle.fp8(y, "e4m3" if kind is F8 else "e5m2")
    assert np.array_equal(results["out"].view(torch.uint8).numpy(), want)


@pytest.mark.parametrize("kind", [F8, F8_WIDE, None])
@pytest.mark.parametrize("name", ["rmsnorm_quant_dynamic", "fused_add_rmsnorm_quant_dynamic"])
def test_dynamic_bytes(name, kind):
    made = call(name, (9, 160))
    made.tensors["input"][3] = 0
    if "residual" in made.tensors:
        made.tensors["residual"][3] = 0
    made.tensors["input"][4] *= 1e-3
    largest = np.float32(57344 if kind is F8_WIDE else 448)
    y = values(made)
    scale = np.maximum(np.abs(y).max(-1, keepdims=True) * (1 / largest), np.float32(1 / (float(largest) * 512)))
    results = made.run(**({} if kind is None else {"out": torch.empty(9, 160, dtype=kind)}))
    assert results["scale"].shape == (9, 1) and np.array_equal(results["scale"].numpy(), scale)
    want = oracle.fp8(y * (1 / scale), "e5m2" if kind is F8_WIDE else "e4m3")
    assert np.array_equal(results["out"].view(torch.uint8).numpy(), want)
    assert scale[3] == np.float32(1 / (float(largest) * 512)) and not (want[3] & 0x7F).any()


def quantized(y: np.ndarray, size: int, kind, format: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    if kind in (F8, F8_WIDE):
        return oracle.mxfp8(y, "e4m3" if kind is F8 else "e5m2")
    return oracle.nvfp4(y) if size == 16 and format != "ue8m0" else oracle.mxfp4(y, size)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("kind", [None, FP4, torch.uint8], ids=str)
@pytest.mark.parametrize("size, format", [(32, None), (32, "ue8m0"), (16, "ue8m0")])
@pytest.mark.parametrize("name", ["rmsnorm_fp4quant", "add_rmsnorm_fp4quant"])
def test_power_of_two_scales_of_fp4(name, size, format, kind, swizzled):
    made = call(name, (130, 96))
    y = values(made)
    change = {"block_size": size, "scale_format": format, "is_sf_swizzled_layout": swizzled}
    if kind is not None:
        change["y_fp4"] = torch.empty(130, 48, dtype=torch.uint8).view(kind)
    for _ in range(2):
        results = made.run(**change, **{n: t.clone() for n, t in made.tensors.items()})
        codes, scales = quantized(y, size, kind, "ue8m0")
        assert results["y_fp4"].dtype is (kind or FP4) and results["block_scale"].dtype is torch.uint8
        assert np.array_equal(results["y_fp4"].view(torch.uint8).numpy(), codes)
        found = results["block_scale"].numpy()
        assert np.array_equal(unswizzled(found, 130, 96 // size) if swizzled else found, scales)


FORMATS = [(16, None, None), (16, "ue8m0", None), (32, None, None), (32, None, F8)]


@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
@pytest.mark.parametrize("size, format, kind", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(130, 96), (2, 3, 64)], ids=str)
def test_scales_in_both_layouts(shape, size, format, kind, given):
    """By FlashInfer's semantics: tiles in block_scale, whatever is_sf_swizzled_layout says, rows beside them."""
    made = call("add_rmsnorm_fp4quant", shape)
    y, rows, blocks = values(made), np.prod(shape[:-1]), shape[-1] // size
    change = {"block_size": size, "scale_format": format, "output_both_sf_layouts": True}
    if kind is not None:
        change["y_fp4"] = torch.empty(shape, dtype=kind)
    apart = torch.full((*shape[:-1], blocks + 3), 7, dtype=torch.uint8)
    if given:
        change["block_scale_unswizzled"] = apart[..., :blocks]
        change["block_scale"] = torch.empty(-(-rows // 128) * 128 * (-(-blocks // 4) * 4), dtype=torch.uint8)
    codes, scales = quantized(y, size, kind, format)
    for tiles in (False, True, False):
        tensors = {n: t.clone() for n, t in made.tensors.items()}
        result = functional.add_rmsnorm_fp4quant(
            **tensors, **change, eps=functional_calls.EPS, is_sf_swizzled_layout=tiles
        )
        elements, in_tiles, in_rows = result
        check(tensors, made.exact)
        assert np.array_equal(elements.view(torch.uint8).numpy(), codes)
        assert in_rows.shape == (*shape[:-1], blocks)
        assert np.array_equal(in_rows.view(torch.uint8).numpy(), scales)
        assert np.array_equal(
            unswizzled(in_tiles.view(torch.uint8).numpy(), rows, blocks), scales.reshape(rows, blocks)
        )
        if given:
            assert in_rows is change["block_scale_unswizzled"] and in_tiles is change["block_scale"]
            assert (apart[..., blocks:] == 7).all()
        else:
            kinds = {in_tiles.dtype, in_rows.dtype}
            assert kinds == {F8 if size == 16 and format is None else torch.uint8}


def test_the_second_layout_is_ignored_where_it_is_not_asked_for():
    made, ignored = call("add_rmsnorm_fp4quant"), torch.full((5, 4), 7, dtype=torch.uint8)
    results = made.run(block_scale_unswizzled=ignored)
    assert results["block_scale"].shape == (5, 4) and (ignored == 7).all()


@pytest.mark.torch
@pytest.mark.parametrize("scaled", [None, 3.5])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("kind", [None, FP4, torch.uint8, F8, F8_WIDE], ids=str)
@pytest.mark.parametrize("shape", [(130, 96), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("name", ["rmsnorm_fp4quant", "add_rmsnorm_fp4quant"])
def test_block_bytes(name, shape, kind, swizzled, scaled):
    made, size = call(name, shape), 32 if kind in (F8, F8_WIDE) else 16
    y = values(made)
    change = {"block_size": size, "is_sf_swizzled_layout": swizzled}
    if kind is not None:
        columns = shape[-1] // (2 if size == 16 else 1)
        change["y_fp4"] = torch.empty((*shape[:-1], columns), dtype=torch.uint8).view(kind)
    if scaled is not None:
        change["global_scale"] = torch.tensor([scaled])
        y = y * np.float32(scaled)
    results = made.run(**change)
    check(results, made.exact)
    codes, scales = quantized(y, size, kind)
    assert np.array_equal(results["y_fp4"].view(torch.uint8).numpy(), codes)
    found = results["block_scale"]
    assert found.dtype is (F8 if size == 16 else torch.uint8)
    if swizzled:
        rows, blocks = y.reshape(-1, y.shape[-1]).shape[0], shape[-1] // size
        assert found.shape == (-(-rows // 128) * 128 * (-(-blocks // 4) * 4),)
        scales, found = scales.reshape(rows, blocks), unswizzled(found.view(torch.uint8).numpy(), rows, blocks)
        assert np.array_equal(found, scales)
    else:
        assert np.array_equal(found.view(torch.uint8).numpy(), scales)


def unswizzled(memory: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """Scales in tiles as FlashInfer's documentation has it: [row tile][column tile][row % 32][row / 32][column]."""
    tiles = memory.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
    return np.array(
        [[tiles[r // 128, c // 4, r % 32, r % 128 // 32, c % 4] for c in range(blocks)] for r in range(rows)]
    )


@pytest.mark.parametrize("kind", [F8, torch.uint8])
def test_given_block_scales(kind):
    made = call("rmsnorm_fp4quant", (130, 96))
    y = values(made)
    rows_apart = torch.full((130, 12), 7, dtype=torch.uint8)
    made.run(block_scale=rows_apart.view(kind)[:, :6])
    assert np.array_equal(rows_apart[:, :6].numpy(), oracle.nvfp4(y)[1]) and (rows_apart[:, 6:] == 7).all()
    for shape in ((2048,), (256, 8)):
        memory = torch.full(shape, 7, dtype=torch.uint8)
        made.run(block_scale=memory.view(kind), is_sf_swizzled_layout=True)
        assert np.array_equal(unswizzled(memory.numpy().reshape(-1), 130, 6), oracle.nvfp4(y)[1])
        assert (memory == 7).sum() >= 2048 - 130 * 6  # padding stays


@pytest.mark.parametrize("kind", FLOATS)
def test_the_norm_beside_the_blocks(kind):
    made = call("add_rmsnorm_fp4quant", (6, 64))
    y = values(made)
    results = made.run(y_out=torch.empty(6, 64, dtype=kind), global_scale=torch.tensor([2.0]))
    assert torch.equal(results["y_out"], torch.from_numpy(y).to(kind))
    assert np.array_equal(results["y_fp4"].view(torch.uint8).numpy(), oracle.nvfp4(2 * y)[0])  # of what is not rounded


@pytest.mark.parametrize("given", [False, True])
def test_silu_to_nvfp4(given):
    x, weight = torch.randn(2, 6, 64).bfloat16(), torch.randn(64).bfloat16()
    y = functional.fused_rmsnorm_silu(x, weight, out=torch.empty(2, 6, 64))
    out = torch.empty(2, 6, 32, dtype=FP4)
    scale = torch.empty(2, 6, 4, dtype=F8) if given else None
    made, scales = functional.fused_rmsnorm_silu(x, weight, out=out, block_scale=scale)
    assert made is out and (not given or scales is scale) and scales.shape == (2, 6, 4)
    codes, want = oracle.nvfp4(y.numpy())
    assert torch.equal(scales.view(torch.uint8), torch.from_numpy(want))
    assert torch.equal(out.view(torch.uint8), torch.from_numpy(codes))


def test_block_scale_is_ignored_without_nvfp4():
    x, weight = torch.randn(4, 32), torch.randn(32)
    ignored = functional.fused_rmsnorm_silu(x, weight, block_scale=torch.empty(0))
    assert torch.equal(ignored, functional.fused_rmsnorm_silu(x, weight))


GROUPED = {
    "rmsnorm_quant_dynamic": lambda x, r, w: {"input": x, "weight": w},
    "fused_add_rmsnorm_quant_dynamic": lambda x, r, w: {"input": x, "residual": r, "weight": w},
    "silu_mul_fp8": lambda x, r, w: {"gate": x, "up": r},
    "quantize_fp8": lambda x, r, w: {"input": x},
}


def grouped(name: str, rows: int, columns: int, **change) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """What is quantized, in float32, and the results."""
    x, r, w = (torch.randn(e, columns).bfloat16() for e in (rows, rows, 1))
    given = GROUPED[name](x, r, w[0])
    if name == "silu_mul_fp8":
        y = (x.float() * (1 / (1 + torch.exp(-x.float())))) * r.float()
    elif name == "quantize_fp8":
        y = x.float()
    else:
        y = torch.empty(rows, columns)
        change["y_out"] = y
    codes, scale = getattr(functional, name)(**given, group_size=128, **change)
    return y.numpy(), codes, scale


@pytest.mark.parametrize("kind", [F8, F8_WIDE])
@pytest.mark.parametrize("rows, columns", [(1, 128), (3, 7168), (130, 256)])
@pytest.mark.parametrize("name", GROUPED)
def test_groups(name, rows, columns, kind):
    y, codes, scale = grouped(name, rows, columns, out=torch.empty(rows, columns, dtype=kind))
    want, scales = oracle.fp8_by_groups(y, "e4m3" if kind is F8 else "e5m2")
    assert scale.shape == (rows, columns // 128) and scale.is_contiguous()
    np.testing.assert_array_equal(scale.numpy(), scales)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), want)


@pytest.mark.parametrize("name", GROUPED)
def test_scales_of_groups_by_columns(name):
    """One after another, for more and fewer rows; what lies between columns stays."""
    memory = torch.empty(4, 16)
    for rows in (3, 9, 3, 14, 16):
        memory.fill_(7)
        scale = memory[:, :rows].t()
        y, codes, found = grouped(name, rows, 512, scale=scale)
        want, scales = oracle.fp8_by_groups(y, "e4m3")
        assert found is scale and (memory[:, rows:] == 7).all()
        np.testing.assert_array_equal(scale.numpy(), scales)
        np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), want)


def test_groups_that_are_refused():
    x = torch.randn(4, 192)
    with pytest.raises(VariantPackError, match=r"input has shape \(4, 192\); accepted with blocks of 128"):
        functional.quantize_fp8(x)
    with pytest.raises(VariantPackError, match="group_size is 64; accepted: None, 128"):
        functional.silu_mul_fp8(x, x, 64)
    with pytest.raises(VariantPackTypeError, match="group_size is float; accepted: None, 128"):
        functional.quantize_fp8(x, 128.0)
    with pytest.raises(VariantPackError, match=r"scale has shape \(4, 1\); accepted: \(4, 2\)"):
        functional.quantize_fp8(torch.randn(4, 256), scale=torch.empty(4, 1))
    with pytest.raises(VariantPackTypeError, match="scale is of torch.bfloat16; accepted: float32"):
        functional.quantize_fp8(torch.randn(4, 256), scale=torch.empty(4, 2).bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_results_have_no_gradient(name):
    made = call(name, dtype=torch.float32)
    weights = [n for n in ("weight", "q_weight", "k_weight") if n in made.tensors]
    read = {n: made.tensors[n].requires_grad_() for n in weights or [made.leads]}
    results = made.run()
    assert read and not any(results[n].requires_grad for n in (*made.returned, *made.exact) if n not in read)
