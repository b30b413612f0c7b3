"""Random graphs of up to 12 nodes, in float64, against differences of what they compute."""

import pytest

from graphfuse import differentiate
from graphfuse.ops import OPS
from support import differentiated, random_graphs

COUNT = 300


@pytest.mark.some(60)
@pytest.mark.parametrize("seed", range(COUNT))
def test_gradients(seed):
    case = random_graphs.drawn(seed)
    made = differentiate(case.graph, case.outputs, case.wrt)
    differentiated.checked(made, case.values, fast=True)


def test_every_op_with_gradients_is_drawn():
    drawn = [random_graphs.drawn(seed).graph for seed in range(COUNT)]
    seen = {node.op.name for g in drawn for node in g.nodes}
    ruled = {op.name for op in OPS.values() if any(callable(op.rule(p.name)) for p in op.inputs)}
    assert ruled <= seen
    assert {len(g.nodes) for g in drawn} == set(range(1, 13))
