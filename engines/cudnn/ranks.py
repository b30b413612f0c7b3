"""Layouts with as many axes as cuDNN expects; axes of extent 1 are added."""

from collections.abc import Sequence

from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Extents and strides, in elements."""

_PRODUCT = 3  # [batch, rows, columns]
_OTHER = 4  # [rows, columns, 1, 1]


def layouts(graph: FrozenGraph, nodes: Sequence[Node]) -> dict[int, Layout]:
    """Layouts of all tensors that `nodes` read or write, with the same rank. Tensors of a lower rank get leading axes.

    If that rank is too low for cuDNN, matrix products get leading axes, which cuDNN uses for batches. Other nodes get
    trailing axes, which cuDNN uses for height and width of images.
    """
    used = {t: graph.tensors[t] for node in nodes for _, t in (*node.inputs, *node.outputs)}
    rank = max(len(t.dim) for t in used.values())
    product = any(node.op_name == "matmul" for node in nodes)
    before = max(_PRODUCT - rank, 0) if product else 0
    behind = 0 if product else max(_OTHER - rank, 0)
    return {number: _widened(t, rank - len(t.dim) + before, behind) for number, t in used.items()}


def _widened(t: FrozenTensor, before: int, behind: int) -> Layout:
    reach = max((extent * stride for extent, stride in zip(t.dim, t.stride, strict=True)), default=1)
    return (
        (*(1,) * before, *t.dim, *(1,) * behind),
        (*(max(reach, 1),) * before, *t.stride, *(1,) * behind),
    )
