"""Elements over one value of a row or tensor: every quotient is IEEE's, whatever the two are; and clamps behind it."""

import math

import pytest
import torch

from graphfuse import data_type, reduction_mode
from graphfuse.base.dtypes import from_foreign
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.rows.program import DIVISOR, NARROW_QUOTIENT, QUOTIENT
from support import graphs
from support.emulation import Planned
from support.graphs import BF16, FLOAT

COLUMNS = 96
BIGGEST = torch.finfo(torch.float32).max
DIVISORS = [0.02, 3.0, 1 / 3, -0.02, 0.0, -0.0, math.inf, math.nan, 2.0**-62, 2.0**-63, 2.0**23, 2.0**24, 1e-40, 1e38]
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 2.0**-102, 2.0**-103, 2.0**64, 2.0**65, BIGGEST]


def dividends(kind: str) -> torch.Tensor:
    """One row. Of "normal" ones all quotients are made by the reciprocal."""
    source = graphs.generator("cpu", 5)
    x = torch.randn(COLUMNS, generator=source) * torch.randint(-60, 60, (COLUMNS,), generator=source).float().exp2()
    x[7] = 0.0
    if kind == "odd":
        x[: len(ODD)] = torch.tensor(ODD)
    return x


def steps(planned: Planned) -> list[str]:
    return [step.op_name for step in planned.part.facts.program.steps]


@pytest.mark.emulate
@pytest.mark.parametrize("kind", ["normal", "odd"])
@pytest.mark.parametrize("divisor", ["a row's", "the tensor's", "across"])
def test_quotients(divisor, kind):
    x = dividends(kind).expand(len(DIVISORS), -1).contiguous()
    by = torch.tensor(DIVISORS)[:, None]
    for n in range(len(DIVISORS)) if divisor == "the tensor's" else [slice(None)]:
        given, over = (x[:1], by[n : n + 1].clone()) if divisor == "the tensor's" else (x, by)
        g = graphs.new(device="emulator")
        stride = (1, len(given)) if divisor == "across" else None
        a = g.tensor([*given.shape], stride, data_type=FLOAT, name="a")
        b = g.tensor([*over.shape], data_type=FLOAT, name="b")
        total = g.reduction(a, mode=reduction_mode.MAX).set_dim([len(given), 1])
        y = g.div(a, b).set_output().set_name("y").set_data_type(FLOAT)
        total.set_output().set_name("total").set_data_type(FLOAT)
        y.set_stride(a.get_stride())
        a_given = given.t().contiguous().t() if divisor == "across" else given
        pack = {"a": a_given, "b": over, "y": torch.empty_like(a_given), "total": torch.empty(len(given), 1)}
        planned = Planned(g, pack)
        assert {DIVISOR, QUOTIENT} <= {*steps(planned)}
        planned.run()
        want = given / over
        same = (pack["y"].contiguous().view(torch.int32) == want.view(torch.int32)) | (want.isnan() & pack["y"].isnan())
        assert same.all(), (given.expand_as(same)[~same], over.expand_as(same)[~same])


