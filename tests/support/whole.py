"""Whole graphs as models have them: products, convolutions and attention among norms and pointwise nodes.

Values are [2, 4, 3, 8]: samples, heads or channels, rows, columns. Products keep that shape, so that any result may
be read by any node.
"""

import math

import torch
from hypothesis import assume
from hypothesis import strategies as st

import graphfuse
from graphfuse import diagonal_alignment, norm_forward_phase
from support import dense, graphs, oracle
from support.graphs import BINARY, UNARY, Op

SHAPE = (2, 4, 3, 8)
COLUMNS, CHANNELS, SQUARE, KEYS = (1, 1, 1, 8), (1, 4, 1, 1), (1, 1, 8, 8), (2, 2, 5, 8)
CONVS = {
    (4, 4, 3, 3): {"padding": [1, 1]},
    (4, 2, 2, 3): {"pre_padding": [1, 2], "post_padding": [0, 0], "stride": [1, 1]},
    (4, 1, 2, 2): {"padding": [1, 2], "dilation": [2, 4]},
}
"""Weights -> how they are slid over an image so that its shape stays."""
LEAVES = (SHAPE, COLUMNS, CHANNELS, SQUARE, KEYS, KEYS, *CONVS)
X, BY_COLUMN, BY_CHANNEL, MATRIX, K, V, *WEIGHTS = (-1 - i for i in range(len(LEAVES)))

