"""What the backward engine proposes, as machine code: nothing is spilled, and as many CTAs fit an SM as are said to."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from graphfuse import heur_mode
from graphfuse.base.device import ARCHES, for_arch
from graphfuse.contract import match
from graphfuse.engines.rows import RowEngine
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.patterns.rows import PATTERN
from graphfuse.runtime import nvrtc
from support import cubin
from support.gradients import Gradient
from support.graphs import BF16, FLOAT

pytestmark = [pytest.mark.compile, pytest.mark.thorough]

ENGINE = RowEngine()
SPILLED = {("sm_100a", 5120): 24}  # bytes: the estimate of registers is fitted to sm_90a, whose compiler needs fewer
_RESERVED = 1024  # bytes of shared memory that the system takes of each CTA's; from 9.0 on cuobjdump counts them
PLAIN, FULL = {}, {"activation": "gate", "residual": True, "dbias": True, "weight": "zero-centred"}
PROBLEMS = [
    Gradient(4096, columns, dtype, **around)
    for columns in (64, 760, 1024, 4096, 5120, 8192, 16384, 32768, 65536)
    for dtype in (BF16, FLOAT)
    for around in (PLAIN, FULL)
]


def of(number: int) -> list[Gradient]:
    """Each problem for one chip, for time's sake."""
    return PROBLEMS[number :: len(ARCHES)]


def candidates(case: Gradient, device) -> list[tuple]:
    facts = next(match.find(PATTERN, lower(freeze(case.graph())))).facts
    every = ENGINE.propose(facts, device, heur_mode.B)
    return [(facts, knobs) for knobs in (*every[:2], *every[3 :: max(1, len(every) // 2)])]


@pytest.mark.parametrize("arch", ARCHES)
def test_what_is_proposed_runs_as_said(arch):
    import cuda.core  # noqa: F401 - before the threads: two first imports of it at once fail

    device = for_arch(arch)
    found = [c for case in of(ARCHES.index(arch)) for c in candidates(case, device)]

    def used(candidate: tuple) -> dict[str, int]:
        return cubin.usage(nvrtc.compile(ENGINE.source(*candidate), device.arch, "persistent.cu"))

    with ThreadPoolExecutor(2) as pool:
        for (facts, knobs), use in zip(found, pool.map(used, found), strict=True):
            launch, what = ENGINE.launch(facts, knobs), (facts.columns, knobs, use)
            assert use["STACK"] <= SPILLED.get((arch, facts.columns), 0) and use["LOCAL"] == 0, what
            warps = -(-launch.block // 32) * knobs.ctas_per_sm
            assert -(-use["REG"] // 8) * 8 * 32 * warps <= device.registers_per_sm, what
            counted = _RESERVED if device.compute_capability >= (9, 0) else 0
            shared = use["SHARED"] - counted + launch.shared_bytes
            assert shared <= device.shared_memory_per_block, what
            assert knobs.ctas_per_sm * (shared + _RESERVED) <= device.shared_memory_per_sm, what
