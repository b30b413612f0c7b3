"""What is measured of what stands around norms, as data: functions of rows, sizes, with a backward or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS, ROWS = 4096, (1024, 4096, 32768)
FORWARD, BOTH = "forward", "forward + backward"
BLOCK, RATE, CAP = 128, 0.1, 30.0
"""Columns that have a scale of FP8 in common, the share that dropout drops, and what caps logits."""

TIMING_SECONDS = 60.0
"""At most, of all ways of a case."""


@dataclass(frozen=True)
class RowFunction:
    """A function of `follower_functions`, by its name there.

    title: in tables.
    given: names of the tensors that it reads.
    dtype: of those that are not of float32 for good.
    has_gradients: whether it is measured with its backward, too.
    is_dynamic: whether the number of rows varies.
    drops: whether it drops elements by chance.
    """

    name: str
    title: str
    given: str
    dtype: str = "bfloat16"
    has_gradients: bool = True
    is_dynamic: bool = False
    drops: bool = False


@dataclass(frozen=True)
class FollowerCase:
    """A function at one size, with its backward or without."""

    function: str
    work: str
    rows: int
    columns: int = COLUMNS

    def __str__(self) -> str:
        return f"{self.function}/{'both' if self.work == BOTH else self.work}/{self.rows}x{self.columns}"


def _functions() -> tuple[RowFunction, ...]:
    of, n = RowFunction, "RMSNorm"
    no = {"has_gradients": False}
    return (
        of("rms", n, "x w"),
        of("rms-half", f"{n} in float16", "x w", dtype="float16"),
        of("rms-float-weight", f"{n} with a weight in float32", "x W"),
        of("rms-gelu", f"{n} → GELU", "x w"),
        of("rms-gelu-tanh", f"{n} → GELU by tanh", "x w"),
        of("rms-gelu-dynamic", f"{n} → GELU, rows vary", "x w", is_dynamic=True),
        of("rms-relu2", f"{n} → ReLU²", "x w"),
        of("rms-tanh", f"{n} → tanh", "x w"),
        of("rms-silu", f"{n} → SiLU", "x w"),
        of("rms-swiglu", f"SiLU({n}) · gate", "x g w"),
        of("rms-fp8", f"{n} → FP8, static", "x w q", **no),
        of("rms-fp8-row", f"{n} → FP8 by row", "x w", **no),
        of("rms-fp8-block", f"{n} → FP8 by 1 × {BLOCK}", "x w", **no),
        of("rms-add", f"{n} + residual", "x r w"),
        of("rms-dropout", f"{n} → dropout", "x w", drops=True),
        of("rms-and-gelu", f"{n}, and GELU of it", "x w"),
        of("gelu-rms", f"GELU → {n}", "x w"),
        of("add-rms", f"sum → {n}, both", "x r w"),
        of("add-rms-alone", f"sum → {n}", "x r w"),
        of("add-rms-gelu", f"sum → {n} → GELU", "x r w"),
        of("add-rms-fp8-row", f"sum → {n} → FP8 by row, and sum", "x r w", **no),
        of("add-two-rms", f"sum → two {n}s", "x r w v"),
        of("rms-add-rms", f"{n} + residual → {n}, and sum", "x r w v"),
        of("dropout-add-rms", f"dropout + residual → {n}, and sum", "x r w", drops=True),
        of("layer", "layer norm", "x w b"),
        of("layer-gelu", "layer norm → GELU", "x w b"),
        of("layer-fp8", "layer norm → FP8, static", "x w b q", **no),
        of("layer-add", "layer norm + residual", "x r w b"),
        of("add-layer", "sum → layer norm, both", "x r w b"),
        of("add-layer-alone", "sum → layer norm", "x r w b"),
        of("add-adaptive", "gated sum → adaptive layer norm, both", "x r c s t"),
        of("l2", "L2 normalization", "x"),
        of("l2-scaled", "L2 normalization · weight", "x w"),
        of("softmax", "softmax", "x"),
        of("log-softmax", "log-softmax", "x"),
        of("masked-softmax", "scale → mask → softmax", "x m"),
        of("cross-entropy", "cross entropy", "x n"),
        of("capped-cross-entropy", f"{CAP:.0f} · tanh(x / {CAP:.0f}) → cross entropy", "x n"),
        of("token-logp", "log-softmax → one element a row", "x n"),
        of("entropy", "entropy of softmax", "x"),
        of("divergence", "Kullback-Leibler divergence of softmax", "x r"),
        of("cosine", "cosine similarity", "x r"),
        of("huber", "smooth L1 loss of rows", "x r", **no),
        of("int8-row", "int8 by row", "x", **no),
        of("rms-int8-row", f"{n} → int8 by row", "x w", **no),
        of("rms-mx", f"{n} → FP8 by 1 × 32, powers of two", "x w", **no),
        of("fp8-tensor", "FP8, one scale", "x", **no),
    )


FUNCTIONS = {function.name: function for function in _functions()}


def cases(rows: Sequence[int] = ROWS, columns: int = COLUMNS) -> tuple[FollowerCase, ...]:
    """Each function at each size, forward and with its backward."""
    works = {name: (FORWARD, BOTH) if one.has_gradients else (FORWARD,) for name, one in FUNCTIONS.items()}
    return tuple(FollowerCase(name, work, n, columns) for name in FUNCTIONS for work in works[name] for n in rows)


CASES = cases()
QUICK = tuple(case for case in CASES if case.rows == ROWS[1] and case.work == FORWARD)
