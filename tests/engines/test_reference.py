"""The reference engine against float64: every op, types, strides, offsets and extreme values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import data_type, heur_mode, norm_forward_phase, reduction_mode
from graphfuse.base.device import CPU
from graphfuse.contract import memory
from graphfuse.ops import OPS
from support import graphs, oracle
from support.graphs import BF16, E4M3, E5M2, FLOAT, FP4, HALF, Norm

pytestmark = pytest.mark.torch

CASES = {
    "relu": ({}, {"negative_slope": 0.25}, {"lower_clip": -0.5, "upper_clip": 0.75}),
    "swish": ({}, {"swish_beta": 1.702}, {"swish_beta": -0.5}, {"swish_beta": 0.0}),
    "elu": ({}, {"elu_alpha": 1.5}, {"elu_alpha": -0.5}, {"elu_alpha": 0.0}),
    "softplus": ({}, {"softplus_beta": 1.5}, {"softplus_beta": -0.5}),
}
CASES |= {f"{name}_backward": cases for name, cases in CASES.items()}
POSITIVE = ("sqrt", "rsqrt", "log", "log2", "log1p", "pow")


def test_every_pointwise_op_has_a_reference_here():
    assert set(oracle.POINTWISE) == {op.name for op in OPS.values() if op.pointwise}


@pytest.mark.parametrize("compute", [FLOAT, data_type.DOUBLE])
@pytest.mark.parametrize(("name", "attributes"), [(n, a) for n in oracle.POINTWISE for a in CASES.get(n, ({},))])
def test_pointwise_op(name, attributes, compute):
    torch_type = {FLOAT: torch.float32, data_type.DOUBLE: torch.float64}[compute]
    g = graphs.new(io_data_type=compute)
    arity = len(OPS[name].inputs)
    data = [
        torch.linspace(-9, 9, 64, dtype=torch_type).view(4, 16),
        torch.linspace(-3, 2, 16, dtype=torch_type).view(1, 16),
        torch.tensor([0.0, 1.0, -0.0, float("nan")], dtype=torch_type).view(4, 1),
    ][:arity]
    if name in POSITIVE:
        data = [d.abs() for d in data]
    tensors = [g.tensor(d.shape, name=f"i{i}") for i, d in enumerate(data)]
    getattr(g, name)(*tensors, **attributes, compute_data_type=compute).set_output().set_name("out")
    out = torch.empty(4, 16, dtype=torch_type)
    graphs.run(g, {"out": out} | {f"i{i}": d for i, d in enumerate(data)})
    exact = oracle.POINTWISE[name](*data, **attributes)
    # float32: a few ulps of the result, plus what rounding the input of tanh and exp does to it.
    tolerance = 1e-12 if compute is data_type.DOUBLE else 2e-6
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance * 1e-2)


def _rows_alone(data: torch.Tensor, run) -> None:
    """Each row of `data`, and some next to each other, alone: the same bits as among all."""
    whole = run(data)
    for first in range(len(data)):
        for count in (1, 3):
            part = data[first : first + count]
            assert torch.equal(run(part.clone()), whole[first : first + count]), f"{len(part)} rows from {first}"


@pytest.mark.some(12, 24)
@pytest.mark.parametrize("compute", [FLOAT, data_type.DOUBLE])
@pytest.mark.parametrize("name", oracle.POINTWISE)
def test_a_value_does_not_depend_on_where_it_stands(name, compute):
    torch_type = {FLOAT: torch.float32, data_type.DOUBLE: torch.float64}[compute]
    for columns in (1, 3, 15, 17, 40, 100):
        data = torch.randn(9, columns, dtype=torch_type, generator=graphs.generator("cpu", columns)) * 3
        data = data.abs() if name in POSITIVE else data

        def run(rows):
            g = graphs.new(io_data_type=compute)
            x = g.tensor(rows.shape, name="x")
            y = getattr(g, name)(*[x] * len(OPS[name].inputs), compute_data_type=compute)
            y.set_output().set_name("out")
            out = torch.empty_like(rows)
            graphs.run(g, {"x": rows, "out": out})
            return out

        _rows_alone(data, run)


@pytest.mark.parametrize("columns", [1, 3, 15, 17, 40, 1000, 32767])
def test_a_row_does_not_depend_on_others(columns):
    """Backward too: of rows side by side, which torch sums one by one."""

    def run(rows):
        g = graphs.new()
        x, scale = g.tensor(rows.shape, name="x"), g.tensor([1, columns], name="scale")
        y, inverse = g.rmsnorm(x, scale, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
        gate = g.swish(y)
        dx = g.rmsnorm_backward(gate, x, scale, inverse, has_dbias=False)[0]
        for name, t in (("gate", gate), ("dx", dx)):
            t.set_output().set_name(name)
        made = {"gate": torch.empty_like(rows), "dx": torch.empty_like(rows)}
        graphs.run(g, {"x": rows, "scale": torch.ones(1, columns)} | made)
        return torch.stack([*made.values()], 1)

    _rows_alone(torch.randn(8, columns, generator=graphs.generator("cpu", columns)), run)


@pytest.mark.parametrize("case", graphs.NORMS.values(), ids=graphs.NORMS)
def test_rmsnorm(case):
    graphs.check(case)


@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 70),
    types=st.tuples(*[st.sampled_from([BF16, HALF, FLOAT])] * 2, st.sampled_from([BF16, HALF, FLOAT, E4M3, E5M2])),
    gaps=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    offset=st.integers(0, 5),
    bias=st.sampled_from([None, BF16, FLOAT]),
    beta=st.sampled_from([None, 1.0, 0.3]),
    training=st.booleans(),
)
def test_rmsnorm_any_layout(rows, columns, types, gaps, offset, bias, beta, training):
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
        alignment=1,
    )
    graphs.check(case, seed=offset)


@given(graph=graphs.drawn(), mode=st.sampled_from([heur_mode.A, heur_mode.FALLBACK]))
def test_any_graph(graph, mode):
    graphs.check_drawn(graph, [mode])


@pytest.mark.parametrize("implicit", [False, True])
def test_nvfp4_is_the_quantizer_of_the_float32_values(implicit):
    case = Norm(rows=40, columns=96, output=FLOAT)
    pack, values = case.inputs(amplitude=3), case.outputs()
    graphs.run(case.graph(), pack | values)
    codes, scales = oracle.nvfp4(values["out"].numpy())
    quantized = Norm(rows=40, columns=96, output=FP4, blocks=not implicit)
    outputs, g = quantized.outputs(), quantized.graph()
    g.build([heur_mode.FALLBACK])
    memory = graphs.workspace(g.get_workspace_size())
    g.execute(pack | outputs, memory)
    if implicit:
        offset = 128 * math.ceil(4 * 40 / 128) + 128
        assert g.get_workspace_size() == offset + 40 * 6
        outputs["block_scale"] = memory[offset:].view(40, 6)
    else:
        assert g.get_workspace_size() == 0
    assert torch.equal(outputs["block_scale"], torch.from_numpy(scales))
    assert torch.equal(outputs["out"], torch.from_numpy(codes))
    # The stated bound: half of the widest gap of E2M1 (4 to 6), or what saturation cuts off.
    error = (oracle.from_nvfp4(outputs["out"], outputs["block_scale"]) - values["out"].double()).abs()
    amax = values["out"].unflatten(1, (-1, 16)).abs().amax(-1).double()
    scale = torch.from_numpy(scales).view(torch.float8_e4m3fn).double()
    bound = torch.maximum(scale, amax - 6 * scale)
    assert (error.unflatten(1, (-1, 16)).amax(-1) <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_is_the_quantizer_of_the_float32_values(name):
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[name]
    case, quantized = Norm(output=FLOAT, factor="value"), Norm(output=dtype, factor="value")
    pack, values, outputs = case.inputs(), case.outputs(), quantized.outputs()
    pack["factor"] = 3e4 if name == "e5m2" else 300.0  # both saturate in places
    graphs.run(case.graph(), pack | values)
    graphs.run(quantized.graph(), pack | outputs)
    want = oracle.fp8(values["out"].numpy(), name)
    assert (outputs["out"].view(torch.uint8).numpy() == want).all()
    assert (want & 0x7F == {"e4m3": 0x7E, "e5m2": 0x7B}[name]).any()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_mxfp8_is_the_quantizer_of_the_float32_values(name):
    values = torch.randn(40, 96) * 10.0 ** torch.randint(-6, 6, (40, 1))
    values[0], values[1, 3], values[2, 40], values[3] = 0, float("nan"), -float("inf"), 1e-44
    g = graphs.new()
    y, scale = g.block_scale_quantize(g.tensor([40, 96], name="x"), block_size=32)
    y.set_output().set_name("y"), scale.set_output().set_name("scale")
    if name == "e5m2":
        y.set_data_type(E5M2)
    codes, scales = torch.empty(40, 96, dtype=torch.uint8), torch.empty(40, 3, dtype=torch.float8_e8m0fnu)
    graphs.run(g, {"x": values, "y": codes, "scale": scales})
    want, want_scales = oracle.mxfp8(values.numpy(), name)
    assert (scales.view(torch.uint8).numpy() == want_scales).all()
    assert (codes.numpy() == want).all()
    # Half of the widest gap at the element's exponent; rounding the scale up, nothing saturates.
    finite = values[4:].double()
    error = (oracle.from_mxfp8(codes, torch.from_numpy(want_scales), name)[4:] - finite).abs()
    least = torch.from_numpy(want_scales[4:]).double() - 127
    gap = finite.abs() * {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[name]
    smallest = 2.0 ** (least - {"e4m3": 10, "e5m2": 17}[name]).repeat_interleave(32, -1)
    assert (error <= torch.maximum(gap, smallest)).all()


@pytest.mark.parametrize("size", [16, 32])
def test_fp4_with_scales_that_are_powers_of_two(size):
    values = torch.randn(40, 96) * 10.0 ** torch.randint(-6, 6, (40, 1))
    values[0], values[1, 3], values[2, 40], values[3], values[4] = 0, float("nan"), -float("inf"), 1e-44, 1e-37
    g = graphs.new()
    y, scale = g.block_scale_quantize(g.tensor([40, 96], name="x"), block_size=size)
    y.set_output().set_name("y").set_data_type(FP4)
    scale.set_output().set_name("scale").set_data_type(data_type.FP8_E8M0)
    codes, scales = torch.empty(40, 48, dtype=torch.uint8), torch.empty(40, 96 // size, dtype=torch.uint8)
    graphs.run(g, {"x": values, "y": codes, "scale": scales})
    want, want_scales = oracle.mxfp4(values.numpy(), size)
    assert (scales.numpy() == want_scales).all()
    assert (codes.numpy() == want).all()


def test_scales_without_elements():
    """And elements without scales: what nobody wants needs no memory."""
    values = torch.randn(40, 96)
    codes, scales = (torch.from_numpy(a) for a in oracle.nvfp4(values.numpy()))
    for port, want in enumerate((codes, scales)):
        g = graphs.new()
        g.block_scale_quantize(g.tensor([40, 96], name="x"))[port].set_output().set_name("made")
        made = torch.empty_like(want)
        graphs.run(g, {"x": values, "made": made})
        assert torch.equal(made, want)


def test_blocks_along_another_axis():
    values = torch.randn(64, 6) * 10
    g = graphs.new()
    y, scale = g.block_scale_quantize(g.tensor([64, 6], name="x"), block_size=32, axis=0)
    y.set_output().set_name("y"), scale.set_output().set_name("scale")
    codes, scales = torch.empty(64, 6, dtype=torch.float8_e4m3fn), torch.empty(2, 6, dtype=torch.uint8)
    graphs.run(g, {"x": values, "y": codes, "scale": scales})
    want, want_scales = oracle.mxfp8(values.T.contiguous().numpy(), "e4m3")
    assert (codes.view(torch.uint8).numpy() == want.T).all() and (scales.numpy() == want_scales.T).all()


def test_a_virtual_quantized_tensor_is_of_its_element_type():
    values = torch.randn(4, 64) * 10
    for block, kind in ((16, FP4), (32, E4M3), (32, E5M2)):
        g = graphs.new()
        y, scale = g.block_scale_quantize(g.tensor([4, 64], name="x"), block_size=block)
        y.set_data_type(kind)
        scale.set_output().set_name("scale")
        g.identity(y).set_output().set_name("out")
        out, scales = torch.empty(4, 64), torch.empty(4, 64 // block, dtype=torch.uint8)
        graphs.run(g, {"x": values, "out": out, "scale": scales})
        name = {E4M3: "e4m3", E5M2: "e5m2"}.get(kind)
        if block == 16:
            codes, want = (torch.from_numpy(a) for a in oracle.nvfp4(values.numpy()))
            one = torch.full_like(want, 0x38)  # 1 in E4M3
            assert torch.equal(out.double(), oracle.from_nvfp4(codes, one))
        else:
            codes, want = (torch.from_numpy(a) for a in oracle.mxfp8(values.numpy(), name))
            assert torch.equal(out.double(), oracle.from_mxfp8(codes, torch.full_like(want, 127), name))
        assert torch.equal(scales, want)


@pytest.mark.parametrize("compute", [FLOAT, data_type.DOUBLE])
@pytest.mark.parametrize("mode", reduction_mode, ids=lambda m: m.name)
def test_reduction(mode, compute):
    values = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    values[0, 0, 0], values[1, 2] = 0, 0
    for dim in ([1, 1, 1], [3, 1, 1], [1, 5, 1], [3, 1, 4], [3, 5, 1], [1, 1, 4], [3, 5, 4]):
        reduced(values, mode, dim, compute)
    reduced(values.transpose(0, 2), mode, [4, 1, 3], compute)
    for shape, dim in (([0, 4], [1, 1]), ([0, 4], [1, 4]), ([0, 4], [0, 1]), ([3, 0], [3, 1])):
        reduced(torch.empty(shape), mode, dim, compute)
    values[2, 1, 1] = float("nan")
    reduced(values, mode, [3, 1, 1], compute)


def reduced(values, mode, dim, compute):
    g = graphs.new()
    x = g.tensor(values.shape, values.stride(), name="x")
    made = g.reduction(x, mode, compute_data_type=compute).set_output().set_name("out")
    if any(extent != 1 for extent in dim):
        made.set_dim(dim)
    g.validate()
    assert (made.get_dim(), made.get_data_type()) == (list(dim), FLOAT)
    out = torch.empty_strided(dim, made.get_stride()).fill_(-5.0)
    graphs.run(g, {"x": values, "out": out})
    want = oracle.reduction(values, mode.name, dim)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_max_and_min_order_zeros_and_pass_nan():
    a = torch.tensor([0.0, -0.0, 0.0, -0.0, float("nan"), 1.0, float("inf"), 2.0])
    b = torch.tensor([-0.0, 0.0, 0.0, -0.0, 1.0, float("nan"), 3.0, -2.0])
    g = graphs.new()
    x, y = g.tensor([8], name="a"), g.tensor([8], name="b")
    g.max(x, y).set_output().set_name("max"), g.min(x, y).set_output().set_name("min")
    larger, smaller = torch.empty(8), torch.empty(8)
    graphs.run(g, {"a": a, "b": b, "max": larger, "min": smaller})
    assert [str(v) for v in larger.tolist()] == ["0.0", "0.0", "0.0", "-0.0", "nan", "nan", "inf", "2.0"]
    assert [str(v) for v in smaller.tolist()] == ["-0.0", "-0.0", "0.0", "-0.0", "nan", "nan", "3.0", "-2.0"]


DIVISORS = (1e-40, -1e-40, 1e-45, 1e-38, 6e-8, 3.0, -0.7, 1e38, math.inf, -math.inf, 0.0, -0.0, math.nan)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=pytest.mark.emulate)])
def test_mod_is_exact(device, dtype):
    """By divisors that rows have too many multiples of, too, where torch's vectors make NaN."""
    types = {FLOAT: torch.float32, BF16: torch.bfloat16, HALF: torch.float16}
    values = torch.tensor([1.0, -7.5, 1e-40, 1e-45, 65504.0, 1e38, 1e10, 0.0, -0.0, math.inf, math.nan] * 3)
    x = values.expand(len(DIVISORS), -1).to(types[dtype]).contiguous()
    by = torch.tensor(DIVISORS)[:, None].to(types[dtype])
    g = graphs.new(device=device, io_data_type=dtype)
    given, divisor = g.tensor(x.shape, name="x"), g.tensor(by.shape, name="by")
    g.mod(given, divisor).set_output().set_name("left")
    g.reduction(given, reduction_mode.MAX).set_dim(by.shape).set_output().set_name("most")
    left = torch.empty_like(x)
    mode = heur_mode.FALLBACK if device == "cpu" else heur_mode.OPENSOURCE
    graphs.run(g, {"x": x, "by": by, "left": left, "most": torch.empty(by.shape)}, [mode])
    want = oracle.POINTWISE["mod"](x, by).to(x.dtype)
    torch.testing.assert_close(left, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(left.signbit() | left.isnan(), want.signbit() | want.isnan())


@pytest.mark.parametrize("bias", [False, True])
def test_rmsnorm_without_a_scale_is_over_the_last_axis(bias):
    g = graphs.new()
    x, b = torch.randn(2, 3, 8), torch.randn(1, 1, 8)
    given = g.tensor([1, 1, 8], name="b") if bias else None
    y, inverse = g.rmsnorm(g.tensor([2, 3, 8], name="x"), None, 1e-3, given, norm_forward_phase.TRAINING)
    y.set_output().set_name("out"), inverse.set_output().set_name("inverse")
    pack = {"x": x, "out": torch.empty(2, 3, 8), "inverse": torch.empty(2, 3, 1)}
    graphs.run(g, pack | ({"b": b} if bias else {}))
    exact, exact_inverse = oracle.rmsnorm(x, None, 1e-3, b if bias else None)
    torch.testing.assert_close(pack["out"].double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pack["inverse"].double(), exact_inverse, rtol=1e-5, atol=0)


def test_zero_centred_weight_is_a_node_on_the_weight():
    g = graphs.new()
    x, w = torch.randn(4, 8), torch.randn(1, 8) * 0.1
    weight = g.add(g.tensor([1, 8], name="w"), 1.0)
    phase = norm_forward_phase.INFERENCE
    g.rmsnorm(g.tensor([4, 8], name="x"), weight, 1e-3, norm_forward_phase=phase)[0].set_output().set_name("out")
    out = torch.empty(4, 8)
    graphs.run(g, {"x": x, "w": w, "out": out})
    torch.testing.assert_close(out.double(), oracle.rmsnorm(x, w.double() + 1, 1e-3)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("value", "want"), graphs.EXTREMES.values(), ids=graphs.EXTREMES)
def test_extreme_values(value, want):
    graphs.check_extreme(value, want)


def test_normalized_over_several_and_middle_axes():
    for dim, scale_dim in (([2, 3, 4, 5], [1, 1, 4, 5]), ([2, 6, 3], [1, 6, 1]), ([3, 4], [1, 1])):
        g = graphs.new()
        x, weight = torch.randn(dim), torch.randn(scale_dim)
        g.rmsnorm(
            g.tensor(dim, name="x"),
            g.tensor(scale_dim, name="w"),
            1e-3,
            norm_forward_phase=norm_forward_phase.INFERENCE,
        )[0].set_output().set_name("out")
        out = torch.empty(dim)
        graphs.run(g, {"x": x, "w": weight, "out": out})
        axes = [a for a, e in enumerate(scale_dim) if e != 1]
        exact = (
            oracle.rmsnorm(x, weight, 1e-3, axes=axes)[0]
            if axes
            else x.double() / (x.double() ** 2 + 1e-3).sqrt() * weight
        )
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


def test_who_reads_an_output_reads_what_is_stored():
    g = graphs.new()
    x = g.tensor([4], name="x")
    stored = g.identity(x).set_output().set_data_type(graphs.E4M3).set_name("stored")
    g.scale(stored, 2.0).set_output().set_name("out")
    given = torch.tensor([1000.0, 0.3, 5.3, -7.1])
    q, out = torch.zeros(4, dtype=torch.float8_e4m3fn), torch.zeros(4)
    graphs.run(g, {"x": given, "stored": q, "out": out})
    assert q[0].float() == 448 and torch.equal(out, 2 * q.float())


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_references_make_tensors_on_the_cpu(default):
    """Whatever device tensors are made on around them."""
    with torch.device(default), memory.on(torch, CPU, 0):
        assert torch.empty(1).device.type == "cpu"
