"""The checker is checked: each bug planted into a kernel is caught, and caught as what it is."""

import re

import numpy as np
import pytest

from graphfuse.base.dtypes import data_type
from graphfuse.codegen.render import template
from graphfuse.engines.rows.by_row import ByRowKnobs
from support.bugs import ADDRESS, RACE, VARIES, WRONG, Bug, assert_caught, caught, each, plant
from support.rmsnorm_problem import SCALES, Problem, Y

pytestmark = pytest.mark.emulate

# The RMSNorm kernel: rows of two warps and more, several to a CTA, of which the last has too few.
SHARED_ROWS = (dict(rows=5, columns=500), ByRowKnobs(64, 128))
LONG_ROWS = (dict(rows=2, columns=2600), ByRowKnobs(512, 512))
CLUSTERS = (dict(rows=2, columns=2600), ByRowKnobs(512, 128))
# Rows within a warp, in pieces of several chunks; blocks of one lane and of two.
PIECES = (dict(rows=20, columns=528), ByRowKnobs(16, 64, 2))
BLOCKS = (dict(rows=5, columns=96, y=data_type.FP4_E2M1), ByRowKnobs(4, 32, 2))
SPLIT_BLOCKS = (dict(rows=5, columns=96, y=data_type.FP4_E2M1), ByRowKnobs(8, 64))

NOWHERE = ("", "")
# The bytes right behind a buffer are poisoned, those further on belong to nobody.
_READ, _WRITE = (f"(heap-buffer-overflow|use-after-poison)[^$]*{access} of size" for access in ("READ", "WRITE"))
_LOAD = ("by_row.cu", "reads[step] = Phase::read_rows(row, at);")
_STORE = ("graphfuse/rows.cuh", "store<BYTES, WIDTH, ACCESS>(offset(address, at * BYTES), piece)")
_STORE_BLOCK = ("graphfuse/rows.cuh", "store<BYTES, WIDTH, ACCESS>(offset(address, at * BYTES), elements)")
_PARTS = ("graphfuse/reduce.cuh", "shared.totals[i * THREADS + thread] = parts[i / COUNT][i % COUNT];")
_BARRIER = """        shared.totals[i * THREADS + thread] = parts[i / COUNT][i % COUNT];
      }
      barrier();
"""
_SECOND_BARRIER = """        barrier();
#pragma unroll
        for (int value = 0; value < VALUES; ++value) {
          results[value] = totals[value];
"""

