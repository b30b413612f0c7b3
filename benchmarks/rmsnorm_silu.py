"""RMSNorm -> SiLU at the 120 problem sizes of the cuDNN frontend's engine."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import cudnn, flashinfer, graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.sizes import BLOCK, COLUMNS, EPS, OUTPUTS, ROWS, Size

if TYPE_CHECKING:
    import torch

CODES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""What the sixteen E2M1 codes stand for."""


ACCURACY = {
    "bf16": Accuracy(Tolerance(2**-7, 2**-20), Tolerance(2**-5, 2**-7)),
    "fp8_e4m3": Accuracy(Tolerance(2**-4 + 2**-10, 2**-9), Tolerance(2**-3, 2**-6)),
    "nvfp4": Accuracy(Tolerance(steps=1), Tolerance(steps=2)),
}


@dataclass
class RmsNormSiluOperands:
    """One buffer set. x (rows, columns) and weight (columns) bfloat16; scales float8_e4m3fn for NVFP4, else None."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    scales: torch.Tensor | None
    eps: float = EPS

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        named = {"x": self.x, "weight": self.weight, "out": self.out, "block_scale": self.scales}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


class RmsNormSiluCase(Size):
    """A size with what a bench asks of it: buffer sets, and a judgement of outputs."""

    def sets(self, count: int, device: str) -> list[RmsNormSiluOperands]:
        """Sets of random numbers of their own, with one weight."""
        made = [self.tensors(device) for _ in range(count)]
        return [RmsNormSiluOperands(t["x"], made[0]["weight"], t["out"], t.get("block_scale")) for t in made]

    def spoil(self, operands: RmsNormSiluOperands) -> None:
        """NaN, which no result is."""
        import torch

        for tensor in (operands.out, operands.scales):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)

    def wrong(self, operands: RmsNormSiluOperands, tight: bool) -> str | None:
        import torch

        rows = judge.checked_rows(self.rows, operands.x.device)
        exact = _exact(operands, rows)
        limit = ACCURACY[self.output].of(tight)
        if operands.scales is None:
            return judge.wrong(judge.taken(operands.out, rows).double(), exact, limit.around(exact), rows)
        scales = judge.taken(operands.scales, rows).double().repeat_interleave(BLOCK, dim=1)
        found = _decode(judge.taken(operands.out, rows)) * scales
        # A block's largest value may be beyond 6 scales by the rounding of the scale.
        top = exact.abs().unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, dim=1)
        accepted = limit.steps * torch.maximum(scales, top - 6 * scales) * (1 + 2**-20)
        return judge.wrong(found, exact, accepted, rows)


def _exact(operands: RmsNormSiluOperands, rows: torch.Tensor) -> torch.Tensor:
    import torch

    x = operands.x[rows].double()
    y = x * torch.rsqrt(x.square().mean(1, keepdim=True) + operands.eps) * operands.weight.double()
    return y * torch.sigmoid(y)


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
