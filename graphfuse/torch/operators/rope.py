"""Normalization and rotation of queries and keys, with gradients: one kernel in forward, one for q and one for k in
backward.

Backward keeps all arguments, and one number a head. Gradients are by rule: backward rotates back, and is then the
backward of RMSNorm.
"""

from dataclasses import replace

import torch

from graphfuse.functional import sharding
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import of_keys
from graphfuse.functional.rope import build_across, build_heads_together, build_per_head, heads_and_angles, rotated
from graphfuse.functional.tensor_parameter import TensorParameter, like, type_of
from graphfuse.torch.operators.by_rule import ByRule
from graphfuse.torch.operators.computation import TYPES, gradient_of, of_rows
from graphfuse.torch.operators.formula import differentiable
from graphfuse.torch.operators.paired_computation import PairedComputation


class RotatedNorm(ByRule):
    """Normalization and rotation of the heads of queries, or of keys, with their gradients. x: "q" or "k"."""

    given = {a.name: a for a in heads_and_angles(TYPES)}

    def __init__(self, x: str):
        self.x = x
        self.tensors = tuple(self.given[name] for name in (x, f"{x}_weight", "cos_sin_cache", "positions"))
        self.results = (TensorParameter(f"{x}_out", TYPES, like(x), written=True, new=type_of(x)),)
        self.statistics = (of_rows(f"{x}_inverse_rms", written=True, of=x),)
        self.kept = (*(a.name for a in self.tensors), f"{x}_inverse_rms")
        self.gradients = gradient_of(x), gradient_of(f"{x}_weight", over_rows="sum"), None, None
        self.normalized = TensorParameter(x, TYPES)

    incoming = property(lambda self: (f"d{self.x}_out",))

    @property
    def read_backward(self) -> tuple[TensorParameter, ...]:
        dy, *others = super().read_backward
        return *others, TensorParameter(f"d{self.x}_out", TYPES, like(self.x), optional=True)

    def _forward(self, d: GraphBuilder) -> None:
        y = d.norm(d[self.x], f"{self.x}_weight", statistics=(f"{self.x}_inverse_rms",))
        d.store(f"{self.x}_out", rotated(d, y))


class RotatedNormAcross(RotatedNorm):
    """``RotatedNorm`` with all heads of a token normalized together."""

    given = {a.name: a for a in heads_and_angles(TYPES, across=True)}

    def __init__(self, x: str):
        super().__init__(x)
        self.statistics = (replace(*self.statistics, shape=lambda shapes: ((*shapes[x][:-2], 1),)),)
        self.normalized = replace(self.normalized, row_axes=2)

    def _forward(self, d: GraphBuilder) -> None:
        build_heads_together(d, self.x)

    def _backward(self, d: GraphBuilder) -> None:
        with d.of_rank(d.rank - 1):
            super()._backward(d)


class RotatedHeads(PairedComputation):
    """Normalization and rotation of queries and keys together. Option is_neox: which columns are pairs."""

    options = ("is_neox",)
    each, rows = (RotatedNorm("q"), RotatedNorm("k")), staticmethod(of_keys)
    _forward = staticmethod(build_per_head)


class RotatedHeadsAcross(RotatedHeads):
    """``RotatedHeads`` with all heads of a token normalized together."""

    each = RotatedNormAcross("q"), RotatedNormAcross("k")
    _forward = staticmethod(build_across)


_run = differentiable("differentiable_qk_norm_rope", RotatedHeads()).run
_run_across = differentiable("differentiable_qk_norm_rope_across_heads", RotatedHeadsAcross()).run


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    eps: float = 1e-6,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of each head of queries and keys, then rotary position embedding, computed in float32, rounded once.

    q: (..., heads, head_dim), bfloat16, float16, float32 or float64, any strides: slices of a packed tensor are read
    where they are. k: as q, with its own number of heads. q_weight, k_weight: (head_dim,), or (heads, head_dim), of any
    of these types; both None for 1. cos_sin_cache: (max_position, rotary_dim), of any of these types. positions: (...).
    is_neox and all else as in ``graphfuse.functional.qk_norm_rope``.

    Returns new tensors like q and k. Gradients of q, k and the weights have their types. Backward needs all arguments,
    and one number a head. eps and cos_sin_cache have no gradient: for a cos_sin_cache that requires one, it is None. A
    position that the cache lacks makes the results NaN, and the gradients of the token's heads and of the weights.
    Gradients cannot be differentiated again. Errors as in ``rms_norm``.
    """
    return _run(q, k, q_weight, k_weight, cos_sin_cache, positions, eps, is_neox)


def qk_norm_rope_across_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    eps: float = 1e-6,
    is_neox: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``qk_norm_rope`` with RMSNorm over all heads of a token together, as in
    ``graphfuse.functional.qk_norm_rope_across_heads``.

    q_weight, k_weight: (heads * head_dim,) of q's and k's heads, both None for 1. is_neox: False by default. All other
    arguments, gradients and errors are as in ``qk_norm_rope``; one number a token is kept.
    """
    return _run_across(q, k, q_weight, k_weight, cos_sin_cache, positions, eps, is_neox)


class QKNormRope(torch.nn.Module):
    """``qk_norm_rope`` with its own weights q_weight and k_weight, (head_dim,), initially ones; None if not
    elementwise_affine."""

    def __init__(
        self,
        head_dim: int,
        eps: float = 1e-6,
        is_neox: bool = True,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.eps, self.is_neox, self.elementwise_affine = head_dim, eps, is_neox, elementwise_affine
        for name in ("q_weight", "k_weight"):
            made = torch.nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype)) if elementwise_affine else None
            self.register_parameter(name, made)
        self.reset_parameters()
        sharding.prepare()  # now, as calls of a compiled model do not do it

    def reset_parameters(self) -> None:
        """Sets the weights to ones."""
        for weight in self.parameters(recurse=False):
            torch.nn.init.ones_(weight)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k: (..., heads, head_dim). Returns tensors like q and k."""
        return qk_norm_rope(q, k, self.q_weight, self.k_weight, cos_sin_cache, positions, self.eps, self.is_neox)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, eps={self.eps}, is_neox={self.is_neox}, elementwise_affine={self.elementwise_affine}"