@pytest.mark.emulate
@pytest.mark.parametrize("divisor", [1.0, -0.25, 2.0**62, 2.0**-62])
def test_a_power_of_two_is_multiplied_by(divisor):
    x = dividends("odd")[None]
    g = graphs.new(device="emulator")
    a = g.tensor([1, COLUMNS], data_type=FLOAT, name="a")
    total = g.reduction(a, mode=reduction_mode.MAX).set_dim([1, 1])
    g.div(a, divisor).set_output().set_name("y").set_data_type(FLOAT)
    total.set_output().set_name("total").set_data_type(FLOAT)
    pack = {"a": x, "y": torch.empty_like(x), "total": torch.empty(1, 1)}
    planned = Planned(g, pack)
    assert "mul" in steps(planned) and not {"div", QUOTIENT} & {*steps(planned)}
    planned.run()
    torch.testing.assert_close(pack["y"], x / divisor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.emulate
def test_a_quotient_of_rounded_values_that_is_clamped():
    """As FP8 is made: three roundings in a row, of which the bounds' change nothing; NaN stays."""
    x = dividends("odd")[None].bfloat16()
    g = graphs.new(device="emulator", intermediate_rounding="declared")
    a = g.tensor([1, COLUMNS], data_type=BF16, name="a")
    b = g.tensor([1, COLUMNS], data_type=BF16, name="b")
    over = g.reduction(b, mode=reduction_mode.MAX).set_dim([1, 1])
    value = g.div(g.mul(a, 3.0).set_data_type(BF16), over).set_data_type(BF16)
    for bound, compare in ((-448.0, g.cmp_lt), (448.0, g.cmp_gt)):
        value = g.binary_select(bound, value, compare(value, bound)).set_data_type(BF16)
    value.set_output().set_name("y").set_data_type(data_type.BFLOAT16)
    pack = {"a": x, "b": torch.linspace(-1, 0.7, COLUMNS)[None].bfloat16(), "y": torch.empty_like(x)}
    planned = Planned(g, pack, ByRowKnobs(32, 64))
    assert not {"cmp_lt", "cmp_gt", "binary_select"} & {*steps(planned)}
    rounded = [step for step in planned.part.facts.program.steps if step.rounded is not None]
    assert [step.op_name for step in rounded if step.exact] == ["max"] and len(rounded) == 3
    planned.run()
    want = (x * 3.0 / pack["b"].amax()).clamp(-448, 448)
    torch.testing.assert_close(pack["y"], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bound", [0.0, -0.0, math.nan])
def test_a_bound_that_comparing_treats_otherwise_is_compared_with(bound):
    g = graphs.new(device="emulator")
    a = g.tensor([1, COLUMNS], data_type=FLOAT, name="a")
    total = g.reduction(a, mode=reduction_mode.ADD).set_dim([1, 1])
    x = g.mul(a, total)
    g.binary_select(bound, x, g.cmp_lt(x, bound)).set_output().set_name("y").set_data_type(FLOAT)
    assert "binary_select" in steps(Planned(g, {}))


HARDEST = [
    1.0 - 2.0**-24,
    1.0 + 2.0**-23,
    257 / 256 - 2.0**-23,
    511 / 512 + 2.0**-24,
    1.9999998807907104,
    3.5 - 2.0**-22,
]
"""Of all significands these bring quotients closest to where they round the other way, or divide without rest."""


def fp8(x: torch.Tensor, by: torch.Tensor, between: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Quotients in float32, rounded to one type and bounded and rounded to the other."""
    largest = torch.finfo(dtype).max
    return (x.float() / by).to(between).float().clamp(-largest, largest).to(dtype)


def quantized(
    x: torch.Tensor, by: torch.Tensor, between: torch.dtype, dtype: torch.dtype, bound=None, more=False, beyond=None
):
    """The same as a graph. bound: in the place of the type's largest number. more: whether that is written, too.
    beyond: a magnitude, what is larger becomes NaN, as casts of torch before 2.13 make it."""
    rows, bound, read = len(x), bound or torch.finfo(dtype).max, from_foreign(x.dtype)
    g = graphs.new(device="emulator", intermediate_rounding="declared")
    a = g.tensor([*x.shape], data_type=read, name="a")
    b = g.tensor([rows, 1], data_type=FLOAT, name="b")
    value = g.div(a, b).set_data_type(from_foreign(between))
    for limit, compare in ((-bound, g.cmp_lt), (bound, g.cmp_gt)):
        value = g.binary_select(limit, value, compare(value, limit)).set_data_type(from_foreign(between))
    written = value
    if beyond:
        written = g.binary_select(math.nan, value, g.cmp_gt(g.abs(value), beyond)).set_data_type(from_foreign(between))
    g.identity(written).set_output().set_name("y").set_data_type(from_foreign(dtype))
    g.reduction(a, mode=reduction_mode.MAX).set_dim([rows, 1]).set_output().set_name("most").set_data_type(FLOAT)
    pack = {"a": x, "b": by, "y": torch.empty(x.shape, dtype=dtype), "most": torch.empty(rows, 1)}
    if more:
        value.set_output().set_name("value")
        pack["value"] = torch.empty(x.shape, dtype=between)
    return Planned(g, pack)


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("between", "beyond"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 6e4)])
@pytest.mark.parametrize("read", [torch.bfloat16, torch.float16])
def test_every_number_of_two_bytes_over_one_value_as_fp8(read, between, beyond, dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(256, 256).view(read)
    drawn = torch.empty(12).uniform_(1, 2, generator=graphs.generator("cpu", 7))
    scales = torch.tensor([1.0, 2.0**-9, 2.0**15, 2.0**-40])[:, None]
    by = torch.cat([(torch.cat([torch.tensor(HARDEST), drawn]) * scales).flatten(), torch.tensor(DIVISORS)])
    x, by = x.repeat(len(by), 1), by.repeat_interleave(256)[:, None]
    planned = quantized(x, by, between, dtype, beyond=beyond)
    assert {NARROW_QUOTIENT} <= {*steps(planned)} and not {"max", "min", "binary_select", QUOTIENT} & {*steps(planned)}
    planned.run()
    got, want = planned.pack["y"], fp8(x, by, between, dtype)
    wrong = (got.view(torch.uint8) != want.view(torch.uint8)) & ~(got.float().isnan() & want.float().isnan())
    assert not wrong.any(), (x[wrong], by.expand_as(wrong)[wrong], got[wrong], want[wrong])


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({}, set()),
        ({"bound": 464.0}, set()),
        ({"beyond": 448.0}, set()),
        ({"beyond": 447.0}, {"max", "min", "binary_select", QUOTIENT}),
        ({"beyond": 464.0, "bound": 480.0}, {"max", "min", "binary_select", QUOTIENT}),
        ({"bound": 240.0}, {"max", "min", QUOTIENT}),
        ({"more": True}, {"max", "min", QUOTIENT}),
    ],
    ids=["the type's", "wider", "never NaN", "NaN in bounds", "NaN within wider ones", "narrower", "also written"],
)
def test_bounds_and_bits_that_are_seen_are_kept(more, kept):
    x, by = torch.zeros(2, 64, dtype=torch.bfloat16), torch.ones(2, 1)
    made = quantized(x, by, torch.bfloat16, torch.float8_e4m3fn, **more)
    assert kept == {"max", "min", "binary_select", QUOTIENT} & {*steps(made)}


def test_all_bits_of_a_float32_dividend_count():
    made = quantized(torch.zeros(2, 64), torch.ones(2, 1), torch.float32, torch.float8_e4m3fn)
    assert QUOTIENT in steps(made)
