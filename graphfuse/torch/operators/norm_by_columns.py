"""A norm whose columns are split over ranks: two graphs, and between them a sum over ranks of numbers of each row.

The first graph makes each rank's part of a row's statistics from its columns. The second reads the statistics of whole
rows. RMSNorm sums one number a row over ranks, the sum of squares. Layer norm sums two, one after the other: the sum,
and the sum of squared distances from the mean of whole rows. The latter is computed from the distances from the rank's
own mean (Chan, Golub and LeVeque 1983), so nothing cancels. Backward sums one number a row, and two for layer norm.

If the second graph has no other sum, it computes its rank's part of a sum again, and adds that of the other ranks. It
reads x anyway, and engines fuse operations around a reduction.

Backward is by rule up to the normalized values. The formula of their gradient is written here, as no rule serves. The
rule of a norm is for whole rows. The rules of its steps cube the inverse RMS, which float32 may not hold, and compute
the second sum of a layer norm from the first sum of all ranks.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphfuse.base.enums import reduction_mode
from graphfuse.functional.declaration import RankColumns, Variant
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import TensorParameter, like, rows
from graphfuse.op_graph.tensor import Tensor
from graphfuse.torch.operators import by_rule
from graphfuse.torch.operators.computation import DTOTAL, STATISTICS, TYPES, Y, of_rows
from graphfuse.torch.operators.graph_operator import GraphOperator, declare, define_operator
from graphfuse.torch.operators.norm import Norm

Given = Mapping[str, object]
Made = Mapping[str, torch.Tensor | None]

_SUMMED = TensorParameter("total", TYPES, like("x"))  # as the first graph stored it
_SQUARES, _OWN_MEAN, _APART = (of_rows(name, written=True) for name in ("squares", "own_mean", "apart"))
# The part of the sum of squares that other ranks have.
_ELSEWHERE = of_rows("elsewhere")
# Sums of dy * normal, and of dy, over a row: with them dx is made orthogonal to normal and to a constant.
_ALONG, _LEVEL = (of_rows(name, written=True) for name in ("along", "level"))


@dataclass(frozen=True)
class NormByColumns:
    """Graphs of a norm whose columns are split over ranks."""

    norm: Norm

    def forward(self, name: str, given: Given, part: RankColumns) -> Made:
        """Results of forward, as ``Columns`` defines them."""
        norm = self.norm
        made = _run(_step(f"{name}_measured", self.measured, ()), given)
        join = _mean_and_inverse_std if norm.centred else _inverse_rms
        known = {**given, **made, **join(made, part, given["eps"]), "share": 1 / part.all}
        return known | _run(_step(f"{name}_finished", self.finished, ("eps", "share")), known)

    def backward(self, name: str, given: Given, part: RankColumns) -> Made:
        """Results of backward, as ``Columns`` defines them."""
        known = dict.fromkeys(a.name for a in self._joined) | given | {"share": 1 / part.all}
        if given["needs_dx"] or given.get("needs_dresidual"):
            again = not any(given[a.asked] for a in self.norm.gradients if a.over_rows)
            for key, own in _run(_step(f"{name}_measured", self.measured_backward, ()), given).items():
                known[key] = part.sum(own) - own if again else part.sum(own)
        others = (*(a.asked for a in self.norm.gradients), "share")
        return _run(_step(f"{name}_finished", self.finished_backward, others), known)

    @functools.cached_property
    def measured(self) -> Variant:
        """Graph of the residual sum, and of the parts of the statistics that this rank's columns give."""
        made = (_OWN_MEAN, _APART) if self.norm.centred else (_SQUARES,)
        summands = [a for a in self.norm.tensors if a.name in ("x", "residual")]
        return Variant((*summands, *self.norm.results[1:], *made), self._measure)

    @functools.cached_property
    def finished(self) -> Variant:
        x, *others = (a for a in self.norm.tensors if a.name != "residual")
        read = (x, *(_SUMMED,) * self.norm.residual, *others)
        return Variant((*read, *(of_rows("mean"),) * self.norm.centred, _ELSEWHERE, Y), self._finish)

    @functools.cached_property
    def measured_backward(self) -> Variant:
        made = (_ALONG, *(_LEVEL,) * self.norm.centred)
        return Variant((*self.norm.read_backward, *made), self._measure_backward)

    @functools.cached_property
    def finished_backward(self) -> Variant:
        read = (*self.norm.read_backward, *(DTOTAL,) * self.norm.residual, *self._joined)
        return Variant((*read, *self.norm.gradients), self._finish_backward)

    @property
    def _joined(self) -> tuple[TensorParameter, ...]:
        """Sums over whole rows; or the other ranks' part of them, if this rank's own part is computed again."""
        names = ("along", "level")[: 1 + self.norm.centred]
        return tuple(TensorParameter(name, STATISTICS, rows("x"), optional=True) for name in names)

    def _measure(self, d: GraphBuilder) -> None:
        squares, mean = self._squares(d, self.norm.summed(d))
        d.store(self.measured.arguments[-1].name, squares)
        if mean is not None:
            d.store_read("own_mean", mean)

    def _squares(self, d: GraphBuilder, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum of squares of this rank's columns, and None; for layer norm, of their distances from their own mean, and
        that mean."""
        mean = d.by_rows(x, reduction_mode.AVG) if self.norm.centred else None
        centred = x if mean is None else d.graph.sub(x, mean)
        return d.by_rows(d.graph.mul(centred, centred)), mean

    def _finish(self, d: GraphBuilder) -> None:
        graph, x = d.graph, d["total" if self.norm.residual else "x"]
        squares = graph.add(self._squares(d, x)[0], d["elsewhere"])
        inverse = graph.rsqrt(graph.add(graph.mul(squares, d.number("share")), d.number("eps")))
        normal = graph.mul(graph.sub(x, d["mean"]) if self.norm.centred else x, inverse)
        scale, rounded = d.weight(zero_centred=self.norm.zero_centred), "x" if self.norm.rounded else None
        self.norm.finish(d, d.scaled(normal, scale, d.get("bias"), rounded))

    def _measure_backward(self, d: GraphBuilder) -> None:
        backward, y = self._backward_by_rule(d)
        grad = backward.gradients([y])[y]
        d.store("along", d.by_rows(d.graph.mul(grad, backward.walk.value(y))))
        if self.norm.centred:
            d.store("level", d.by_rows(grad))

    def _finish_backward(self, d: GraphBuilder) -> None:
        graph, (backward, y) = d.graph, self._backward_by_rule(d)
        sums = [name for name in backward.requested.values() if name in ("dx", "dresidual")]
        wanted = {t: name for t, name in backward.requested.items() if name not in sums}
        found = backward.gradients([*wanted, y] if sums else wanted)
        gradients = {wanted[t]: found[t] for t in wanted}
        if sums:
            scaled, normal = found[y], backward.walk.value(y)
            again = not any(a.name in d for a in self.norm.gradients if a.over_rows)

            def mean(name: str, own: Callable[[], Tensor]) -> Tensor:
                whole = graph.add(d.by_rows(own()), d[name]) if again else d[name]
                return graph.mul(whole, d.number("share"))

            dx = graph.sub(scaled, graph.mul(normal, mean("along", lambda: graph.mul(scaled, normal))))
            if self.norm.centred:
                dx = graph.sub(dx, mean("level", lambda: graph.identity(scaled)))
            dx = graph.mul(dx, d["inverse_std" if self.norm.centred else "inverse_rms"])
            dx = graph.add(dx, d["dtotal"]) if "dtotal" in d else dx
            gradients |= dict.fromkeys(sums, dx)
        by_rule.store(d, gradients)

    def _backward_by_rule(self, d: GraphBuilder) -> tuple[by_rule.BackwardByRule, Tensor]:
        """Gradients by rule, and the norm without weight and bias, at which the rules end."""
        norm, kind = self.norm, {"centred": self.norm.centred}

        def draw(d: GraphBuilder) -> None:
            normal = d.norm(norm.summed(d), None, **kind, statistics=[a.name for a in norm.statistics])
            norm.finish(d, d.scaled(normal, d.weight(zero_centred=norm.zero_centred), d.get("bias"), None))

        backward = by_rule.BackwardByRule(d, norm, draw)
        (y,) = (node.outputs["Y"] for node in backward.walk.forward.nodes if "Y" in node.op.recompute)
        return backward, y


def _inverse_rms(made: Made, part: RankColumns, eps: float) -> Made:
    squares = part.sum(made["squares"])
    return {"inverse_rms": (squares / part.all + eps).rsqrt(), "elsewhere": squares - made["squares"]}


def _mean_and_inverse_std(made: Made, part: RankColumns, eps: float) -> Made:
    own = made["own_mean"]
    mean = part.sum(own * part.mine) / part.all
    apart = part.sum(made["apart"] + (own - mean).square() * part.mine)
    inverse_std = (apart / part.all + eps).rsqrt()
    return {"mean": mean, "inverse_std": inverse_std, "elsewhere": apart - made["apart"]}


_step = functools.cache(lambda *declaration: define_operator(declare(*declaration)))
"""Defines a step when it is first needed. Most programs need none."""


def _run(step: GraphOperator, given: Given) -> Made:
    f = step.declaration
    made = step(*(given[name] for name in f.parameters))
    return dict(zip(f.results, made if isinstance(made, tuple) else (made,), strict=True))
