"""A norm whose columns are split over ranks: two graphs, and between them numbers of each row that are added up.

The first graph makes of the columns at hand what a row's statistics are made of. The second has the statistics of whole
rows. RMSNorm adds up one number a row, the sum of squares. Layer norm adds up two one after the other, the sum and then
the sum of squared distances from the mean of all, made of those from the rank's own mean (Chan, Golub and LeVeque
1983): nothing cancels. Backward adds up one number a row, and of a layer norm two.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graphfuse.enums import reduction_mode
from graphfuse.functional.declaration import Columns, Part, Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.operator import pass_by_autograd
from graphfuse.functional.tensor_parameter import TensorParameter, like, rows
from graphfuse.tensor import Tensor
from graphfuse.torch.norm import (
    BIAS,
    DTOTAL,
    DY,
    GATE,
    NORMALIZED,
    RESIDUAL,
    STATISTICS,
    TOTAL,
    TYPES,
    WEIGHT,
    Norm,
    X,
    Y,
    of_rows,
)
from graphfuse.torch.step import Step, defined

Given = Mapping[str, object]
Made = Mapping[str, torch.Tensor | None]

_SUMMED = TensorParameter("total", TYPES, like("x"))  # as the first step stored it
_SQUARES, _OWN_MEAN, _APART = (of_rows(name, written=True) for name in ("squares", "own_mean", "apart"))
# The mean of dy * normal, and of dy, over a row: dx without what a change of the statistics would add.
_ALONG, _LEVEL = (of_rows(name, written=True) for name in ("along", "level"))
_KNOWN_ALONG, _KNOWN_LEVEL = (
    TensorParameter(name, STATISTICS, rows("x"), optional=True) for name in ("along", "level")
)


@dataclass(frozen=True)
class NormByColumns:
    """How the graphs of a norm run where its columns are split."""

    norm: Norm

    @property
    def forward(self) -> Columns:
        return self._run_forward

    @property
    def backward(self) -> Columns:
        return self._run_backward

    def _run_forward(self, name: str, given: Given, part: Part) -> Made:
        norm = self.norm
        measured = _step(f"{name}_measured", self.measured)
        made = _run(measured, self.measured, given)
        join = _mean_and_inverse_std if norm.centred else _inverse_rms
        statistics = join(made, part, given["eps"])
        known = {**given, **made, **statistics}
        return known | _run(_step(f"{name}_finished", self.finished), self.finished, known)

    def _run_backward(self, name: str, given: Given, part: Part) -> Made:
        known = {"along": None, "level": None, **given}
        if given["needs_dx"] or given.get("needs_dresidual"):
            made = _run(_step(f"{name}_measured", self.measured_backward), self.measured_backward, given)
            known |= {key: part.sum(t) / part.all for key, t in made.items()}
        asked = [a.asked for a in self.norm.gradients]
        return _run(_step(f"{name}_finished", self.finished_backward, tuple(asked)), self.finished_backward, known)

    @functools.cached_property
    def measured(self) -> Variant:
        """The residual sum, and of the columns at hand what statistics are made of."""
        residual = self.norm.residual
        made = (_OWN_MEAN, _APART) if self.norm.centred else (_SQUARES,)
        return Variant((X, *(RESIDUAL,) * residual, *(TOTAL,) * residual, *made), self._measure)

    @functools.cached_property
    def finished(self) -> Variant:
        norm = self.norm
        read = (X, *(_SUMMED,) * norm.residual, *(GATE,) * norm.gate, WEIGHT, *(BIAS,) * norm.bias)
        return Variant((*read, *(of_rows(a.name) for a in norm.statistics), Y), self._finish)

    @functools.cached_property
    def measured_backward(self) -> Variant:
        made = (_ALONG, *(_LEVEL,) * self.norm.centred)
        return Variant((*self._read_backward, *made), self._measure_backward)

    @functools.cached_property
    def finished_backward(self) -> Variant:
        norm = self.norm
        joined = (*(DTOTAL,) * norm.residual, _KNOWN_ALONG, *(_KNOWN_LEVEL,) * norm.centred)
        return Variant((*self._read_backward, *joined, *norm.gradients), self._finish_backward)

    @property
    def _read_backward(self) -> tuple[TensorParameter, ...]:
        saved = (of_rows(a.name) for a in self.norm.statistics)
        return (DY, NORMALIZED, *(GATE,) * self.norm.gate, WEIGHT, *saved)

    def _measure(self, d: Drawing) -> None:
        graph, x = d.graph, d["x"]
        if self.norm.residual:
            x = graph.add(x, d["residual"])
            d.store("total", x)
        if not self.norm.centred:
            d.store("squares", _of_rows(d, graph.mul(x, x), reduction_mode.ADD))
            return
        mean = _of_rows(d, x, reduction_mode.AVG)
        apart = graph.sub(x, mean)
        d.store("apart", _of_rows(d, graph.mul(apart, apart), reduction_mode.ADD))
        d.store("own_mean", graph.identity(mean))  # an output that is read would be read as stored

    def _finish(self, d: Drawing) -> None:
        graph = d.graph
        y = self._weighted(d, self._normal(d, d["total" if self.norm.residual else "x"]))
        if "bias" in d:
            y = graph.add(y, d["bias"])
        if self.norm.silu:
            y = graph.swish(y)
        d.store("y", graph.mul(y, d["gate"]) if self.norm.gate else y)

    def _measure_backward(self, d: Drawing) -> None:
        graph, normal = d.graph, self._normal(d, d["x"])
        grad = self._weighted(d, self._before_activation(d, normal))
        d.store("along", _of_rows(d, graph.mul(grad, normal), reduction_mode.ADD))
        if self.norm.centred:
            d.store("level", _of_rows(d, grad, reduction_mode.ADD))

    def _finish_backward(self, d: Drawing) -> None:
        graph, normal = d.graph, self._normal(d, d["x"])
        if "dgate" in d:
            d.store("dgate", graph.mul(d["dy"], graph.swish(self._weighted(d, normal))))
        grad = self._before_activation(d, normal)
        for name, values in (("dweight", lambda: graph.mul(grad, normal)), ("dbias", lambda: graph.identity(grad))):
            if name in d:
                shape = d.layouts[name].shape
                total = graph.reduction(values(), mode=reduction_mode.ADD)
                d.store(name, total.set_dim((1,) * (d.rank - len(shape)) + shape))
        sums = [name for name in ("dx", "dresidual") if name in d]
        if not sums:
            return
        dx = graph.sub(self._weighted(d, grad), graph.mul(normal, d["along"]))
        if self.norm.centred:
            dx = graph.sub(dx, d["level"])
        dx = graph.mul(dx, d["inverse_std" if self.norm.centred else "inverse_rms"])
        if "dtotal" in d:
            dx = graph.add(dx, d["dtotal"])
        for name in sums:  # an output that is read would be read as stored
            d.store(name, dx if len(sums) == 1 else graph.identity(dx))

    def _normal(self, d: Drawing, x: Tensor) -> Tensor:
        """x normalized by statistics that are known."""
        if self.norm.centred:
            return d.graph.mul(d.graph.sub(x, d["mean"]), d["inverse_std"])
        return d.graph.mul(x, d["inverse_rms"])

    def _weighted(self, d: Drawing, values: Tensor) -> Tensor:
        if "weight" not in d:
            return values
        return d.graph.mul(values, d.graph.add(d["weight"], 1.0) if self.norm.zero_centred else d["weight"])

    def _before_activation(self, d: Drawing, normal: Tensor) -> Tensor:
        """dy, taken back through gate and SiLU."""
        grad = d.graph.mul(d["dy"], d["gate"]) if self.norm.gate else d["dy"]
        return d.graph.swish_backward(grad, self._weighted(d, normal)) if self.norm.silu else grad


def _inverse_rms(made: Made, part: Part, eps: float) -> Made:
    return {"inverse_rms": (part.sum(made["squares"]) / part.all + eps).rsqrt()}


def _mean_and_inverse_std(made: Made, part: Part, eps: float) -> Made:
    own = made["own_mean"]
    mean = part.sum(own * part.mine) / part.all
    apart = part.sum(made["apart"] + (own - mean).square() * part.mine)
    return {"mean": mean, "inverse_std": (apart / part.all + eps).rsqrt()}


def _of_rows(d: Drawing, values: Tensor, mode: reduction_mode) -> Tensor:
    return d.graph.reduction(values, mode=mode).set_dim((*next(iter(d.layouts.values())).shape[:-1], 1))


@functools.cache
def _step(name: str, variant: Variant, asked: Sequence[str] = ()) -> Step:
    """Defined when it is first needed, which most programs never do."""
    step = defined(name, variant, asked)
    pass_by_autograd(step.declaration, step.operator)
    return step


def _run(step: Step, variant: Variant, given: Given) -> Made:
    f = step.declaration
    made = step(*(given[name] for name in f.parameters))
    return dict(zip(f.results, made if isinstance(made, tuple) else (made,), strict=True))
