"""What the functions refuse: errors that name the argument, what was given and what is accepted, before any write."""

import inspect
import re

import pytest
import torch

import graphfuse
from graphfuse import VariantPackError, VariantPackTypeError, fused_rmsnorm_silu
from support.functional_calls import F8, NAMES, WITH_EPS, call


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
    "no dimension": ({"input": torch.tensor(1.0)}, VariantPackError, r"input has shape \(\)", "one dimension or more"),
    "rank 9, apart": (
        {"input": torch.ones((4,) * 8 + (32,))[(slice(None, None, 2),) * 8]},
        VariantPackError,
        "'input'",
        "1 to 8 dimensions",
    ),
    "no columns": ({"input": torch.ones(4, 0)}, VariantPackError, r"input has shape \(4, 0\)", "not empty"),
    "out shape": ({"out": torch.empty(4, 31)}, VariantPackError, r"out has shape \(4, 31\)", r"\(4, 32\)"),
    "out rank": ({"out": torch.empty(1, 4, 32)}, VariantPackError, r"out has shape \(1, 4, 32\)", r"\(4, 32\)"),
    "out overlaps itself": ({"out": torch.empty(32).expand(4, 32)}, VariantPackError, "tensor 'out'", "one address"),
    "eps": ({"eps": "small"}, VariantPackTypeError, "'eps'", "number"),
    "eps range": ({"eps": 1e300}, VariantPackError, "'eps'.*1e\\+300", "float32; accepted"),
    "partly aliased": (
        {"input": (memory := torch.randn(5, 32))[:4], "out": memory[1:]},
        VariantPackError,
        "'out'.*overlaps.*'input'",
        "of its own",
    ),
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
    "meta": ({"input": torch.empty(4, 32, device="meta")}, VariantPackError, "input is on meta", "one device"),
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


# Every function, by the arguments that all of them have.


def refused(made, error, message, **change):
    """The call raises, by itself and after one that was right, and leaves every tensor as it is."""
    before = {name: t.clone() for name, t in (made.tensors | tensors_of(change)).items()}
    for _ in range(2):
        with pytest.raises(error, match=message):
            made.run(**change)
        for name, t in (made.tensors | tensors_of(change)).items():
            assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8)), name
        right = {name: t.clone() for name, t in made.tensors.items()}
        made.run(**right)


def tensors_of(values):
    return {name: v for name, v in values.items() if isinstance(v, torch.Tensor) and v.dim()}


ARGUMENTS = [(name, argument) for name in NAMES for argument in call(name).tensors]


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_types(name, argument):
    made = call(name)
    refused(made, VariantPackTypeError, f"{argument} must be a torch tensor, got float", **{argument: 1.0})
    maybe = inspect.signature(made.function).parameters[argument]
    if maybe.default is not None and "None" not in str(maybe.annotation):
        refused(made, VariantPackTypeError, f"{argument} must be a torch tensor, got NoneType", **{argument: None})
    wrong = torch.zeros(made.tensors[argument].shape, dtype=torch.int32)
    refused(made, VariantPackTypeError, f"{argument} is of torch.int32; accepted: (bfl|float)", **{argument: wrong})
    sparse = made.tensors[argument].float().to_sparse().to(made.tensors[argument].dtype)
    with pytest.raises(VariantPackTypeError, match=f"{argument} is a tensor of layout torch.sparse"):
        made.run(**{argument: sparse})


@pytest.mark.parametrize(("name", "argument"), [(n, a) for n, a in ARGUMENTS if len(call(n).tensors) > 1])
def test_shapes(name, argument):
    made = call(name)
    given = made.tensors[argument]
    kind = given.dtype
    wrong = torch.zeros(*given.shape[:-1], given.shape[-1] + 1).to(kind)
    # Where all others follow an argument, it is one of them that does not fit.
    leads = argument == made.leads
    shown = "has shape" if leads else rf"{argument} has shape {re.escape(str(tuple(wrong.shape)))}; accepted: \("
    refused(made, VariantPackError, shown, **{argument: wrong})
    if not leads:
        refused(made, VariantPackError, rf"{argument} has shape \(1, ", **{argument: given.clone()[None]})


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in NAMES), *((n, {"is_sf_swizzled_layout": True}) for n in NAMES if "fp4quant" in n)],
)
def test_no_dimension(name, options):
    made = call(name)
    leads = made.leads
    shown = rf"{leads} has shape \(\); accepted: one dimension or more, the last not empty"
    refused(made, VariantPackError, shown, **{leads: torch.ones((), dtype=made.tensors[leads].dtype)}, **options)


