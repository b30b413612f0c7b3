"""The heuristic's choice, for chips that are not here: machine code that fits them and spills nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from graphfuse.base.device import for_arch
from graphfuse.benchmarks import sizes
from graphfuse.runtime import nvrtc
from support import cubin

pytestmark = pytest.mark.compile

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_103a", "sm_120")
SIZES = (*sizes.seeds(rows=sizes.ROWS[:1]), *sizes.off_the_table())  # rows enter no source


def of(number: int) -> list[sizes.Size]:
    """Each size for one chip, of every kind for each chip."""
    return [size for i, size in enumerate(SIZES) if (i + i // len(ARCHES) + number) % len(ARCHES) == 0]


def test_every_size_is_compiled_for_some_chip():
    assert {size for number in range(len(ARCHES)) for size in of(number)} == set(SIZES)


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ARCHES)
def test_first_choices_fit(arch):
    import cuda.core  # noqa: F401 - before the threads: two first imports of it at once fail

    device = for_arch(arch)
    parts = [size.plans(device)[0].parts[0] for size in of(ARCHES.index(arch))]
    found = {
        (part.engine.source(part.facts, part.knobs), part.outline.block, part.outline.shared_bytes) for part in parts
    }

    def used(what: tuple[str, int, int]) -> dict[str, int]:
        source, _, _ = what
        return cubin.usage(nvrtc.compile(source, device.arch, "by_row.cu"))

    with ThreadPoolExecutor(2) as pool:
        for (_, threads, dynamic), use in zip(found, pool.map(used, found), strict=True):
            assert use["STACK"] == use["LOCAL"] == 0
            # Registers are given to warps in units of 8 a thread.
            assert -(-use["REG"] // 8) * 8 * threads <= device.registers_per_sm
            assert use["SHARED"] + dynamic <= device.shared_memory_per_block
            assert use["SHARED"] <= 48 << 10 and threads <= device.threads_per_sm
