"""What the RMSNorm engine makes of cases that are benched: the L2's hints, and what the kernel asks for first."""

import re

import pytest

from graphfuse.base.device import for_arch
from graphfuse.base.enums import heur_mode
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.codegen.render import template
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.planning import registry as plugins
from graphfuse.planning.plan import matches, propose

H200 = for_arch("sm_90a")
AS_USUAL, READS_LAST, ALL_FIRST = range(3)


def part_of(bench: str, name: str, graph: str = "graph"):
    """The one kernel of a case, with the knobs of the heuristic."""
    (case,) = (case for case in BENCHES[bench].cases if str(case) == name)
    lowered, known = lower(freeze(getattr(case, graph)())), plugins.installed()
    (part,) = propose(lowered, matches(lowered, known)[0], known.engines, H200, heur_mode.OPENSOURCE).plans[0].parts
    return part


@pytest.mark.parametrize(
    ("bench", "name", "graph", "eviction"),
    [
        ("rmsnorm-silu", "bf16 1560x64", "graph", AS_USUAL),
        ("add-rmsnorm", "bf16 128x5120", "graph", ALL_FIRST),
        ("add-rmsnorm", "bf16 128x7168", "graph", READS_LAST),
        ("qk-norm", "bf16 128x64x8", "joint_graph", ALL_FIRST),  # its weights, one for each head, are no rows
    ],
)
def test_eviction_goes_by_what_is_moved(bench, name, graph, eviction):
    assert part_of(bench, name, graph).knobs.eviction == eviction


@pytest.mark.parametrize(
    ("bench", "name", "later"),
    [
        ("rmsnorm-silu", "bf16 1560x64", []),
        ("rmsnorm-training", "bf16 8192x128", ["o1"]),
        ("add-rmsnorm", "bf16 16x2048", ["o0", "o1"]),
        ("rmsnorm-silu", "nvfp4 1560x64", ["b0"]),
    ],
)
def test_outputs_beyond_the_first_line_of_parameters_are_addressed_later(bench, name, later):
    part = part_of(bench, name)
    source = part.engine.source(part.facts, part.knobs)
    (row,) = re.findall(r"Row row_of\(.*?\n\}", source, re.DOTALL)
    (rest,) = re.findall(r"void complete\(.*?\n\}", source, re.DOTALL)
    assert re.findall(r"row\.(\w+) = ", rest) == later
    outputs = {f"o{k}" for k in range(len(part.facts.program.stores))}
    assert outputs - set(later) == set(re.findall(r"gf::offset\(a\.(o\d)", row))


def test_rows_are_read_before():
    kernel = template("graphfuse.engines.rows.by_row", "by_row.cu").split("problem::start(")[1]
    assert kernel.index("= row_of(") < kernel.index("read_rows<Phase<0>>") < kernel.index("complete(row")
    assert kernel.index("complete(row") < kernel.index("store(gf::Number<0>(), row)")
