"""The RMSNorm kernel: any size, type, layout and extreme value, in every output format."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse import heur_mode
from support import graphs, oracle
from support.graphs import BF16, E4M3, E5M2, FLOAT, FP4, HALF, Norm

pytestmark = pytest.mark.gpu

OPENSOURCE = [heur_mode.OPENSOURCE]
COLUMNS = (1, 7, 17, 33, 48, 111, 3420, 3584, 7168, 16384, 65537)
ROWS = (0, 1, 3, 4097)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_any_size(columns, rows):
    for output in (BF16, FLOAT):
        graphs.check(Norm(rows, columns, output=output, training=True), OPENSOURCE, "cuda")
    if columns % 16 == 0:
        quantized(Norm(rows, columns, output=FP4, blocks=True))


def quantized(case: Norm, seed: int = 0) -> None:
    """The output is what a quantizer makes of the float32 output of the same graph; those are right."""
    pack = case.inputs("cuda", seed)
    plain = Norm(**{**vars(case), "output": FLOAT, "blocks": False, "output_stride": None})
    wide, narrow = plain.outputs("cuda"), case.outputs("cuda")
    graphs.fused(plain).execute(pack | wide)
    graph = graphs.fused(case)
    memory = graphs.workspace(graph.get_workspace_size(), "cuda")
    graph.execute(pack | narrow, memory)
    exact = case.exact(pack)
    assert ((wide["out"] - exact["out"]).abs() <= 1e-5 * (exact["out"].abs() + (1 if case.bias else 0))).all()
    values, out = wide["out"], narrow["out"].contiguous()
    if case.output is FP4:
        codes, scales = oracle.nvfp4_search(values)
        got = (
            narrow["block_scale"]
            if case.blocks
            else memory[-scales.numel() :].view(scales.shape)
            if case.rows
            else scales
        )
        assert torch.equal(got, scales) and torch.equal(out, codes)
    elif case.output in (E4M3, E5M2):
        name = "e4m3" if case.output is E4M3 else "e5m2"
        assert torch.equal(out.view(torch.uint8), oracle.fp8_search(values, name))
    else:
        assert torch.equal(out, values.to(graphs.TORCH[case.output]))
    if case.training:
        assert torch.equal(narrow["inverse_rms"], wide["inverse_rms"])
        torch.testing.assert_close(narrow["inverse_rms"].double(), exact["inverse_rms"], rtol=1e-6, atol=0)


TYPES = list(itertools.product((BF16, HALF, FLOAT), (BF16, HALF, FLOAT), (BF16, HALF, FLOAT, E4M3, E5M2, FP4)))
VARIANTS = {
    "plain": {},
    "norm alone": {"beta": None},
    "all": {"bias": BF16, "beta": 1.702, "training": True, "factor": "device", "eps": None},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("x", "weight", "output"), TYPES, ids=lambda t: t.name)
def test_any_types(x, weight, output, variant):
    quantized(Norm(37, 112, x, weight, output, blocks=output is FP4, **variant))


@pytest.mark.parametrize("bias", [BF16, HALF, FLOAT])
@pytest.mark.parametrize("factor", [None, "value", "device"])
@pytest.mark.parametrize("beta", [None, 0.0, -0.5, 1.0, 30.0])
def test_any_epilogue(beta, factor, bias):
    quantized(Norm(19, 320, bias=bias, beta=beta, factor=factor, output=E4M3))


@pytest.mark.parametrize("output", [E4M3, E5M2], ids=lambda t: t.name)
def test_fp8_saturates(output):
    case = Norm(64, 64, output=output, factor="value")
    pack, outputs = case.inputs("cuda"), case.outputs("cuda")
    graphs.fused(case).execute(pack | outputs | {"factor": 1e6})
    largest = {E4M3: 448.0, E5M2: 57344.0}[output]
    assert outputs["out"].float().abs().max() == largest and not outputs["out"].float().isnan().any()


@pytest.mark.parametrize("rows", [1, 33, 4097])
@pytest.mark.parametrize("columns", [16, 64, 512, 3584, 16384])
def test_implicit_block_scales_lie_in_the_workspace(columns, rows):
    """At row statistics (4 bytes a row) and a counter, each rounded up to 128, and nothing before them is written."""
    case = Norm(rows, columns, output=FP4)
    quantized(case)
    graph = graphs.fused(case)
    offset = -(-4 * rows // 128) * 128 + 128
    assert graph.get_workspace_size() == offset + rows * columns // 16
    memory = graphs.workspace(graph.get_workspace_size(), "cuda")
    graph.execute(case.inputs("cuda") | case.outputs("cuda"), memory)
    assert (memory[:offset] == 0xEE).all()


LAYOUTS = {
    "rows apart": Norm(33, 512, input_stride=520, output_stride=1024),
    "odd row stride": Norm(33, 512, input_stride=513, output_stride=515),
    "unaligned start": Norm(33, 512, offset=1, alignment=2),
    "half aligned": Norm(33, 512, offset=4, alignment=8),
    "unaligned float": Norm(33, 512, FLOAT, FLOAT, FLOAT, offset=1, alignment=4),
    "odd everything": Norm(33, 111, input_stride=113, output_stride=127, offset=3, alignment=2),
    "one row, any stride": Norm(1, 512, input_stride=99999, output_stride=77777),
    "one column": Norm(4097, 1, input_stride=3, output_stride=5),
    "fp8 unaligned": Norm(33, 512, output=E4M3, output_stride=513, offset=1, alignment=1),
    "long rows": Norm(5, 16384, input_stride=16387, output_stride=16385, offset=1, alignment=2),
    "longer rows": Norm(5, 65537, input_stride=65539, output_stride=65541, offset=1, alignment=2),
    "bias and all": Norm(33, 48, HALF, FLOAT, BF16, FLOAT, training=True, offset=2, alignment=1, input_stride=51),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(case):
    graphs.check(case, OPENSOURCE, "cuda")


@pytest.mark.parametrize("stride", [96, 98, 112, 1024])
def test_layouts_of_packed_pairs(stride):
    quantized(Norm(33, 96, output=FP4, blocks=True, output_stride=stride, alignment=1))


@settings(max_examples=40)
@given(
    rows=st.integers(0, 300),
    columns=st.integers(1, 3000),
    types=st.tuples(*[st.sampled_from([BF16, HALF, FLOAT])] * 2, st.sampled_from([BF16, HALF, FLOAT, E4M3, E5M2])),
    gaps=st.tuples(st.integers(0, 17), st.integers(0, 17)),
    offset=st.integers(0, 17),
    bias=st.sampled_from([None, BF16, FLOAT]),
    beta=st.sampled_from([None, 1.0, 0.3]),
    training=st.booleans(),
    seed=st.integers(0, 3),
)
def test_any_layout(rows, columns, types, gaps, offset, bias, beta, training, seed):
    case = Norm(
        rows,
        columns,
        *types,
        bias,
        beta,
        training=training,
        input_stride=columns + gaps[0],
        output_stride=columns + gaps[1],
        offset=offset,
        alignment=1 if offset else 16,
    )
    graphs.check(case, OPENSOURCE, "cuda", seed)


@pytest.mark.parametrize("mode", [heur_mode.OPENSOURCE, heur_mode.FALLBACK], ids=lambda m: m.name)
@pytest.mark.parametrize(("value", "want"), graphs.EXTREMES.values(), ids=graphs.EXTREMES)
def test_extreme_values(value, want, mode):
    graphs.check_extreme(value, want, [mode], "cuda")


@pytest.mark.parametrize("output", [BF16, HALF, E4M3, E5M2, FP4], ids=lambda t: t.name)
def test_extreme_values_in_every_format(output):
    """Infinity, NaN and zero rows, quantized as the float32 values are."""
    case = Norm(8, 64, FLOAT, FLOAT, output, blocks=output is FP4)
    plain = Norm(8, 64, FLOAT, FLOAT, FLOAT)
    pack = case.inputs("cuda")
    pack["x"][0], pack["x"][1, 5], pack["x"][2, 7], pack["x"][3] = 0, float("inf"), float("nan"), 1e-30
    pack["weight"][0, 17], pack["weight"][0, 40], pack["weight"][0, 50] = float("inf"), float("nan"), 3e38
    wide, narrow = plain.outputs("cuda"), case.outputs("cuda")
    graphs.fused(plain).execute(pack | wide)
    graphs.fused(case).execute(pack | narrow)
    values, out = wide["out"], narrow["out"]
    if output is FP4:
        codes, scales = oracle.nvfp4_search(values)
        assert torch.equal(narrow["block_scale"], scales) and torch.equal(out, codes)
    elif output in (E4M3, E5M2):
        want = oracle.fp8_search(values, "e4m3" if output is E4M3 else "e5m2")
        assert torch.equal(out.view(torch.uint8), want)
    else:
        assert oracle.ulps(out, values.to(out.dtype)).max() == 0


def test_sigmoid_is_as_accurate_as_said():
    """What the engine's note says, over arguments that are weights: a row of ones is normalized to ones."""
    columns = 1 << 14
    case = Norm(
        2, columns, FLOAT, FLOAT, FLOAT, beta=None, eps=1e-12, training=True, chain=(graphs.Op("sigmoid", (0,)),)
    )
    pack, outputs = case.inputs("cuda"), case.outputs("cuda")
    pack["x"].fill_(1)
    pack["weight"][0, : columns // 2] = torch.linspace(-120, -87, columns // 2)
    pack["weight"][0, columns // 2 :] = torch.linspace(-87, 30, columns // 2)
    graphs.fused(case).execute(pack | outputs)
    x = (pack["weight"][0] * outputs["inverse_rms"][0]).double()  # in float32, as the kernel does
    exact, got = torch.special.expit(x), outputs["out"][0].double()
    error = (got - exact).abs()
    inside = x >= -87
    assert (error <= exact * (5e-7 + 8e-8 * x.abs()))[inside].all()
    assert (error <= 1.2e-38)[~inside].all()
    assert torch.equal(outputs["out"][0], outputs["out"][1])


def test_more_than_2_31_elements(room):
    room(40 << 30)
    case = Norm(2**31 // 512 + 3, 512)
    pack, outputs = large(case), case.outputs("cuda")
    graphs.fused(case).execute(pack | outputs)
    assert pack["x"].numel() > 2**31
    for start in range(0, case.rows, 1 << 17):
        rows = slice(start, start + (1 << 17))
        exact = case.exact(pack | {"x": pack["x"][rows]})["out"]
        assert oracle.ulps(outputs["out"][rows], oracle.rounded(exact, torch.bfloat16)).max() <= 1


def large(case: Norm) -> dict:
    """Inputs without float32 copies of everything."""
    pack = Norm(1, case.columns).inputs("cuda")
    pack["x"] = torch.empty(case.rows, case.columns, dtype=torch.bfloat16, device="cuda")
    pack["x"].normal_(generator=graphs.generator("cuda", 1))
    return pack


@pytest.mark.parametrize("output", [BF16, E4M3], ids=lambda t: t.name)
def test_rows_further_apart_than_2_31_elements(room, output):
    room(40 << 30)
    far = 2**31 + 8
    graphs.check(Norm(3, 64, output=output, input_stride=far, output_stride=far), OPENSOURCE, "cuda")


def test_rows_longer_than_32_bit_offsets(room):
    room(40 << 30)
    case = Norm(2, 2**28 + 17)
    pack, outputs = large(case), case.outputs("cuda")
    graph = graphs.fused(case)
    graph.execute(pack | outputs, torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda"))
    for row in range(2):
        exact = case.exact(pack | {"x": pack["x"][row : row + 1]})["out"]
        assert oracle.ulps(outputs["out"][row : row + 1], oracle.rounded(exact, torch.bfloat16)).max() <= 1
