"""A norm in a graph, with what an operator computes with it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from graphfuse.torch.fusion.form import OPERATORS, Form, Serving
from graphfuse.torch.fusion.meaning import value

Number = int | float | torch.SymFloat | None


@dataclass(frozen=True)
class NormSite:
    """A norm in a graph.

    out: the node that has its result.
    tensors: what it is computed from, by the names of the operator's arguments.
    eps: the epsilon, which may be symbolic.
    total: the node of a residual sum, which the operator makes as well.
    dim: the dimension of x that rows lie along, counted from the last.
    groups: of how many equal parts of a row each is normalized by itself.
    factor: of a "unit" norm, the number.
    inner: the norm that is a term of the residual sum, where the operator computes that, too.
    begun: the node that has the norm before what follows it, None for `out`; its place in the model is the site's.
    """

    form: Form
    out: Node
    tensors: dict[str, Node]
    eps: Number
    total: Node | None = None
    dim: int = -1
    groups: int = 1
    factor: float | None = None
    inner: "NormSite | None" = None
    begun: Node | None = None

    @property
    def serving(self) -> Serving:
        return OPERATORS[self.form]

    @property
    def is_training(self) -> bool:
        """True if its result has gradients."""
        return bool(value(self.out).requires_grad)

    @property
    def numbers(self) -> dict[str, Number]:
        """Numbers that operators take, by name."""
        if self.inner is not None:
            return {"eps": self.inner.eps, "next_eps": self.eps}
        return {"eps": self.eps, "factor": self.factor, "dim": self.dim}

    def reading(self, new: Mapping[Node, Node]) -> "NormSite":
        """The site where other nodes have taken the place of some that it reads."""
        inner = self.inner and self.inner.reading(new)
        return replace(self, tensors={name: new.get(t, t) for name, t in self.tensors.items()}, inner=inner)

    @property
    def alone(self) -> "NormSite":
        """Without the residual sum."""
        if self.total is None:
            return self
        if self.inner is not None:
            return self.parts[1].alone
        of_sum = ("residual", "gate") if self.form.unrounded else ("residual",)
        tensors = {n: t for n, t in self.tensors.items() if n not in of_sum} | {"x": self.total}
        form = replace(self.form, residual=False, unrounded=False)
        return replace(self, form=form, tensors=tensors, total=None)

    @property
    def parts(self) -> tuple["NormSite", ...]:
        """The sites that it is made of: one before a residual sum and that with the sum, or itself."""
        if self.inner is None:
            return (self,)
        given = {"x": self.inner.out, "residual": self.tensors["residual"]}
        weight = {"weight": self.tensors["next_weight"]} if "next_weight" in self.tensors else {}
        form = replace(self.form, inner=False)
        return self.inner, replace(self, form=form, tensors=given | weight, inner=None)
