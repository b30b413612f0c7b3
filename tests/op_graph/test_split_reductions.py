"""Reductions along axes that lie apart: which become two, what is computed again, and values by kernels."""

import pytest
import torch

from graphfuse import heur_mode, reduction_mode
from graphfuse.op_graph.lower import lower
from support import graphs
from support.graphs import FLOAT

IMAGES = [3, 8, 5, 6]


def new():
    return graphs.new(io_data_type=FLOAT)


def summed(g, t, dim, mode=reduction_mode.ADD):
    return g.reduction(t, mode=mode).set_dim(dim)


def names(g):
    g.validate()
    return [node.name for node in lower(g._ir).nodes]


def exact(x, mode):
    x = x.double()
    return {
        reduction_mode.ADD: lambda: x.sum((0, 2, 3), keepdim=True),
        reduction_mode.MIN: lambda: x.amin((0, 2, 3), keepdim=True),
        reduction_mode.MAX: lambda: x.amax((0, 2, 3), keepdim=True),
        reduction_mode.AMAX: lambda: x.abs().amax((0, 2, 3), keepdim=True),
        reduction_mode.AVG: lambda: x.mean((0, 2, 3), keepdim=True),
        reduction_mode.NORM1: lambda: x.abs().sum((0, 2, 3), keepdim=True),
    }[mode]()


@pytest.mark.parametrize("mode", ["ADD", "MIN", "MAX", "AMAX", "AVG", "NORM1"])
def test_values_by_kernels(mode):
    mode, x = reduction_mode[mode], torch.randn(IMAGES, generator=torch.Generator().manual_seed(0))
    g, out = graphs.new(io_data_type=FLOAT, device="emulator"), torch.full((1, 8, 1, 1), float("nan"))
    summed(g, g.mul(g.tensor(IMAGES, name="x"), 2.0), [1, 8, 1, 1], mode).set_output().set_name("out")
    g.build([heur_mode.OPENSOURCE])
    g.execute({"x": x, "out": out}, graphs.workspace(g.get_workspace_size(), "cpu"))
    torch.testing.assert_close(out.double(), exact(2 * x, mode), rtol=1e-6, atol=1e-5)


def test_others_are_one():
    """Axes that one stride joins, axes beside the elements that lie together, products, and what libraries compute."""
    g = new()
    last = [240, 1, 48, 8]
    for name, stride, dim in (
        ("rows", [240, 30, 6, 1], [3, 1, 1, 1]),
        ("channels", last, [1, 8, 1, 1]),
        ("all", [240, 30, 6, 1], [1, 1, 1, 1]),
    ):
        summed(g, g.tensor(IMAGES, stride, name=name), dim).set_output()
    summed(g, g.tensor(IMAGES), [1, 8, 1, 1], reduction_mode.MUL).set_output()
    assert names(g) == [f"reduction.{n}" for n in range(4)]
    g = new()
    y = g.conv_fprop(g.tensor(IMAGES), g.tensor([8, 8, 1, 1]))
    summed(g, y, [1, 8, 1, 1]).set_output()
    assert names(g) == ["conv_fprop.0", "reduction.0"]


def test_what_others_read_is_computed_again():
    """The product is for the sums alone, and the difference is for the result, too."""
    g = new()
    difference = g.sub(g.tensor(IMAGES, name="x"), g.tensor([3, 1, 5, 6], name="mean"))
    summed(g, g.mul(difference, g.tensor(IMAGES, name="loss")), [1, 8, 1, 1]).set_output()
    g.relu(difference).set_output()
    assert names(g) == ["sub.0::reduction.0", "sub.0", "mul.0", "reduction.0::parts", "reduction.0", "relu.0"]


def test_reductions_of_one_chain_share_what_is_computed_again():
    g = new()
    y = g.tensor(IMAGES, name="x")
    for _ in range(3):
        y = g.tanh(y)
        summed(g, y, [1, 8, 1, 1]).set_output()
    g.relu(y).set_output()
    assert len(names(g)) == 3 * 4 + 1  # of each the node, that again, two reductions


def test_a_node_that_others_do_not_read_any_more_is_left_out():
    g = new()
    y = g.relu(g.tensor(IMAGES, name="x"))
    summed(g, y, [1, 8, 1, 1]).set_output()
    summed(g, y, [1, 1, 5, 1]).set_output()
    assert names(g).count("relu.0") == 0


def test_the_largest_magnitude_of_a_tensor_with_gaps_is_one():
    """A kernel of rows makes it beside."""
    g = new()
    summed(g, g.tensor([4, 8], [16, 1]), [1, 1], reduction_mode.AMAX).set_output()
    summed(g, g.tensor([4, 8], [16, 1]), [1, 1], reduction_mode.MAX).set_output()
    assert names(g) == ["reduction.0", "reduction.1::parts", "reduction.1"]


def test_what_is_in_memory_is_read():
    g = new()
    difference = g.sub(g.tensor(IMAGES), 1.0).set_output()
    summed(g, difference, [1, 8, 1, 1]).set_output()
    assert names(g) == ["sub.0", "reduction.0::parts", "reduction.0"]
