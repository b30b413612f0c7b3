"""Choosing among plans through the public methods: indices, names, barring, engines and knobs by name."""

import pytest
import torch

from graphfuse import (
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    PluginError,
    build_plan_policy,
    heur_mode,
)
from graphfuse.contract.engine import No, knobs_from_dict
from graphfuse.contract.match import Pattern
from graphfuse.engines.rows import RowEngine
from support import graphs, toys
from support.graphs import FP4, Norm

MODES = [heur_mode.A, heur_mode.FALLBACK]


def planned(engines=(), modes=MODES):
    """relu on 100 floats, with plans of toy engines first and the reference last."""
    g = graphs.new()
    g.relu(g.tensor([100], name="x")).set_output().set_name("out")
    g.validate()
    g.build_operation_graph(patterns=toys.solo("relu"), engines=engines or [toys.HostSolo("toy", (3, 1, 2))])
    g.create_execution_plans(modes)
    return g


def names(g) -> list[str]:
    return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]


def test_plans_come_in_rank_without_repeats():
    assert names(planned()) == ["toy[size=3]", "toy[size=1]", "toy[size=2]", "reference"]
    assert names(planned(modes=[heur_mode.FALLBACK, heur_mode.A]))[0] == "reference"


def test_engine_and_knobs_make_the_plan_again():
    g = planned()
    for index, name in enumerate(names(g)):
        made = g.create_execution_plan(*g.get_engine_and_knobs_at_index(index))
        assert g.get_plan_name_at_index(made) == name and made == g.get_execution_plan_count() - 1
    assert g.get_engine_and_knobs_at_index(0) == ("toy", {"size": 3})


def test_knobs_that_nothing_proposed_may_be_chosen():
    g = planned()
    index = g.create_execution_plan("toy", {"size": 77})
    g.build_plan_at_index(index)
    x, out = torch.randn(100), torch.empty(100)
    g.execute({"x": x, "out": out})
    assert g.get_plan_name_at_index(index) == "toy[size=77]" and torch.equal(out, x.relu())


def test_several_regions_take_tuples():
    g = graphs.new()
    g.tanh(g.relu(g.tensor([8]))).set_output()
    g.validate()
    g.build_operation_graph(patterns=toys.solo("relu", "tanh"), engines=[toys.HostSolo("toy", (1, 2))])
    g.create_execution_plans([heur_mode.A])
    assert g.get_engine_and_knobs_at_index(0) == (("toy", "toy"), ({"size": 1}, {"size": 1}))
    index = g.create_execution_plan(("toy", "toy"), ({"size": 5}, {"size": 6}))
    assert g.get_plan_name_at_index(index) == "toy[size=5] + toy[size=6]"
    with pytest.raises(GraphNotSupportedError, match="do not cover"):
        g.create_execution_plan("toy", {"size": 5})


