"""The bench of RMSNorm over the channels of video: what is right and what is wrong."""

import pytest
import torch

from graphfuse.benchmarks import session
from graphfuse.benchmarks.peer import Work
from graphfuse.benchmarks.peers import graphfuse, torch_eager
from graphfuse.benchmarks.rmsnorm_channels import BENCH, CONTIGUOUS, LAYOUTS, RmsNormChannelsCase
from graphfuse.runtime.handle import create_handle
from support.bench_runs import made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager_torch_is_right(layout):
    case = RmsNormChannelsCase(24, 2, 3, 8, layout)
    sets, work = made(torch_eager.RMSNORM_CHANNELS, case)
    assert session.checked(case, sets[0], work, False) is None


@pytest.mark.emulate
@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_kernels_copy_nothing(layout):
    """Each layout has the engine whose threads read neighbours."""
    case = RmsNormChannelsCase(24, 2, 3, 8, layout)
    sets = case.sets(2, "cpu")
    work = graphfuse.work(case.graph(create_handle("emulator")), [s.pack() for s in sets])
    assert work.note.count("rows[") == 1
    assert session.checked(case, sets[0], work, tight=True) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_value_is_seen(layout):
    case = RmsNormChannelsCase(24, 2, 3, 8, layout)
    (operands,) = case.sets(1, "cpu")
    right = torch_eager.rmsnorm_channels(operands.x, operands.weight, operands.eps)
    assert session.checked(case, operands, Work([lambda: operands.out.copy_(right)]), False) is None
    assert "wrong out: 1152 of 1152" in session.checked(case, operands, Work([lambda: None]), False)
    operands.out.copy_(right)
    operands.out[0, 5, 1, 2, 7] += 1
    assert "wrong out: 1 of 1152 values checked, first in row 47, column 5" in case.wrong(operands, False)


def test_layouts_are_those_of_torch():
    for case in BENCH.cases:
        x = torch.empty(1, case.columns, case.frames, case.height, case.width, device="meta")
        x = x if case.layout == CONTIGUOUS else x.to(memory_format=torch.channels_last_3d)
        assert (x.shape, x.stride()) == (case.drawn["x"].dim, case.drawn["x"].stride)
