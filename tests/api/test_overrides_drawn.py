"""Any graph, with other numbers of rows or samples than it was built for."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse import heur_mode
from support import graphs, whole


@settings(max_examples=40)
@given(graph=graphs.drawn(), rows=st.integers(1, 40), mode=st.sampled_from([heur_mode.A, heur_mode.FALLBACK]))
def test_any_graph_of_rows(graph, rows, mode):
    _check_drawn(graph, graphs.SHAPE, (rows, *graphs.SHAPE[1:]), [mode], "cpu")


@pytest.mark.emulate
@settings(max_examples=8)
@given(graph=graphs.drawn(), rows=st.integers(1, 40))
def test_any_graph_of_rows_with_kernels(graph, rows):
    _check_drawn(graph, graphs.SHAPE, (rows, *graphs.SHAPE[1:]), [heur_mode.A], "emulator")


@settings(max_examples=25)
@given(graph=whole.drawn(max_ops=8), samples=st.sampled_from([1, 3, 5]))
def test_any_whole_graph_with_other_numbers_of_samples(graph, samples):
    _check_drawn(graph, whole.SHAPE, (samples, *whole.SHAPE[1:]), [heur_mode.A], "cpu")


@pytest.mark.emulate
@settings(max_examples=6)
@given(graph=whole.drawn(max_ops=6), samples=st.sampled_from([1, 3, 5]))
def test_any_whole_graph_with_kernels(graph, samples):
    """Where kernels and the reference engine take parts in turns."""
    _check_drawn(graph, whole.SHAPE, (samples, *whole.SHAPE[1:]), [heur_mode.A], "emulator")


def _check_drawn(graph, shape, other, modes, device):
    """Build with leaves of one shape, execute with them of another."""

    def resized(leaf):
        if leaf == whole.KEYS:
            return (other[0], *leaf[1:])
        return other if leaf == shape else leaf

    there = dataclasses.replace(graph, leaves=tuple(map(resized, graph.leaves)))
    pack = there.inputs()
    exact = there.exact(pack)
    model = there.build(device=device)
    model.validate()
    outputs = {t.name: torch.empty_strided(t.dim, t.stride).fill_(float("nan")) for t in model._ir.outputs}
    g = graph.build(device=device, is_override_shape_enabled=True)
    g.build(modes)
    built = {t.name: t for t in g._ir.bound}
    changed = [t for t in model._ir.bound if t.dim != built[t.name].dim]
    lists = [built[t.name].uid for t in changed], [t.dim for t in changed], [t.stride for t in changed]
    g.execute(pack | outputs, graphs.workspace(g.get_workspace_size(None, *lists)), None, *lists)
    for name, want in exact.items():
        torch.testing.assert_close(outputs[name].double(), want, rtol=2e-4, atol=2e-4)
