"""RMSNorm and rotary position embedding of Q's and K's heads, K and V written to a paged cache by slots."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.benchmarks import qk_norm_rope, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Around, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.qk_norm import HEAD
from graphfuse.benchmarks.qk_norm_rope_training import HEADS
from graphfuse.benchmarks.row_case import Buffer, full

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

ROWS = (1, 16, 64, 1024, 4096, 32768)
TYPES = {"bf16": data_type.BFLOAT16, "fp8_e4m3": data_type.FP8_E4M3}
"""Of the cache, by output."""
PAGE = 16
_SCALES = 0.03, 0.02
_STORED = {
    "bf16": Accuracy(Tolerance(2**-7, 2**-18), Tolerance(2**-5, 2**-7)),
    # A value beside a midpoint may be rounded to either side. In units of the scale.
    "fp8_e4m3": Accuracy(Tolerance(2**-4 + 2**-7, 2**-9), Tolerance(2**-3, 2**-4)),
}


@dataclass(frozen=True)
class QkNormRopeCacheCase(qk_norm_rope.QkNormRopeCase):
    """A case whose keys, and values beside them, go to caches of one of TYPES, pages of PAGE slots one after another.
    scales: of K and V in FP8."""

    @property
    def moved(self) -> int:
        """Bytes: Q read and written, K and V read and written to the caches, slots, and what is read beside them."""
        each = TYPES[self.output].nbytes(1) + 2
        of_cache = 2 * each * self.rows * self.k_heads * HEAD
        return 2 * 2 * self.rows * self.q_heads * HEAD + of_cache + self.angle_bytes + 8 * self.rows + 2 * 2 * HEAD

    @property
    def slots(self) -> int:
        """Of a cache that is half full, in whole pages."""
        return -(-2 * self.rows // PAGE) * PAGE

    def buffers(self) -> dict[str, Buffer | None]:
        named = super().buffers() | {"v": self.part(self.k_heads), "slots": self.numbers(self._slots)}
        del named["k_out"]
        dim = (self.slots, self.k_heads, HEAD)
        for name, scale in zip("kv", _SCALES, strict=True):
            named[f"{name}_cache"] = Buffer(TYPES[self.output], dim, (self.k_heads * HEAD, HEAD, 1))
            one = Buffer(data_type.FLOAT, (1, 1, 1), values=full(scale), shared=True, own=(1,), alignment=4)
            named[f"{name}_scale"] = None if self.output == "bf16" else one
        return named

    def _slots(self, *shape: int, device: str, **_) -> torch.Tensor:
        import torch

        return torch.randperm(self.slots, device=device)[: self.rows]

    def fill(self, operands: BufferSet) -> None:
        super().fill(operands)
        operands.scales = None if operands.k_scale is None else (operands.k_scale, operands.v_scale)

    def draw(self, graph, v, slots, k_scale=None, v_scale=None, **given):
        def scaled(t, scale):
            return t if scale is None else graph.mul(t, graph.reciprocal(scale))

        y = self.normed(graph, **given)
        q, k = self.of(graph, y, "q"), self.of(graph, scaled(y, k_scale), "k")
        caches = {"k_cache": k, "v_cache": scaled(v, v_scale)}
        return {"q_out": q} | {name: graph.scatter_rows(made, slots) for name, made in caches.items()}

    def found(self, operands: BufferSet, name: str, rows: torch.Tensor) -> torch.Tensor:
        return super().found(operands, name, operands.slots[rows] if name.endswith("cache") else rows)

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        v = operands.v[rows].double()
        heads = {name: self.exact_heads(operands, name, rows) for name in self.heads} | {"v": (v, v.abs())}
        for name, (exact, size) in heads.items():
            size = size.maximum(exact.abs())  # a rotated value may be larger than the largest of its head
            scale = getattr(operands, f"{name}_scale", None)
            scale, accuracy = 1.0 if scale is None else scale.double(), _STORED["bf16" if name == "q" else self.output]
            of = "q_out" if name == "q" else f"{name}_cache"
            yield of, (exact / scale).flatten(1), Around(accuracy, (size / scale).flatten(1))


BENCH = Bench(
    name="qk-norm-rope-cache",
    title="RMSNorm and rotary position embedding of Q's and K's heads, K and V to a paged cache, bf16",
    cases=tuple(QkNormRopeCacheCase(r, *HEADS, output=output) for output, r in itertools.product(TYPES, ROWS)),
    quick=tuple(QkNormRopeCacheCase(r, *HEADS, output=output) for output in TYPES for r in (16, 4096)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        torch_compile.QK_NORM_ROPE_CACHE,
        torch_eager.QK_NORM_ROPE_CACHE,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(tuple(TYPES), 1.02),
        *(target.least_of_stream(output, 16e6, math.inf, 1 / 1.1) for output in TYPES),
    ),
)
