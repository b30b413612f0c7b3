"""The RMSNorm engine proposes no knobs that make the kernel spill."""

import pytest

from graphfuse.base.device import for_arch
from graphfuse.base.enums import heur_mode
from graphfuse.runtime import nvrtc
from support import cubin
from support.variants import VARIANTS

pytestmark = [pytest.mark.compile, pytest.mark.thorough]


@pytest.mark.parametrize("name", ["silu 1024", "FLOAT to FLOAT", "long e5m2", "long nvfp4", "longest held"])
def test_no_proposed_knobs_spill(name):
    variant, device = VARIANTS[name], for_arch("sm_90a")
    engine, facts = variant.engine, variant.facts()
    # Threads a CTA and how much a thread holds, in which pieces, decide; one of each will do.
    held = {}
    for knobs in engine.propose(facts, device, heur_mode.B):
        chunks = getattr(knobs, "chunks", None)  # which knobs of persistent kernels do not have
        held[type(knobs), knobs.threads_per_row, chunks, knobs.threads >= 512 and knobs.threads] = knobs
    for knobs in held.values():
        used = cubin.usage(nvrtc.compile(engine.source(facts, knobs), "sm_90a", "by_row.cu"))
        assert used["STACK"] == used["LOCAL"] == 0, (knobs, used)
