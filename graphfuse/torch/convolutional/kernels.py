"""Functions for the operations between two convolutions of a video autoencoder, on rows of channels, in one kernel
each.

They are for inference. ``input`` is the result of a convolution without its bias, which is ``addend``.
"""

import torch

from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import INPUT, OUT, WEIGHT
from graphfuse.functional.tensor_parameter import FLOATS, TensorParameter, columns, like

_ADDEND = TensorParameter("addend", FLOATS, columns("input"))
_RESIDUAL = TensorParameter("residual", FLOATS, like("input"), optional=True)
_TOTAL = TensorParameter("total", FLOATS, like("input"), written=True, optional=True)


def _build_norm(d: GraphBuilder) -> None:
    total = d.graph.add(d["input"], d["addend"])
    total = d.graph.add(total, d["residual"]) if "residual" in d else total
    if "total" in d:
        d.store_read("total", total)
    d.store("out", d.graph.swish(d.norm(total)))


@function(Variant((INPUT, _ADDEND, WEIGHT, _RESIDUAL, _TOTAL, OUT), _build_norm), "out")
def biased_rmsnorm_silu(
    input: torch.Tensor,  # noqa: A002 - as in the other functions
    addend: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """SiLU(RMSNorm(input + addend + residual, weight, eps)) over the last dimension.

    input, residual: (..., channels); bfloat16, float16 or float32. addend, weight: (channels). total: receives the sum,
    rounded to its type; the norm reads the sum before rounding; it may be input itself. out: as for ``rmsnorm``.

    Returns out. Errors as in ``rmsnorm``.
    """