@pytest.mark.parametrize("name", WITH_EPS)
def test_eps(name):
    refused(call(name), VariantPackTypeError, "'eps'.*number", eps="small")
    refused(call(name), VariantPackError, "'eps'.*float32; accepted", eps=1e300)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fused_rmsnorm_silu"])
def test_enable_pdl(name):
    for wrong in (1, "yes", 0):
        made, shown = call(name), re.escape(f"enable_pdl is {type(wrong).__name__}; accepted: None, True, False")
        refused(made, VariantPackTypeError, shown, enable_pdl=wrong)
    for right in (None, True, False):
        call(name).run(enable_pdl=right)


BLOCKS = {
    "size": ({"block_size": 8}, VariantPackError, "block_size is 8; accepted: 16, 32"),
    "size type": ({"block_size": 16.0}, VariantPackTypeError, "block_size is float; accepted: 16, 32"),
    "format": ({"scale_format": "e5m2"}, VariantPackError, "scale_format is 'e5m2'; accepted: None, 'e4m3', 'ue8m0'"),
    "other format": (
        {"block_size": 32, "scale_format": "e4m3"},
        VariantPackError,
        r"\(32, 'e4m3', False\); accepted: .*\(32, 'ue8m0', False\)",
    ),
    "layout": (
        {"is_sf_swizzled_layout": 1},
        VariantPackTypeError,
        "is_sf_swizzled_layout is int; accepted: False, True",
    ),
    "MXFP4 and MXFP8": (
        {"block_size": 32, "y_fp4": torch.empty(5, 64, dtype=torch.bfloat16)},
        VariantPackTypeError,
        "y_fp4 is of torch.bfloat16; accepted: float4_e2m1fn_x2, uint8, float8_e4m3fn, float8_e5m2$",
    ),
    "MXFP4 of MXFP8's shape": (
        {"block_size": 32, "y_fp4": torch.empty(5, 64, dtype=torch.uint8)},
        VariantPackError,
        r"y_fp4 has shape \(5, 64\); accepted: \(5, 32\)",
    ),
    "scales of E4M3 in MXFP4": (
        {"block_size": 32, "block_scale": torch.empty(5, 2, dtype=F8)},
        VariantPackTypeError,
        "block_scale is of torch.float8_e4m3fn; accepted: float8_e8m0fnu, uint8",
    ),
    "FP8 in NVFP4": (
        {"y_fp4": torch.empty(5, 64, dtype=F8)},
        VariantPackTypeError,
        "y_fp4 is of .*; accepted: float4_",
    ),
    "elements": (
        {"y_fp4": torch.empty(5, 64, dtype=torch.uint8)},
        VariantPackError,
        r"y_fp4 has shape \(5, 64\); accepted: \(5, 32\)",
    ),
    "scales": (
        {"block_scale": torch.empty(5, 5, dtype=F8)},
        VariantPackError,
        r"block_scale has shape \(5, 5\); accepted: \(5, 4\)",
    ),
    "tiles": (
        {"block_scale": torch.empty(20, dtype=F8), "is_sf_swizzled_layout": True},
        VariantPackError,
        r"block_scale has shape \(20,\); accepted: \(512,\) or \(128, 4\)",
    ),
    "global scale": ({"global_scale": torch.ones(2)}, VariantPackError, r"global_scale .*; accepted: \(1,\) or \(\)"),
    "global scale type": (
        {"global_scale": 1.0},
        VariantPackTypeError,
        "global_scale must be a torch tensor, got float",
    ),
}


@pytest.mark.parametrize("name", ["rmsnorm_fp4quant", "add_rmsnorm_fp4quant"])
@pytest.mark.parametrize(("change", "error", "message"), BLOCKS.values(), ids=BLOCKS)
def test_blocks(name, change, error, message):
    refused(call(name), error, message, **change)


@pytest.mark.parametrize("name", ["rmsnorm_fp4quant", "add_rmsnorm_fp4quant"])
def test_rows_of_broken_blocks(name):
    with pytest.raises(VariantPackError, match=r"input has shape \(5, 40\); accepted .* multiple of 16"):
        call(name, (5, 40)).run()
    with pytest.raises(VariantPackError, match=r"input has shape \(5, 48\); accepted .* multiple of 32"):
        call(name, (5, 48)).run(block_size=32, y_fp4=torch.empty(5, 48, dtype=F8))


