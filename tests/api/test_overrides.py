"""execute with override_uids, override_shapes, override_strides: one build, any number of rows.

What a graph computes with other shapes is held against float64, and bit by bit against a graph that was built for them.
"""

import random
import threading

import pytest
import torch

from graphfuse import GraphStateError, VariantPackError, data_type, heur_mode, norm_forward_phase
from graphfuse.contract.row_counts import row_class
from graphfuse.planning import reshaped_plan
from support import graphs, oracle
from support.overridden import COLUMNS, FALLBACK, OPEN, PLANS, check, new, norm, to, values


@pytest.mark.emulate
def test_any_number_of_rows_of_one_build(work):
    """Each class of counts is planned once, and kernels are compiled by their text alone."""
    g = norm("emulator", rows=4096)
    g.build(OPEN)
    counts = [1, 2, 3, 15, 16, 17, 18, 19, 31, 33, 63, 64, 65, 100, 127, 129, 200, 255, 257, 300, 511, 513]
    random.Random(0).shuffle(counts)
    for n, rows in enumerate(counts):
        pack = values(rows, seed=n)
        g.execute(pack, None, None, *to(rows))
        check(pack)
    classes = {row_class(rows) for rows in counts}
    planned, compiled = work()
    assert planned == 1 + len(classes) and compiled <= 4
    for rows in (r for r in range(1, 514) if row_class(r) in classes and r % 3):
        pack = values(rows)
        g.execute(pack, None, None, *to(rows))
        g.execute(pack, None, None, *to(rows))
        check(pack)
    assert work() == (planned, compiled)


@pytest.mark.emulate
def test_every_class_up_to_4096_is_compiled_by_its_text_alone(work):
    """As many kernels as graphs built for each class would have texts."""
    g = norm("emulator", rows=4096, columns=48)
    g.build(OPEN)
    classes = sorted({row_class(rows) for rows in range(1, 4097)})
    assert len(classes) == 80 <= reshaped_plan.CLASSES_KEPT
    for rows in classes:
        g.get_workspace_size(None, *to(rows, 48))
    texts = set()
    for rows in classes:
        other = norm("emulator", rows, 48)
        other.validate(), other.build_operation_graph(), other.create_execution_plans(OPEN)
        texts |= {*other.get_kernel_source_at_index(0)}
    assert work()[1] == len(texts) < 8


@pytest.mark.parametrize("modes, device", PLANS)
def test_the_same_bits_as_a_graph_of_that_shape(modes, device):
    g = norm(device)
    g.build(modes)
    for rows in (1, 7, 64, 65, 200):
        one, other = norm(device, rows), values(rows)
        pack = values(rows)
        g.execute(pack, None, None, *to(rows))
        graphs.run(one, other, modes)
        assert torch.equal(pack["out"], other["out"])


@pytest.mark.parametrize("modes, device", PLANS)
def test_no_rows(modes, device):
    g = norm(device)
    g.build(modes)
    g.execute(values(0), None, None, *to(0))


def test_a_built_graph_of_no_or_one_row():
    for rows in (0, 1):
        g = norm(rows=rows)
        g.build(FALLBACK)
        pack = values(9)
        g.execute(pack, None, None, *to(9))
        check(pack)


@pytest.mark.emulate
def test_bound_and_by_index_and_dependent():
    g = norm("emulator")
    g.build(OPEN)
    pack = values(33)
    g.bind(pack, None, None, *to(33))()
    check(pack)
    for way in ({}, {"programmatic_dependent_launch": True}):
        pack = values(34, seed=1)
        g.execute(pack, None, None, *to(34), **way)
        g.execute_plan_at_index(pack, None, 0, None, *to(34), **way)
        check(pack)
    g.execute(values(64))  # the graph's own shape, still


def test_the_users_tensors_stay_as_they_are():
    g = norm()
    g.build(FALLBACK)
    text = str(g)
    g.execute(values(5), None, None, *to(5))
    assert g.query_tensor_attributes_of_uid(1).get_dim() == [64, COLUMNS] and str(g) == text
    g.execute(values(64))
    with pytest.raises(VariantPackError, match=r"'x'.*the shape given is \[5, 40\]; accepted: \[64, 40\]"):
        g.execute(values(5))


def test_a_changed_graph_is_built_anew():
    g = norm()
    g.build(FALLBACK)
    g.execute(values(5), None, None, *to(5))
    g.query_tensor_attributes_of_uid(3).set_data_type(data_type.DOUBLE)
    with pytest.raises(GraphStateError, match="call build"):
        g.execute(values(5), None, None, *to(5))
    g.build(FALLBACK)
    pack = values(5)
    pack["out"] = pack["out"].double()
    g.execute(pack, None, None, *to(5))
    check(pack)


def test_what_is_deselected_stays_so():
    g = norm("emulator")
    g.build(OPEN)
    g.execute(values(5), None, None, *to(5))
    g.deselect_engines(["rows"])
    with pytest.raises(GraphStateError, match="no plan is built and allowed"):
        g.execute(values(5), None, None, *to(5))


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=pytest.mark.emulate)])
def test_what_a_virtual_reshape_makes_is_said(device):
    """Nothing else does: rows that are kept apart for a norm, and swapped behind it."""
    g = new(device)
    x, w = g.tensor([4, 6, 64], name="x"), g.tensor([1, 64], name="w")
    flat = g.reshape(x).set_dim([24, 64])
    y, _ = g.rmsnorm(flat, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    apart = g.reshape(y).set_dim([6, 4, 64])
    out = g.reshape(g.transpose(apart, [1, 0, 2])).set_dim([24, 64]).set_output().set_name("out")
    g.build([heur_mode.A])
    for first, second in (((5, 6), (3, 10)), ((4, 6), (8, 3)), ((1, 7), (7, 1)), ((5, 6), (6, 5))):
        rows = first[0] * first[1]
        pack = {"x": torch.randn(*first, 64), "w": torch.randn(1, 64), "out": torch.full((rows, 64), float("nan"))}
        given = {x: [*first, 64], flat: [rows, 64], apart: [*second, 64], out: [rows, 64]}
        lists = [t.get_uid() for t in given], [*given.values()]
        g.execute(pack, graphs.workspace(g.get_workspace_size(None, *lists)), None, *lists)
        want = oracle.rmsnorm(pack["x"].reshape(rows, 64), pack["w"], 1e-5)[0]
        want = want.reshape(*second, 64).transpose(0, 1).reshape(rows, 64)
        torch.testing.assert_close(pack["out"].double(), want, rtol=1e-5, atol=1e-5)


def test_no_more_is_kept_than_said(monkeypatch):
    """Shapes and classes that were used last."""
    monkeypatch.setattr(reshaped_plan, "SHAPES_KEPT", 4)
    monkeypatch.setattr(reshaped_plan, "CLASSES_KEPT", 3)
    g = norm("emulator")
    g.build(OPEN)
    for rows in range(1, 30):
        g.get_workspace_size(None, *to(rows))
    ((_, kept),) = g._reshaped.values()
    assert kept.executable.cache_info().currsize == 4 and kept._built_class.cache_info().currsize == 3
    pack = values(1)
    g.execute(pack, None, None, *to(1))
    check(pack)


@pytest.mark.parametrize("modes, device", PLANS)
def test_many_threads_at_once(modes, device):
    g = norm(device)
    g.build(modes)
    failed = []

    def calls(seed):
        try:
            for rows in random.Random(seed).choices(range(1, 60), k=25):
                pack = values(rows, seed=seed)
                g.execute(pack, None, None, *to(rows))
                check(pack)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=calls, args=(n,)) for n in range(6)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not failed
