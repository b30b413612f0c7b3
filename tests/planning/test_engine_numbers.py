"""Engines by number: their knobs, and plans of them."""

import pytest

from graphfuse import GraphNotSupportedError, GraphTypeError, GraphValidationError, heur_mode
from graphfuse.contract.engine import knobs_to_dict
from support import graphs, toys
from support.graphs import Norm


def drawn(**problem):
    g = Norm(**problem).graph("emulator")
    g.build_operation_graph()
    return g


def numbers(g):
    return {str(one): n for n, one in enumerate(g._planner.lookup.numbered)}


def test_an_engine_counts_once_for_each_kind_of_knobs_that_it_proposes():
    g = drawn()
    g.create_execution_plans([heur_mode.B, heur_mode.FALLBACK])
    kinds = {(part.engine.name, type(part.knobs)) for p in g._planner.plans for part in p.parts}
    found = [(one.engine.name, one.kind) for one in g._planner.lookup.numbered]
    assert len(found) == len(set(found)) == g.get_engine_count() == len(kinds) and set(found) == kinds
    assert found[-1][0] == "reference"


def test_ranges_are_those_of_the_proposals():
    g = drawn()
    g.create_execution_plans([heur_mode.B])
    for number, one in enumerate(g._planner.lookup.numbered[:-1]):
        values = [knobs_to_dict(p.parts[0].knobs) for p in g._planner.plans if type(p.parts[0].knobs) is one.kind]
        for k in g.get_knobs_for_engine(number):
            for_any_region = {knobs_to_dict(one)[k.type] for one in one.proposed}
            assert (k.min_value, k.max_value) == (min(for_any_region), max(for_any_region)) and k.stride > 0
            assert {v[k.type] for v in values} <= for_any_region <= set(range(k.min_value, k.max_value + 1, k.stride))
    assert g.get_knobs_for_engine(g.get_engine_count() - 1) == g.get_knobs_for_engine("reference") == []


def test_each_engine_makes_a_plan_of_its_own_choice():
    g = drawn()
    for number in range(g.get_engine_count()):
        one = g._planner.lookup.numbered[number]
        for arguments in ({"engine": number, "knobs": {}}, {"engine_id": number}):
            index = g.create_execution_plan(**arguments)
            assert index == g.get_execution_plan_count() - 1
            engine, knobs = g.get_engine_and_knobs_at_index(index)
            assert engine == one.engine.name and one.kind(**knobs) == one.proposed[0]


def test_what_is_left_out_is_the_engines_choice():
    g = drawn()
    number, one = next((n, one) for n, one in enumerate(g._planner.lookup.numbered) if len(one.proposed) > 1)
    last = knobs_to_dict(one.proposed[-1])
    name = next(name for name, value in last.items() if value != knobs_to_dict(one.proposed[0])[name])
    _, knobs = g.get_engine_and_knobs_at_index(g.create_execution_plan(number, {name: last[name]}))
    having = next(k for k in map(knobs_to_dict, one.proposed) if k[name] == last[name])
    assert knobs == having  # the best of those that have it, not the best with one value changed
    with pytest.raises(GraphNotSupportedError, match="engine 'rows' cannot use .*threads=3"):
        g.create_execution_plan(number, {"threads": 3})


def test_a_plan_by_number_runs():
    case = Norm(rows=3)
    g = case.graph("emulator")
    g.build_operation_graph()
    got, want = case.outputs(), case.outputs()
    for out, number in ((got, 0), (want, g.get_engine_count() - 1)):
        assert g.build_plan_at_index(g.create_execution_plan(number)) is g
        g.execute(case.inputs() | out, graphs.workspace(g.get_workspace_size()))
    assert (got["out"].float() - want["out"].float()).abs().max() < 0.1


def test_an_engine_that_takes_nothing_has_no_number():
    g = graphs.new(device="cpu")
    g.relu(g.tensor([8])).set_output()
    g.build_operation_graph()
    assert g.get_engine_count() == 1  # no kernel runs on the CPU
    with pytest.raises(GraphValidationError, match="engine 'rows' has the numbers none, as it takes nothing"):
        g.get_knobs_for_engine("rows")


def test_numbers_of_another_graph():
    """They are worked out anew when a graph changes."""
    g = graphs.new(device="cpu")
    x = g.relu(g.tensor([8])).set_output()
    g.build_operation_graph(patterns=toys.solo("relu"), engines=[toys.HostSolo("mine"), "reference"])
    assert list(numbers(g)) == ["mine (size)", "reference"]
    g.relu(x).set_output()
    g.build_operation_graph()
    assert list(numbers(g)) == ["reference"]


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda g: g.get_knobs_for_engine(99), GraphValidationError, "no engine has the number 99; there are: 0: ro"),
        (lambda g: g.get_knobs_for_engine(-1), GraphValidationError, "no engine has the number -1"),
        (lambda g: g.get_knobs_for_engine(True), GraphTypeError, "by its name or its number, got True"),
        (
            lambda g: g.get_knobs_for_engine("eng0"),
            GraphValidationError,
            "named 'eng0'; there are: rows, cudnn, torch, reference",
        ),
        (lambda g: g.create_execution_plan(99, {}), GraphValidationError, "no engine has the number 99"),
        (lambda g: g.create_execution_plan(0, {"tile": 1}), GraphValidationError, "has no knob tile; it has"),
        (lambda g: g.create_execution_plan(0, 3), GraphTypeError, "an engine's name or number and a dict of knobs"),
        (lambda g: g.create_execution_plan((0, 1), ({},)), GraphTypeError, "or tuples of both"),
        (lambda g: g.create_execution_plan((0, 0, 0)), GraphNotSupportedError, "do not cover graph"),
    ],
)
def test_what_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call(drawn())
