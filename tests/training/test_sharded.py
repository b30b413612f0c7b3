"""Operators and modules on DTensors, on two ranks: what they return and where, against one process."""

import pytest

from support import ranks, sharded

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.torch]


@pytest.fixture(scope="module")
def on_cpus(request):
    return ranks.run("support.sharded", ranks.cases(request))


@pytest.mark.some(16)
@pytest.mark.parametrize("case", sharded.CASES)
def test_two_ranks(on_cpus, case):
    assert not on_cpus[case], "\n".join(on_cpus[case])


@pytest.fixture(scope="module")
def on_gpus():
    return ranks.on_two_gpus("support.sharded", [*sharded.CASES])


@pytest.mark.gpu
@pytest.mark.parametrize("case", sharded.CASES)
def test_two_gpus(on_gpus, case):
    assert not on_gpus[case], "\n".join(on_gpus[case])
