"""RMSNorm -> SiLU at the 120 problem sizes of the cuDNN frontend's engine."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING

from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import cudnn, flashinfer, graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import rms_normal
from graphfuse.benchmarks.sizes import BLOCK, COLUMNS, OUTPUTS, ROWS, Size

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

CODES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""What the sixteen E2M1 codes stand for."""

ACCURACY = {
    "bf16": Accuracy(Tolerance(2**-7, 2**-20), Tolerance(2**-5, 2**-7)),
    "fp8_e4m3": Accuracy(Tolerance(2**-4 + 2**-10, 2**-9), Tolerance(2**-3, 2**-6)),
}


class RmsNormSiluCase(Size):
    """A size with a judgement of outputs."""

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        y = rms_normal(operands.x[rows].double(), operands.eps) * operands.weight.double()
        accuracy = ACCURACY.get(self.output) or functools.partial(_within_steps, self._scales(operands, rows))
        yield "out", y * y.sigmoid(), accuracy

    def found(self, operands: BufferSet, name: str, rows: torch.Tensor) -> torch.Tensor:
        found = super().found(operands, name, rows)
        return found if operands.block_scale is None else _decode(found) * self._scales(operands, rows)

    def _scales(self, operands: BufferSet, rows: torch.Tensor) -> torch.Tensor:
        """Of each element."""
        return self.of_rows(operands.block_scale, rows).double().repeat_interleave(BLOCK, dim=1)


def _within_steps(scales: torch.Tensor, tight: bool, exact: torch.Tensor) -> torch.Tensor:
    """What is accepted of NVFP4: a step of the scale, two of peers that round in between."""
    import torch

    # A block's largest value may be beyond 6 scales by the rounding of the scale.
    top = exact.abs().unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, dim=1)
    return (1 if tight else 2) * torch.maximum(scales, top - 6 * scales) * (1 + 2**-20)


def _decode(pairs: torch.Tensor) -> torch.Tensor:
    """The values of packed E2M1 pairs, low nibble first."""
    import torch

    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    return torch.tensor(CODES, dtype=torch.float64, device=pairs.device)[codes.long()]


TARGETS = (
    target.slowest_against_best(("bf16", "fp8_e4m3"), 1.02),
    target.slowest_against_best(("bf16", "fp8_e4m3"), 1.02, graphfuse.DEPENDENT.name, " with dependent launch"),
    target.mean_speedup("torch_compile", "torch.compile", ("bf16", "fp8_e4m3"), 1.12),
    target.mean_speedup("cudnn_oss", "the cuDNN frontend's open-source engine", ("bf16", "fp8_e4m3"), 9),
    *(
        target.least_of_stream(output, low * MB, high * MB, limit)
        for output, limits in {"bf16": (0.97, 0.95, 0.90), "fp8_e4m3": (0.95, 0.93, 0.88)}.items()
        for (low, high), limit in zip(((512, math.inf), (128, 512), (32, 128)), limits, strict=True)
    ),
    target.least_of_stream("nvfp4", 128 * MB, math.inf, 0.85),
    target.slowest_against_output("nvfp4", "fp8_e4m3", 1.15),
    target.slowest_against_stream(2 * MB, 1.15),
)

BENCH = Bench(
    name="rmsnorm-silu",
    title="RMSNorm → SiLU, bf16 input",
    cases=tuple(RmsNormSiluCase(r, c, o) for o, c, r in itertools.product(OUTPUTS, COLUMNS, ROWS)),
    quick=tuple(RmsNormSiluCase(r, c, o) for o, c, r in itertools.product(OUTPUTS, (64, 1024), (1560, 399360))),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        cudnn.RMSNORM_SILU_OSS,
        cudnn.RMSNORM_SILU_A,
        flashinfer.RMSNORM_SILU,
        torch_compile.RMSNORM_SILU,
        torch_eager.RMSNORM_SILU,
        stream.PEER,
    ),
    targets=TARGETS,
)
