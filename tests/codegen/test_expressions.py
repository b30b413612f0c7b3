"""Programs as C++: what is printed, and every op's scalar form against torch in float64."""

import ctypes
import dataclasses

import numpy as np
import pytest
import torch

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import MalformedError
from graphfuse.codegen.declarations import check_form
from graphfuse.codegen.expressions import argument, expression, literal, parameter_type
from graphfuse.contract.engine import Address, HostScalar
from graphfuse.ops import OPS
from graphfuse.rows.program import FUSED, RowProgram
from graphfuse.rows.steps import Chain, Load, Scalar, Step
from support import scalar_forms
from support.scalar_forms import CASES


def test_operands_stand_where_their_ports_are():
    step = Step("sub", (("b", Chain(1)), ("a", Load(0))), ())
    assert expression(step, lambda o: f"{'x' if isinstance(o, Chain) else 'l'}{o.index}") == "(l0 - x1)"


def test_scalars_are_passed_by_value_or_by_address():
    alpha = Scalar(7, "alpha", data_type.FLOAT, True)
    beta = Scalar(9, "beta", data_type.BFLOAT16, False)
    assert [parameter_type(s) for s in (alpha, beta)] == ["float", "const gf::bf16*"]
    assert [argument(s) for s in (alpha, beta)] == [HostScalar(7), Address(9)]


def test_one_element_operands_are_numbered_in_the_order_of_their_first_use():
    alpha = Scalar(7, "alpha", data_type.FLOAT, True)
    beta = Scalar(9, "beta", data_type.BFLOAT16, False)
    steps = (
        Step("mul", (("a", Load(0)), ("b", beta))),
        Step("add", (("a", alpha), ("b", Chain(0)))),
        Step("sub", (("a", Chain(1)), ("b", beta))),
    )
    assert RowProgram((), steps, ()).scalars == (beta, alpha)


def test_only_pointwise_ops_and_numbers_are_printed():
    with pytest.raises(ValueError, match="rmsnorm"):
        expression(Step("rmsnorm", (("input", Chain(0)),)), str)
    with pytest.raises(ValueError, match="'1; evil'"):
        expression(Step("swish", (("input", Chain(0)),), (("swish_beta", "1; evil"),)), str)


def test_every_form_calls_what_headers_declare():
    forms = [(op.name, form) for op in OPS.values() if op.pointwise for form in (op.cuda, *op.narrow.values())]
    for name, form in forms + [(n, f.cuda) for n, f in FUSED.items()]:
        check_form(name, form)


@pytest.mark.parametrize(
    "form, called",
    [("log10f(expf({input}))", "log10f"), ("gf::mish({input})", "gf::mish"), ("std::exp({x})", "std::exp")],
)
def test_a_form_that_calls_what_no_header_declares_is_refused_as_it_is_read(monkeypatch, form, called):
    """With what an author needs: the op, the function, the header, and what there is."""
    monkeypatch.setitem(OPS, "gelu", dataclasses.replace(OPS["gelu"], cuda=form))
    step = Step("gelu", (("input", Load(0)),), ())
    with pytest.raises(
        MalformedError, match=rf"op 'gelu': .* calls {called}, which .*/math.cuh does not declare; accepted: "
    ) as error:
        expression(step, lambda o: "x")
    assert "expf" in str(error.value) and "gf::sigmoid," in str(error.value)


@pytest.mark.parametrize("value", [0.0, -0.0, 1, -2.5, 0.1, 1e-45, -3.4e38, 1e-60, 1e300, -1e300, float("inf"), 7])
def test_literals_are_exact(host_library, value):
    library = host_library(
        f'#include "graphfuse/math.cuh"\nextern "C" unsigned bits() {{ return gf::as_bits({literal(value)}); }}'
    )
    library.bits.restype = ctypes.c_uint
    with np.errstate(over="ignore"):
        assert library.bits() == np.float32(value).view(np.uint32)
    assert "nan" not in literal(float("nan")) and "inf" not in literal(float("inf"))


