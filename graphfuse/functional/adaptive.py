"""Layer norm of diffusion transformers: with a scale and a shift per sample, or after a gated residual sum.

After such a sum, it may have scale and shift, or weight and bias.
"""

import torch

from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import INPUT, MAYBE_BIAS, MAYBE_WEIGHTS, OUT, RESIDUAL_OUT, SUMMAND
from graphfuse.functional.tensor_parameter import FLOATS, TensorParameter, samples
from graphfuse.op_graph.tensor import Tensor

_SCALE, _SHIFT = (TensorParameter(name, FLOATS, samples("input")) for name in ("scale", "shift"))


def modulated(d: GraphBuilder, normal: Tensor) -> Tensor:
    return d.graph.add(d.graph.mul(normal, d.graph.add(d["scale"], 1.0)), d["shift"])


def _gated_sum(d: GraphBuilder) -> Tensor:
    summand = d.graph.mul(d["input"], d["gate"]) if "gate" in d else d["input"]
    return d.store_read("residual_out", d.graph.add(summand, d["residual"]))


_PLAIN = Variant(
    (INPUT, _SCALE, _SHIFT, OUT), lambda d: d.store("out", modulated(d, d.norm(d["input"], None, centred=True)))
)
_GATE = TensorParameter("gate", FLOATS, samples("input"), optional=True)
_ADDED = Variant(
    (INPUT, SUMMAND, _SCALE, _SHIFT, _GATE, OUT, RESIDUAL_OUT),
    lambda d: d.store("out", modulated(d, d.norm(_gated_sum(d), None, centred=True))),
)
_ADDED_BEFORE_WEIGHT = Variant(
    (INPUT, SUMMAND, MAYBE_WEIGHTS, MAYBE_BIAS, _GATE, OUT, RESIDUAL_OUT),
    lambda d: d.store("out", d.norm(_gated_sum(d), centred=True)),
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
    embedding; (hidden,) or (1, ..., 1, hidden), the same for all rows; input's shape, different for each row. 1 is
    added in float32. out, enable_pdl and errors as for ``rmsnorm``. Returns out, which has no gradient:
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

    gate: as scale, possibly in another of its shapes; None for 1. The sum is normalized unrounded; residual_out
    receives it rounded to its type. residual: of input's shape, any strides; bfloat16, float16 or float32.
    residual_out: of input's shape and these types; it may be residual itself if types agree. Default: residual's type,
    newly allocated. The other arguments and errors as in ``adalayernorm``.

    Returns (out, residual_out).
    """


@function(_ADDED_BEFORE_WEIGHT, "out", "residual_out")
def add_layernorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual_out is residual + input * gate, and out is ``layernorm`` of that sum, in one kernel.

    weight, bias: as in ``layernorm``. The other arguments and errors as in ``add_adalayernorm``; without a gate,
    ``fused_add_layernorm`` is the same in place. Returns (out, residual_out).
    """