def test_scales_in_both_layouts():
    made, both = call("add_rmsnorm_fp4quant"), {"output_both_sf_layouts": True}
    message = "output_both_sf_layouts is int; accepted: False, True"
    refused(made, VariantPackTypeError, message, output_both_sf_layouts=1)
    refused(made, VariantPackTypeError, "is_sf_swizzled_layout is int", is_sf_swizzled_layout=1, **both)
    other = torch.empty(5, 5, dtype=F8)
    message = r"block_scale_unswizzled has shape \(5, 5\); accepted: \(5, 4\)"
    refused(made, VariantPackError, message, block_scale_unswizzled=other, **both)
    rows = torch.empty(5, 4, dtype=F8)
    message = r"block_scale has shape \(5, 4\); accepted: \(512,\) or \(128, 4\)"
    refused(made, VariantPackError, message, block_scale=rows, **both)
    message = "block_scale_unswizzled is of torch.float32; accepted: float8_e4m3fn, uint8"
    refused(made, VariantPackTypeError, message, block_scale_unswizzled=rows.float(), **both)
    overlapping = torch.empty(512, dtype=torch.uint8)
    message = "output 'block_scale(_unswizzled)?' overlaps 'block_scale"
    given = {"block_scale": overlapping, "block_scale_unswizzled": overlapping[:20].view(5, 4)}
    refused(made, VariantPackError, message, **given, **both)


def test_heads():
    made = call("qk_rmsnorm", (5, 4, 64))
    refused(
        made, VariantPackError, r"k has shape \(6, 2, 64\); accepted: \(5, 2, 64\)", k=torch.zeros(6, 2, 64).bfloat16()
    )
    refused(made, VariantPackError, r"k has shape \(5, 64\); accepted", k=torch.zeros(5, 64).bfloat16())


OVERLAPS = {
    "input and residual": ("fused_add_rmsnorm", lambda m: {"input": m[:4], "residual": m[1:5]}, "'residual'"),
    "the same": ("fused_add_rmsnorm", lambda m: {"input": m[:4], "residual": m[:4]}, "residual"),
    "across": (
        "fused_add_rmsnorm",
        lambda m: {"input": m[:4], "residual": m[:4].flip(0)[:4] * 0, "weight": m[0]},
        "'weight'",
    ),
    "out and residual": (
        "fused_add_rmsnorm",
        lambda m: {"input": m[4:8] + 1, "residual": m[:4], "out": m[1:5]},
        "'(out|residual)'",
    ),
    "shifted": ("rmsnorm", lambda m: {"input": m[:4], "out": m.view(-1)[8 : 8 + 256].view(4, 64)}, "'out'.*'input'"),
    "other strides": ("rmsnorm", lambda m: {"input": m[:4], "out": m[0:8:2]}, "'out'.*'input'"),
    "gate": ("rmsnorm_silu_gate", lambda m: {"input": m[8:12], "gate": m[:4], "out": m[1:5]}, "'out'.*'gate'"),
    "weight": ("rmsnorm", lambda m: {"input": m[8:12], "weight": m[0], "out": m[:4]}, "'out'.*'weight'"),
    "k_out on q": (
        "qk_rmsnorm",
        lambda m: {"q": m[:4], "k": m[4:8], "q_out": m[8:12], "k_out": m[1:5]},
        "'k_out'.*'q'",
    ),
    "sum on input": (
        "sandwich_rmsnorm",
        lambda m: {"input": m[:4], "residual": m[4:8], "residual_out": m[1:5]},
        "'residual_out'.*'(input|residual)'",
    ),
    "residual on y_out": (
        "add_rmsnorm_fp4quant",
        lambda m: {"input": m[4:8], "residual": m[:4], "y_out": m[1:5]},
        "'(y_out|residual)'",
    ),
}


@pytest.mark.parametrize(("name", "arguments", "message"), OVERLAPS.values(), ids=OVERLAPS)
def test_partial_overlap(name, arguments, message):
    made, memory = call(name, (4, 64)), torch.randn(12, 64).bfloat16()
    before = memory.clone()
    for _ in range(2):
        with pytest.raises(VariantPackError, match="overlaps.*accepted: memory of its own"):
            made.run(**arguments(memory))
        with pytest.raises(VariantPackError, match=message):
            made.run(**arguments(memory))
        assert torch.equal(memory, before)
        call(name, (4, 64)).run()
