"""Matrix products by cuBLAS, also with a bias and a ReLU in the same call."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from graphfuse.base import rounding
from graphfuse.base.dtypes import data_type
from graphfuse.contract.engine import No
from graphfuse.engines.torch_calls.call import TorchCall, TorchView, multiplied, unfit
from graphfuse.engines.torch_calls.epilogue import epilogue
from graphfuse.engines.torch_calls.settings import EXACT_PRODUCTS
from graphfuse.op_graph.ir import FrozenTensor, Node, Subgraph
from graphfuse.patterns.epilogues import core


def matmul(facts: Subgraph) -> TorchCall | No:
    """Torch's call for a product, which may have a bias of one value per column, and a ReLU after that; No with the
    first reason if there is none."""
    tensors, nodes = facts.graph.tensors, facts.nodes
    node = core(facts)
    a, b = (_operand(facts, node, port) for port in ("A", "B"))
    c = tensors[nodes[-1].outputs[0][1]]
    if why := multiplied(a, b) or unfit(c):
        return No(why)
    batch, folded = _batch(a, b, c)
    after = epilogue(facts, node, a.dtype) if nodes[-1] is not node else None
    if isinstance(after, No):
        return after
    if after and batch:
        return No(f"{node} has batches, and torch adds no bias to their products; accepted: {node} alone")
    a_view, c_view = (_matrices(t, n, batch, folded) for n, t in ((_A, a), (_C, c)))
    b_view = _matrices(b, _B, batch, None)
    # A result of another type than the operands is computed in float32, and then rounded.
    made = c.dtype if c.dtype is a.dtype else data_type.FLOAT
    product = {0: "mm", 1: "bmm"}.get(len(batch), "each")
    bind = partial(
        _bind, product, made is a.dtype, None if made is c.dtype else c.dtype, after is not None and after.relu
    )
    read = (a_view, b_view) if after is None else (a_view, b_view, after.bias)
    return TorchCall((*read, c_view), bind, settings=EXACT_PRODUCTS[a.dtype])


def _operand(facts: Subgraph, node: Node, port: str) -> FrozenTensor:
    """An operand of the product. If a transpose among the nodes makes it, its input with permuted axes."""
    tensors, read = facts.graph.tensors, node.input(port)
    for transpose in facts.nodes:
        if transpose.op_name == "transpose" and transpose.output("output") == read:
            t, order = tensors[transpose.input("input")], transpose.attribute("permutation")
            return replace(t, dim=tuple(t.dim[axis] for axis in order), stride=tuple(t.stride[axis] for axis in order))
    return tensors[read]


def _bind(product: str, same: bool, rounded: data_type | None, relu: bool, torch, a, b, *rest) -> Callable[[], object]:
    """Function that computes the product. same: whether torch computes it in the operands' type, else in float32.
    rounded: the type that it is then rounded to; None if it is not."""
    *bias, c = rest
    kind = {} if same else {"out_dtype": torch.float32}

    def into(out) -> Callable[[], object]:
        if bias:
            added = partial(torch.addmm, *bias, a, b, out=out)
            return (lambda: torch.relu_(added())) if relu else added
        if product != "each":
            return partial(getattr(torch, product), a, b, out=out, **kind)
        places = itertools.product(*map(range, out.shape[:-3]))
        every = [partial(torch.bmm, a[at], b[at], out=out[at], **kind) for at in places]
        return lambda: [one() for one in every]

    if rounded is None:
        return into(c)

    def then_rounded() -> None:
        out = torch.empty(c.shape, dtype=torch.float32, device=c.device)
        into(out)()
        c.copy_(rounding.encode(torch, out, rounded))

    return then_rounded


_A, _B, _C = range(3)
BatchAxis = tuple[int, tuple[int, ...]]
"""Extent, and strides of A, B and C. These are by place, as A and B may be the same tensor."""

Batch = tuple[BatchAxis, ...]


def _batch(a: FrozenTensor, b: FrozenTensor, c: FrozenTensor) -> tuple[Batch, BatchAxis | None]:
    """Batch axes, joined as far as possible, the longest last. If the only one can be joined with the rows of A and C,
    there are none, and it is the second result."""
    axes: list[BatchAxis] = []
    for axis, extent in enumerate(c.dim[:-2]):
        if extent == 1:
            continue
        strides = tuple(t.stride[axis] if t.dim[axis] != 1 else 0 for t in (a, b, c))
        if axes and all(outer == extent * stride for outer, stride in zip(axes[-1][1], strides, strict=True)):
            axes[-1] = (axes[-1][0] * extent, strides)
        else:
            axes.append((extent, strides))
    if len(axes) == 1:
        ((extent, strides),) = axes
        rows = c.dim[-2]
        if not strides[_B] and all(rows == 1 or strides[n] == rows * t.stride[-2] for n, t in ((_A, a), (_C, c))):
            return (), axes[0]
    return tuple(sorted(axes, key=lambda axis: axis[0])), None


def _matrices(t: FrozenTensor, place: int, batch: Batch, folded: BatchAxis | None) -> TorchView:
    """View of a tensor as matrices with leading batch axes. place: which of A, B and C it is. folded: the batch axis
    that is joined with the rows."""
    (rows, columns), (of_rows, of_columns) = t.dim[-2:], t.stride[-2:]
    if folded is not None:
        extent, strides = folded
        rows, of_rows = extent * rows, strides[place] if rows == 1 else of_rows
    dim = (*(extent for extent, _ in batch), rows, columns)
    return TorchView.of(t, dim, (*(strides[place] for _, strides in batch), of_rows, of_columns))
