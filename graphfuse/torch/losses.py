"""Cross entropy with gradients: the loss of each row in one kernel, the gradient in another.

``graphfuse::cross_entropy_loss`` is what users call. With gradients, autograd sees ``cross_entropy_loss_training`` run
instead, and ``cross_entropy_loss_backward`` for the gradient. The logits, the targets and one number a row are kept.
"""

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.dtypes import data_type
from graphfuse.errors import VariantPackError
from graphfuse.functional import sharding
from graphfuse.functional.losses import OPTIONS, gradient_variant, loss_variant
from graphfuse.functional.operator import LIBRARY, pass_by_autograd
from graphfuse.functional.tensor_parameter import FLOATS, INTEGERS, TensorParameter, each_row, like, type_of, types
from graphfuse.runtime import torch_private
from graphfuse.torch.step import defined, made_once, refuse_tangents, refuse_transforms

NAME = "cross_entropy_loss"
REDUCTIONS = ("mean", "sum", "none")

_observed, _any_requires_grad = torch_private.observed(), torch_private.any_requires_grad()
_TYPES, _STATISTICS = FLOATS | types(data_type.DOUBLE), types(data_type.FLOAT, data_type.DOUBLE)


def _statistics(tensors) -> torch.dtype:
    return torch.float64 if tensors["input"].dtype == torch.float64 else torch.float32


_ROW = each_row("input")
_INPUT, _TARGET = TensorParameter("input", _TYPES), TensorParameter("target", INTEGERS, _ROW)
_LOSS, _LOGSUMEXP = (
    TensorParameter(name, _STATISTICS, _ROW, written=True, new=_statistics) for name in ("loss", "logsumexp")
)
_SAVED, _GRAD = (TensorParameter(name, _STATISTICS, _ROW) for name in ("logsumexp", "grad"))
_DINPUT = TensorParameter("dinput", _TYPES, like("input"), written=True, new=type_of("input"))

_BY = tuple(OPTIONS)
_inference = defined(NAME, loss_variant(_INPUT, _TARGET, _LOSS), _BY, _BY)
_training = defined(f"{NAME}_training", loss_variant(_INPUT, _TARGET, _LOSS, _LOGSUMEXP), _BY, _BY)
_gradient = defined(f"{NAME}_backward", gradient_variant(_INPUT, _TARGET, _SAVED, _GRAD, _DINPUT), _BY, _BY)
for _step in (_training, _gradient):
    pass_by_autograd(_step.declaration, _step.operator)
_once = made_once(NAME, _gradient)


class CrossEntropy(torch.autograd.Function):
    """The loss of each row. By the class's name torch calls the node of its graph."""

    @staticmethod
    def forward(ctx, input, target, *options):  # noqa: A002
        loss, logsumexp = _training(input, target, *options)
        ctx.save_for_backward(input, target, logsumexp)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx, grad):
        # The gradient of a sum is one element, expanded.
        values = (*ctx.saved_tensors, grad.contiguous(), *ctx.options)
        made = _once(*values) if torch.is_grad_enabled() else _gradient(*values)
        return made, None, *(None for _ in ctx.options)


_apply_alone = torch_private.single_level_apply(CrossEntropy)


def _below_autograd(keyset, *values):
    sharding.prepare()
    refuse_tangents(NAME, values)
    if torch.is_grad_enabled() and _any_requires_grad(*values):
        refuse_transforms(NAME)
        return CrossEntropy.apply(*values)
    return torch_private.below_autograd(_inference.operator, keyset, *values)


LIBRARY.impl(NAME, _below_autograd, "Autograd", with_keyset=True)


def _losses(*values) -> torch.Tensor:
    if is_dynamo_compiling() or _observed():
        return _inference.operator(*values)
    if torch.is_grad_enabled() and _any_requires_grad(*values):
        return _apply_alone(*values)
    return _inference.function(*values)


def cross_entropy(
    input: torch.Tensor,  # noqa: A002 - torch's spelling
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Cross entropy of each row's softmax with its target, computed in float32, and reduced over rows.

    input: (..., classes), bfloat16, float16, float32 or float64, any strides: logits, the classes last, where torch has
    them second. target: (...), int64 or int32, numbers of classes; class probabilities are not accepted. Rows whose
    target is ignore_index count for nothing, and have a gradient of 0. A target that is neither that nor the number of
    a class makes the loss NaN, and its row's gradient. reduction: "mean" over the rows that are not ignored (NaN if
    there are none), "sum" or "none". label_smoothing: 0 to 1, the part of the target that all classes share. z_loss:
    the factor of each row's squared logarithm of the sum of exponentials, which is added to its loss.

    Returns float32, float64 for an input of float64. The gradient has input's type. It cannot be differentiated again.
    Raises VariantPackError, and VariantPackTypeError for wrong types, naming the argument, before anything is written.
    """
    check_reduction(reduction)
    loss = _losses(input, target, ignore_index, label_smoothing, z_loss)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def check_reduction(reduction: object) -> None:
    """VariantPackError for what is none of REDUCTIONS."""
    if reduction not in REDUCTIONS:
        raise VariantPackError(f"reduction is {reduction!r}; accepted: {', '.join(map(repr, REDUCTIONS))}")


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` of class numbers by ``cross_entropy``, without weights for classes, the classes
    last. ignore_index, reduction, label_smoothing and z_loss as there."""

    def __init__(
        self,
        weight: None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ):
        if weight is not None:
            raise VariantPackError(f"weight is a {type(weight).__name__}; accepted: None")
        check_reduction(reduction)
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.z_loss = z_loss

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """input: (..., classes). target: (...)."""
        return cross_entropy(input, target, self.ignore_index, self.reduction, self.label_smoothing, self.z_loss)
