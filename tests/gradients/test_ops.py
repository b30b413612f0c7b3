"""Every rule of the op table against differences of what the op computes, in float64."""

import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import pytest
import torch

from graphfuse import convolution_mode, data_type, differentiate, norm_forward_phase, reduction_mode
from graphfuse.ops import OPS
from graphfuse.ops.pullback import UNKNOWN, NoRule
from support import differentiated
from support.graphs import generator

INFERENCE, TRAINING = (
    {"norm_forward_phase": phase} for phase in (norm_forward_phase.INFERENCE, norm_forward_phase.TRAINING)
)
EPS = {"epsilon": 1e-3}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A node whose gradients are looked at.

    inputs: shapes of those with a gradient, by port. given: what else it reads, numbers and tensors.
    of: the outputs whose gradients are given; none for all. dim: of the output, where it must be said.
    least: how far values are from 0. sign: 0 for either.
    """

    op: str
    inputs: Mapping[str, Shape]
    given: Mapping[str, float | torch.Tensor] = field(default_factory=dict)
    attributes: Mapping[str, object] = field(default_factory=dict)
    of: tuple[str, ...] = ()
    dim: Shape | None = None
    least: float = 0.1
    sign: int = 0

    def __str__(self) -> str:
        told = {**{p: list(d) for p, d in self.inputs.items()}, **self.attributes}
        told |= {p: v if isinstance(v, float) else list(v.shape) for p, v in self.given.items()}
        return f"{self.op} {', '.join(f'{k}={v}' for k, v in told.items())} {','.join(self.of)}".strip()

    def values(self) -> dict[str, torch.Tensor]:
        """Values that lie apart from each other and from 0, so that no difference crosses a kink."""
        source, found = generator("cpu", 3), {}
        sizes = list(map(prod, self.inputs.values()))
        total = sum(sizes)
        apart = (torch.randperm(total, generator=source) + 0.5).double() * (2.0 / max(total, 1)) + self.least
        signs = torch.randint(0, 2, (total,), generator=source) * 2 - 1
        drawn = (apart * (self.sign or signs)).split(sizes)
        for (port, dim), part in zip(self.inputs.items(), drawn, strict=True):
            found[port] = part.reshape(dim)
        return found | {p: v for p, v in self.given.items() if isinstance(v, torch.Tensor)}

    def drawn(self):
        g = differentiated.new()
        kinds = {dtype: name for name, dtype in differentiated.TYPES.items()}
        read = {port: g.tensor(list(dim), name=port) for port, dim in self.inputs.items()}
        for port, value in self.given.items():
            is_tensor = isinstance(value, torch.Tensor)
            read[port] = g.tensor(list(value.shape), data_type=kinds[value.dtype], name=port) if is_tensor else value
        made = getattr(g, self.op)(**read, **self.attributes)
        made = made if isinstance(made, list | tuple) else [made]
        if self.dim is not None:
            made[0].set_dim(list(self.dim))
        ports = [p.name for p in OPS[self.op].outputs if not p.given]
        for port, t in zip(ports, made, strict=True):
            if t is not None:
                t.set_output().set_name(f"made {port}").set_data_type(data_type.DOUBLE)
        outputs = [t for port, t in zip(ports, made, strict=True) if t is not None and (not self.of or port in self.of)]
        return g, outputs


DIM = (2, 3, 2)
BROADCAST = [
    tuple(1 if axis in ones else extent for axis, extent in enumerate(DIM))
    for count in range(4)
    for ones in itertools.combinations(range(3), count)
]
POSITIVE = ("log", "log2", "log1p", "sqrt", "rsqrt", "pow")
CLIPS = (
    {},
    {"negative_slope": 0.1},
    {"lower_clip": 0.5},
    {"upper_clip": 0.7},
    {"negative_slope": 0.2, "lower_clip": -0.5, "upper_clip": 1.5},
)
VARIANTS = {
    name + more: told
    for more in ("", "_backward")
    for name, told in (
        ("relu", CLIPS),
        ("swish", ({}, {"swish_beta": 1.7})),
        ("elu", ({}, {"elu_alpha": 1.7})),
        ("softplus", ({}, {"softplus_beta": 1.7})),
    )
}


def pointwise() -> Iterator[Case]:
    """Each operand broadcast along each set of axes, two along different ones, and each as a number."""
    for op in OPS.values():
        ports = [port.name for port in op.inputs]
        ruled = [port for port in ports if not isinstance(op.rule(port), NoRule)]
        if not op.pointwise or not ruled:
            continue

        def case(shapes, told=types.MappingProxyType({}), op=op, ruled=ruled, numbers=types.MappingProxyType({})):
            given = {p: torch.linspace(-1.1, 1.3, prod(d), dtype=torch.float64).reshape(d) for p, d in shapes.items()}
            given = {p: v for p, v in given.items() if p not in ruled}
            asked = {p: d for p, d in shapes.items() if p in ruled}
            least = 0.1237 if op.name == "mod" else 0.1  # of no two operands one is a multiple of the other
            return Case(op.name, asked, {**given, **numbers}, told, least=least, sign=op.name in POSITIVE)

        for told in VARIANTS.get(op.name, ({},)):
            yield case(dict.fromkeys(ports, DIM), told)
        for port in ports if len(ports) > 1 else ():
            for dim in BROADCAST[1:]:
                yield case({p: dim if p == port else DIM for p in ports})
            others = {p: DIM for p in ports if p != port}
            if others.keys() & set(ruled):
                yield case(others, numbers={port: 0.75})
        if len(ports) > 1:
            yield case(dict(zip(ports, ((2, 1, 2), (1, 3, 2), (2, 3, 1)), strict=False)))


def reductions() -> Iterator[Case]:
    for mode in reduction_mode:
        if mode.name in ("MUL", "NOT_SET"):
            continue
        for dim in BROADCAST[1:]:
            yield Case("reduction", {"input": DIM}, attributes={"mode": mode}, dim=dim)
        yield Case("reduction", {"input": (2, 1, 3)}, attributes={"mode": mode}, dim=(2, 1, 1))


def norms() -> Iterator[Case]:
    """With and without weights and statistics; weights of several axes and of lower rank; gradients of statistics."""
    x = (3, 2, 4)
    for scale in ((1, 1, 4), (1, 2, 4), (4,), (2, 4)):
        yield from norm("rmsnorm", x, ("inv_variance",), {"scale": scale, "bias": scale})
        yield from norm("rmsnorm", x, ("inv_variance",), {"scale": scale})
        yield from norm("layernorm", x, ("mean", "inv_variance"), {"scale": scale, "bias": scale})
    yield from norm("rmsnorm", x, ("inv_variance",), {"bias": (1, 1, 4)})
    yield from norm("rmsnorm", x, ("inv_variance",), {})
    for name, x, weight in (("instancenorm", (2, 3, 2, 2), (1, 3, 1, 1)), ("adalayernorm", (2, 3, 4), (2, 1, 4))):
        yield from norm(name, x, ("mean", "inv_variance"), {"scale": weight, "bias": weight})
    x, weight = (4, 3, 2, 1), (1, 3, 1, 1)
    weights = {"scale": weight, "bias": weight}
    running = {p: torch.ones(weight, dtype=torch.float64) for p in ("in_running_mean", "in_running_var")}
    yield Case("batchnorm", {"input": x, **weights}, EPS)
    yield Case("batchnorm", {"input": x, **weights}, EPS, of=("Y",))
    yield Case(
        "batchnorm", {"input": x, **weights}, {**EPS, **running, "momentum": 0.1}, of=("Y", "mean", "inv_variance")
    )
    for of in ((), ("SUM",), ("SQ_SUM",)):
        yield Case("genstats", {"input": x}, of=of)
    yield Case("batchnorm_inference", {"input": x, **dict.fromkeys(("mean", "inv_variance", "scale", "bias"), weight)})


def norm(name: str, x: Shape, statistics: Sequence[str], weights: Mapping[str, Shape]) -> Iterator[Case]:
    yield Case(name, {"input": x, **weights}, EPS, INFERENCE)
    for of in (("Y",), ("Y", statistics[-1]), ()):
        yield Case(name, {"input": x, **weights}, EPS, TRAINING, of=of)
    ones = {port: torch.ones(dim, dtype=torch.float64) for port, dim in weights.items()}
    for of in statistics:
        yield Case(name, {"input": x}, {**EPS, **ones}, TRAINING, of=(of,))


def rows() -> Iterator[Case]:
    for name in ("softmax", "log_softmax", "logsumexp", "softmax_backward"):
        for axis in (0, 1, -1):
            if name == "softmax_backward":
                y = torch.rand(DIM, generator=generator("cpu", 0), dtype=torch.float64).softmax(axis)
                yield Case(name, {"grad": DIM}, {"output": y}, {"axis": axis})
            else:
                yield Case(name, {"input": DIM}, attributes={"axis": axis})
    for told in (
        {},
        {"ignore_index": 1},
        {"label_smoothing": 0.2},
        {"z_loss": 0.1},
        {"ignore_index": 0, "label_smoothing": 0.1, "z_loss": 0.05},
    ):
        for kind in (torch.int32, torch.int64):
            for of in ((), ("loss",), ("logsumexp",)):
                yield Case(
                    "cross_entropy",
                    {"input": (4, 3)},
                    {"target": torch.tensor([[0], [1], [2], [0]], dtype=kind)},
                    told,
                    of=of,
                )


def dropouts() -> Iterator[Case]:
    key = {"seed": torch.full((1, 1, 1), 7.0, dtype=torch.float64), "offset": torch.ones(1, 1, 1, dtype=torch.float64)}
    for probability in (0, 0.25, 0.9):
        yield Case("dropout", {"input": DIM}, key, {"probability": probability})


def moves() -> Iterator[Case]:
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)):
        yield Case("transpose", {"input": DIM}, attributes={"permutation": order})
    x = (3, 5, 4)
    for slices in (
        (slice(None), slice(None), slice(None)),
        (slice(1, 2), slice(None), slice(1, 3)),
        (slice(None, None, 2), slice(1, None, 3), slice(None)),
        (slice(-2, None), slice(0, -1, 2), slice(0, 4, 3)),
        (slice(None), slice(4, None, 2), slice(3, 4)),
        (slice(None), slice(1, 4, 2), slice(0, 3, 2)),
        (slice(2, 2), slice(None), slice(None)),
        (slice(None), slice(None), slice(7, 9)),
    ):
        yield Case("slice", {"input": x}, attributes={"slices": slices})
    for dim in ((12,), (3, 4), (2, 6, 1), (1, 2, 3, 2, 1)):
        yield Case("reshape", {"input": DIM}, dim=dim)
    for dim in BROADCAST:
        yield Case("expand", {"input": dim}, dim=DIM)
    for axis in (0, 1, 2, -1):
        for extent in (1, 3):
            other = tuple(extent if axis in (k, k - 3) else e for k, e in enumerate(DIM))
            yield Case("join", {"a": DIM, "b": other}, attributes={"axis": axis})
            yield Case("join", {"a": other, "b": DIM}, attributes={"axis": axis})
    numbers = [[0, 1, 2, 3], [2, 2, 0, 2], [3, -1, 9, 0]]
    for found, kind in itertools.product(numbers, (torch.int32, torch.int64)):
        index = torch.tensor(found, dtype=kind).reshape(4, 1)
        if len({n for n in found if n in range(4)}) == sum(n in range(4) for n in found):  # each is written once
            yield Case("scatter_rows", {"input": (4, 3)}, {"index": index}, dim=(4, 3))
        yield Case("add_rows", {"input": (4, 3)}, {"index": index}, dim=(4, 3))
    for found, kind in itertools.product(numbers[:2], (torch.int32, torch.int64)):
        yield Case("gather_rows", {"input": (4, 3)}, {"index": torch.tensor(found, dtype=kind).reshape(4, 1)})
    angles = torch.linspace(0, 3, 4, dtype=torch.float64).reshape(2, 1, 2)
    for told in ({}, {"interleaved": True}, {"inverse": True}, {"interleaved": True, "inverse": True}):
        for columns in (4, 5):
            yield Case("rotate_pairs", {"input": (2, 3, columns)}, {"cos": angles.cos(), "sin": angles.sin()}, told)
    freqs = torch.linspace(0, 3, 12, dtype=torch.float64).reshape(3, 1, 1, 4)
    for name, port in (("rope", "input"), ("rope_backward", "dY")):
        for told in ({}, {"output_scale": 1.5, "rope_dim": 2}):
            angles = freqs[..., : told.get("rope_dim", 4)].contiguous()
            yield Case(name, {port: (1, 2, 3, 4)}, {"freqs": angles}, told)
    for interleaved in (False, True):
        yield Case("turn_pairs", {"input": (2, 3, 4)}, attributes={"interleaved": interleaved})


def products() -> Iterator[Case]:
    for a, b in (
        ((2, 3), (3, 4)),
        ((2, 2, 3), (2, 3, 4)),
        ((1, 2, 3), (2, 3, 1)),
        ((2, 2, 3), (1, 3, 2)),
        ((2, 1, 2, 3), (1, 3, 3, 2)),
    ):
        yield Case("matmul", {"A": a, "B": b})
    image, weight, loss = (2, 4, 5, 4), (4, 2, 2, 3), (2, 4, 3, 4)
    window = {"pre_padding": (1, 0), "post_padding": (0, 2), "stride": (2, 1)}
    turned = {**window, "convolution_mode": convolution_mode.CONVOLUTION}
    for told in (window, turned):
        yield Case("conv_fprop", {"image": image, "weight": weight}, attributes=told)
        yield Case("conv_dgrad", {"loss": loss, "filter": weight}, attributes=told, dim=image)
        yield Case("conv_wgrad", {"image": image, "loss": loss}, attributes=told, dim=weight)
    yield Case("conv_fprop", {"image": (1, 2, 2, 3, 3), "weight": (3, 2, 1, 2, 2)}, attributes={"dilation": (1, 2, 1)})


def attention() -> Iterator[Case]:
    of = {"q": (2, 4, 3, 2), "k": (2, 2, 5, 2), "v": (2, 2, 5, 3)}  # two heads of q for each of k and v
    scores = torch.rand(1, 4, 3, 5, generator=generator("cpu", 1), dtype=torch.float64)
    lengths = {port: torch.tensor(ends, dtype=torch.int32).view(2, 1, 1, 1) for port, ends in _LENGTHS.items()}
    drops = {"dropout_mask": (scores > 0.3).double(), "dropout_scale": torch.full((1, 1, 1, 1), 1.5).double()}
    for given, attributes in (
        ({}, {}),
        ({"attn_scale": 0.7, "bias": scores}, {"use_causal_mask": True}),
        (lengths, {"use_padding_mask": True, "use_causal_mask_bottom_right": True}),
        (drops, {"sliding_window_length": 2, "use_causal_mask": True}),
    ):
        yield Case("sdpa", of, given, {"is_inference": True, **attributes}, ("O",))


_LENGTHS = {"seq_len_q": [2, 3], "seq_len_kv": [5, 4]}

CASES = [*pointwise(), *reductions(), *norms(), *rows(), *dropouts(), *moves(), *products(), *attention()]


@pytest.mark.some(150)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case):
    graph, outputs = case.drawn()
    values = case.values()
    differentiated.checked(differentiate(graph, outputs, list(case.inputs)), values)


PORTS = [(op, port.name) for op in OPS.values() for port in op.inputs]


@pytest.mark.parametrize(("op", "port"), PORTS, ids=lambda value: getattr(value, "name", value))
def test_each_input_has_a_rule_or_a_reason(op, port):
    """And each rule a case above."""
    rule = op.rule(port)
    assert rule is not UNKNOWN, (
        f"op {op.name!r}: its vjp has neither a rule for input {port!r} nor a NoRule with the reason"
    )
    ruled = any(case.op == op.name and port in case.inputs for case in CASES)
    assert ruled is not isinstance(rule, NoRule), f"op {op.name!r}: no case of tests/gradients/test_ops.py has {port!r}"
