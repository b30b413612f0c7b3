"""A norm whose columns are split over ranks: two graphs, and between them numbers of each row that are added up.

The first graph makes of the columns at hand what a row's statistics are made of. The second has the statistics of whole
rows. RMSNorm adds up one number a row, the sum of squares. Layer norm adds up two one after the other, the sum and then
the sum of squared distances from the mean of all, made of those from the rank's own mean (Chan, Golub and LeVeque
1983): nothing cancels. Backward adds up one number a row, and of a layer norm two.

The second graph makes a rank's own part of a sum again and adds the rest to it, where nothing else in it is a sum: it
has x at hand, and engines fuse what is around a reduction.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
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
# What other ranks have of the sum of squares.
_ELSEWHERE = of_rows("elsewhere")
# The sums of dy * normal, and of dy, over a row, which dx is made orthogonal to.
_ALONG, _LEVEL = (of_rows(name, written=True) for name in ("along", "level"))


def _joined(name: str) -> tuple[TensorParameter, ...]:
    """A sum over whole rows, and what of it other ranks have."""
    return tuple(TensorParameter(n, STATISTICS, rows("x"), optional=True) for n in (name, f"{name}_elsewhere"))


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
        made = _run(_step(f"{name}_measured", self.measured), given)
        join = _mean_and_inverse_std if norm.centred else _inverse_rms
        known = {**given, **made, **join(made, part, given["eps"]), "share": 1 / part.all}
        return known | _run(_step(f"{name}_finished", self.finished, ("eps", "share")), known)

    def _run_backward(self, name: str, given: Given, part: Part) -> Made:
        known = dict.fromkeys(a.name for a in self._joined) | given | {"share": 1 / part.all}
        if given["needs_dx"] or given.get("needs_dresidual"):
            for key, own in _run(_step(f"{name}_measured", self.measured_backward), given).items():
                known[key] = part.sum(own)
                known[f"{key}_elsewhere"] = known[key] - own
        others = (*(a.asked for a in self.norm.gradients), "share")
        return _run(_step(f"{name}_finished", self.finished_backward, others), known)

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
        return Variant((*read, *(of_rows("mean"),) * norm.centred, _ELSEWHERE, Y), self._finish)

    @functools.cached_property
    def measured_backward(self) -> Variant:
        made = (_ALONG, *(_LEVEL,) * self.norm.centred)
        return Variant((*self._read_backward, *made), self._measure_backward)

    @functools.cached_property
    def finished_backward(self) -> Variant:
        read = (*self._read_backward, *(DTOTAL,) * self.norm.residual, *self._joined)
        return Variant((*read, *self.norm.gradients), self._finish_backward)

    @property
    def _joined(self) -> tuple[TensorParameter, ...]:
        return (*_joined("along"), *(_joined("level") if self.norm.centred else ()))

    @property
    def _read_backward(self) -> tuple[TensorParameter, ...]:
        saved = (of_rows(a.name) for a in self.norm.statistics)
        return (DY, NORMALIZED, *(GATE,) * self.norm.gate, WEIGHT, *saved)

    def _measure(self, d: Drawing) -> None:
        graph, x = d.graph, d["x"]
        if self.norm.residual:
            x = graph.add(x, d["residual"])
            d.store("total", x)
        squares, mean = self._squares(d, x)
        d.store(self.measured.arguments[-1].name, squares)
        if mean is not None:
            d.store("own_mean", graph.identity(mean))  # an output that is read would be read as stored

    def _squares(self, d: Drawing, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The sum of squares of the columns at hand, of a layer norm from their own mean, which comes with it."""
        mean = _of_rows(d, x, reduction_mode.AVG) if self.norm.centred else None
        apart = x if mean is None else d.graph.sub(x, mean)
        return _of_rows(d, d.graph.mul(apart, apart), reduction_mode.ADD), mean

    def _finish(self, d: Drawing) -> None:
        graph, x = d.graph, d["total" if self.norm.residual else "x"]
        squares = graph.add(self._squares(d, x)[0], d["elsewhere"])
        inverse = graph.rsqrt(graph.add(graph.mul(squares, d.number("share")), d.number("eps")))
        normal = graph.mul(graph.sub(x, d["mean"]) if self.norm.centred else x, inverse)
        if self.norm.rounded and "weight" in d:
            normal = d.rounded(normal, "x")
        y = self._weighted(d, normal)
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
        scaled, again = self._weighted(d, grad), not {"dweight", "dbias"} & d.layouts.keys()

        def mean(name: str, own: Callable[[], Tensor]) -> Tensor:
            whole = graph.add(_of_rows(d, own(), reduction_mode.ADD), d[f"{name}_elsewhere"]) if again else d[name]
            return graph.mul(whole, d.number("share"))

        dx = graph.sub(scaled, graph.mul(normal, mean("along", lambda: graph.mul(scaled, normal))))
        if self.norm.centred:
            dx = graph.sub(dx, mean("level", lambda: graph.identity(scaled)))
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
    squares = part.sum(made["squares"])
    return {"inverse_rms": (squares / part.all + eps).rsqrt(), "elsewhere": squares - made["squares"]}


def _mean_and_inverse_std(made: Made, part: Part, eps: float) -> Made:
    own = made["own_mean"]
    mean = part.sum(own * part.mine) / part.all
    apart = part.sum(made["apart"] + (own - mean).square() * part.mine)
    inverse_std = (apart / part.all + eps).rsqrt()
    return {"mean": mean, "inverse_std": inverse_std, "elsewhere": apart - made["apart"]}


def _of_rows(d: Drawing, values: Tensor, mode: reduction_mode) -> Tensor:
    return d.graph.reduction(values, mode=mode).set_dim((*next(iter(d.layouts.values())).shape[:-1], 1))


@functools.cache
def _step(name: str, variant: Variant, others: Sequence[str] = ()) -> Step:
    """Defined when it is first needed, which most programs never do."""
    step = defined(name, variant, others)
    pass_by_autograd(step.declaration, step.operator)
    return step


def _run(step: Step, given: Given) -> Made:
    f = step.declaration
    made = step(*(given[name] for name in f.parameters))
    return dict(zip(f.results, made if isinstance(made, tuple) else (made,), strict=True))
