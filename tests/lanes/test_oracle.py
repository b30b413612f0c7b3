"""The two quantizers agree with each other, and the distance counts representable values."""

import ml_dtypes
import numpy as np
import pytest
import torch

from support import oracle


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_search_equals_ml_dtypes(name):
    values = oracle.probes()
    assert (oracle.fp8_search(torch.from_numpy(values), name).numpy() == oracle.fp8(values, name)).all()


def test_nvfp4_search_equals_ml_dtypes():
    blocks = blocks_of(64)
    codes, scales = oracle.nvfp4(blocks)
    searched, searched_scales = oracle.nvfp4_search(torch.from_numpy(blocks))
    assert (searched_scales.numpy() == scales).all()
    assert (searched.numpy() == codes).all()
    assert scales[200, 0] == 0x7F and (codes[200, :8] == 0x77).all()
    assert scales[201, 1] == 0x7E and codes[201, 10] & 15 == 7
    assert not codes[203].any() and not scales[203].any()  # a scale that rounds to zero


def test_e8m0_search_equals_the_bits():
    powers = 2.0 ** np.arange(-149, 128, dtype=np.float64)
    values = np.concatenate([powers.astype(np.float32), oracle.probes()])
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))])
    codes = oracle.e8m0(values)
    assert (oracle.e8m0_search(torch.from_numpy(values)).numpy() == codes).all()
    scales = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    magnitude = np.abs(values.astype(np.float64))
    inside = (magnitude >= 2.0**-127) & (magnitude <= 2.0**127)
    assert ((magnitude <= scales) & (scales < 2 * magnitude))[inside].all()
    assert oracle.e8m0(np.array([0, 1e-45, 2.0**-127, 1, 3.4e38, np.inf, np.nan], np.float32)).tolist() == [
        0,
        0,
        0,
        127,
        254,
        254,
        255,
    ]


@pytest.mark.parametrize("size", [16, 32])
def test_mxfp4_search_equals_ml_dtypes(size):
    blocks = blocks_of(64)
    codes, scales = oracle.mxfp4(blocks, size)
    searched, searched_scales = oracle.mxfp4_search(torch.from_numpy(blocks), size)
    assert (searched_scales.numpy() == scales).all()
    assert (searched.numpy() == codes).all()
    assert scales[200, 0] == 255 and (codes[200, : size // 2] == 0x77).all()
    assert scales[201, 20 // size] == 254 and codes[201, 10] & 15 == 7
    # Rounding the scale up, nothing saturates: off by half of the widest gap at most, which is the scale.
    one = oracle.from_mxfp4(torch.full_like(searched, 0x22), searched_scales)
    error = (oracle.from_mxfp4(searched, searched_scales) - torch.from_numpy(blocks).double()).abs()
    assert (error[:200] <= one[:200] * (1 + 2e-6)).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_mxfp8_search_equals_ml_dtypes(name):
    blocks = blocks_of(64)
    codes, scales = oracle.mxfp8(blocks, name)
    searched, searched_scales = oracle.mxfp8_search(torch.from_numpy(blocks), name)
    assert (searched_scales.numpy() == scales).all()
    assert (searched.numpy() == codes).all()
    assert scales[200, 0] == 255 and (codes[200, :32] == 0x7F).all()
    assert scales[201, 0] == 254 and codes[201, 20] == {"e4m3": 0x7E, "e5m2": 0x7B}[name]
    assert (codes[204:206] & 0x7F == 0).all() and not scales[204:206].any()


def blocks_of(columns: int) -> np.ndarray:
    """Rows of probes, of normal numbers of every size, zeros, specials and tiny numbers."""
    values, rng = oracle.probes(), np.random.default_rng(0)
    blocks = rng.choice(values[np.isfinite(values)], (400, columns)).astype(np.float32)
    blocks[:100] *= (rng.random((100, columns)) < 0.1).astype(np.float32)  # zeros, and blocks of nothing else
    blocks[100:200] = rng.standard_normal((100, columns)) * 10.0 ** rng.integers(-6, 6, (100, 1))
    blocks[200, 3], blocks[201, 20], blocks[202, 40] = np.nan, np.inf, -np.inf
    blocks[203], blocks[204], blocks[205] = 1e-4, 0, 1e-44
    return blocks


def test_ulps_counts_steps_across_zero():
    tiny = torch.tensor([2.0**-133, -(2.0**-133), 1.0, float("nan"), float("nan")], dtype=torch.bfloat16)
    other = torch.tensor([-(2.0**-133), 2.0**-133, 1.0 + 2.0**-7, 1.0, float("nan")], dtype=torch.bfloat16)
    assert oracle.ulps(tiny, other).tolist() == [2, 2, 1, 1 << 31, 0]
