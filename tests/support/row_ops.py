"""Every op with an expansion, and every reduction of rows, as data: what it reads, and what it makes in float64.

The float64 results are those of torch's own functions and of torch.autograd, or of matrices: nothing of the library.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from graphfuse import data_type, norm_forward_phase, pygraph, reduction_mode
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import EXPANSIONS, OPS, REDUCTIONS
from support import graphs, oracle
from support.graphs import BF16, E4M3, E5M2, FLOAT, HALF, TORCH
from support.losses import INT32, INT64, INTEGERS

EPS = 1e-5

Values = Mapping[str, torch.Tensor]
"""In float64, by port."""
Exact = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By output port the result, and the magnitudes that float32 rounds on the way to it."""


@dataclass(frozen=True)
class RowOp:
    """inputs: by port the axes along which it varies, of s, samples, r, rows, and c, columns; none for epsilon.

    exact(inputs, attributes) -> results. given: inputs that are made of others, as forward makes them.
    """

    inputs: Mapping[str, str]
    exact: Callable[[Values, Mapping[str, object]], Exact]
    attributes: tuple[Mapping[str, object], ...] = ({},)  # each of them is tried
    given: Callable[[Values], Values] = lambda x: {}
    middle: float = 0.0  # of values of rows x columns
    spread: float = 1.0


def _inverse(x: torch.Tensor) -> torch.Tensor:
    return 1 / ((x * x).mean(-1, keepdim=True) + EPS).sqrt()


def _one(x: Values, name: str, otherwise: float) -> torch.Tensor:
    return x.get(name, torch.tensor(otherwise, dtype=torch.float64))


def _rmsnorm(x: Values, _) -> Exact:
    plain = functional.rms_norm(x["input"], x["input"].shape[-1:], eps=EPS)
    y, inverse = plain * _one(x, "scale", 1) + _one(x, "bias", 0), _inverse(x["input"])
    return {"Y": (y, (plain * _one(x, "scale", 1)).abs() + y.abs()), "inv_variance": (inverse, inverse)}


def _layernorm(x: Values, _) -> Exact:
    plain = functional.layer_norm(x["input"], x["input"].shape[-1:], eps=EPS)
    y, mean = plain * _one(x, "scale", 1) + _one(x, "bias", 0), x["input"].mean(-1, keepdim=True)
    inverse = _inverse(x["input"] - mean)
    size = (x["input"].abs() + 2 * mean.abs()) * inverse * _one(x, "scale", 1).abs() + _one(x, "bias", 0).abs()
    magnitude = x["input"].abs().mean(-1, keepdim=True)
    return {"Y": (y, size), "mean": (mean, magnitude), "inv_variance": (inverse, inverse * (1 + magnitude * inverse))}


def _of_given_statistics(x: Values, _) -> Exact:
    factor = x["inv_variance"] * x["scale"]
    size = (x["input"].abs() + x["mean"].abs()) * factor.abs() + x["bias"].abs()
    return {"Y": (factor * x["input"] + (x["bias"] - factor * x["mean"]), size)}


def _gradients(norm: Callable[..., torch.Tensor], centred: bool) -> Callable[[Values, object], Exact]:
    """Of a norm over the last axis, by torch.autograd."""

    def exact(x: Values, _) -> Exact:
        value, grad = x["input"].clone().requires_grad_(), x["grad"]
        weights = [x["scale"].clone().requires_grad_(), torch.zeros_like(x["scale"], requires_grad=True)]
        y = norm(value, value.shape[-1:], eps=EPS) * weights[0] + weights[1]
        made = torch.autograd.grad(y, [value, *weights], grad)
        mean = x["input"].mean(-1, keepdim=True) * centred
        inverse = _inverse(x["input"] - mean)
        normal = ((x["input"].abs() + 2 * mean.abs()) * inverse).detach()
        scaled = (grad * x["scale"]).abs()
        along = normal * (scaled * normal).mean(-1, keepdim=True)
        size = inverse * (2 * scaled + scaled.mean(-1, keepdim=True) + along)
        sizes = [size, *((grad * n).abs().sum_to_size(x["scale"].shape) for n in (normal, 1))]
        return dict(zip(("DX", "DScale", "DBias"), zip(made, sizes, strict=True), strict=True))

    return exact


def _moments(x: Values) -> Values:
    mean = x["input"].mean(-1, keepdim=True)
    return {"mean": mean, "inv_variance": _inverse(x["input"] - mean)}


def _softmax(x: Values, _) -> Exact:
    made = torch.softmax(x["input"], -1)
    return {"output": (made, made * (1 + x["input"].amax(-1, keepdim=True) - x["input"]))}


