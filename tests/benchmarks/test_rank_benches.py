"""The benchmarks of several ranks, on two CPU ranks."""

import pytest

from support import rank_benches, ranks


@pytest.fixture(scope="module")
def found(request):
    return ranks.run("support.rank_benches", ranks.cases(request))


@pytest.mark.parametrize("case", rank_benches.CASES)
def test_two_ranks(found, case):
    assert not found[case], "\n".join(found[case])
