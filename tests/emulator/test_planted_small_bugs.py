"""Bugs planted into the small kernels, one for each header."""

import re

import pytest

from support.bugs import ADDRESS, RACE, VARIES, WRONG, Bug, assert_caught, caught, each, plant
from support.small_kernels import CASES, changed

pytestmark = pytest.mark.emulate

_WAIT = "shared->arrived[row % 2].wait(row / 2 % 2);"
_LAST_ROUND = """  gf::cluster_arrive();
  output[gf::i64(gf::block_index()) * THREADS + thread] = sum;
  gf::cluster_wait();  // all have read
  neighbours[gf::i64(gf::block_index()) * THREADS + thread] = mailbox[thread];
"""

SMALL = {
    "missing cp.async wait": (
        "async_copy 16",
        Bug(
            "gf::async_wait<1>();", "", {ADDRESS: "use-after-poison", RACE: "data race"}, ("async_copy.cu", "sum[i] +=")
        ),
    ),
    "cp.async wait for one group too few": (
        "async_copy 8",
        Bug(
            "gf::async_wait<1>();",
            "gf::async_wait<2>();",
            {ADDRESS: "use-after-poison", RACE: "data race"},
            ("async_copy.cu", "sum[i] +="),
        ),
    ),
    "missing cp.async wait, 4 bytes": (
        "async_copy 4",
        Bug(
            "gf::async_wait<1>();",
            "",
            {ADDRESS: "use-after-poison|unknown-crash", RACE: "data race"},
            ("async_copy.cu", "sum[i] +="),
        ),
    ),
    "missing barrier behind cp.async": (
        "async_copy 16",
        Bug("gf::barrier();  // after write", "", {RACE: "data race"}, ("async_copy.cu", "sum[i] +=")),
    ),
    "missing write-after-read barrier before cp.async": (
        "async_copy 16",
        Bug("gf::barrier();  // before write", "", {RACE: "data race"}, ("async_copy.cu", "sum[i] +=")),
    ),
    "cp.async past the end of shared memory": (
        "async_copy 16",
        Bug(
            "step % 2 * STAGE + at, row",
            "step % 2 * STAGE + at + 4, row",
            {ADDRESS: "copy_async of 16 bytes to memory that is not this CTA's shared memory"},
            ("async_copy.cu", "gf::copy_async<BYTES>"),
        ),
    ),
    "cp.async past the end of the input": (
        "async_copy 16",
        Bug(
            "if (step < STEPS) {",
            "if (step <= STEPS) {",
            {ADDRESS: "copy_async of 16 bytes from outside the buffers"},
            ("async_copy.cu", "gf::copy_async<BYTES>"),
        ),
    ),
    "cp.async never waited for": (
        "async_copy 16",
        Bug(
            "  gf::async_wait<0>();",
            "  fetch(stages, row, 0);",
            {ADDRESS: "copy_async that the thread never waited for"},
            ("async_copy.cu", "gf::copy_async<BYTES>"),
        ),
    ),
    "cp.async without commit": (
        "async_copy 16",
        Bug("  gf::async_commit();", "", {ADDRESS: "use-after-poison"}, ("async_copy.cu", "sum[i] +=")),
    ),
    "missing mbarrier wait": (
        "bulk_copy",
        Bug(_WAIT, "", {ADDRESS: "use-after-poison"}, ("bulk_copy.cu", "sum[i] +=")),
    ),
    "mbarrier that nobody waits for": (
        "bulk_copy",
        Bug(_WAIT, "", {RACE: "all 1 arrivals of the phase have come"}, ("bulk_copy.cu", "arrived.arrive_expect")),
    ),
    "missing barrier before the next bulk copy": (
        "bulk_copy",
        Bug("gf::barrier();  // before refill", "", {RACE: "data race"}, ("bulk_copy.cu", "sum[i] +=")),
    ),
    "mbarrier used before it is made": (
        "bulk_copy",
        Bug(
            "gf::barrier();  // after init",
            "",
            {ADDRESS: "mbarrier wait on what is no mbarrier: nobody made it", RACE: "nobody made it|data race"},
            ("bulk_copy.cu", _WAIT),
        ),
    ),
    "mbarrier without fence": (
        "bulk_copy",
        Bug(
            "gf::mbarrier_fence_init();",
            "",
            {ADDRESS: "without mbarrier_fence_init"},
            ("bulk_copy.cu", "gf::bulk_load"),
        ),
    ),
    "mbarrier made twice": (
        "bulk_copy",
        Bug(
            "shared->arrived[1].init(1);",
            "shared->arrived[0].init(1 /*again*/);",
            {ADDRESS: "made a second time"},
            ("bulk_copy.cu", "/*again*/"),
        ),
    ),
    "mbarrier that expects too many bytes": (
        "bulk_copy",
        Bug(
            "arrive_expect(COLUMNS * 4);",
            "arrive_expect(COLUMNS * 4 + 16);",
            {ADDRESS: r"deadlock[^$]*threads 0-63 of CTA 0: at mbarrier wait, \S+ for 0 arrivals and 16 bytes"},
            ("bulk_copy.cu", _WAIT),
        ),
    ),
    "mbarrier that expects bytes of no copy": (
        "bulk_copy",
        Bug(
            "gf::barrier();  // after init",
            "gf::barrier();\n  if (fetches && rows == 7) shared->arrived[1].arrive_expect(16);",
            {ADDRESS: "when all 1 arrivals of the phase have come"},
            ("bulk_copy.cu", "arrive_expect(COLUMNS * 4)"),
        ),
    ),
    "mbarrier that too many arrive at": (
        "bulk_copy",
        Bug(
            "arrive_expect(COLUMNS * 4);",
            "arrive_expect(COLUMNS * 4);\n  arrived.arrive();",
            {ADDRESS: "when all 1 arrivals of the phase have come"},
            ("bulk_copy.cu", "arrived.arrive();"),
        ),
    ),
    "mbarrier written over": (
        "bulk_copy",
        Bug(
            "gf::barrier();  // after init",
            "if (fetches) *(&shared->stages[0][0] + 2 * COLUMNS) = 0.0f;\n  gf::barrier();",
            {ADDRESS: "use-after-poison[^$]*WRITE"},
            ("bulk_copy.cu", "+ 2 * COLUMNS"),
        ),
    ),
    "misaligned bulk copy": (
        "bulk_copy",
        Bug(
            "input + row * COLUMNS, COLUMNS * 4",
            "input + row * COLUMNS + 1, COLUMNS * 4",
            {ADDRESS: "bulk_load of 800 bytes from an address that is no multiple of 16"},
            ("bulk_copy.cu", "gf::bulk_load"),
        ),
    ),
    "missing cluster sync": (
        "cluster",
        Bug(
            "gf::cluster_barrier();  // all have written",
            "",
            {ADDRESS: "use-after-poison[^$]*READ", RACE: "data race"},
            ("cluster.cu", "sum +="),
        ),
    ),
    "missing cluster sync before the end": (
        "cluster",
        Bug(
            _LAST_ROUND,
            "  output[gf::i64(gf::block_index()) * THREADS + thread] = sum + mailbox[thread];\n",
            {ADDRESS: "its shared memory is gone|use-after-poison", RACE: "data race|is gone"},
            ("cluster.cu", "gf::map_shared("),
        ),
    ),
    "cluster barrier that some leave out": (
        "cluster",
        Bug(
            "gf::cluster_barrier();  // all have written",
            "if (rank != 3) gf::cluster_barrier(/*three*/);",
            {ADDRESS: "use-after-poison|cluster_arrive when threads of the cluster have ended"},
            ("cluster.cu", "cluster"),
        ),
    ),
    "missing grid barrier": (
        "grid",
        Bug(
            "gf::grid_barrier();  // all have written",
            "",
            {RACE: "data race"},
            ("grid.cu", "partial[cta] ="),
        ),
    ),
    "missing write-after-read grid barrier": (
        "grid",
        Bug(
            "gf::grid_barrier();  // all have read",
            "",
            {RACE: "data race"},
            ("grid.cu", "partial[cta] ="),
        ),
    ),
    "count that is not atomic": (
        "grid",
        Bug(
            "gf::atomic_add(&counts->narrow, 1u);",
            "counts->narrow += 1;",
            {RACE: "data race"},
            ("grid.cu", "counts->narrow += 1;"),
        ),
    ),
    "two CTAs that write one address": (
        "async_copy 16",
        Bug(
            "output[gf::i64(gf::block_index()) * STAGE",
            "output[gf::i64(gf::block_index() / 2) * STAGE",
            {ADDRESS: f"{WRONG}|{VARIES}", RACE: "data race"},
            ("async_copy.cu", "output[gf::i64"),
        ),
    ),
    "shared memory without a warp barrier": (
        "warp",
        Bug(
            "gf::warp_barrier();",
            "",
            {ADDRESS: f"{WRONG}|{VARIES}", RACE: "data race"},
            ("warp.cu", "shared[thread] = value;"),
        ),
    ),
    "ballot that half a warp leaves out": (
        "warp",
        Bug(
            "gf::ballot(value % 3 == 0),",
            "gf::lane() < 16 ? gf::ballot(value % 3 == 0) : 0,",
            {ADDRESS: "ballot meets ballot of thread"},
            ("warp.cu", "gf::lane() < 16"),
        ),
    ),
}


@pytest.mark.parametrize(("name", "build"), each(SMALL))
def test_in_small_kernels(name, build):
    kernel, bug = SMALL[name]
    case = CASES[kernel]
    source = case.source(plant(case.text, bug))
    report = caught(source, case.kernel, case.launch, case.arrays, {}, build, case.expected(case.arrays))
    assert_caught(bug, report, build, {f"{case.kernel}.cu": case.text})


def test_a_grid_barrier_needs_a_cooperative_launch():
    case = changed(CASES["grid"], cooperative=False)
    report = caught(case.source(), case.kernel, case.launch, case.arrays, {}, ADDRESS, {})
    assert re.search(r"grid\.cu:\d+: grid_barrier in a launch that is not cooperative", report), report
