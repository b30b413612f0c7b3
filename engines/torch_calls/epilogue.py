"""Nodes after a matrix product that the same call of torch computes: a bias, and a ReLU."""

import math
from dataclasses import dataclass

from graphfuse.base.dtypes import data_type
from graphfuse.contract.engine import No
from graphfuse.engines.torch_calls.call import TorchView, unfit
from graphfuse.op_graph.ir import Node, Subgraph

_PLAIN_RELU = {"negative_slope": 0.0, "lower_clip": 0.0, "upper_clip": math.inf}


@dataclass(frozen=True)
class Epilogue:
    """An addition of a bias, which is a vector. relu: whether a ReLU follows."""

    bias: TorchView
    relu: bool


def epilogue(facts: Subgraph, product: Node, dtype: data_type) -> Epilogue | No:
    """The addition after a matrix product, and a ReLU if there is one more node; No with the first reason against them.

    dtype: of the product's operands, which bias and result must have, too."""
    graph = facts.graph
    add, *after = facts.nodes[facts.nodes.index(product) + 1 :]
    (_, made), (_, total) = product.outputs[0], add.outputs[0]
    alone = "accepted: an add of a bias, and a relu"
    if add.op_name != "add" or made not in (t for _, t in add.inputs) or len(after) > 1:
        return No(f"{facts.nodes[-1]} is behind {product}; {alone}")
    if after and (after[0].op_name != "relu" or dict(after[0].attributes) != _PLAIN_RELU):
        return No(f"{after[0]} is behind {add}; {alone} without slope and clips")
    if after and after[0].input("input") != total:
        return No(f"{after[0]} does not read the sum; {alone}")
    for t in (made, total) if after else (made,):
        if t in facts.outputs:
            return No(f"{graph.tensors[t]} is read by others, too; {alone}, of which only the last result is read")
        if graph.tensors[t].dtype is not data_type.FLOAT:
            return No(f"{graph.tensors[t]} is rounded to {graph.tensors[t].dtype.name} between nodes; accepted: FLOAT")
    terms = [graph.tensors[t] for _, t in add.inputs if t != made]
    if len(terms) != 1:
        return No(f"{add} adds the product to itself; {alone}")
    (bias,), result = terms, graph.tensors[facts.nodes[-1].outputs[0][1]]
    columns = result.dim[-1]
    if why := unfit(bias):
        return No(why)
    if bias.elements != columns or bias.dim[-1] != columns:
        return No(f"{bias} is no bias of the {columns} columns of {result}; {alone}")
    for t in (bias, result):
        if t.dtype is not dtype:
            return No(f"{t} is not of {dtype.name}, as what is multiplied; accepted: a bias and a result of that type")
    return Epilogue(TorchView.of(bias, (columns,), (bias.stride[-1],)), bool(after))
