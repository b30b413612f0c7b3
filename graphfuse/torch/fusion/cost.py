"""Where inductor's own code is as fast as an operator, by what was measured.

Only such cases count: a site that no case says something about is replaced. All were measured on one H200 in the
inference phase, in bfloat16, which stands for all types of two bytes; in training phase the operators' backward is
faster than inductor's by more than a forward may lose (docs/performance).
"""

import math
from dataclasses import dataclass

import torch

from graphfuse.torch.fusion.meaning import value
from graphfuse.torch.fusion.site import NormSite

REACH = 16
"""A measured case stands for rows and columns up to this factor away, where no other case is nearer."""

DEVICE = "cuda"
BYTES = 2

LAYER = "layer norm"
FOLLOWED = "norm, then residual sum and norm"
"""What was measured: a norm with elementwise operations behind it that no operator computes with it. Inductor makes one
kernel of all, which does not write the norm's result."""


@dataclass(frozen=True)
class MeasuredCase:
    """ours, inductors: microseconds of the medians. record: the file in docs/records."""

    what: str
    rows: int
    columns: int
    ours: float
    inductors: float
    record: str

    @property
    def is_left(self) -> bool:
        return self.inductors <= self.ours

    def __str__(self) -> str:
        return f"{self.inductors:.2f} against {self.ours:.2f} µs for {self.what} at {self.rows} x {self.columns}"


_LAYERNORM, _NORM_ADD_NORM = "layernorm-nvidia-h200.json", "norm-add-norm-nvidia-h200.json"

CASES = (
    MeasuredCase(LAYER, 4096, 1024, 6.1554, 5.9761, _LAYERNORM),
    MeasuredCase(LAYER, 4096, 2048, 10.1972, 14.7779, _LAYERNORM),
    MeasuredCase(LAYER, 4096, 4096, 17.9676, 26.984, _LAYERNORM),
    MeasuredCase(LAYER, 4096, 8192, 34.8677, 39.1415, _LAYERNORM),
    MeasuredCase(LAYER, 32768, 1024, 33.4566, 33.8529, _LAYERNORM),
    MeasuredCase(LAYER, 32768, 2048, 64.1829, 98.583, _LAYERNORM),
    MeasuredCase(LAYER, 32768, 4096, 125.7933, 182.664, _LAYERNORM),
    MeasuredCase(LAYER, 32768, 8192, 250.288, 286.344, _LAYERNORM),
    MeasuredCase(FOLLOWED, 16, 2560, 3.0869, 2.5801, _NORM_ADD_NORM),
    MeasuredCase(FOLLOWED, 4096, 2560, 32.3327, 27.9872, _NORM_ADD_NORM),
    MeasuredCase(FOLLOWED, 16384, 2560, 120.8467, 105.783, _NORM_ADD_NORM),
    MeasuredCase(FOLLOWED, 16, 5376, 4.2819, 4.2375, _NORM_ADD_NORM),
    MeasuredCase(FOLLOWED, 4096, 5376, 66.244, 55.4395, _NORM_ADD_NORM),
    MeasuredCase(FOLLOWED, 16384, 5376, 249.664, 200.076, _NORM_ADD_NORM),
)


def followed(site: NormSite) -> MeasuredCase | None:
    """The case by which inductor is left a norm with what stands behind it."""
    return _of(site, FOLLOWED) if site.left else None


def alone(site: NormSite) -> MeasuredCase | None:
    """The case by which inductor is left a norm for itself."""
    return _of(site, LAYER) if site.form.kind == "layer" and not site.form.residual and not site.form.after else None


def _of(site: NormSite, what: str) -> MeasuredCase | None:
    x, out = value(site.tensors["x"]), value(site.out)
    if x is None or x.device.type != DEVICE or x.dtype.itemsize != BYTES or _is_training(out):
        return None
    *leading, columns = x.shape
    if not isinstance(columns, int):
        return None
    rows = math.prod(leading) if all(isinstance(n, int) for n in leading) else None
    found = _nearest(what, rows, columns)
    return found[0] if found and all(case.is_left for case in found) else None


def _is_training(out: torch.Tensor | None) -> bool:
    return out is not None and out.requires_grad


def _nearest(what: str, rows: int | None, columns: int) -> list[MeasuredCase]:
    """The nearest case within reach. For a number of rows that varies (None): those of all numbers, at the nearest
    number of columns."""
    there = [case for case in CASES if case.what == what]
    if rows is None:
        width = min((case.columns for case in there), key=lambda n: _apart(n, columns))
        return [c for c in there if c.columns == width and _apart(width, columns) <= math.log2(REACH)]
    within = [c for c in there if max(_apart(c.rows, rows), _apart(c.columns, columns)) <= math.log2(REACH)]
    return sorted(within, key=lambda c: _apart(c.rows, rows) + _apart(c.columns, columns))[:1]


def _apart(a: int, b: int) -> float:
    return abs(math.log2(a / b)) if a > 0 and b > 0 else math.inf
