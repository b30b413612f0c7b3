"""Which engine comes first, measured: problems, what times come to, and the table's text. Times are made up."""

import math

import pytest
import torch

from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.benchmarks.programs import ranking
from graphfuse.ops import OPS
from graphfuse.tuned_tables import measured
from graphfuse.tuned_tables.entry import Source
from graphfuse.tuned_tables.ranking import OTHERS, entry

H200 = Source("measured", "NVIDIA H200", "sm_90", "2026-11-23", "580.1", {"graphfuse": "0.1.0", "cuda": "13.0"}, "abc")
B200 = Source("measured", 'a "B200"', "sm_100", "2026-11-24")


def entries(text: str) -> list:
    """What planning would make of the file."""
    made: dict = {}
    exec(text, made)
    return [entry(family, us, Source.parse(made["SOURCES"][place])) for place, family, us in made["TIMES"]]


@pytest.mark.parametrize("problem", ranking.PROBLEMS, ids=lambda p: f"{p.family}-{p.name}")
def test_a_problem_is_of_its_family_alone(problem):
    """One node of the family, and at most a bias behind it, which the reference engine at least takes."""
    assert problem.family in OPS
    ops = [node.op_name for node in problem.graph("reference").frozen.nodes]
    assert ops in ([problem.family], [problem.family, "add"])


def test_an_engine_that_does_not_take_a_problem_says_so():
    (product, *_) = (p for p in ranking.PROBLEMS if p.family == "matmul")
    with pytest.raises(GraphNotSupportedError):
        product.graph("rows")
    if not torch.cuda.is_available():
        with pytest.raises(GraphNotSupportedError, match="cuDNN runs on CUDA devices"):
            product.graph("cudnn")


def test_figures_are_geometric_means_over_what_all_engines_take():
    def timer(problem, engine):
        known = {"rows": {"a": 1.0, "b": 4.0}, "cudnn": {"a": 9.0, "b": 4.0, "c": 1.0}}
        if problem.family == "matmul":
            return 7.0 if engine == "cudnn" else None
        return known.get(engine, {}).get(problem.name)

    problems = [ranking.Problem("rmsnorm", name, None) for name in "abc"] + [ranking.Problem("matmul", "d", None)]
    times = ranking.timed(problems, timer)
    assert times["rmsnorm"]["c"] == {"cudnn": 1.0} and times["matmul"] == {"d": {"cudnn": 7.0}}
    assert ranking.figures(times) == {"rmsnorm": {"rows": 2.0, "cudnn": 6.0}}
    shown = ranking.table(times)
    assert ("rmsnorm a", "1.0 (1.00)", "9.0 (9.00)", "-", "-") in [tuple(row) for row in shown.rows]
    assert ("matmul d", "-", "7.0 (1.00)", "-", "-") in [tuple(row) for row in shown.rows]


def test_the_text_is_what_planning_reads():
    us = {"rmsnorm": {"rows": 2.5, "cudnn": 2.0}, "matmul": {"cudnn": 3.0, "reference": 90.0}}
    text = ranking.text(us, H200, (), ())
    found = {rank.family: rank for rank in entries(text)}
    assert found["rmsnorm"].engines == ("cudnn", "rows", OTHERS)
    assert found["matmul"].engines == ("cudnn", OTHERS, "reference")
    assert all(rank.source == H200 for rank in found.values()) and found["rmsnorm"].us == us["rmsnorm"]
    assert max(map(len, text.splitlines())) <= 120
    assert text.count('"""') == ranking.text({}, H200, (), ()).count('"""')
    assert entry("x", {"reference": 1.0, "rows": 2.0}, H200).engines == ("reference", "rows", OTHERS)


def test_new_figures_take_the_place_of_old_ones_of_their_family_and_architecture():
    made: dict = {}
    first = {"rmsnorm": {"rows": 1.0, "cudnn": 2.0}, "sdpa": {"cudnn": 1.0, "reference": 2.0}}
    exec(ranking.text(first, H200, (), ()), made)
    exec(ranking.text({"rmsnorm": {"rows": 3.0, "cudnn": 2.0}}, B200, made["SOURCES"], made["TIMES"]), made)
    text = ranking.text({"rmsnorm": {"rows": 5.0, "cudnn": 4.0}}, H200, made["SOURCES"], made["TIMES"])
    found = [(rank.source.arch, rank.family, rank.us) for rank in entries(text)]
    assert found == [
        ("sm_90", "sdpa", {"cudnn": 1.0, "reference": 2.0}),
        ("sm_100", "rmsnorm", {"rows": 3.0, "cudnn": 2.0}),
        ("sm_90", "rmsnorm", {"rows": 5.0, "cudnn": 4.0}),
    ]


def test_the_table_is_the_text_that_is_written():
    """The file, written anew from what it has."""
    if not measured.TIMES:
        assert ranking.text({}, H200) == ranking.FILE.read_text()
    for place, family, us in measured.TIMES:
        assert Source.parse(measured.SOURCES[place]).origin == "measured"
        assert family in OPS and all(0 < t < math.inf for t in us.values())
