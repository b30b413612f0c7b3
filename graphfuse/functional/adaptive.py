"""Layer norm with a scale and a shift per sample, alone and after a gated residual sum, as in diffusion
transformers."""

import torch

from graphfuse.functional.declaration import Variant
from graphfuse.functional.drawing import Drawing
from graphfuse.functional.function import function
from graphfuse.functional.norms import INPUT, OUT, layer
from graphfuse.functional.tensor_parameter import FLOATS, TensorParameter, like, samples, type_of
from graphfuse.tensor import Tensor

_SCALE, _SHIFT = (TensorParameter(name, FLOATS, samples("input")) for name in ("scale", "shift"))


def _modulated(d: Drawing, x: Tensor) -> Tensor:
    y = d.graph.mul(layer(d, x, None, None), d.graph.add(d["scale"], 1.0))
    return d.graph.add(y, d["shift"])


def _added(d: Drawing) -> None:
    x = d.graph.mul(d["input"], d["gate"]) if "gate" in d else d["input"]
    total = d.graph.add(x, d["residual"])
    d.store("residual_out", d.graph.identity(total))  # an output that is read would be read as stored
    d.store("out", _modulated(d, total))


_PLAIN = Variant((INPUT, _SCALE, _SHIFT, OUT), lambda d: d.store("out", _modulated(d, d["input"])))
_ADDED = Variant(
    (
        INPUT,
        TensorParameter("residual", FLOATS, like("input")),
        _SCALE,
        _SHIFT,
        TensorParameter("gate", FLOATS, samples("input"), optional=True),
        OUT,
        TensorParameter("residual_out", FLOATS, like("input"), written=True, new=type_of("residual")),
    ),
    _added,
)


@function(_PLAIN, "out")
def adalayernorm(
    input: torch.Tensor,  # noqa: A002 - as in the other functions
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """(input - mean) / sqrt(mean((input - mean)^2) + eps) * (1 + scale) + shift over the last dimension, in float32,
    rounded once: adaptive layer norm (Peebles and Xie 2023).

    input: (samples, ..., hidden), bfloat16, float16 or float32, any strides. scale, shift: of these types, any strides,
    each of one of these shapes: (samples, 1, ..., hidden), one row of values for each sample, such as a chunk of an
    embedding; (hidden,) or (1, ..., 1, hidden), the same for all rows; input's shape, others for each row. 1 is added
    in float32. out, enable_pdl and errors as for ``rmsnorm``. Returns out, which has no gradient:
    ``graphfuse.torch.ada_layer_norm`` has one.
    """


@function(_ADDED, "out", "residual_out")
def add_adalayernorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    gate: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual_out is residual + input * gate, and out is ``adalayernorm`` of that sum, in one kernel.

    gate: as scale, in a shape of its own; None for 1. The sum is normalized unrounded; residual_out gets it rounded to
    its type. residual: of input's shape, any strides; bfloat16, float16 or float32. residual_out: of input's shape and
    these types; it may be residual itself where types agree. Default: residual's type, newly allocated. The other
    arguments and errors as of ``adalayernorm``.

    Returns (out, residual_out).
    """
