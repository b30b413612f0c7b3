"""The two quantizers agree with each other, and the distance counts representable values."""

import numpy as np
import pytest
import torch

import oracle


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_search_equals_ml_dtypes(name):
    values = oracle.probes()
    assert (oracle.fp8_search(torch.from_numpy(values), name).numpy() == oracle.fp8(values, name)).all()


def test_nvfp4_search_equals_ml_dtypes():
    values = oracle.probes()
    rng = np.random.default_rng(0)
    blocks = rng.choice(values[np.isfinite(values)], (400, 64)).astype(np.float32)
    blocks[:100] *= (rng.random((100, 64)) < 0.1).astype(np.float32)  # zeros, and blocks of nothing else
    blocks[100:200] = rng.standard_normal((100, 64)) * 10.0 ** rng.integers(-6, 6, (100, 1))
    blocks[200, 3], blocks[201, 20], blocks[202, 40] = np.nan, np.inf, -np.inf
    blocks[203] = 1e-4  # a scale that rounds to zero
    codes, scales = oracle.nvfp4(blocks)
    searched, searched_scales = oracle.nvfp4_search(torch.from_numpy(blocks))
    assert (searched_scales.numpy() == scales).all()
    assert (searched.numpy() == codes).all()
    assert scales[200, 0] == 0x7F and (codes[200, :8] == 0x77).all()
    assert scales[201, 1] == 0x7E and codes[201, 10] & 15 == 7
    assert not codes[203].any() and not scales[203].any()


def test_ulps_counts_steps_across_zero():
    tiny = torch.tensor([2.0**-133, -(2.0**-133), 1.0, float("nan"), float("nan")], dtype=torch.bfloat16)
    other = torch.tensor([-(2.0**-133), 2.0**-133, 1.0 + 2.0**-7, 1.0, float("nan")], dtype=torch.bfloat16)
    assert oracle.ulps(tiny, other).tolist() == [2, 2, 1, 1 << 31, 0]
