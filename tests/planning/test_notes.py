"""Notes of plans as enums, and plans selected by them."""

import pytest

import graphfuse
from graphfuse import (
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    behavior_note,
    heur_mode,
    norm_forward_phase,
    numerical_note,
)
from support import graphs, toys
from support.graphs import Norm

COMPILED = behavior_note.RUNTIME_COMPILATION


class Approximate(toys.HostSolo):
    numerical_notes = frozenset({numerical_note.TENSOR_CORE, numerical_note.NONDETERMINISTIC})


def planned(engines=()):
    g = Norm().graph("emulator")
    g.build_operation_graph(engines=engines)
    g.create_execution_plans([heur_mode.A])
    return g


def test_behavior_notes_of_each_plan():
    g = planned()
    found = [g.get_behavior_notes_for_plan_at_index(i) for i in range(g.get_execution_plan_count())]
    assert found == [*[[COMPILED]] * (len(found) - 1), []] and len(found) > 1  # the reference engine ranks last
    with pytest.raises(GraphStateError, match="no plan is built"):
        g.get_behavior_notes()
    g.build_plan_at_index(len(found) - 1)
    assert g.get_behavior_notes() == []


def test_plans_that_a_cuda_graph_takes():
    """Those of kernels alone, on a CUDA device: what populate_cuda_graph accepts."""
    native = behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API
    g = Norm().graph("cuda", device_property=graphfuse.create_device_properties("sm_100a"))
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    last = g.get_execution_plan_count() - 1
    assert g.get_behavior_notes_for_plan_at_index(0) == [COMPILED, native]
    assert g.get_behavior_notes_for_plan_at_index(last) == []
    g.select_behavior_notes([native])
    assert [p.parts[0].engine.name for p in g._planner.plans if not g._planner.barred(p)] == ["rows"] * last


def test_a_plan_of_a_kernel_and_a_call():
    """It is compiled, and no CUDA graph takes it."""
    g = graphfuse.pygraph(device_property=graphfuse.create_device_properties("sm_90a"), io_data_type=graphs.FLOAT)
    y, _ = g.rmsnorm(g.tensor([8, 64]), epsilon=1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    g.matmul(y, g.tensor([64, 16])).set_output()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    assert g.get_engine_and_knobs_at_index(0)[0] == ("rows", "torch")
    assert g.get_behavior_notes_for_plan_at_index(0) == [COMPILED]


def test_plans_without_a_compiler():
    g = planned()
    assert g.deselect_behavior_notes([COMPILED]) is g
    g.build_plans()
    assert g.explanation().regions[0].engine == "reference"
    assert f"it has {COMPILED}, which is deselected" in g.explain()


def test_plans_that_are_compiled():
    g = planned()
    last = g.get_execution_plan_count() - 1
    g.build_plan_at_index(last)
    g.select_behavior_notes([COMPILED])
    with pytest.raises(GraphNotSupportedError, match=f"it lacks {COMPILED}, which is selected"):
        g.build_plan_at_index(last)
    with pytest.raises(GraphStateError, match="no plan is built and allowed"):
        g.get_workspace_size()
    g.check_support()
    g.select_behavior_notes([behavior_note.CUBLASLT_DEPENDENCY])
    with pytest.raises(GraphNotSupportedError, match="every plan is deselected") as error:
        g.check_support()
    # No mode refused anything: what is said of plans stands under no mode.
    why = "it lacks behavior_note.CUBLASLT_DEPENDENCY, which is selected"
    assert str(error.value).splitlines()[1] == f" plan {g.get_plan_name_at_index(0)}: {why}"


def test_numeric_notes_of_an_engine():
    def toy():
        g = graphs.new(device="cpu")
        g.relu(g.tensor([8])).set_output()
        g.build_operation_graph(patterns=toys.solo("relu"), engines=[Approximate("approximate")])
        return g

    def engine(g):
        g.create_execution_plans([heur_mode.A])
        g.build_plans()
        return g.explanation().regions[0].engine

    assert engine(toy()) == "approximate"
    assert engine(toy().deselect_numeric_notes([numerical_note.NONDETERMINISTIC])) == "reference"
    assert engine(toy().deselect_numeric_notes([numerical_note.FFT])) == "approximate"
    both = [numerical_note.NONDETERMINISTIC, numerical_note.TENSOR_CORE]
    assert engine(toy().select_numeric_notes(both)) == "approximate"
    with pytest.raises(GraphNotSupportedError, match="it lacks numerical_note.FFT, which is selected"):
        engine(toy().select_numeric_notes([numerical_note.TENSOR_CORE, numerical_note.FFT]))


def test_wrong_notes():
    g = planned()
    with pytest.raises(GraphTypeError, match="deselect_numeric_notes: give a list of numerical_note, got behavior_no"):
        g.deselect_numeric_notes([COMPILED])
    with pytest.raises(GraphTypeError, match="select_behavior_notes: give a list, got behavior_note.RUNTIME"):
        g.select_behavior_notes(COMPILED)
    with pytest.raises(GraphStateError, match=r"call build_operation_graph\(\) first"):
        Norm().graph().select_numeric_notes([])


def test_tensors_by_uid():
    g = graphs.new()
    x = g.tensor([4], uid=7)
    assert g.query_tensor_attributes_of_uid(7) is x
    with pytest.raises(GraphValidationError, match=r"has no tensor with uid 8; it has \[7\]"):
        g.query_tensor_attributes_of_uid(8)
