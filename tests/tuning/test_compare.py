"""What counts as the reference's result, by data type."""

import math

import pytest
import torch

from graphfuse import norm_forward_phase
from graphfuse.base import reordering
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.ir import FrozenTensor, Subgraph
from graphfuse.op_graph.lower import lower
from graphfuse.tuning import compare
from support import graphs
from support.graphs import TORCH

FLOATS = [data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.FP8_E4M3, data_type.FP8_E5M2]
NARROW = FLOATS[1:]


def tensor(dtype, dim=(64, 32), stride=(32, 1)) -> FrozenTensor:
    return FrozenTensor(0, 1, "out", dtype, dim, stride)


def values(dtype) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(TORCH[dtype])


def difference(dtype, got, want, rounded: int = 0):
    stored = (v.contiguous().view(torch.uint8).flatten() for v in (got, want))
    return compare.difference(torch, tensor(dtype), *stored, rounded)


def next_up(t, steps: int = 1):
    """Each element so many representable values further from 0."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]
    return (t.view(kind) + steps).view(t.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_is_equal_nan_and_infinity_too(dtype):
    want = values(dtype)
    want[3, 4] = float("nan")
    if dtype is not data_type.FP8_E4M3:  # which has none
        want[5, 6] = float("inf")
    assert difference(dtype, want.clone(), want) is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wrong", [0.0, 7.0, float("nan")])
def test_one_wrong_element_is_seen(dtype, wrong):
    want = values(dtype)
    want[9, 9] = 3.0
    got = want.clone()
    got[9, 9] = wrong
    assert "1 of 2048 elements are off" in difference(dtype, got, want) and "'out'" in difference(dtype, got, want)
    assert "1 of 2048" in difference(dtype, want, got)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_few_elements_may_be_one_step_off_none_two(dtype):
    want = values(dtype)
    some = torch.rand(64, 32, generator=torch.Generator().manual_seed(2)) < 0.05
    got = torch.where(some, next_up(want).float(), want.float()).to(want.dtype)
    assert difference(dtype, got, want) is None
    assert "are equal" in difference(dtype, next_up(want), want)
    got = torch.where(some, next_up(want, 2).float(), want.float()).to(want.dtype)
    assert "are off" in difference(dtype, got, want)


def test_float32_may_differ_in_its_last_digits():
    want = values(data_type.FLOAT)
    assert difference(data_type.FLOAT, want * (1 + 5e-5), want) is None
    assert "are off" in difference(data_type.FLOAT, want * (1 + 1e-3), want)


def test_float32_of_rounded_values_may_differ_by_their_steps():
    """As the scale of a row, by the largest of its values in bfloat16."""
    want = values(data_type.FLOAT)
    assert difference(data_type.FLOAT, want * (1 + 2**-7), want, rounded=1) is None
    assert "are off" in difference(data_type.FLOAT, want * (1 + 2**-5), want, rounded=1)


@pytest.mark.parametrize("dtype", [data_type.FLOAT, data_type.BFLOAT16])
def test_few_elements_of_rounded_values_may_be_off_by_steps_of_the_largest(dtype):
    """GELU of -3, and of the bfloat16 number beside it, are so far apart."""

    def found(offsets, rounded=1, size=2_000_000):
        want = torch.full((size,), 2.0)
        want[:8] = -0.004
        got = want.clone()
        got[: len(offsets)] = want[: len(offsets)] + torch.tensor(offsets)
        stored = (v.to(TORCH[dtype]).view(torch.uint8) for v in (got, want))
        return compare.difference(torch, tensor(dtype, (size,), (1,)), *stored, rounded)

    assert found([4e-4, 4e-4]) is None
    assert "3 of 2000000 elements are off" in found([4e-4] * 3)
    assert "1 of 2000000 elements are off" in found([0.1])
    assert "1 of 2000000 elements are off" in found([4e-4], rounded=0)
    assert "1 of 2000000 elements are off" in found([math.nan])


def test_zeros_of_both_signs_are_one():
    zero = torch.zeros(64, 32, dtype=torch.bfloat16)
    assert difference(data_type.BFLOAT16, -zero, zero) is None


def test_fp4_counts_codes_in_the_order_of_their_values():
    want = torch.randint(0, 256, (64, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    assert difference(data_type.FP4_E2M1, want.clone(), want) is None
    for code, other, fine in ((0x07, 0x06, True), (0x70, 0x60, True), (0x08, 0x01, True), (0x07, 0x05, False)):
        one, two = want.clone(), want.clone()
        one[5, 5], two[5, 5] = code, other
        assert (difference(data_type.FP4_E2M1, one, two) is None) == fine
    assert "equal" in difference(data_type.FP4_E2M1, torch.full_like(want, 0x22), torch.full_like(want, 0x33))


def test_integers_are_equal_or_wrong():
    want = torch.arange(2048, dtype=torch.int32).view(64, 32)
    assert difference(data_type.INT32, want.clone(), want) is None
    assert "are off" in difference(data_type.INT32, want + (want == 7), want)


def test_a_few_integers_of_8_bits_may_be_one_off_none_two():
    """What they are rounded from may lie close to the middle of two."""
    source = torch.Generator().manual_seed(2)
    want = torch.randint(-100, 100, (64, 32), generator=source).to(torch.int8)
    some = (torch.rand(64, 32, generator=source) < 0.05).to(torch.int8)
    assert difference(data_type.INT8, want + some, want) is None
    assert "are equal" in difference(data_type.INT8, want + 1, want)
    assert "are off" in difference(data_type.INT8, want + 2 * some, want)


def test_what_was_rounded_before_may_be_off_by_more():
    """One representable value in a sum that is stored may be two in its norm, and one more where that is rounded."""
    graph = graphs.new()
    x, w = graph.tensor([64, 32], data_type=data_type.BFLOAT16), graph.tensor([1, 32], data_type=data_type.BFLOAT16)
    total = graph.add(x, x).set_output().set_data_type(data_type.BFLOAT16)
    graph.rmsnorm(total, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0].set_output()
    graph.validate()
    lowered = lower(freeze(graph))
    rounded = compare.rounded_between(Subgraph(lowered, tuple(range(len(lowered.nodes)))))
    assert rounded == 1
    want = values(data_type.BFLOAT16)
    got = want.clone()
    for steps in (3, 4):
        got.view(torch.int16).view(-1)[7] = want.view(torch.int16).view(-1)[7] + steps
        args = (v.contiguous().view(torch.uint8).flatten() for v in (got, want))
        found = compare.difference(torch, tensor(data_type.BFLOAT16), *args, rounded)
        assert (found is None) == (steps == 3), found


def test_only_what_the_strides_reach_counts():
    t = tensor(data_type.BFLOAT16, (4, 6), (8, 1))
    got = torch.full((3 * 8 + 6,), 2.0, dtype=torch.bfloat16)
    want = got.clone()
    want[6:8], want[14:16] = 5.0, float("nan")
    assert compare.difference(torch, t, got.view(torch.uint8), want.view(torch.uint8)) is None
    want[8] = 3.0
    assert "1 of 24" in compare.difference(torch, t, got.view(torch.uint8), want.view(torch.uint8))


def test_large_tensors_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr(compare, "_CHUNK", 100)
    want = values(data_type.HALF)
    got = want.clone()
    got[63, 31] += 1
    assert difference(data_type.HALF, want.clone(), want) is None and "1 of 2048" in difference(
        data_type.HALF, got, want
    )


def test_of_scales_in_tiles_only_what_is_written_counts():
    scales = FrozenTensor(0, 1, "scale", data_type.FP8_E8M0, (5, 6), (6, 1), reordering=tensor_reordering.F8_128x4)
    want = torch.arange(reordering.padded(scales.dim)).to(torch.uint8)
    written = reordering.offsets(torch, scales.dim, "cpu").flatten()
    got = ~want
    got[written] = want[written]
    assert compare.difference(torch, scales, got, want) is None
    got[written[-1]] += 1
    assert "1 of 30 elements are off" in compare.difference(torch, scales, got, want)
