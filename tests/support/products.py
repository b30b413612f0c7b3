"""Graphs of one matrix product, and graphs as planning gets them."""

from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from support.graphs import BF16


def lowered(g):
    """The frozen graph."""
    g.validate()
    return lower(freeze(g))


def product(g, batch=(), **kwargs):
    """The result of a node named product, [*batch, 8, 4]."""
    a, b = (g.tensor([*batch, *dim], data_type=BF16) for dim in ((8, 16), (16, 4)))
    return g.matmul(a, b, name="product", **kwargs)