@pytest.fixture(scope="module")
def forms(host_library):
    """All cases in one library: form_N(a, b, out, count)."""
    text = scalar_forms.source(
        'extern "C" void form_{i}(const float* a, const float* b, float* out, long count) {{\n'
        "  (void)b;\n  for (long k = 0; k < count; ++k) out[k] = {form};\n}}"
    )
    return host_library(text)


@pytest.mark.parametrize("index", range(len(CASES)), ids=scalar_forms.IDS)
def test_scalar_form_against_torch(forms, index):
    a, b = scalar_forms.operands(index)
    out = np.empty_like(a)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, out)]
    forms[f"form_{index}"](*pointers, ctypes.c_long(a.size))
    scalar_forms.hold(index, a, b, out, sigmoid=5e-6)


def test_tanh_bears_the_errors_of_a_gpus_approximations(host_library):
    """Those of the exponential and of the reciprocal together are less than 2^-21 of the exponential; four times as
    much changes a rounding."""
    library = host_library(
        "#define exp2f exp2f_of_gpu\n"
        '#include "graphfuse/convert.cuh"\n#include "graphfuse/math.cuh"\n#undef exp2f\n'
        'extern "C" float exp2f(float) noexcept;\nstatic float off = 1.0f;\n'
        'extern "C" float exp2f_of_gpu(float x) noexcept { return exp2f(x) * off; }\n'
        'extern "C" void every(float by, unsigned short* y) {\n'
        "  off = by;\n  for (unsigned x = 0; x < 65536; ++x) {\n"
        "    y[x] = gf::encode<gf::bf16>(gf::tanh_of_bf16(gf::decode<gf::bf16>(x)));\n  }\n}\n"
    )
    library.every.argtypes = [ctypes.c_float, ctypes.c_void_p]

    def made(off: float) -> torch.Tensor:
        y = np.empty(65536, np.uint16)
        library.every(1 + off, y.ctypes.data)
        return torch.from_numpy(y.view(np.int16)).view(torch.bfloat16)

    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    want = bits.view(torch.bfloat16).double().tanh().to(torch.bfloat16)
    for off, same in ((2**-21, True), (-(2**-21), True), (2**-19, False), (-(2**-19), False)):
        assert torch.equal(made(off).nan_to_num(7), want.nan_to_num(7)) == same, off


def test_max_and_min_order_zeros_and_pass_nan(host_library):
    """As the instructions do, to the bit."""
    library = host_library(
        '#include "graphfuse/math.cuh"\n'
        'extern "C" float larger(float a, float b) { return gf::max(a, b); }\n'
        'extern "C" float smaller(float a, float b) { return gf::min(a, b); }\n'
    )

    def bits(function, a, b):
        function.argtypes, function.restype = [ctypes.c_float] * 2, ctypes.c_float
        return hex(np.float32(function(a, b)).view(np.uint32))

    nan = float("nan")
    larger = [bits(library.larger, a, b) for a, b in ((0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0), (nan, 1), (1, nan))]
    smaller = [bits(library.smaller, a, b) for a, b in ((0.0, -0.0), (-0.0, 0.0), (0.0, 0.0), (nan, 1), (1, nan))]
    assert larger == ["0x0", "0x0", "0x80000000", "0x7fffffff", "0x7fffffff"]
    assert smaller == ["0x80000000", "0x80000000", "0x0", "0x7fffffff", "0x7fffffff"]
    assert [library.larger(-2, 1), library.smaller(-2, 1), library.larger(float("inf"), 5)] == [1, -2, float("inf")]


def test_every_attribute_of_a_pointwise_op_is_printable():
    for op, _ in CASES:
        for attribute in op.attributes:
            assert literal(attribute.default)