WRONG = [
    (("nobody",), GraphValidationError, "no engine is named 'nobody'.*toy.*reference"),
    (("toy", {"colour": 1}), GraphValidationError, "'toy' has no knob colour; it has: size"),
    (("toy", {1: 1}), GraphValidationError, "'toy' has no knob 1; it has: size"),
    (("reference", {"threads": 64}), GraphValidationError, "'reference' has no knob threads; it has: none"),
    (("toy", {"size": 101}), GraphNotSupportedError, "'toy' cannot use.*size is 101; accepted: 1 to 100"),
    ((("toy",), {}), GraphTypeError, "create_execution_plan"),
    ((7,), GraphValidationError, "no engine has the number 7; there are: 0: toy .size.; 1: reference"),
    ((True,), GraphValidationError, "no engine is named True"),
    (("toy", 5), GraphTypeError, "create_execution_plan: .*5"),
    ((("toy",), (5,)), GraphTypeError, "create_execution_plan"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_create_execution_plan_refuses(arguments, error, message):
    g = planned()
    with pytest.raises(error, match=message):
        g.create_execution_plan(*arguments)
    assert g.get_execution_plan_count() == 4


def test_a_knob_that_is_missing_is_named():
    with pytest.raises(GraphValidationError, match="'rows': .*missing.*'threads_per_row' and 'threads'"):
        knobs_from_dict(RowEngine(), {})


@pytest.mark.parametrize(
    ("index", "error"),
    [(4, GraphValidationError), (-1, GraphValidationError), ("0", GraphTypeError), (True, GraphTypeError)],
)
@pytest.mark.parametrize(
    "method",
    [
        "get_plan_name_at_index",
        "get_engine_and_knobs_at_index",
        "get_workspace_size_plan_at_index",
        "build_plan_at_index",
        "get_numerical_notes_at_index",
    ],
)
def test_indices_are_checked(method, index, error):
    with pytest.raises(error, match="plan index"):
        getattr(planned(), method)(index)


def test_deselected_engines_are_not_built():
    g = planned()
    assert g.deselect_engines(["toy"]) is g
    g.check_support()
    g.build_plans()
    assert "3: reference" in g.explain() and g.get_numerical_notes_at_index(3)
    with pytest.raises(GraphNotSupportedError, match=r"plan 0 \(toy\[size=3\]\): engine 'toy' is deselected"):
        g.build_plan_at_index(0)
    with pytest.raises(GraphStateError, match="plan 0.*not built.*build_plan_at_index"):
        g.execute_plan_at_index({}, None, 0)


@pytest.mark.parametrize("names", [["typo"], ["toy", "typo"], [5]])
def test_only_engines_that_exist_are_deselected(names):
    g = planned()
    with pytest.raises(GraphValidationError, match=f"no engine is named {names[-1]!r}; there are: toy.*reference"):
        g.deselect_engines(names)
    g.build_plan_at_index(0)


def test_deselecting_a_built_plan_asks_for_another():
    g = planned()
    g.build_plans(build_plan_policy.ALL)
    pack = {"x": torch.randn(100), "out": torch.empty(100)}
    g.deselect_engines(["toy"])
    with pytest.raises(GraphStateError, match="no plan is built and allowed; call build_plans"):
        g.execute(pack)
    with pytest.raises(GraphStateError, match="plan 0.*not built"):
        g.execute_plan_at_index(pack, None, 0)
    g.execute_plan_at_index(pack, None, 3)
    g.build_plans()
    g.execute(pack)
    assert "3: reference, 0 bytes of workspace (selected)" in g.explain()


def test_nothing_left_lists_every_plan_with_its_reason():
    g = planned().deselect_engines(["toy", "reference"])
    for call in (g.check_support, g.build_plans):
        with pytest.raises(GraphNotSupportedError) as caught:
            call()
        for name in names(g):
            assert f"plan {name}: engine" in str(caught.value)


def test_deselect_by_workspace():
    g = Norm(rows=33, output=FP4).graph()
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans(MODES)
    need = g.get_workspace_size_plan_at_index(0)
    assert need == 256 + 128 + 33 * 4
    assert g.deselect_workspace_greater_than(need) is g
    g.check_support()
    g.deselect_workspace_greater_than(need - 1)
    with pytest.raises(
        GraphNotSupportedError, match=f"needs {need} bytes of workspace, more than the limit of {need - 1}"
    ):
        g.check_support()


@pytest.mark.parametrize("limit", ["1", 1.5, None, True, -1])
def test_a_workspace_limit_is_a_number_of_bytes(limit):
    with pytest.raises(GraphTypeError, match="workspace limit"):
        planned().deselect_workspace_greater_than(limit)


def test_no_plan_lists_every_engine_with_its_reason():
    g = graphs.new("unloved")
    g.relu(g.tensor([4]), name="lonely").set_output()
    g.validate()
    engines = [toys.HostSolo("first", reason="it is Saturday"), toys.HostSolo("second", reason="it rains")]
    g.build_operation_graph(patterns=toys.solo("relu"), engines=engines)
    with pytest.raises(GraphNotSupportedError) as caught:
        g.create_execution_plans([heur_mode.OPENSOURCE])
    message = str(caught.value)
    for part in ("'unloved'", "first: it is Saturday", "second: it rains", "lonely", "OPENSOURCE", "cpu"):
        assert part in message
    assert isinstance(caught.value, NotImplementedError)


def test_opensource_without_a_gpu_says_so():
    g = Norm().graph()
    with pytest.raises(GraphNotSupportedError, match="rows: needs a CUDA device or the emulator; got cpu") as caught:
        g.build([heur_mode.OPENSOURCE])
    assert "GRAPHFUSE_DEVICE=emulator" in str(caught.value)


def test_restricting_engines_and_patterns_by_name():
    g = planned()
    g.build_operation_graph(engines=["reference"])
    g.create_execution_plans([heur_mode.A])
    assert names(g) == ["reference"]
    for arguments, error in (({"engines": ["nobody"]}, GraphValidationError), ({"patterns": [7]}, GraphTypeError)):
        with pytest.raises(error):
            g.build_operation_graph(**arguments)


def test_building_all_selects_the_first_and_executes_any():
    g = planned()
    g.build_plans(build_plan_policy.ALL)
    x, out = torch.randn(100), torch.empty(100)
    for index in range(g.get_execution_plan_count()):
        out.fill_(9)
        g.execute_plan_at_index({"x": x, "out": out}, None, index)
        assert torch.equal(out, x.relu())
    assert "0: toy[size=3], 0 bytes of workspace (selected)" in g.explain()


def test_an_exception_inside_an_engine_is_no_decline():
    class Broken(toys.HostSolo):
        def why_not(self, facts, device):
            raise ZeroDivisionError("a bug")

    with pytest.raises(PluginError, match="engine 'toy': why_not for relu.0 raised ZeroDivisionError: a bug") as error:
        planned([Broken("toy")])
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def both(g):
    return {"out": g.tanh(g.relu(g.capture("a")))}


def four_nodes(modes=MODES):
    """A pair that a pattern takes as one, a node that none takes, and one that is taken alone."""
    g = graphs.new()
    y = g.tanh(g.relu(g.tensor([8], name="x")))
    g.relu(g.sigmoid(y)).set_output().set_name("out")
    g.validate()
    patterns = [Pattern("both", both, toys.facts), *toys.solo("relu", "tanh")]
    g.build_operation_graph(patterns=patterns, engines=[toys.HostSolo("toy", (1, 2)), toys.HostSolo("other")])
    g.create_execution_plans(modes)
    return g


def test_every_plan_is_made_again_whatever_its_partition():
    """Also those in which an engine of any nodes runs what others would fuse."""
    g = four_nodes()
    known = names(g)
    assert {"toy[size=1] + reference + reference", "reference + reference + toy[size=1]", "reference"} <= {*known}
    for index, name in enumerate(known):
        made = g.create_execution_plan(*g.get_engine_and_knobs_at_index(index))
        assert names(g)[made] == name
        assert partition(g, made) == partition(g, index)


def partition(g, index):
    return [part.region.subgraph.node_ids for part in g._planner.at(index).parts]


FINER = {
    ("toy", "toy", "reference", "toy"): [(0,), (1,), (2,), (3,)],
    ("toy", "other", "reference", "reference"): [(0,), (1,), (2,), (3,)],
    ("toy", "reference", "other"): [(0, 1), (2,), (3,)],
    ("toy", "reference"): [(0, 1), (2, 3)],
    ("reference", "other"): [(0, 1, 2), (3,)],
}


@pytest.mark.parametrize("wanted", FINER)
def test_engines_by_name_find_partitions_that_are_not_the_best(wanted):
    g = four_nodes()
    index = g.create_execution_plan(wanted, tuple({"size": 3} if n != "reference" else {} for n in wanted))
    assert g.get_engine_and_knobs_at_index(index)[0] == wanted
    assert partition(g, index) == FINER[wanted]
    g.build_plan_at_index(index)
    x, out = torch.randn(8), torch.empty(8)
    size = g.get_workspace_size_plan_at_index(index)
    g.execute_plan_at_index({"x": x, "out": out}, graphs.workspace(size), index)
    torch.testing.assert_close(out, x.relu().tanh().sigmoid().relu())


def test_engines_that_no_partition_has_are_refused():
    g = four_nodes()
    with pytest.raises(GraphNotSupportedError, match=r"engines \(reference, toy, toy\) do not cover graph"):
        g.create_execution_plan(("reference", "toy", "toy"), ({}, {}, {}))


def test_knobs_that_are_illegal_in_one_partition_may_be_legal_in_another():
    class Choosy(toys.HostSolo):
        """Size 9 is for single nodes."""

        def illegal(self, facts, knobs, device):
            wide = knobs.size == 9 and len(facts.subgraph.node_ids) > 1
            return No("9 is for one node") if wide else None

    g = graphs.new()
    g.tanh(g.relu(g.sigmoid(g.tensor([8])))).set_output()
    g.validate()
    patterns = [Pattern("both", both, toys.facts), *toys.solo("tanh")]
    g.build_operation_graph(patterns=patterns, engines=[Choosy("toy")])
    index = g.create_execution_plan(("reference", "toy"), ({}, {"size": 9}))
    assert partition(g, index) == [(0, 1), (2,)]
    assert partition(g, g.create_execution_plan(("reference", "toy"), ({}, {"size": 1}))) == [(0,), (1, 2)]
