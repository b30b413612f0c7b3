"""Softmax, its logarithm, log-sum-exp and L2 normalization, over the last dimension."""

import torch

from graphfuse.base.enums import reduction_mode
from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import INPUT, OUT
from graphfuse.functional.tensor_parameter import FLOATS, TensorParameter, rows
from graphfuse.op_graph.tensor import Tensor

_PER_ROW = TensorParameter("out", FLOATS, rows("input"), written=True, new=torch.float32)


def of_unit_length(d: GraphBuilder, x: Tensor) -> Tensor:
    """x divided by the length of each row, which is also written to the argument "length" if there is one."""
    length = d.by_rows(x, reduction_mode.NORM2)
    if "length" in d:
        d.store("length", length)
    return d.graph.div(x, d.graph.max(length, d.number("eps")))


_SOFTMAX = Variant((INPUT, OUT), lambda d: d.store("out", d.graph.softmax(d["input"])))
_LOG_SOFTMAX = Variant((INPUT, OUT), lambda d: d.store("out", d.graph.log_softmax(d["input"])))
_LOGSUMEXP = Variant((INPUT, _PER_ROW), lambda d: d.store("out", d.graph.logsumexp(d["input"])))
_NORMALIZE = Variant((INPUT, OUT), lambda d: d.store("out", of_unit_length(d, d["input"])))


@function(_SOFTMAX, "out")
def softmax(
    input: torch.Tensor,  # noqa: A002 - as in the other functions
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """e^input over its sum along the last dimension, in float32, rounded once.

    The largest element of each row is subtracted first, so that nothing overflows. -infinity becomes 0. A row of
    -infinity alone becomes NaN, and so does a row with infinity or NaN, as in torch.

    input: (..., columns), bfloat16, float16 or float32, any strides. out: of input's shape, any strides; of these
    types, or float8_e4m3fn or float8_e5m2, saturating; it may be input itself if types agree. Default: input's
    type, newly allocated. enable_pdl and errors as in ``rmsnorm``. Returns out, which has no gradient:
    ``graphfuse.torch.softmax`` has one.
    """


@function(_LOG_SOFTMAX, "out")
def log_softmax(
    input: torch.Tensor,  # noqa: A002
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """The logarithm of ``softmax``, accurate even if that is close to 0. -infinity remains; arguments, infinities and
    errors as in ``softmax``. Returns out."""


@function(_LOGSUMEXP, "out")
def logsumexp(
    input: torch.Tensor,  # noqa: A002
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """log(sum(e^input)) along the last dimension, which is kept with extent 1, computed relative to the row's largest
    element.

    A row of -infinity alone gives -infinity, a row with infinity gives infinity, and NaN stays NaN, as in torch.
    input, enable_pdl and errors as in ``softmax``. out: (..., 1), bfloat16, float16 or float32, the default, newly
    allocated. Returns out.
    """


@function(_NORMALIZE, "out")
def normalize(
    input: torch.Tensor,  # noqa: A002
    eps: float = 1e-12,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """input / max(sqrt(sum(input^2)), eps) over the last dimension, in float32, rounded once:
    ``torch.nn.functional.normalize``. Arguments and errors as in ``softmax``. Returns out."""