def test_sigmoid_is_as_accurate_as_said(host_library):
    """A bound that also holds for a GPU's approximations, of 2 ulp and 1 ulp: tests/gpu/test_rmsnorm.py."""
    library = host_library(
        '#include "graphfuse/math.cuh"\n'
        'extern "C" void sigmoid(const float* x, float* y, long count) {\n'
        "  for (long i = 0; i < count; ++i) y[i] = gf::sigmoid(x[i]);\n}"
    )

    def sigmoid(x):
        x, y = np.asarray(x, np.float32), np.empty(len(x), np.float32)
        library.sigmoid(x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(x.size))
        return y

    x = np.concatenate([np.linspace(-87, 30, 1 << 20), -np.geomspace(1e-30, 87, 1 << 16)]).astype(np.float32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    error = np.abs(sigmoid(x) - exact) / exact
    assert (error <= 5e-7 + 8e-8 * np.abs(x)).all()
    assert error.max() > 3e-6  # which is why it is said
    x = np.linspace(-120, -87, 1 << 16).astype(np.float32)
    assert (np.abs(sigmoid(x) - np.exp(x.astype(np.float64))) <= 1.2e-38).all()
    assert sigmoid([np.inf, -np.inf, 0.0, -0.0, 200.0, -200.0]).tolist() == [1, 0, 0.5, 0.5, 1, 0]
    assert np.isnan(sigmoid([np.nan])).all()


# By op: (fixed part, growth, magnitude it grows with, largest |input|), relative to the terms of the slope.
STATED = {
    "sigmoid_backward": (1e-6, 8e-8, lambda x: x.abs(), 87),
    "tanh_backward": (1e-6, 8e-8, lambda x: 2 * x.abs(), 43.5),
    "swish_backward": (1e-6, 8e-8, lambda x: x.abs(), 87),
    "gelu_backward": (1e-6, 1e-7, lambda x: x * x, 13),
    "gelu_approx_tanh_backward": (2e-6, 4e-7, lambda x: 1.6 * (x + 0.044715 * x**3).abs(), 9.9),
}


@pytest.mark.parametrize("name", STATED)
def test_slopes_are_as_accurate_as_said(forms, name):
    """A bound with room for a GPU's approximations, of 2 ulp and 1 ulp."""
    index = next(i for i, (op, _) in enumerate(CASES) if op.name == name)
    fixed, growth, magnitude, limit = STATED[name]
    x = np.concatenate([np.linspace(-limit, limit, 1 << 20), np.geomspace(1e-30, limit, 1 << 16)]).astype(np.float32)
    out, ones = np.empty_like(x), np.ones_like(x)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (ones, x, out)]
    forms[f"form_{index}"](*pointers, ctypes.c_long(x.size))
    inputs = {"loss": torch.ones(x.size, dtype=torch.float64), "input": torch.from_numpy(x.astype(np.float64))}
    op = CASES[index][0]
    exact = op.reference(torch, inputs, {a.name: a.default for a in op.attributes})["output"]
    terms = scalar_forms.TERMS.get(name, lambda x: exact)(inputs["input"])
    error = (torch.from_numpy(out.astype(np.float64)) - exact).abs() / terms
    assert (error <= fixed + growth * magnitude(inputs["input"])).all()


ANGLES = {"sin": 3e-7, "cos": 3e-7, "tan": 5e-7}


@pytest.mark.parametrize("name", ANGLES)
def test_angles_of_any_size_are_as_accurate_as_said(forms, name):
    """Float64 functions of numpy take off quarters of any angle. 16367173 2^72 is next to a multiple of pi/2."""
    index = next(i for i, (op, _) in enumerate(CASES) if op.name == name)

    def made(x):
        out = np.empty_like(x)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, x, out)]
        forms[f"form_{index}"](*pointers, ctypes.c_long(x.size))
        return out

    drawn = np.random.default_rng(0).integers(0, 0x7F800000, 1 << 20).astype(np.uint32).view(np.float32)
    small = np.linspace(-70000, 70000, 1 << 20)
    x = np.concatenate([drawn, -drawn, small, [16367173 * 2.0**72, 65536, np.nextafter(65536, 0)]]).astype(np.float32)
    exact = getattr(np, name)(x.astype(np.float64))
    assert (np.abs(made(x) - exact) <= ANGLES[name] * np.abs(exact) + 1.5e-45).all()
    assert np.isnan(made(np.array([np.inf, -np.inf, np.nan], np.float32))).all()
    assert np.signbit(made(np.array([0.0, -0.0], np.float32))).tolist() == [False, name != "cos"]


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_every_scalar_form_compiles(arch):
    from graphfuse.runtime import nvrtc

    assert nvrtc.compile(scalar_forms.kernels(), arch, "forms.cu")