def _log_softmax(x: Values, _) -> Exact:
    made = torch.log_softmax(x["input"], -1)
    return {"output": (made, made.abs() + 1)}


def _logsumexp(x: Values, _) -> Exact:
    made = torch.logsumexp(x["input"], -1, keepdim=True)
    return {"output": (made, made.abs() + x["input"].abs().amax(-1, keepdim=True) + 1)}


def _by_jacobian(jacobian: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Values, object], Exact]:
    """The gradient, by each row's matrix of derivatives of outputs (first) by inputs, from the output."""

    def exact(x: Values, _) -> Exact:
        rows, grad = jacobian(x["output"]), x["grad"].unsqueeze(-2)
        return {"DX": ((grad @ rows).squeeze(-2), (grad.abs() @ rows.abs()).squeeze(-2))}

    return exact


def _of_softmax(y: torch.Tensor) -> torch.Tensor:
    return torch.diag_embed(y) - y.unsqueeze(-1) * y.unsqueeze(-2)


def _of_log_softmax(y: torch.Tensor) -> torch.Tensor:
    return torch.eye(y.shape[-1], dtype=y.dtype) - y.exp().unsqueeze(-2)


def _philox(seed: int, offset: int, counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Words of Philox 4x32 of seven rounds, in Python's integers (Salmon et al., SC 2011)."""
    word, key = 2**32 - 1, [seed, offset]
    for _ in range(7):
        one, other = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (other >> 32) ^ counter[1] ^ key[0], other & word, (one >> 32) ^ counter[3] ^ key[1], one & word
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return counter


def _dropout(x: Values, a: Mapping[str, object]) -> Exact:
    value = x["input"]
    rows, columns = value.numel() // value.shape[-1], value.shape[-1]
    key = int(x["seed"]), int(x["offset"])
    words = [(_philox(*key, (c // 8, r, 0, 0))[c // 2 % 4], c) for r in range(rows) for c in range(columns)]
    halves = torch.tensor([word >> 16 if c % 2 else word % 2**16 for word, c in words])
    kept = halves.reshape(value.shape) >= a["probability"] * 2**16
    made = torch.where(kept, value / (1 - a["probability"]), 0.0)
    return {"output": (made, made.abs())}


def _losses(x: torch.Tensor, target: torch.Tensor, ignore_index=-100, label_smoothing=0.0, z_loss=0.0) -> torch.Tensor:
    rows, classes = x.flatten(0, -2), target.flatten().long()
    loss = functional.cross_entropy(
        rows, classes, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    return (loss + z_loss * rows.logsumexp(-1).square() * (classes != ignore_index)).view(target.shape)


def _cross_entropy(x: Values, a: Mapping[str, object]) -> Exact:
    value, total = x["input"], x["input"].logsumexp(-1, keepdim=True)
    largest, least = value.amax(-1, keepdim=True), value.amin(-1, keepdim=True)
    size = 1 + largest - least + value.abs().amax(-1, keepdim=True) * (a.get("label_smoothing", 0) > 0)
    size = size + a.get("z_loss", 0) * total.square()
    return {"loss": (_losses(value, x["target"], **a), size), "logsumexp": (total, 1 + total.abs())}


def _cross_entropy_backward(x: Values, a: Mapping[str, object]) -> Exact:
    value = x["input"].clone().requires_grad_()
    (made,) = torch.autograd.grad(_losses(value, x["target"], **a), value, x["grad"])
    total = x["input"].logsumexp(-1, keepdim=True)
    below = total - x["input"]
    slope = (-below).exp() * (1 + 2 * a.get("z_loss", 0) * total.abs()) * (1 + below)
    return {"DX": (made, x["grad"].abs() * (slope + 1))}


def _reduced(mode: str) -> Callable[[Values, object], Exact]:
    def exact(x: Values, _) -> Exact:
        made = oracle.reduction(x["input"], mode, [*x["input"].shape[:-1], 1])
        size = x["input"].abs().sum(-1, keepdim=True) if mode in ("ADD", "AVG") else made.abs()
        return {"output": (made, size / x["input"].shape[-1] if mode == "AVG" else size)}

    return exact


_TRAINING = ({"norm_forward_phase": norm_forward_phase.TRAINING},)
_LOSSES = ({}, {"label_smoothing": 0.1, "ignore_index": 0}, {"z_loss": 1e-2, "ignore_index": 3})
_WEIGHTS = {"scale": "c", "bias": "c", "epsilon": ""}
_OF_SAMPLES = {"scale": "sc", "bias": "sc", "epsilon": ""}
_READ, _STATISTICS = {"grad": "src", "input": "src"}, {"mean": "sr", "inv_variance": "sr"}

ROW_OPS = {
    "rmsnorm": RowOp({"input": "src", **_WEIGHTS}, _rmsnorm, _TRAINING),
    "layernorm": RowOp({"input": "src", **_WEIGHTS}, _layernorm, _TRAINING, middle=2.0),
    "rmsnorm_backward": RowOp(
        {**_READ, "scale": "c", "inv_variance": "sr"},
        _gradients(functional.rms_norm, False),
        ({"has_dbias": True},),
        lambda x: {"inv_variance": _inverse(x["input"])},
    ),
    "layernorm_backward": RowOp(
        {**_READ, "scale": "c", **_STATISTICS}, _gradients(functional.layer_norm, True), given=_moments, middle=2.0
    ),
    "adalayernorm": RowOp({"input": "src", **_OF_SAMPLES}, _layernorm, _TRAINING, middle=2.0),
    "adalayernorm_backward": RowOp(
        {**_READ, "scale": "sc", **_STATISTICS}, _gradients(functional.layer_norm, True), given=_moments, middle=2.0
    ),
    "instancenorm": RowOp(
        {"input": "src", "scale": "r", "bias": "r", "epsilon": ""}, _layernorm, _TRAINING, middle=2.0
    ),
    "batchnorm_inference": RowOp(
        {"input": "src", **dict.fromkeys(("mean", "inv_variance", "scale", "bias"), "r")}, _of_given_statistics
    ),
    # Far from zero: e^x would overflow, or be zero.
    "softmax": RowOp({"input": "src"}, _softmax, middle=90.0, spread=4.0),
    "log_softmax": RowOp({"input": "src"}, _log_softmax, middle=-90.0, spread=4.0),
    "logsumexp": RowOp({"input": "src"}, _logsumexp, middle=-90.0, spread=4.0),
    "softmax_backward": RowOp(
        {"grad": "src", "output": "src"}, _by_jacobian(_of_softmax), given=lambda x: {"output": x["output"].softmax(-1)}
    ),
    "log_softmax_backward": RowOp(
        {"grad": "src", "output": "src"},
        _by_jacobian(_of_log_softmax),
        given=lambda x: {"output": x["output"].log_softmax(-1)},
    ),
    "dropout": RowOp(
        {"input": "src", "seed": "1", "offset": "1"},
        _dropout,
        tuple({"probability": p} for p in (0.25, 0, 0.9)),
        lambda x: {"seed": torch.full((1, 1, 1), 2.0**24 - 1), "offset": torch.full((1, 1, 1), 1234567.0)},
    ),
    "cross_entropy": RowOp({"input": "src", "target": "sr"}, _cross_entropy, _LOSSES, middle=9.0, spread=3.0),
    "cross_entropy_backward": RowOp(
        {**{p: "sr" for p in ("grad", "target", "logsumexp")}, "input": "src"},
        _cross_entropy_backward,
        _LOSSES,
        lambda x: {"logsumexp": x["input"].logsumexp(-1, keepdim=True)},
        spread=3.0,
    ),
    **{
        f"reduction {mode.name}": RowOp({"input": "src"}, _reduced(mode.name), ({"mode": mode},))
        for mode, how in REDUCTIONS.items()
        if how.in_rows
    },
}

NAMES = tuple(dict.fromkeys((*EXPANSIONS, *ROW_OPS)))
"""Those of the op table, whether or not they are here."""

INPUTS = (BF16, HALF, FLOAT)
OUTPUTS = (FLOAT, BF16, E4M3, HALF, E5M2)
SHAPES = ((1, 5, 96), (1, 3, 7), (1, 2, 1000))
BETWEEN = (None, "float32", "declared")
"""How the first output is made: stored; or virtual, read by a node that stores it as FLOAT, in either rounding."""


def of(name: str) -> RowOp:
    """The entry of an op; an error that says what to add."""
    assert name in ROW_OPS, (
        f"op {name!r} has an expansion, and no entry in ROW_OPS of tests/support/row_ops.py: add its inputs and its "
        "results in float64, of torch or numpy alone; its reference and its kernels are held against these"
    )
    return ROW_OPS[name]


@dataclass(frozen=True)
class Problem:
    """An op with types and shape. attributes: which of its entry's."""

    name: str
    input: data_type = BF16  # of all that has rows and columns
    weight: data_type = FLOAT  # of all else that has columns
    output: data_type = FLOAT  # of the first output
    between: str | None = None
    shape: tuple[int, int, int] = SHAPES[0]  # samples, rows, columns
    attributes: int = 0

    @property
    def _op(self) -> RowOp:
        return of(self.name)

    @property
    def _attributes(self) -> Mapping[str, object]:
        return self._op.attributes[self.attributes % len(self._op.attributes)]

    def _dim(self, axes: str) -> list[int]:
        return [extent if axis in axes else 1 for axis, extent in zip("src", self.shape, strict=True)]

    def _type(self, port: str) -> data_type:
        if port == "target":
            return INT64 if self.input is BF16 else INT32
        axes = self._op.inputs[port]
        return self.input if axes == "src" else self.weight if "c" in axes else FLOAT

    def graph(self, device: str = "cpu") -> pygraph:
        g = graphs.new(device=device, intermediate_rounding=self.between or "float32")
        inputs: dict[str, object] = {port: EPS for port, axes in self._op.inputs.items() if not axes}
        for port, axes in self._op.inputs.items():
            if axes:
                inputs[port] = g.tensor(self._dim(axes), data_type=self._type(port), name=port)
        name, attributes = self.name.split(" ")[0], self._attributes
        made = getattr(g, name)(**inputs, **attributes)
        made = made if isinstance(made, list | tuple) else [made]
        if name == "reduction":
            made[0].set_dim(self._dim("sr"))
        made[0].set_data_type(self.output)
        stored: list[Tensor | None] = [g.identity(made[0]) if self.between else made[0], *made[1:]]
        for port, t in zip(OPS[name].outputs, stored, strict=True):
            if t is not None:
                t.set_output().set_name(f"made {port.name}")
                if t is not made[0]:
                    t.set_data_type(FLOAT)
        return g

    def inputs(self) -> dict[str, torch.Tensor]:
        """Random values for all that the graph reads; those of a row are small, so that epsilon counts."""
        source, pack = graphs.generator("cpu", 1), {}
        for port, axes in self._op.inputs.items():
            whole, dim = axes == "src", self._dim(axes)
            if port == "target":
                pack[port] = torch.randint(self.shape[-1], dim, generator=source).to(INTEGERS[self._type(port)])
            elif axes:
                drawn = torch.randn(dim, generator=source) * (self._op.spread if whole else 0.5)
                drawn = drawn + (self._op.middle if whole and port != "grad" else port == "scale")
                drawn[:, -1] *= 0.01 if whole else 1.0
                pack[port] = drawn.to(TORCH[self._type(port)])
        given = self._op.given({port: t.double() for port, t in pack.items()})
        return pack | {port: t.to(TORCH[self._type(port)]) for port, t in given.items()}

    def exact(self, pack: Values) -> Exact:
        return self._op.exact({port: t.double() for port, t in pack.items()}, self._told)

    @property
    def _told(self) -> Mapping[str, object]:
        return {k: v for k, v in self._attributes.items() if not isinstance(v, norm_forward_phase | reduction_mode)}

    def outputs(self, exact: Exact) -> dict[str, torch.Tensor]:
        """Memory for what the graph writes, filled with a byte that no result is."""
        found = {}
        for number, (port, (value, _)) in enumerate(exact.items()):
            dtype = self.output if not number and not self.between else FLOAT
            found[f"made {port}"] = torch.empty(value.shape, dtype=TORCH[dtype])
            found[f"made {port}"].view(torch.uint8).fill_(0xA5)
        return found

    def hold(self, exact: Exact, outputs: Mapping[str, torch.Tensor]) -> None:
        """Against float64: 2e-6 of the magnitudes that a result is made of, or one representable value of slack."""
        for number, (port, (value, size)) in enumerate(exact.items()):
            got = outputs[f"made {port}"]
            rounds = number == 0 and self.between != "float32"
            narrow = TORCH[self.output] if rounds else torch.float32
            values, again = (t.double().nan_to_num() for t in (got, got.to(narrow)))
            assert torch.equal(values, again), f"{self}: {port} is not rounded"
            close = (got.double() - value).abs() <= 2e-6 * size + torch.finfo(torch.float32).tiny
            if narrow is not torch.float32:
                close |= oracle.ulps(got.to(narrow), oracle.rounded(value, narrow)) <= 1
            wrong = (~close).nonzero()
            assert close.all(), (
                f"{self}: {port} is off in {len(wrong)} places, at {wrong[0].tolist()} it is "
                f"{got[tuple(wrong[0])].item()}, not {value[tuple(wrong[0])].item()}"
            )
