"""What the bench of untuned sizes measures, and how it judges."""

import pytest

from graphfuse.base.device import for_arch
from graphfuse.benchmarks import sizes
from graphfuse.benchmarks.programs import every_size
from graphfuse.benchmarks.programs.every_size import Measured
from graphfuse.benchmarks.sizes import Size

DEVICE = for_arch("sm_90a")


def test_random_sizes_stay_and_are_of_any_number_of_columns():
    found = every_size.random_sizes(60)
    assert found == every_size.random_sizes(60) != every_size.random_sizes(60, 1)
    assert len(set(found)) == 60 and not set(found) & set(sizes.seeds())
    assert {s.output for s in found} == set(sizes.OUTPUTS)
    assert all(s.columns % sizes.BLOCK == 0 for s in found if s.output == "nvfp4")
    assert sum(s.columns % 8 > 0 for s in found) >= 25
    assert all(s.moved < 1 << 31 for s in found)


def test_lengths_are_below_the_multiple_of_8_that_they_are_compared_with():
    for odd, even in every_size.lengths():
        assert even.columns % 8 == 0 and 0 < even.columns - odd.columns < 8
        assert odd.rows == even.rows and odd.output == even.output and odd.moved >= every_size.LARGE


@pytest.mark.parametrize("size", every_size.NAMED, ids=str)
def test_every_ranking_chooses_legal_knobs_and_the_engines_is_its_own(size):
    (part,) = size.plans(DEVICE)[0].parts
    found = every_size.chosen(part, DEVICE)
    assert set(found) == set(every_size.RANKINGS)
    assert found["engine"] == part.knobs
    assert all(part.engine.illegal(part.facts, knobs, DEVICE) is None for knobs in found.values())


def test_waves_count_where_an_sm_has_room_for_one_cta():
    """343 rows of 132 SMs: a CTA of 512 threads and 18416 columns leaves no room for another one."""
    (part,) = Size(343, 18416, "fp8_e4m3").plans(DEVICE)[0].parts
    facts, split = part.facts, every_size.ByRowSplit.of(part.facts)
    one = every_size.ByRowKnobs(512, 512, 1, 1, 1)
    assert every_size.resident(split, one) == 1 and every_size.ctas(facts, one) == 343
    model = every_size.cost(split, one, DEVICE)
    alone = every_size._alone(split, one, DEVICE)
    assert every_size.by_waves(split, one, DEVICE) == pytest.approx(model + 2 * alone)
    assert every_size.balanced(split, one, DEVICE) == pytest.approx(alone + (model - alone) * 3 / (343 / 132))


def measured(size: Size, us: float, **others: float) -> Measured:
    times = {"engine": us, **others}
    return Measured(size, 10.0, times, {name: {"threads": 128} for name in times})


def test_targets_are_by_bytes():
    large, small = Size(10000, 1000, "bf16"), Size(10, 1000, "bf16")
    assert "MISSED" in str(measured(large, 12.6)) and "MISSED" not in str(measured(large, 12.4))
    assert "MISSED" in str(measured(small, 16.1)) and "MISSED" not in str(measured(small, 15.9))
    lines = every_size.summary([measured(large, 12.0, waves=11.0), measured(large, 13.0, waves=12.0)])
    assert lines == [
        "from 8 MB    engine            2 sizes: median 1.250, worst 1.300, 1 above 1.25",
        "from 8 MB    waves             2 sizes: median 1.150, worst 1.200, 0 above 1.25",
    ]
