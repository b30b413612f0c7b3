"""Knobs that the by-row schedule's cost model ranks first, for rows on which they were measured."""

import pytest

from graphfuse.base.device import for_sm
from graphfuse.base.enums import heur_mode
from graphfuse.benchmarks.qk_norm import QkNormCase
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins


@pytest.mark.parametrize("heads", [32, 64])
def test_rows_with_a_weight_for_each_head_have_several_threads(heads):
    """The L1 serves a warp lines of all its rows, and as many weights. With two threads a row that took longer than
    memory: the kernel of qk-norm-nvidia-h200.json had 0.86 of the stream limit."""
    graph, known = lower(freeze(QkNormCase(32768, heads, 8).joint_graph())), plugins.installed()
    regions, _ = plan.matches(graph, known)
    first = plan.propose(graph, regions, known.engines, for_sm(90), heur_mode.A).plans[0]
    assert [part.knobs.threads_per_row >= 4 for part in first.parts] == [True]
