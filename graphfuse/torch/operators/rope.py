"""Queries and keys normalized and rotated, with gradients: both in one kernel forward, a kernel for each backward.

``graphfuse::differentiable_qk_norm_rope`` is what users call. With gradients, autograd sees ``..._training`` run
instead, and ``..._backward`` once for queries and once for keys. All that is given, and one number a head, are kept.
Gradients are by rule: backward rotates back, then it is the backward of RMSNorm.
"""

from dataclasses import dataclass

import torch

from graphfuse.base.errors import VariantPackTypeError
from graphfuse.functional import sharding
from graphfuse.functional.drawing import DrawnGraph
from graphfuse.functional.rope import angle_parameters, angles, draw, either_way, heads_and_angles
from graphfuse.functional.tensor_parameter import TensorParameter, like, type_of
from graphfuse.torch.operators.computation import DWEIGHT, DX, INVERSE_RMS, TYPES, WEIGHT, Computation, X, of_rows
from graphfuse.torch.operators.step import defined, entered, made_once

NAME = "differentiable_qk_norm_rope"

_GIVEN = heads_and_angles(TYPES)
_MADE = tuple(TensorParameter(f"{x}_out", TYPES, like(x), written=True, new=type_of(x)) for x in "qk")
_STATISTICS = tuple(of_rows(f"{x}_inverse_rms", written=True, of=x) for x in "qk")


@dataclass(frozen=True)
class RotatedNorm(Computation):
    """The heads of queries alone, or of keys, normalized and rotated: what the gradients of either are of."""

    is_neox: bool
    tensors = (X, WEIGHT, *angle_parameters("x", TYPES))
    statistics = (INVERSE_RMS,)
    kept = ("x", "weight", "cos_sin_cache", "positions", "inverse_rms")
    gradients = (DX, DWEIGHT, None, None)

    def _forward(self, d: DrawnGraph) -> None:
        y = d.norm(d["x"], statistics=("inverse_rms",))
        d.store("y", d.graph.rotate_pairs(y, *angles(d), interleaved=not self.is_neox))


_NUMBERS, _BY = ("eps", "is_neox"), ("is_neox",)
_inference = defined(NAME, either_way((*_GIVEN, *_MADE), draw), _NUMBERS, _BY, seen=True)
_training = defined(f"{NAME}_training", either_way((*_GIVEN, *_MADE, *_STATISTICS), draw), _NUMBERS, _BY)
_asked = ("is_neox", DX.asked, DWEIGHT.asked)
_gradients = defined(f"{NAME}_backward", {(neox,): RotatedNorm(neox).backward for neox in (True, False)}, _asked, _BY)
_once = made_once(NAME, _gradients)


class QKNormRopeFunction(torch.autograd.Function):
    """Both results. By the class's name torch calls the node of its graph."""

    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos_sin_cache, positions, eps, is_neox):
        needs_q, needs_k, needs_q_weight, needs_k_weight, *_, needs_eps, _ = ctx.needs_input_grad
        if needs_eps:
            raise VariantPackTypeError("eps is a tensor that requires a gradient; accepted: a number")
        given = q, k, q_weight, k_weight, cos_sin_cache, positions
        q_out, k_out, *inverse_rms = _training(*given, eps, is_neox)
        ctx.save_for_backward(*given, *inverse_rms)
        ctx.is_neox = is_neox
        ctx.set_materialize_grads(False)
        asked = (needs_q or needs_q_weight, q_out), (needs_k or needs_k_weight, k_out)
        ctx.mark_non_differentiable(*(y for needed, y in asked if not needed))
        return q_out, k_out

    @staticmethod
    def backward(ctx, dq_out, dk_out):
        q, k, q_weight, k_weight, *angles, q_inverse, k_inverse = ctx.saved_tensors
        needs_q, needs_k, needs_q_weight, needs_k_weight, *_ = ctx.needs_input_grad
        run = _once if torch.is_grad_enabled() else _gradients

        def gradients(dy, x, weight, inverse_rms, *needed):
            if dy is None or not any(needed):  # nobody used the result
                return None, None
            # The gradient of a sum is one element, expanded.
            dy = dy if dy.stride(-1) == 1 else dy.contiguous()
            return run(dy, x, weight, *angles, inverse_rms, ctx.is_neox, *needed)

        dq, dq_weight = gradients(dq_out, q, q_weight, q_inverse, needs_q, needs_q_weight)
        dk, dk_weight = gradients(dk_out, k, k_weight, k_inverse, needs_k, needs_k_weight)
        return dq, dk, dq_weight, dk_weight, None, None, None, None


# Of queries, keys and weights there are gradients.
_run = entered(NAME, _inference, QKNormRopeFunction, QKNormRopeFunction, of=4)


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
    of these types; both None for 1. cos_sin_cache: (max_position, rotary_dim), of any of these types, positions: (...),
    is_neox: as of ``graphfuse.functional.qk_norm_rope``.

    Returns new tensors like q and k. Gradients of q, k and the weights have their types; backward needs all that is
    given, and one number a head. cos_sin_cache and eps have no gradient: that of a cos_sin_cache that requires one is
    None. A position that the cache does not have makes the gradients of the token's heads and of the weights NaN, as it
    makes the results. Gradients cannot be differentiated again. Errors as of ``rms_norm``.
    """
    return _run(q, k, q_weight, k_weight, cos_sin_cache, positions, eps, is_neox)


class QKNormRope(torch.nn.Module):
    """``qk_norm_rope`` with weights of its own, q_weight and k_weight, (head_dim,), ones at first; None if not
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
        sharding.prepare()  # a compiled model makes no call that would

    def reset_parameters(self) -> None:
        """Ones."""
        for weight in self.parameters(recurse=False):
            torch.nn.init.ones_(weight)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k: (..., heads, head_dim). Returns tensors like q and k."""
        return qk_norm_rope(q, k, self.q_weight, self.k_weight, cos_sin_cache, positions, self.eps, self.is_neox)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, eps={self.eps}, is_neox={self.is_neox}, elementwise_affine={self.elementwise_affine}"