MASKS = (
    {},
    {"use_causal_mask": True},
    {"diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 1},
    {"diagonal_band_left_bound": 2},
)
LARGEST = 30.0
"""Of any value: products of larger ones, exponentials above all, lose more of float32's places than tests allow."""


class Whole(graphs.Drawn):
    def inputs(self, device: str = "cpu", prefix: str = "") -> dict[str, torch.Tensor]:
        """Weights so small that products stay as large as what is multiplied."""
        pack = super().inputs(device, prefix)
        for leaf, shape in ((MATRIX, SQUARE), *zip(WEIGHTS, CONVS, strict=True)):
            name = f"{prefix}l{-leaf}"
            if name in pack:
                pack[name] *= math.prod(shape[1:]) ** -0.5
        return pack

    def add(self, g, op: Op, operands, name: str) -> graphfuse.Tensor:
        attributes = dict(op.attributes)
        if op.name == "sdpa":
            return g.sdpa(*operands, attn_scale=0.25, **attributes, name=name)[0]
        if op.name == "layernorm":
            phase = norm_forward_phase.INFERENCE
            return g.layernorm(*operands, epsilon=1e-3, norm_forward_phase=phase, name=name)[0]
        if op.name == "instancenorm":
            phase = norm_forward_phase.INFERENCE
            return g.instancenorm(*operands, epsilon=1e-3, norm_forward_phase=phase, name=name)[0]
        if op.name == "batchnorm":
            return g.batchnorm(*operands, epsilon=1e-3, name=name)[0]
        return super().add(g, op, operands, name)

    def compute(self, op: Op, operands) -> torch.Tensor:
        attributes = dict(op.attributes)
        if op.name in graphs.UNARY + BINARY:
            return super().compute(op, operands)
        x = operands[0].double()
        if op.name == "softmax":
            return torch.from_numpy(dense.softmax(x))
        if op.name == "matmul":
            return torch.from_numpy(dense.matmul(x, operands[1]))
        if op.name == "conv_fprop":
            before, after = (attributes.get(f"{side}_padding", attributes.get("padding")) for side in ("pre", "post"))
            dilation = attributes.get("dilation", [1, 1])
            return torch.from_numpy(dense.convolution(x, operands[1], before, after, [1, 1], dilation))
        if op.name == "sdpa":
            return torch.from_numpy(dense.attention(*operands, 0.25, **_bounds(attributes))[0])
        of_scale = [axis for axis, extent in enumerate(operands[1].shape) if extent != 1]
        axes = {"instancenorm": [2, 3], "batchnorm": [0, 2, 3]}.get(op.name, of_scale)
        if op.name != "rmsnorm":
            x = x - x.mean(dim=axes, keepdim=True)
        return oracle.rmsnorm(x, operands[1], 1e-3, *operands[2:], axes=axes)[0]

    def bounded(self) -> bool:
        """Whether no value is large, nor a score of attention."""
        values = self.results(self.inputs())
        attended = [[values[v].double() for v in op.operands] for op in self.ops if op.name == "sdpa"]
        scores = [0.25 * q.norm(dim=-1).max() * k.norm(dim=-1).max() for q, k, _ in attended]
        return all(t is None or t.abs().max() <= LARGEST for t in values.values()) and max(scores, default=0) <= LARGEST


def _bounds(attributes) -> dict[str, object]:
    if "use_causal_mask" in attributes:
        return {"right": 0}
    return {
        "left": attributes.get("diagonal_band_left_bound"),
        "right": attributes.get("diagonal_band_right_bound"),
        "bottom_right": attributes.get("diagonal_alignment") is diagonal_alignment.BOTTOM_RIGHT,
    }


@st.composite
def drawn(
    draw,
    max_ops: int = 20,
    products: tuple[str, ...] = ("matmul", "conv_fprop", "sdpa"),
    norms: tuple[str, ...] = ("rmsnorm", "layernorm", "softmax", "instancenorm", "batchnorm"),
) -> Whole:
    """Graphs of up to so many nodes, at least one of `products`, in which every result is read or an output."""
    shapes = {-1 - i: shape for i, shape in enumerate(LEAVES)}
    operands = {X, BY_COLUMN, BY_CHANNEL}  # of pointwise nodes: these and all results
    ops: list[Op] = []
    count = draw(st.integers(2, max_ops))
    certain = draw(st.integers(0, count - 1))
    for index in range(count):
        full = st.sampled_from(sorted(v for v in operands if shapes[v] == SHAPE))
        # What was made last comes first to mind: graphs are deep, not wide.
        last = st.sampled_from([max(operands), *sorted(operands)])
        names = st.sampled_from(("unary", "binary", *norms, *products))
        kind = draw(st.sampled_from(products) if index == certain else names)
        if kind == "unary":
            op = Op(draw(st.sampled_from(UNARY)), (draw(last),))
        elif kind == "binary":
            op = Op(draw(st.sampled_from(BINARY)), (draw(last), draw(st.sampled_from(sorted(operands)))))
        elif kind == "matmul":
            op = Op("matmul", (draw(full), MATRIX))
        elif kind == "conv_fprop":
            weight = draw(st.sampled_from(WEIGHTS))
            op = Op("conv_fprop", (draw(full), weight), tuple(CONVS[shapes[weight]].items()))
        elif kind == "sdpa":
            k, v = (draw(st.sampled_from((K, V))) for _ in "kv") if draw(st.booleans()) else (draw(full), draw(full))
            mask = draw(st.sampled_from(MASKS))
            op = Op("sdpa", (draw(full), k, v), tuple(mask.items()))
        elif kind == "softmax":
            op = Op("softmax", (draw(full),))
        elif kind in ("instancenorm", "batchnorm"):
            op = Op(kind, (draw(full), BY_CHANNEL, BY_CHANNEL))
        else:
            op = Op(kind, (draw(full), draw(st.sampled_from((BY_COLUMN, BY_CHANNEL)))))
        ops.append(op)
        wide = [shapes[v] for v in op.operands] if kind == "binary" else [shapes[op.operands[0]]]
        shapes[index] = tuple(map(max, zip(*wide, strict=True)))
        operands.add(index)
    read = {v for op in ops for v in op.operands}
    extra = draw(st.frozensets(st.integers(0, count - 1), max_size=2))
    graph = Whole(LEAVES, tuple(ops), frozenset(i for i in range(count) if i not in read) | extra)
    assume(graph.bounded())
    return graph
