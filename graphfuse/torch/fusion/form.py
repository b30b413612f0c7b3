"""What a norm computes, rounding points included, and the operator that computes it."""

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.torch.operators import declared as operators
from graphfuse.torch.operators import unit_norm
from graphfuse.torch.operators.formula import Operator
from graphfuse.torch.operators.norm_add_norm import NormAddNorm

ADAPTED = "(1 + scale) + shift"

_NAMES = {"rms": "RMSNorm", "layer": "layer norm", "l2": "L2 normalization", "unit": "L2 normalization * number"}


@dataclass(frozen=True)
class Form:
    """A norm of rows, computed in float32 (of float64 in that) and rounded to the type of what is normalized.

    kind: "rms", "layer", "l2", which is x / max(length, eps), or "unit", which is that times a number, each step
        rounded.
    weight: "", "w", or "1 + w", added in float32.
    bias: added before anything is rounded.
    rounded: whether the norm is rounded before it is multiplied by the weight, and again after; of a "unit" norm,
        whether the length is rounded.
    before: "" or "* SiLU(gate)", what x is multiplied by, which is not rounded.
    after: "" or "SiLU", "SiLU * gate", "(1 + scale) + shift", "* SiLU(gate)", "* sigmoid(gate)"; before anything is
        rounded, unless `rounded` or the kind says otherwise.
    residual: whether what is normalized is a sum, which is rounded and used elsewhere, too.
    inner: whether a term of that sum is a norm of the same weight and rounding.
    unrounded: whether that sum is normalized before it is rounded, and its term x, times a gate of each sample or not,
        is not rounded either.
    """

    kind: str
    weight: str = ""
    bias: bool = False
    rounded: bool = False
    after: str = ""
    residual: bool = False
    before: str = ""
    inner: bool = False
    unrounded: bool = False

    def __str__(self) -> str:
        norm = _NAMES[self.kind]
        parts = [
            "residual sum" * self.residual + ", unrounded" * self.unrounded,
            norm + ", rounded" * self.rounded,
            f"* ({self.weight})",
        ]
        parts[0] = f"{norm} -> residual sum ->" if self.inner else parts[0]
        parts[2] *= bool(self.weight)
        after = self.after if self.after.startswith("*") else f"-> {self.after}" * bool(self.after)
        before = f"(x {self.before}) ->" * bool(self.before)
        return " ".join(p for p in (before, *parts, "+ bias" * self.bias, after) if p)


@dataclass(frozen=True)
class Serving:
    """An operator of ``graphfuse.torch`` that computes a form. name: ``graphfuse::NAME``. It takes what
    ``operator.tensors`` names, None for a weight that a form has not, and then `numbers`."""

    name: str
    operator: Operator
    numbers: tuple[str, ...] = ("eps",)


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
    yield Form("layer", after=ADAPTED), Serving("ada_layer_norm", of.ADA_LAYER_NORM)
    added = Form("layer", after=ADAPTED, residual=True, unrounded=True)
    yield added, Serving("add_ada_layer_norm", of.ADD_ADA_LAYER_NORM)
    yield Form("l2"), Serving("differentiable_normalize", of.NORMALIZE)
    yield from _gated()
    yield from _norms_around_sums()
    for after, silu in (("", ""), ("SiLU", "_silu")):
        for weight, bias in (("", False), ("w", False), ("w", True)):
            for rounded in ("", "rounded_"):
                name = f"{rounded}unit_norm{silu}"
                form = Form("unit", weight, bias, rounded=bool(rounded), after=after)
                yield form, Serving(name, of.OF_MODELS[name], unit_norm.NUMBERS)


_KINDS = (("", {"weight": "w"}), ("llama_", {"weight": "w", "rounded": True}), ("gemma_", {"weight": "1 + w"}))


def _gated() -> Iterator[tuple[Form, Serving]]:
    served = {
        "times_silu": {"after": "* SiLU(gate)"},
        "times_sigmoid": {"after": "* sigmoid(gate)"},
        "of_gated": {"before": "* SiLU(gate)"},
    }
    for prefix, kind in (*_KINDS, ("", {})):
        for suffix, gate in served.items():
            name = f"{prefix}rms_norm_{suffix}"
            yield Form("rms", **kind, **gate), Serving(name, operators.OF_MODELS[name])


def _norms_around_sums() -> Iterator[tuple[Form, Serving]]:
    for prefix, kind in (*_KINDS, ("", {})):
        name = f"{prefix}rms_norm_add_norm"
        served = Serving(name, operators.OF_MODELS[name], NormAddNorm.numbers)
        yield Form("rms", **kind, residual=True, inner=True), served


OPERATORS: dict[Form, Serving] = dict(_table())
"""Differentiable operators by what they compute. A form that is not here has none."""
