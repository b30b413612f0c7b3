"""Cross entropy of rows of logits with class indices as targets, and its gradient."""

import torch

from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import FLOAT, FLOATS, INTEGERS, TensorParameter, each_row, like, type_of

OPTIONS = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
"""Options of a loss with their defaults. They are part of its kernels."""

INPUT = TensorParameter("input", FLOATS)
TARGET = TensorParameter("target", INTEGERS, each_row("input"))


def build_loss(d: GraphBuilder) -> None:
    """Builds the loss of each row, and what its gradient requires, if that is an argument."""
    loss, logsumexp = d.graph.cross_entropy(d["input"], d.of_rows("target"), **d.options)
    d.store("loss", loss, of_rows=True)
    if "logsumexp" in d:
        d.store("logsumexp", logsumexp, of_rows=True)


def _build_gradient(d: GraphBuilder) -> None:
    dloss, target, logsumexp = (d.of_rows(name) for name in ("grad", "target", "logsumexp"))
    d.store("dinput", d.graph.cross_entropy_backward(dloss, d["input"], target, logsumexp, **d.options))


_ROW = each_row("input")
_LOSS = Variant(
    (
        INPUT,
        TARGET,
        *(TensorParameter(name, FLOAT, _ROW, written=True, new=torch.float32) for name in ("loss", "logsumexp")),
    ),
    build_loss,
)
_GRADIENT = Variant(
    (
        INPUT,
        TARGET,
        *(TensorParameter(name, FLOAT, _ROW) for name in ("logsumexp", "grad")),
        TensorParameter("dinput", FLOATS, like("input"), written=True, new=type_of("input")),
    ),
    _build_gradient,
)


@function(_LOSS, "loss", "logsumexp", chosen_by=tuple(OPTIONS))
def cross_entropy(
    input: torch.Tensor,  # noqa: A002 - torch's spelling
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss: torch.Tensor | None = None,
    logsumexp: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of each row's softmax with its target, and the logarithm of the row's sum of exponentials.

    input: (..., columns), bfloat16, float16 or float32, any strides: logits, the classes last. target: (...), int64 or
    int32, numbers of columns. A row whose target is ignore_index has a loss of 0. If its target is neither that nor the
    number of a column, the loss is NaN, and no memory outside the row is read. label_smoothing: 0 to 1, the part of the
    target that all columns share. z_loss: the factor of logsumexp^2, which is added to the loss. These three numbers
    are part of the kernel, so each choice of them is compiled once. loss, logsumexp: (...), float32, newly allocated if
    None. enable_pdl and errors as in ``rmsnorm``.

    Returns (loss, logsumexp), not reduced over rows. Autograd does not record the call;
    ``graphfuse.torch.cross_entropy`` is differentiable.
    """


@function(_GRADIENT, "dinput", chosen_by=tuple(OPTIONS))
def cross_entropy_backward(
    input: torch.Tensor,  # noqa: A002
    target: torch.Tensor,
    logsumexp: torch.Tensor,
    grad: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dinput: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """The gradient of ``cross_entropy`` with respect to input.

    input, target, ignore_index, label_smoothing, z_loss: arguments of the loss. logsumexp: its result. grad: (...),
    float32, the gradient of each row's loss. dinput: of input's shape, bfloat16, float16 or float32, any strides; it
    may be input itself if types agree. Default: input's type, newly allocated. Ignored rows become 0, rows with an
    invalid target NaN. enable_pdl and errors as in ``rmsnorm``.

    Returns dinput.
    """
