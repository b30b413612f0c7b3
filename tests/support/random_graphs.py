"""Random graphs of all ops that have gradients, with values that lie away from kinks and poles."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from graphfuse import GraphValidationError, norm_forward_phase, pygraph, reduction_mode
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import OPS
from support import differentiated
from support.graphs import generator

MOST_ELEMENTS = 48
MARGIN = 1e-3  # from a kink
LARGEST = 30.0

Shape = tuple[int, ...]


@dataclass(eq=False)
class Made:
    """A tensor of the graph, its value, and the leaves that it has a gradient for."""

    tensor: Tensor
    value: torch.Tensor
    leaves: frozenset[str] = frozenset()

    @property
    def dim(self) -> Shape:
        return tuple(self.value.shape)


@dataclass
class RandomGraph:
    """outputs, wrt: names; each of `wrt` changes one of `outputs`. values: of all that the graph reads."""

    graph: pygraph
    outputs: list[str]
    wrt: list[str]
    values: dict[str, torch.Tensor]


@dataclass
class _Drawer:
    random: random.Random
    most: int  # nodes
    graph: pygraph = field(default_factory=differentiated.new)
    pool: list[Made] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def leaf(self, dim: Shape, positive: bool = False) -> Made:
        name = f"leaf{len(self.values)}"
        source = generator("cpu", self.random.randrange(1 << 30))
        value = torch.randn(dim, generator=source, dtype=torch.float64)
        return self.read(name, value.abs() + 0.3 if positive else value, frozenset((name,)))

    def numbers(self, dim: Shape, below: int) -> Made:
        """Row numbers, some of them twice."""
        kind = self.random.choice((torch.int32, torch.int64))
        found = [self.random.randrange(below) for _ in range(prod(dim))]
        return self.read(f"numbers{len(self.values)}", torch.tensor(found, dtype=kind).reshape(dim), frozenset())

    def read(self, name: str, value: torch.Tensor, leaves: frozenset[str]) -> Made:
        self.values[name] = value
        kinds = {dtype: kind for kind, dtype in differentiated.TYPES.items()}
        t = self.graph.tensor(list(value.shape), data_type=kinds[value.dtype], name=name)
        return Made(t, value, leaves)

    def any(self, ranks: Sequence[int] = (1, 2, 3, 4)) -> Made | None:
        found = [made for made in self.pool if len(made.dim) in ranks]
        return self.random.choice(found) if found else None

    def beside(self, dim: Shape) -> Made | float:
        """An operand for one of this shape: one of the pool, a new one that broadcasts or is, a number."""
        fits = [made for made in self.pool if _broadcast(dim, made.dim) is not None]
        choice = self.random.random()
        if choice < 0.5 and fits:
            return self.random.choice(fits)
        if choice < 0.65:
            return self.random.uniform(0.4, 1.6)
        own = tuple(e if self.random.random() < 0.6 else 1 for e in dim)
        if choice < 0.75:
            own = tuple(self.random.randint(2, 3) if e == 1 else o for e, o in zip(dim, own, strict=True))
        return self.leaf(own)

    def node(
        self,
        op: str,
        inputs: Mapping[str, Made | float],
        attributes: Mapping[str, object] = {},  # noqa: B006
        dim: Shape | None = None,
        pooled: Sequence[str] = (),
    ) -> bool:
        """Draws a node if its values are fit to be compared with differences. pooled: outputs that others may read;
        none for the first."""
        tensors = {p: m for p, m in inputs.items() if isinstance(m, Made)}
        made = _computed(op, inputs, attributes, dim)
        if made is None:
            return False
        given = {p: m.tensor if isinstance(m, Made) else m for p, m in inputs.items()}
        drawn = getattr(self.graph, op)(**given, **attributes)
        drawn = drawn if isinstance(drawn, list | tuple) else [drawn]
        if dim is not None:
            drawn[0].set_dim(list(dim))
        smooth = {p for p in tensors if callable(OPS[op].rule(p))}
        leaves = frozenset().union(*(tensors[p].leaves for p in smooth))
        if any(p.kept for p in OPS[op].outputs):
            drawn[0].set_output().set_data_type(differentiated.DOUBLE)
        for port, t in zip((p.name for p in OPS[op].outputs if not p.given), drawn, strict=True):
            if t is not None and (not pooled or port in pooled) and (pooled or t is drawn[0]):
                self.pool.append(Made(t, made[port], leaves if t is drawn[0] else tensors["input"].leaves))
        return True


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    return tuple(map(max, a, b))


def _computed(
    op: str, inputs: Mapping[str, Made | float], attributes: Mapping[str, object], dim: Shape | None
) -> dict[str, torch.Tensor] | None:
    """Outputs by port; None where they are large, or jump or bend nearby."""
    entry = OPS[op]
    rank = max(len(m.dim) for m in inputs.values() if isinstance(m, Made))
    values = {p: m.value if isinstance(m, Made) else torch.full((1,) * rank, m).double() for p, m in inputs.items()}
    shapes = {p: tuple(v.shape) for p, v in values.items()}
    told = {a.name: a.default for a in entry.attributes} | dict(attributes)
    wanted = {} if dim is None else {entry.outputs[0].name: dim}
    try:
        made = entry.infer(shapes, told, wanted)
    except GraphValidationError:
        return None
    if any(prod(d) > MOST_ELEMENTS for d in made.values()) or not all(prod(d) for d in made.values()):
        return None
    frozen = entry.frozen(told, shapes, {p: (d, differentiated.DOUBLE) for p, d in made.items()})
    kept = {p.name: torch.zeros(made[p.name]).double() for p in entry.outputs if p.kept}
    found = entry.reference(torch, {**values, **kept}, frozen)
    if any(not v.isfinite().all() or v.abs().max() > LARGEST for v in found.values()):
        return None
    return found if _margin(op, values, told, found) > MARGIN else None


def _margin(op: str, x: Mapping[str, torch.Tensor], told: Mapping[str, object], made: Mapping) -> float:
    """The least distance of a value from where the op jumps, bends or has a pole."""
    if op in ("max", "min") or op.startswith("cmp_"):
        a, b = x.values()
        return float((a - b).abs().min())
    if op == "div":
        return float(x["b"].abs().min()) - 0.2
    if op == "reduction":
        mode, values = told["mode"].name, x["input"]
        if mode in ("NORM1", "AMAX", "MUL_NO_ZEROS", "NORM2") and values.abs().min() < MARGIN:
            return 0.0
        if mode in ("MIN", "MAX", "AMAX"):
            values = values.abs() if mode == "AMAX" else values
            near = ((values - made["output"]).abs() < 2 * MARGIN).sum()
            return float(near == made["output"].numel())
        return 1.0
    if op in ("abs", "relu", "relu_backward"):
        clips = [0.0] if op == "abs" else [told["lower_clip"], told["upper_clip"]]
        return min(float((x["input"] - clip).abs().min()) for clip in clips)
    if op in ("ceil", "floor", "round", "trunc"):
        jumps = x["input"] - 0.5 * (op == "round")
        return float((jumps - jumps.round()).abs().min())
    if op == "mod":
        quotients = x["input0"] / x["input1"]
        return min(float(x["input1"].abs().min()) - 0.2, float((quotients - quotients.round()).abs().min()))
    if op.startswith("logical_"):
        return min(float(v.abs().min()) for v in x.values())
    if op in ("elu", "elu_backward"):
        return float(x["input"].abs().min())
    if op == "tan":
        return float(x["input"].cos().abs().min()) - 0.2
    if op == "pow":
        return float(x["input0"].min()) - 0.2
    if op in ("log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal"):
        values = x["input"].abs() if op == "reciprocal" else x["input"]
        return float(values.min()) - 0.2
    return 1.0


def _unary(d: _Drawer) -> bool:
    told = {
        "relu": ({}, {"negative_slope": 0.1}, {"lower_clip": -0.5, "upper_clip": 1.0}),
        "swish": ({}, {"swish_beta": 1.5}),
        "elu": ({}, {"elu_alpha": 1.5}),
        "softplus": ({}, {"softplus_beta": 1.5}),
    }
    names = [op.name for op in OPS.values() if op.pointwise and [p.name for p in op.inputs] == ["input"]]
    name = d.random.choice(names)
    return d.node(name, {"input": d.any()}, d.random.choice(told.get(name, ({},))))


def _binary(d: _Drawer) -> bool:
    names = [
        op.name for op in OPS.values() if op.pointwise and len(op.inputs) == 2 and callable(op.rule(op.inputs[1].name))
    ]
    name, x = d.random.choice(names), d.any()
    operands = [x, d.beside(x.dim)]
    d.random.shuffle(operands)
    return d.node(name, dict(zip((p.name for p in OPS[name].inputs), operands, strict=True)))


def _slope(d: _Drawer) -> bool:
    names = [op.name for op in OPS.values() if op.pointwise and [p.name for p in op.inputs] == ["loss", "input"]]
    x = d.any()
    at = d.leaf(tuple(e if d.random.random() < 0.7 else 1 for e in x.dim))
    at.leaves = frozenset()
    return d.node(d.random.choice(names), {"loss": x, "input": at})


def _selection(d: _Drawer) -> bool:
    x = d.any()
    a, b = x, d.beside(x.dim)
    if len(d.graph.nodes) + 2 > d.most:
        return False
    name = d.random.choice([op.name for op in OPS.values() if op.name.startswith("cmp_")])
    if not d.node(name, {"input": x, "comparison": d.beside(x.dim)}):
        return False
    mask = d.pool.pop()
    return d.node("binary_select", {"input0": a, "input1": b, "mask": mask})


def _reduction(d: _Drawer) -> bool:
    x = d.any()
    dim = tuple(1 if d.random.random() < 0.5 else e for e in x.dim)
    modes = [m for m in reduction_mode if m.name not in ("MUL", "NOT_SET")]
    return dim != x.dim and d.node("reduction", {"input": x}, {"mode": d.random.choice(modes)}, dim)


def _softmax(d: _Drawer) -> bool:
    x = d.any()
    name = d.random.choice(("softmax", "log_softmax", "logsumexp"))
    return d.node(name, {"input": x}, {"axis": d.random.randrange(-len(x.dim), len(x.dim))})


def _softmax_backward(d: _Drawer) -> bool:
    x = d.any()
    axis = d.random.randrange(len(x.dim))
    y = torch.randn(x.dim, generator=generator("cpu", len(d.values)), dtype=torch.float64).softmax(axis)
    y = d.read(f"probabilities{len(d.values)}", y, frozenset())
    return d.node("softmax_backward", {"grad": x, "output": y}, {"axis": axis})


def _norm(d: _Drawer) -> bool:
    name = d.random.choice(("rmsnorm", "layernorm", "adalayernorm", "instancenorm", "batchnorm"))
    x = d.any({"adalayernorm": (3,), "instancenorm": (3, 4), "batchnorm": (2, 3, 4)}.get(name, (2, 3)))
    if x is None:
        return False
    rank = len(x.dim)
    if name in ("instancenorm", "batchnorm"):
        weight = tuple(e if axis == 1 else 1 for axis, e in enumerate(x.dim))
    elif name == "adalayernorm":
        weight = (x.dim[0], 1, x.dim[2])
    else:
        weight = (*(1,) * (rank - 1), x.dim[-1])[d.random.choice((0, rank - 1)) :]
    inputs = {"input": x, "epsilon": 0.1}
    for port in ("scale", "bias"):
        if name != "rmsnorm" or d.random.random() < 0.7 and (port == "scale" or "scale" in inputs):
            inputs[port] = d.leaf(weight)
    phase = d.random.choice((norm_forward_phase.INFERENCE, norm_forward_phase.TRAINING))
    told = {} if name == "batchnorm" else {"norm_forward_phase": phase}
    all_of = phase is norm_forward_phase.TRAINING or name == "batchnorm"
    statistics = ("inv_variance",) if name == "rmsnorm" else ("mean", "inv_variance")
    return d.node(name, inputs, told, pooled=("Y", *(s for s in statistics if all_of and d.random.random() < 0.5)))


def _of_given_statistics(d: _Drawer) -> bool:
    x = d.any((2, 3, 4))
    if x is None:
        return False
    weight = tuple(e if axis == 1 else 1 for axis, e in enumerate(x.dim))
    weights = {p: d.leaf(weight) for p in ("mean", "inv_variance", "scale", "bias")}
    return d.node("batchnorm_inference", {"input": x, **weights})


def _of_channels(d: _Drawer) -> bool:
    x, both = d.any((2, 3, 4)), d.random.random() < 0.5
    return x is not None and d.node("genstats", {"input": x}, pooled=("SUM", "SQ_SUM") if both else ())


def _loss(d: _Drawer) -> bool:
    x = d.any((2, 3))
    if x is None:
        return False
    told = d.random.choice(({}, {"ignore_index": 0}, {"label_smoothing": 0.2}, {"z_loss": 0.1}))
    target = d.numbers((*x.dim[:-1], 1), x.dim[-1])
    both = d.random.random() < 0.5
    return d.node("cross_entropy", {"input": x, "target": target}, told, pooled=("loss", "logsumexp") if both else ())


def _dropout(d: _Drawer) -> bool:
    x = d.any((2, 3, 4))
    if x is None:
        return False
    key = {port: d.numbers((1,) * len(x.dim), 1000) for port in ("seed", "offset")}
    return d.node("dropout", {"input": x, **key}, {"probability": 0.4})


def _product(d: _Drawer) -> bool:
    x = d.any((2, 3, 4))
    if x is None:
        return False
    batch = tuple(e if d.random.random() < 0.6 else 1 for e in x.dim[:-2])
    extent = d.random.randint(1, 3)
    if d.random.random() < 0.5:
        return d.node("matmul", {"A": x, "B": d.leaf((*batch, x.dim[-1], extent))})
    return d.node("matmul", {"A": d.leaf((*batch, extent, x.dim[-2])), "B": x})


def _convolution(d: _Drawer) -> bool:
    x = d.any((4,))
    if x is None or x.dim[2] < 2:
        return False
    channels = x.dim[1]
    told = {"padding": (0, 1), "stride": (1, d.random.randint(1, 2))}
    kept = d.random.randint(1, 2)  # taps along the height
    out = (x.dim[2] - kept + 1, (x.dim[3] + 1) // told["stride"][1] + (x.dim[3] + 1) % told["stride"][1])
    made = d.random.randint(1, 2)
    op = d.random.choice(("conv_fprop", "conv_dgrad", "conv_wgrad"))
    if op == "conv_fprop":
        return d.node(op, {"image": x, "weight": d.leaf((made, channels, kept, 2))}, told)
    if op == "conv_wgrad":
        loss = d.leaf((x.dim[0], made, *out))
        return d.node(op, {"image": x, "loss": loss}, told, dim=(made, channels, kept, 2))
    dim = (x.dim[0], made, x.dim[2] + kept - 1, (x.dim[3] - 1) * told["stride"][1])
    return dim[3] > 0 and d.node(op, {"loss": x, "filter": d.leaf((channels, made, kept, 2))}, told, dim=dim)


def _attention(d: _Drawer) -> bool:
    q = d.any((4,))
    if q is None:
        return False
    batch, heads, _, columns = q.dim
    of = d.random.choice([n for n in range(1, heads + 1) if heads % n == 0])
    rows = d.random.randint(1, 3)
    k, v = d.leaf((batch, of, rows, columns)), d.leaf((batch, of, rows, d.random.randint(1, 3)))
    told = {"use_causal_mask": d.random.random() < 0.5, "generate_stats": False}
    return d.node("sdpa", {"q": q, "k": k, "v": v, "attn_scale": d.random.uniform(0.4, 1.6)}, told)


def _move(d: _Drawer) -> bool:
    x, name = d.any(), d.random.choice(("transpose", "slice", "reshape", "expand", "join"))
    rank = len(x.dim)
    if name == "transpose":
        return d.node(name, {"input": x}, {"permutation": tuple(d.random.sample(range(rank), rank))})
    if name == "slice":
        slices = []
        for extent in x.dim:
            start = d.random.randrange(extent)
            slices.append(slice(start, d.random.randint(start + 1, extent), d.random.choice((None, 1, 2))))
        return d.node(name, {"input": x}, {"slices": tuple(slices)})
    if name == "reshape":
        count = prod(x.dim)
        first = d.random.choice([n for n in range(1, count + 1) if count % n == 0])
        return d.node(
            name, {"input": x}, dim=d.random.choice(((count,), (first, count // first), (first, 1, count // first)))
        )
    if name == "expand":
        return d.node(name, {"input": x}, dim=tuple(d.random.randint(1, 3) if e == 1 else e for e in x.dim))
    axis = d.random.randrange(rank)
    fits = [
        m for m in d.pool if len(m.dim) == rank and m.dim[:axis] + m.dim[axis + 1 :] == x.dim[:axis] + x.dim[axis + 1 :]
    ]
    own = (*x.dim[:axis], d.random.randint(1, 2), *x.dim[axis + 1 :])
    return d.node(
        name, {"a": x, "b": d.random.choice(fits) if d.random.random() < 0.6 else d.leaf(own)}, {"axis": axis}
    )


def _by_number(d: _Drawer) -> bool:
    x, name = d.any((2, 3, 4)), d.random.choice(("gather_rows", "add_rows", "scatter_rows"))
    if x is None:
        return False
    rows, rest = d.random.randint(1, 4), (1,) * (len(x.dim) - 1)
    if name == "gather_rows":
        return d.node(name, {"input": x, "index": d.numbers((rows, *rest), x.dim[0])})
    dim = (rows + (x.dim[0] if name == "scatter_rows" else 0), *x.dim[1:])
    if name == "add_rows":
        return d.node(name, {"input": x, "index": d.numbers((x.dim[0], *rest), rows)}, dim=dim)
    found = torch.tensor(d.random.sample(range(dim[0]), x.dim[0])).reshape(-1, *rest)
    return d.node(name, {"input": x, "index": d.read(f"numbers{len(d.values)}", found, frozenset())}, dim=dim)


def _rotation(d: _Drawer) -> bool:
    x = d.any((2, 3, 4))
    if x is None or x.dim[-1] < 2:
        return False
    if x.dim[-1] % 2 == 0 and d.random.random() < 0.3:
        return d.node("turn_pairs", {"input": x}, {"interleaved": d.random.random() < 0.5})
    if len(x.dim) == 4 and x.dim[-1] == 2 and d.random.random() < 0.7:
        name, port = d.random.choice((("rope", "input"), ("rope_backward", "dY")))
        freqs = torch.randn((x.dim[2], 1, 1, 2), dtype=torch.float64)
        freqs = d.read(f"freqs{len(d.values)}", freqs, frozenset())
        return d.node(name, {port: x, "freqs": freqs}, {"output_scale": 1.5})
    angles = torch.randn((*(1,) * (len(x.dim) - 2), x.dim[-2], x.dim[-1] // 2), dtype=torch.float64)
    given = {p: d.read(f"{p}{len(d.values)}", getattr(angles, p)(), frozenset()) for p in ("cos", "sin")}
    return d.node("rotate_pairs", {"input": x, **given}, {"interleaved": d.random.random() < 0.5})


FAMILIES: Mapping[Callable[[_Drawer], bool], int] = {
    _unary: 4,
    _binary: 6,
    _slope: 1,
    _selection: 1,
    _reduction: 3,
    _softmax: 1,
    _softmax_backward: 1,
    _norm: 3,
    _of_given_statistics: 1,
    _of_channels: 1,
    _loss: 1,
    _dropout: 1,
    _product: 2,
    _convolution: 2,
    _attention: 2,
    _move: 3,
    _by_number: 1,
    _rotation: 1,
}
"""What draws a node, or none, and how often it is asked."""


def drawn(seed: int) -> RandomGraph:
    """Graph of 1 to 12 nodes, the same each time."""
    source = random.Random(seed)
    d = _Drawer(source, source.randint(1, 12))
    for _ in range(d.random.randint(1, 2)):
        d.pool.append(d.leaf(tuple(d.random.randint(1, 3) for _ in range(d.random.choice((2, 2, 3, 3, 4))))))
    while len(d.graph.nodes) < d.most:
        d.random.choices(list(FAMILIES), list(FAMILIES.values()))[0](d)
    made = [m for m in d.pool if m.leaves and m.tensor.get_name() not in m.leaves]
    if not made:
        return drawn(seed + 1_000_000)
    last = made[-1]
    chosen = list(dict.fromkeys((last, *d.random.sample(made, min(len(made), d.random.randint(0, 2))))))
    for number, m in enumerate(chosen):
        m.tensor.set_output().set_name(f"made{number}").set_data_type(differentiated.DOUBLE)
    read = {t for node in d.graph.nodes for t in node.inputs.values()}
    for node in d.graph.nodes:  # what nobody reads is an output, whose gradient is none
        for port, t in node.outputs.items():
            if t not in read and port not in node.absent:
                t.set_output().set_data_type(differentiated.DOUBLE)
    leaves = sorted(frozenset().union(*(m.leaves for m in chosen)))
    wrt = d.random.sample(leaves, d.random.randint(1, len(leaves)))
    d.graph.validate()
    values = {name: value for name, value in d.values.items() if name in {t.get_name() for t in read}}
    return RandomGraph(d.graph, [m.tensor.get_name() for m in chosen], wrt, values)
