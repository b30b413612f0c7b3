"""Matrix products by cuBLAS, with a bias and a ReLU where one call has them."""

import itertools
import math
from functools import partial

from graphfuse.base import rounding
from graphfuse.base.dtypes import data_type
from graphfuse.contract.engine import No
from graphfuse.engines.torch_calls.call import Seen, TorchCall, multiplied, unfit
from graphfuse.engines.torch_calls.settings import EXACT_PRODUCTS
from graphfuse.op_graph.ir import FrozenTensor, Subgraph, TensorId

_PLAIN_RELU = {"negative_slope": 0.0, "lower_clip": 0.0, "upper_clip": math.inf}


def matmul(facts: Subgraph) -> TorchCall | No:
    """The product alone, or with a bias of one value a column, or with that and a ReLU."""
    tensors, node = facts.graph.tensors, facts.nodes[0]
    a, b = (tensors[node.input(port)] for port in ("A", "B"))
    c = tensors[facts.nodes[-1].outputs[0][1]]
    if why := multiplied(a, b) or unfit(c):
        return No(why)
    batch, folded = _batch(a, b, c)
    bias = None
    if facts.nodes[1:]:
        found = _bias(facts, a, c)
        if isinstance(found, No):
            return found
        bias = found
        if batch:
            return No(f"{node} has batches, and torch adds no bias to their products; accepted: {node} alone")
    a_seen, b_seen, c_seen = _matrices(a, batch, folded), _matrices(b, batch, None), _matrices(c, batch, folded)
    # What is not made in its own type is made in float32, and then rounded.
    made = c.dtype if c.dtype is a.dtype else data_type.FLOAT
    product = {0: "mm", 1: "bmm"}.get(len(batch), "each")
    run = partial(_run, product, made is a.dtype, None if made is c.dtype else c.dtype, len(facts.nodes) == 3)
    read = (a_seen, b_seen) if bias is None else (a_seen, b_seen, bias)
    return TorchCall((*read, c_seen), run, settings=EXACT_PRODUCTS[a.dtype])


def _run(product: str, same: bool, rounded: data_type | None, relu: bool, torch, a, b, *rest) -> None:
    """same: whether the product is made in the type of what is multiplied, else in float32. rounded: the type that it
    is then rounded to."""
    *bias, c = rest
    out = torch.empty(c.shape, dtype=torch.float32, device=c.device) if rounded else c
    kind = {} if same else {"out_dtype": torch.float32}
    if bias:
        torch.addmm(*bias, a, b, out=out)
    elif product == "each":
        for at in itertools.product(*map(range, out.shape[:-3])):
            torch.bmm(a[at], b[at], out=out[at], **kind)
    else:
        getattr(torch, product)(a, b, out=out, **kind)
    if relu:
        torch.relu_(out)
    if rounded:
        c.copy_(rounding.encode(torch, out, rounded))


def _bias(facts: Subgraph, a: FrozenTensor, c: FrozenTensor) -> Seen | No:
    """The bias that an addition behind the product reads."""
    graph = facts.graph
    product, add, *after = facts.nodes
    (_, made), (_, total) = product.outputs[0], add.outputs[0]
    inside = [made, total] if after else [made]
    alone = "accepted: an add of a bias, and a relu"
    if add.op_name != "add" or made not in (t for _, t in add.inputs) or len(after) > 1:
        return No(f"{facts.nodes[-1]} is behind {product}; {alone}")
    if after and (after[0].op_name != "relu" or dict(after[0].attributes) != _PLAIN_RELU):
        return No(f"{after[0]} is behind {add}; {alone} without slope and clips")
    for node in (add, *after):
        if node.compute is not data_type.FLOAT:
            return No(f"{node} computes in {node.compute.name}; accepted: FLOAT")
    if after and after[0].input("input") != total:
        return No(f"{after[0]} does not read the sum; {alone}")
    for t in inside:
        if t in facts.outputs:
            return No(f"{graph.tensors[t]} is read by others, too; {alone}, of which only the last result is read")
        if graph.tensors[t].dtype is not data_type.FLOAT:
            return No(f"{graph.tensors[t]} is rounded to {graph.tensors[t].dtype.name} between nodes; accepted: FLOAT")
    terms = [graph.tensors[t] for _, t in add.inputs if t != made]
    if len(terms) != 1:
        return No(f"{add} adds the product to itself; {alone}")
    (bias,) = terms
    columns = c.dim[-1]
    if bias.dim != (*(1,) * (len(c.dim) - 1), columns) or (why := unfit(bias)):
        return No(f"{bias} is no bias of the {columns} columns; {alone}" if bias.elements != columns else str(why))
    for t in (bias, c):
        if t.dtype is not a.dtype:
            return No(
                f"{t} is not of {a.dtype.name}, as what is multiplied; accepted: a bias and a result of that type"
            )
    return Seen.of(bias, (columns,), (bias.stride[-1],))


BatchAxis = tuple[int, dict[TensorId, int]]
"""Extent, and stride by tensor."""

Batch = tuple[BatchAxis, ...]


def _batch(a: FrozenTensor, b: FrozenTensor, c: FrozenTensor) -> tuple[Batch, BatchAxis | None]:
    """Axes of batches, as few as there can be, the longest last; or none, and the one that is more rows of A and C."""
    axes: list[BatchAxis] = []
    for axis, extent in enumerate(c.dim[:-2]):
        if extent == 1:
            continue
        strides = {t.id: t.stride[axis] if t.dim[axis] != 1 else 0 for t in (a, b, c)}
        if axes and all(stride == extent * strides[t] for t, stride in axes[-1][1].items()):
            axes[-1] = (axes[-1][0] * extent, strides)
        else:
            axes.append((extent, strides))
    if len(axes) == 1:
        ((extent, strides),) = axes
        rows = c.dim[-2]
        if not strides[b.id] and all(rows == 1 or strides[t.id] == rows * t.stride[-2] for t in (a, c)):
            return (), axes[0]
    return tuple(sorted(axes, key=lambda axis: axis[0])), None


def _matrices(t: FrozenTensor, batch: Batch, folded: BatchAxis | None) -> Seen:
    """A tensor as matrices with the axes of batches before. folded: the batches that are rows of one matrix."""
    (rows, columns), (of_rows, of_columns) = t.dim[-2:], t.stride[-2:]
    if folded is not None:
        extent, strides = folded
        rows, of_rows = extent * rows, strides[t.id] if rows == 1 else of_rows
    dim = (*(extent for extent, _ in batch), rows, columns)
    return Seen.of(t, dim, (*(strides[t.id] for _, strides in batch), of_rows, of_columns))
