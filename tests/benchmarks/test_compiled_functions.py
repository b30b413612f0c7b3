"""Functions of programs.compiled_functions: what a way runs, and when it is too far from eager mode."""

import pytest
import torch

from graphfuse.benchmarks.programs import compiled_functions
from graphfuse.benchmarks.programs.torch_functions import FUNCTIONS, Draw, TorchFunction, gemma

pytestmark = pytest.mark.torch


def test_functions_have_names_of_their_own():
    assert len({function.name for function in FUNCTIONS}) == len(FUNCTIONS)


@pytest.mark.further  # inductor compiles C++
@pytest.mark.parametrize("trains", [False, True])
def test_both_ways_make_what_eager_mode_does(trains):
    function = TorchFunction("a norm", gemma, lambda d: (d(8, 64), d(64)), trains)
    given, *others = compiled_functions.sets(function, "cpu")
    assert others and not torch.equal(others[0][0], given[0]) and given[0].requires_grad is trains
    wanted = compiled_functions.called(function, "")(given)
    assert [t.shape for t in wanted] == [(8, 64), (64,)][: 1 + trains]
    for way in compiled_functions.BACKENDS:
        torch.compiler.reset()
        made = compiled_functions.called(function, way)(given)
        assert compiled_functions.distance(made, wanted) <= compiled_functions.FARTHEST


def test_another_result_is_far():
    x = Draw("cpu", 0)(64, 64)
    assert compiled_functions.distance([x], [x]) == 0
    assert compiled_functions.distance([x * 1.1], [x]) > compiled_functions.FARTHEST
