"""What a norm computes, rounding points included, and the operator that computes it."""

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.torch import operators
from graphfuse.torch.formula import Operator


@dataclass(frozen=True)
class Form:
    """A norm over the last dimension, computed in float32 (of float64 in that) and rounded to the type of what is
    normalized.

    kind: "rms", "layer", or "l2", which is x / max(length, eps). weight: "", "w", or "1 + w", added in float32. bias:
    added before anything is rounded. rounded: whether the norm is rounded before it is multiplied by the weight, and
    again after. after: "" or "SiLU", "SiLU * gate", "(1 + scale) + shift", before anything is rounded. residual:
    whether what is normalized is a sum, which is rounded and used elsewhere, too.
    """

    kind: str
    weight: str = ""
    bias: bool = False
    rounded: bool = False
    after: str = ""
    residual: bool = False

    def __str__(self) -> str:
        norm = {"rms": "RMSNorm", "layer": "layer norm", "l2": "L2 normalization"}[self.kind]
        parts = ["residual sum" * self.residual, norm + ", rounded" * self.rounded, f"* ({self.weight})"]
        parts[2] *= bool(self.weight)
        return " ".join(p for p in (*parts, "+ bias" * self.bias, f"-> {self.after}" * bool(self.after)) if p)


@dataclass(frozen=True)
class Serving:
    """An operator of ``graphfuse.torch`` that computes a form. name: ``graphfuse::NAME``. It takes what
    ``operator.tensors`` names, None for a weight that a form has not, and then the epsilon."""

    name: str
    operator: Operator


def _table() -> Iterator[tuple[Form, Serving]]:
    of = operators
    for weight in ("", "w"):
        yield Form("rms", weight), Serving("rms_norm", of.RMS_NORM)
        yield Form("rms", weight, bias=True), Serving("rms_norm_bias", of.RMS_NORM_BIAS)
        yield Form("rms", weight, after="SiLU"), Serving("rms_norm_silu", of.RMS_NORM_SILU)
        yield Form("rms", weight, after="SiLU * gate"), Serving("rms_norm_silu_gate", of.RMS_NORM_SILU_GATE)
        yield Form("rms", weight, residual=True), Serving("add_rms_norm", of.ADD_RMS_NORM)
        yield Form("rms", weight, bias=True, residual=True), Serving("add_rms_norm_bias", of.ADD_RMS_NORM_BIAS)
        yield Form("layer", weight), Serving("layer_norm", of.LAYER_NORM)
        yield Form("layer", weight, bias=True), Serving("layer_norm_bias", of.LAYER_NORM_BIAS)
        yield Form("layer", weight, residual=True), Serving("add_layer_norm", of.ADD_LAYER_NORM)
        yield Form("layer", weight, bias=True, residual=True), Serving("add_layer_norm_bias", of.ADD_LAYER_NORM_BIAS)
    yield Form("rms", "w", rounded=True), Serving("llama_rms_norm", of.LLAMA_RMS_NORM)
    yield Form("rms", "w", rounded=True, residual=True), Serving("llama_add_rms_norm", of.LLAMA_ADD_RMS_NORM)
    yield Form("rms", "1 + w"), Serving("gemma_rms_norm", of.GEMMA_RMS_NORM)
    yield Form("rms", "1 + w", residual=True), Serving("gemma_add_rms_norm", of.GEMMA_ADD_RMS_NORM)
    yield Form("layer", after="(1 + scale) + shift"), Serving("ada_layer_norm", of.ADA_LAYER_NORM)
    yield Form("l2"), Serving("differentiable_normalize", of.NORMALIZE)


OPERATORS: dict[Form, Serving] = dict(_table())
"""Differentiable operators by what they compute. A form that is not here has none."""
