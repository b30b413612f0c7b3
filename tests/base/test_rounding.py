"""Storage forms against ml_dtypes, around every midpoint; the facts of data types against torch and numpy."""

import ml_dtypes
import numpy as np
import pytest
import torch

from graphfuse import data_type
from graphfuse.base import rounding
from graphfuse.base.dtypes import FACTS, fit, from_foreign
from support import oracle


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8(name):
    dtype = {"e4m3": data_type.FP8_E4M3, "e5m2": data_type.FP8_E5M2}[name]
    values = oracle.probes()
    stored = rounding.encode(torch, torch.from_numpy(values), dtype)
    codes, want = stored.view(torch.uint8).numpy(), oracle.fp8(values, name)
    assert (codes == want).all()
    decoded = rounding.decode(torch, stored, dtype, torch.float32)
    assert torch.equal(decoded.nan_to_num(7), stored.float().nan_to_num(7))
    assert torch.equal(rounding.round_to(torch, torch.from_numpy(values), dtype).nan_to_num(7), decoded.nan_to_num(7))


def test_fp4_packs_pairs_low_nibble_first():
    values = oracle.probes()[: len(oracle.probes()) // 2 * 2]
    packed = rounding.encode(torch, torch.from_numpy(values), data_type.FP4_E2M1).numpy()
    want = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    want = np.where(np.isnan(values), 7, want)
    assert (packed == (want[0::2] | want[1::2] << 4)).all()
    every = torch.arange(256, dtype=torch.uint8)
    decoded = rounding.decode(torch, every, data_type.FP4_E2M1, torch.float32)
    assert torch.equal(rounding.encode(torch, decoded, data_type.FP4_E2M1), every)
    assert (
        decoded.numpy()
        == np.stack([every & 15, every >> 4], 1)
        .astype(np.uint8)
        .view(ml_dtypes.float4_e2m1fn)
        .astype(np.float32)
        .ravel()
    ).all()


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_e8m0_rounds_up(compute):
    powers = 2.0 ** np.arange(-149, 128, dtype=np.float64)
    values = np.concatenate([powers.astype(np.float32), oracle.probes()])
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))])
    stored = rounding.encode(torch, torch.from_numpy(values).to(compute), data_type.FP8_E8M0)
    want = oracle.e8m0(values)
    assert (stored.view(torch.uint8).numpy() == want).all()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    decoded = rounding.decode(torch, every, data_type.FP8_E8M0, compute)
    assert decoded[:255].tolist() == [2.0**e for e in range(-127, 128)] and decoded[255].isnan()
    assert torch.equal(rounding.round_to(torch, decoded[:255], data_type.FP8_E8M0), decoded[:255])


@pytest.mark.parametrize("dtype", [data_type.BFLOAT16, data_type.HALF])
def test_half_precision_rounds_to_nearest_even(dtype):
    values = np.random.default_rng(0).standard_normal(10000).astype(np.float32)
    values = np.concatenate([values, (values.view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32), oracle.probes()])
    kind = {data_type.BFLOAT16: ml_dtypes.bfloat16, data_type.HALF: np.float16}[dtype]
    stored = rounding.encode(torch, torch.from_numpy(values), dtype)
    with np.errstate(over="ignore"):
        want = values.astype(kind).view(np.uint16)
    got = stored.view(torch.int16).numpy().view(np.uint16)
    assert (got == want)[~np.isnan(values)].all() and stored.isnan()[np.isnan(values)].all()


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["int8", "uint8", "int32", "int64"])
def test_integers_round_to_even_and_saturate(name, compute):
    dtype, limits = from_foreign(name), torch.iinfo(getattr(torch, name))
    assert dtype.facts.integers == (limits.min, limits.max)
    given = [0.4, 0.5, 0.6, 1.5, 1.7, 2.5, 100.0, float("nan"), -0.5]
    beyond = [float("inf"), 1e30, 2.0**63, float(limits.max)]
    stored = rounding.encode(torch, torch.tensor(given + beyond, dtype=compute), dtype)
    assert stored.tolist() == [0, 0, 1, 2, 2, 2, 100, 0, 0] + [limits.max] * len(beyond)
    low = rounding.encode(torch, torch.tensor([-float("inf"), -1e30, -300.0, -1.5], dtype=compute), dtype)
    assert low.tolist() == [limits.min, limits.min, max(limits.min, -300), max(limits.min, -2)]


def test_booleans_are_what_is_not_zero():
    given = torch.tensor([0.0, -0.0, 0.3, -2.0, float("inf")])
    assert rounding.encode(torch, given, data_type.BOOLEAN).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("dtype", "holds", "not_"),
    [
        ("FLOAT", [1e38, 3.4028235e38, float("inf"), float("nan")], [3.5e38, -1e300, 10**400]),
        ("DOUBLE", [1e38], [1e300, 10**10000]),  # kernels get float32
        ("HALF", [65519.9, -65504], [65520, 1e6]),
        ("BFLOAT16", [3.39e38], [3.4e38]),
        ("FP8_E5M2", [57344.0], [1e6]),
        ("INT8", [127, -128.0], [3.7, 128, -129, float("inf"), float("nan"), 10**400]),
        ("UINT8", [0, 255], [-1, 256]),
        ("INT64", [-(2**63)], [2.0**63, 0.5]),
        ("BOOLEAN", [True, 0], [2]),
    ],
)
def test_numbers_that_fit(dtype, holds, not_):
    dtype = data_type[dtype]
    assert [str(fit(value, dtype)) for value in holds] == [str(float(value)) for value in holds]
    for value in not_:
        with pytest.raises(ValueError, match="does not fit .*; accepted: .* to "):
            fit(value, dtype)


@pytest.mark.parametrize("dtype", FACTS, ids=lambda d: d.name)
def test_facts_agree_with_torch_and_numpy(dtype):
    facts = dtype.facts
    torch_type = getattr(torch, facts.torch)
    numpy_type = np.dtype(getattr(ml_dtypes, facts.numpy, facts.numpy))
    assert (
        from_foreign(torch_type) is dtype and from_foreign(numpy_type) is dtype and from_foreign(facts.numpy) is dtype
    )
    if facts.bits >= 8:
        assert torch_type.itemsize * 8 == numpy_type.itemsize * 8 == facts.bits
        assert dtype.nbytes(3) == 3 * facts.bits // 8
    if dtype.is_float and dtype is not data_type.FP4_E2M1:
        assert torch.finfo(torch_type).max == facts.max
    elif dtype.is_float:
        assert (dtype.nbytes(3), ml_dtypes.finfo(ml_dtypes.float4_e2m1fn).max) == (2, 6)


def test_not_set_has_no_size():
    with pytest.raises(ValueError, match="NOT_SET"):
        data_type.NOT_SET.bits  # noqa: B018
