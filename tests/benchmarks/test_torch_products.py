"""Attention of programs.torch_products: both sides compute the same, and torch's kernels are planned for it."""

import pytest

from graphfuse import heur_mode
from graphfuse.benchmarks.programs import torch_attention, torch_problem

CASES = [
    (beside, causal, makes)
    for beside, causal in (("", True), ("bias", False), ("padding", True), ("ragged", True), ("ragged", False))
    for makes in ("O", "dQ", "dK", "dV", *(["dBias"] if beside == "bias" else []), *(["Stats"] if not beside else []))
]


@pytest.mark.parametrize(("beside", "causal", "makes"), CASES)
def test_attention(beside, causal, makes, monkeypatch):
    monkeypatch.setattr(torch_problem, "DEVICE", "cpu")
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "cpu")
    problem = torch_attention.attention((3, 4, 24, 16), causal, makes=makes, beside=beside)
    call, _ = problem.call(("reference",))
    problem.out.fill_(float("nan"))
    call()
    assert problem.distance(problem.out) <= 1.0
    problem.out[(0,) * problem.out.dim()] += 1.0
    assert problem.distance(problem.out) > 1.0

    graph, _ = problem.graph(sm_version=90)
    graph.build_operation_graph()
    graph.create_execution_plans([heur_mode.A])
    assert {part.engine.name for part in graph._planner.at(0).parts} == {"torch"}


def test_names_of_problems_differ(monkeypatch):
    monkeypatch.setattr(torch_problem, "DEVICE", "cpu")
    names = [problem.name for problem in torch_attention.checks()]
    assert len(names) == len(set(names))
