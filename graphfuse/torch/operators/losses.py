"""Cross entropy with gradients: one kernel makes the loss of each row, another the gradient.

Backward keeps the logits, the targets and one number a row.
"""

import torch

from graphfuse.base.errors import VariantPackError
from graphfuse.base.wording import with_article
from graphfuse.functional.losses import OPTIONS, build_loss
from graphfuse.functional.tensor_parameter import INTEGERS, TensorParameter, each_row
from graphfuse.torch.operators.by_rule import ByRule
from graphfuse.torch.operators.computation import STATISTICS, TYPES, gradient_of, type_computed_in
from graphfuse.torch.operators.formula import differentiable

REDUCTIONS = ("mean", "sum", "none")

_ROW = each_row("input")


class CrossEntropy(ByRule):
    """Cross entropy of each row."""

    tensors = (TensorParameter("input", TYPES), TensorParameter("target", INTEGERS, _ROW))
    numbers = ()
    options = tuple(OPTIONS)
    results, statistics = (
        (TensorParameter(name, STATISTICS, _ROW, written=True, new=type_computed_in),) for name in ("loss", "logsumexp")
    )
    kept = ("input", "target", "logsumexp")
    normalized = tensors[0]
    gradients = (gradient_of("input", asked=None), None)

    read_backward = (*tensors, TensorParameter("logsumexp", STATISTICS, _ROW), TensorParameter("dy", STATISTICS, _ROW))
    _forward = staticmethod(build_loss)


_CROSS_ENTROPY = differentiable("cross_entropy_loss", CrossEntropy())


def cross_entropy(
    input: torch.Tensor,  # noqa: A002 - torch's spelling
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Cross entropy of each row's softmax with its target, computed in float32, and reduced over rows.

    input: (..., classes), bfloat16, float16, float32 or float64, any strides: logits with classes last, where torch has
    them second. target: (...), int64 or int32, numbers of classes; class probabilities are not accepted. Rows whose
    target is ignore_index do not count, and have a gradient of 0. Any other target that is not the number of a class
    makes the loss and the row's gradient NaN. reduction: "mean" over the rows that are not ignored (NaN if there are
    none), "sum" or "none". label_smoothing: 0 to 1, the part of the target that all classes share. z_loss: factor of
    each row's squared logarithm of the sum of exponentials, which is added to its loss.

    Returns float32, or float64 for an input of float64. The gradient has input's type, and cannot be differentiated
    again. Raises VariantPackError, and VariantPackTypeError for wrong types, naming the argument, before anything is
    written.
    """
    check_reduction(reduction)
    loss = _CROSS_ENTROPY.run(input, target, ignore_index, label_smoothing, z_loss)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def check_reduction(reduction: object) -> None:
    """Raises VariantPackError if reduction is none of REDUCTIONS."""
    if reduction not in REDUCTIONS:
        raise VariantPackError(f"reduction is {reduction!r}; accepted: {', '.join(map(repr, REDUCTIONS))}")


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` of class numbers, computed by ``cross_entropy``: classes are last, and have no
    weights. ignore_index, reduction, label_smoothing and z_loss as in ``cross_entropy``."""

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
            raise VariantPackError(f"weight is {with_article(type(weight).__name__)}; accepted: None")
        check_reduction(reduction)
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.z_loss = z_loss

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """input: (..., classes). target: (...)."""
        return cross_entropy(input, target, self.ignore_index, self.reduction, self.label_smoothing, self.z_loss)
