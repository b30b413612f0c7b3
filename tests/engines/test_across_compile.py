"""The engine of rows whose columns lie apart proposes no knobs that make its kernel spill."""

import pytest

from graphfuse.base.device import for_arch
from graphfuse.base.enums import heur_mode
from graphfuse.engines.rows.across.split import AcrossSplit, available
from graphfuse.runtime import nvrtc
from support import cubin
from support.variants import ACROSS

pytestmark = [pytest.mark.compile, pytest.mark.thorough]


@pytest.mark.parametrize(
    "name",
    ["across 96 in 12 groups", "across 96 in 4 groups", "across residual", "across bf16 to float", "across read again"],
)
def test_no_proposed_knobs_spill(name):
    variant, device = ACROSS[name], for_arch("sm_90a")
    engine, facts = variant.engine, variant.facts()
    # How many registers a thread has, and for how many chunks it needs them, decide; one of each will do.
    tried = {}
    for knobs in engine.propose(facts, device, heur_mode.B):
        split = AcrossSplit.of(facts)
        tried[available(knobs), split.steps(knobs), split.passes(knobs), knobs.groups] = knobs
    for knobs in tried.values():
        used = cubin.usage(nvrtc.compile(engine.source(facts, knobs), "sm_90a", "across.cu"))
        assert used["STACK"] == used["LOCAL"] == 0, (knobs, used)
