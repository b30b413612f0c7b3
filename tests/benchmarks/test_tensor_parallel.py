"""The benchmark of tensor-parallel layers, on two CPU ranks."""

import pytest

from support import ranks, split_models


@pytest.fixture(scope="module")
def found():
    return ranks.run("support.split_models", [*split_models.CASES], "gloo")


@pytest.mark.parametrize("case", split_models.CASES)
def test_layers_of_two_ranks(found, case):
    assert not found[case], "\n".join(found[case])
