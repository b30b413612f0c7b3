"""Functions of rows as data: softmax and its like, layer norm, L2 normalization, held against float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphfuse import data_type, norm_forward_phase, pygraph, reduction_mode
from graphfuse.op_graph.tensor import Tensor
from support import graphs, oracle
from support.graphs import BF16, FLOAT, TORCH

EPS, LEAST = 1e-5, 1e-12

Exact = tuple[torch.Tensor, torch.Tensor]
"""A result in float64, and the magnitudes that float32 rounds on the way to it."""


@dataclass(frozen=True)
class Kind:
    """draw(graph, x, weight, bias) -> the result. exact(x, weight, bias), all float64. weights: whether there are any.
    per_row: whether a row has one result. middle, spread: of the x that it is given. part: columns are a multiple
    of it."""

    draw: Callable[..., Tensor]
    exact: Callable[..., Exact]
    weights: bool = False
    per_row: bool = False
    middle: float = 0.0
    spread: float = 1.0
    part: int = 1


PART = 32


def _parts(g: pygraph, x: Tensor, *_) -> Tensor:
    """Of the row that has length 1, each part over the sum of its magnitudes."""
    rows, columns = x.get_dim()
    parts = g.reshape(_normalize(g, x)).set_dim([rows, columns // PART, PART])
    total = g.reduction(parts, mode=reduction_mode.NORM1).set_dim([rows, columns // PART, 1])
    return g.reshape(g.div(parts, g.max(total, LEAST))).set_dim([rows, columns])


def _layer_norm(g: pygraph, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return g.layernorm(x, weight, bias, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]


def _normalize(g: pygraph, x: Tensor, *_) -> Tensor:
    length = g.reduction(x, mode=reduction_mode.NORM2).set_dim([x.get_dim()[0], 1])
    return g.div(x, g.max(length, LEAST))


def _exact_softmax(x, *_) -> Exact:
    made, below = torch.softmax(x, 1), x.amax(1, keepdim=True) - x
    return made, made * (1 + below)


def _exact_log_softmax(x, *_) -> Exact:
    made = torch.log_softmax(x, 1)
    return made, made.abs() + 1


def _exact_logsumexp(x, *_) -> Exact:
    made = torch.logsumexp(x, 1, keepdim=True)
    return made, made.abs() + x.abs().amax(1, keepdim=True) + 1


def _exact_layer_norm(x, weight, bias) -> Exact:
    mean = x.mean(1, keepdim=True)
    inverse = 1 / ((x - mean).square().mean(1, keepdim=True) + EPS).sqrt()
    made = (x - mean) * inverse * weight + bias
    return made, (x.abs() + 2 * mean.abs()) * inverse * weight.abs() + bias.abs()


def _exact_normalize(x, *_) -> Exact:
    made = torch.nn.functional.normalize(x, dim=1, eps=LEAST)
    return made, made.abs()


def _exact_parts(x, *_) -> Exact:
    parts = _exact_normalize(x)[0].unflatten(1, (-1, PART))
    made = torch.nn.functional.normalize(parts, p=1, dim=2, eps=LEAST).flatten(1)
    return made, made.abs()


KINDS = {
    # Far from zero: e^x would overflow, and what counts as a row's end is no element of it.
    "softmax": Kind(lambda g, x, *_: g.softmax(x), _exact_softmax, middle=90.0, spread=4.0),
    "log_softmax": Kind(lambda g, x, *_: g.log_softmax(x), _exact_log_softmax, middle=-90.0, spread=4.0),
    "logsumexp": Kind(lambda g, x, *_: g.logsumexp(x), _exact_logsumexp, per_row=True, middle=-90.0, spread=4.0),
    "layer norm": Kind(_layer_norm, _exact_layer_norm, weights=True, middle=9.0, spread=3.0),
    "L2 normalization": Kind(_normalize, _exact_normalize, spread=3.0),
    "parts": Kind(_parts, _exact_parts, spread=3.0, part=PART),
}


@dataclass(frozen=True)
class RowFunction:
    """One of KINDS on rows x columns. Its tensors are named x, weight, bias and out."""

    kind: str
    rows: int = 5
    columns: int = 96
    input: data_type = BF16
    output: data_type = BF16
    weight: data_type = FLOAT

    @property
    def _kind(self) -> Kind:
        return KINDS[self.kind]

    def graph(self, device: str = "cpu") -> pygraph:
        g = graphs.new(device=device)
        x = g.tensor([self.rows, self.columns], data_type=self.input, name="x")
        weight = bias = None
        if self._kind.weights:
            weight, bias = (g.tensor([1, self.columns], data_type=self.weight, name=n) for n in ("weight", "bias"))
        self._kind.draw(g, x, weight, bias).set_output().set_name("out").set_data_type(self.output)
        return g

    def inputs(self, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        """Random values for everything the graph reads."""
        source, kind = graphs.generator(device, seed), self._kind

        def values(rows, dtype, spread, middle):
            drawn = torch.randn(rows, self.columns, generator=source, device=device)
            return (drawn * spread + middle).to(TORCH[dtype])

        pack = {"x": values(self.rows, self.input, kind.spread, kind.middle)}
        if kind.weights:
            pack |= {"weight": values(1, self.weight, 0.25, 1.0), "bias": values(1, self.weight, 0.5, 0.0)}
        return pack

    def outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Memory for what the graph writes, filled with a byte that no result is."""
        out = torch.empty(self.rows, 1 if self._kind.per_row else self.columns, dtype=TORCH[self.output], device=device)
        out.view(torch.uint8).fill_(0xA5)
        return {"out": out}

    def hold(self, pack: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        """Against float64: one representable value of slack, or 2e-6 of the magnitudes that a result is made of."""
        exact, size = self._kind.exact(*(pack[n].double() if n in pack else None for n in ("x", "weight", "bias")))
        got = outputs["out"]
        difference = (got.double() - exact).abs()
        close = difference <= 2e-6 * size + torch.finfo(torch.float32).tiny
        if got.dtype is not torch.float32:
            close |= oracle.ulps(got, oracle.rounded(exact, got.dtype)) <= 1
        assert close.all(), f"{int((~close).sum())} elements are off, by up to {difference.max()}"