RMSNORM = {
    "out-of-bounds read": (
        SHARED_ROWS,
        Bug(
            "reads[step] = {};\n      if (in_row(row.thread + at)) {",
            "reads[step] = {};\n      if (row.exists) {",
            {ADDRESS: _READ},
            _LOAD,
        ),
    ),
    "read of the row after the last": (
        SHARED_ROWS,
        Bug("  if (row.exists) {", "  if (in_row(0)) {", {ADDRESS: _READ}, _LOAD),
    ),
    "out-of-bounds write": (
        SHARED_ROWS,
        Bug(
            "inside && row.exists",
            "row.exists",
            {ADDRESS: _WRITE},
            _STORE,
        ),
    ),
    "write of the row after the last": (
        SHARED_ROWS,
        Bug(
            "inside && row.exists",
            "inside",
            {ADDRESS: _WRITE},
            _STORE,
        ),
    ),
    "out-of-bounds write of a block": (
        BLOCKS,
        Bug(
            "inside && row.exists",
            "row.exists",
            {ADDRESS: _WRITE},
            _STORE_BLOCK,
        ),
    ),
    "off by one in the last row": (
        SHARED_ROWS,
        Bug(
            "thread, index < RowIndex(a.rows)}",
            "thread, index <= RowIndex(a.rows)}",
            {ADDRESS: _READ},
            _LOAD,
        ),
    ),
    "last row left out": (
        SHARED_ROWS,
        Bug("thread, index < RowIndex(a.rows)}", "thread, index < RowIndex(a.rows - 1)}", {ADDRESS: WRONG}, NOWHERE),
    ),
    "wrong tail mask": (
        SHARED_ROWS,
        Bug("|| piece < PIECES;", "|| piece < PIECES - 1;", {ADDRESS: WRONG}, NOWHERE),
    ),
    "wrong tail mask, several chunks to a piece": (
        PIECES,
        Bug("|| piece < PIECES;", "|| piece < PIECES - 1;", {ADDRESS: WRONG}, NOWHERE),
    ),
    "chunks of a thread added first": (
        PIECES,
        Bug(
            "RowSum{shared[TURN % SUM_PLACES]}(totals, joined.sums, TURN / SUM_PLACES);",
            "float first[1][CHUNKS] = {};\n  for (float t : totals[0]) first[0][0] += t;\n"
            "  RowSum{shared[TURN % SUM_PLACES]}(first, joined.sums, TURN / SUM_PLACES);",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "lanes added in another order": (
        PIECES,
        Bug(
            "for (int mask = LANES / 2; mask >= ALIKE; mask /= 2) {",
            "for (int mask = 1; mask < LANES; mask *= 2) {",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "a chunk summed twice": (
        PIECES,
        Bug(
            "for (int i = first; i < first + COUNT; ++i) {",
            "for (int i = 0; i < COUNT; ++i) {",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "scale of half a block": (
        SPLIT_BLOCKS,
        Bug("mask < LANES; mask *= 2", "mask < LANES / 2; mask *= 2", {ADDRESS: WRONG}, NOWHERE),
    ),
    "scale beside its block": (
        SPLIT_BLOCKS,
        Bug(
            "gf::offset(a.b0, thread / 2)",
            "gf::offset(a.b0, thread)",
            {ADDRESS: _WRITE},
            ("graphfuse/rows.cuh", "ACCESS>(scales.of("),
        ),
    ),
    "vote that rows which do not exist leave out": (
        BLOCKS,
        Bug(
            "const Bytes<BYTES> elements = Blocks<T>::quantized(values, scale);",
            "const Bytes<BYTES> elements = stored ? Blocks<T>::quantized(values, scale) : Bytes<BYTES>{};",
            {ADDRESS: "ballot"},
            ("graphfuse/quantize.cuh", "if (any_lane("),
        ),
    ),
    "shared memory overflow": (
        SHARED_ROWS,
        Bug(
            "float totals[TOTALS];",
            "float totals[TOTALS - 1];",
            {ADDRESS: "heap-buffer-overflow[^$]*WRITE of size 4"},
            _PARTS,
        ),
    ),
    "shared memory for one chunk a thread": (
        (dict(rows=5, columns=992), ByRowKnobs(64, 128, 2)),
        Bug(
            "EACH = COUNT * THREADS;",
            "EACH = THREADS;",
            {ADDRESS: "heap-buffer-overflow[^$]*WRITE of size 4"},
            _PARTS,
        ),
    ),
    "missing barrier": (
        SHARED_ROWS,
        Bug(
            _BARRIER,
            _BARRIER.replace("barrier();", ""),
            {ADDRESS: f"{WRONG}|{VARIES}", RACE: "data race"},
            _PARTS,
        ),
    ),
    "missing barrier, long rows": (
        LONG_ROWS,
        Bug(_BARRIER, _BARRIER.replace("barrier();", ""), {RACE: "data race"}, _PARTS),
    ),
    "missing barrier behind the total": (
        LONG_ROWS,
        Bug(
            _SECOND_BARRIER,
            _SECOND_BARRIER.replace("barrier();", ""),
            {ADDRESS: f"{WRONG}|{VARIES}", RACE: "data race"},
            ("graphfuse/reduce.cuh", "total"),
        ),
    ),
    "total over a part that others still read": (
        LONG_ROWS,
        Bug(
            "shared.totals + PARTS + thread / ROW_THREADS * MOST;",
            "shared.totals + 1;",
            {RACE: "data race"},
            ("graphfuse/reduce.cuh", "totals[value] = result;"),
        ),
    ),
    "missing wait for other CTAs' parts": (
        CLUSTERS,
        Bug(
            "    shared.arrived.wait(phase);\n",
            "",
            {ADDRESS: "use-after-poison|unknown-crash", RACE: "data race|nobody waited"},
            ("graphfuse/reduce.cuh", "shared.sent"),
        ),
    ),
    "parts that nobody expects": (
        CLUSTERS,
        Bug(
            "(CTAS - 1) * VALUES",
            "(CTAS - 2) * VALUES",
            {ADDRESS: "use-after-poison|unknown-crash|nobody waited"},
            ("graphfuse/reduce.cuh", "shared.sent"),
        ),
    ),
    "parts for an mbarrier that nobody made": (
        CLUSTERS,
        Bug(
            "RowSum::begin(shared, SUM_PLACES);",
            "RowSum::begin(shared, 0);",
            {ADDRESS: "on what is no mbarrier|send to memory and an mbarrier that no CTA of the cluster has both"},
            ("graphfuse/reduce.cuh", "shared.arrived"),
        ),
    ),
    "missing wait for the others' mbarriers": (
        CLUSTERS,
        Bug(
            "  RowSum::begun();\n",
            "",
            {ADDRESS: "cluster_arrive without cluster_wait"},
            ("graphfuse/reduce.cuh", "shuffle_xor"),
        ),
    ),
    "mbarriers that other CTAs cannot see": (
        CLUSTERS,
        Bug(
            "mbarrier_fence_init();\n      }\n      cluster_arrive_relaxed();",
            "}\n      cluster_arrive_relaxed();",
            {ADDRESS: "send on an mbarrier without mbarrier_fence_init"},
            ("graphfuse/reduce.cuh", "send(parts[i / COUNT]"),
        ),
    ),
    "another CTA's part left out": (
        CLUSTERS,
        Bug(
            "shared.sent[cta][i * THREADS + thread];",
            "shared.sent[(rank + 1) % CTAS][i * THREADS + thread];",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "divergent barrier": (
        SHARED_ROWS,
        Bug(
            _BARRIER,
            _BARRIER.replace(
                "barrier();", "if (thread < 64) {\n barrier(/*low*/);\n } else {\n barrier(/*high*/);\n }"
            ),
            {ADDRESS: "divergent barrier: thread 0 of CTA 0 is at another", RACE: "divergent barrier"},
            ("graphfuse/reduce.cuh", "barrier(/*high*/)"),
        ),
    ),
    "barrier that some leave out": (
        SHARED_ROWS,
        Bug(
            _BARRIER,
            _BARRIER.replace("barrier();", "if (thread < 64) barrier(/*low*/);"),
            {ADDRESS: r"barrier that thread \d+ of CTA 0 does not come to: it has ended"},
            ("graphfuse/reduce.cuh", "barrier(/*low*/)"),
        ),
    ),
    "return before a shuffle": (
        (dict(rows=5, columns=64), ByRowKnobs(8, 64)),
        Bug(
            "  Phase<0>::Rows rows0[STEPS];\n",
            "  if (!row.exists) return;\n  Phase<0>::Rows rows0[STEPS];\n",
            {ADDRESS: "shuffle names lane"},
            ("by_row.cu", "gf::shuffle_xor("),
        ),
    ),
    "misaligned vector access": (
        SHARED_ROWS,
        Bug(
            "gf::offset(a.i0, thread * 8)",
            "gf::offset(a.i0, thread * 8 + (index == 4 && thread == 3) * 2)",
            {ADDRESS: r"load of 8 bytes at an address that is a multiple of 2 \(thread 3 of CTA 2\)"},
            ("generated.cuh", "gf::load<8, 8, ROW_READS>"),
        ),
    ),
    "partial sums added in any order": (
        (dict(rows=2, columns=1000), ByRowKnobs(128, 128)),
        Bug(
            _BARRIER,
            """        if (thread == 0) shared.totals[0] = 0.0f;
        barrier();
        atomic_add(&shared.totals[0], parts[i / COUNT][i % COUNT]);
      }
      barrier();
      if (THREADS > 0) {
        results[0] = shared.totals[0];
        return;
      }
""",
            {ADDRESS: VARIES},
            NOWHERE,
        ),
    ),
}


@pytest.mark.some(18)
@pytest.mark.parametrize(("name", "build"), each(RMSNORM))
def test_in_rmsnorm(name, build):
    (options, knobs), bug = RMSNORM[name]
    problem, right = problem_and_result(options, knobs)
    source, *rest = problem.plan(knobs)
    source = plant(source, bug)
    if "atomic_add" in bug.new:
        place = '#line 1 "graphfuse/reduce.cuh"'
        for part in re.findall(r'#line \d+ "graphfuse/atomics.cuh"\n.*?(?=#line)', source, re.DOTALL):
            if source.index(part) > source.index(place):
                source = source.replace(part, "").replace(place, part + place)
    files = {"by_row.cu": template("graphfuse.engines.rows.by_row", "by_row.cu")}
    (files["generated.cuh"],) = re.findall(r'#line 1 "generated.cuh"\n(.*?)#line', source, re.DOTALL)
    for header in ("reduce.cuh", "rows.cuh", "quantize.cuh"):
        files[f"graphfuse/{header}"] = template("graphfuse.codegen.headers", header)
    assert_caught(bug, caught(source, *rest, build, right), build, files)


def problem_and_result(options: dict, knobs: ByRowKnobs) -> tuple[Problem, dict[int, np.ndarray]]:
    """A problem whose outputs are as they were before, and what belongs there."""
    problem = Problem(**{"y": data_type.FLOAT} | options)
    before = {tensor: problem.buffers[tensor].copy() for tensor in (Y, SCALES) if tensor in problem.buffers}
    problem.run(knobs)
    right = {tensor: problem.buffers[tensor].copy() for tensor in before}
    for tensor, content in before.items():
        problem.buffers[tensor][:] = content
    return problem, right


@pytest.mark.thorough
@pytest.mark.parametrize("options, knobs", {name: case for name, (case, _) in RMSNORM.items()}.values(), ids=RMSNORM)
@pytest.mark.parametrize("build", [ADDRESS, RACE])
def test_without_a_bug_nothing_is_found(options, knobs, build):
    problem, right = problem_and_result(options, knobs)
    assert not caught(*problem.plan(knobs), build, right)
