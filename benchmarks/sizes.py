"""The sizes that RMSNorm → SiLU is tuned and judged on: the 120 of the cuDNN frontend's engine, and random ones."""

import itertools
import random
from dataclasses import replace

from graphfuse.api import pygraph
from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode, norm_forward_phase
from graphfuse.benchmarks.row_case import Buffer, BufferSet, RowCase, around_one, normal
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.planning.plan import Plan
from graphfuse.planning.planner import Planner

COLUMNS = (64, 128, 160, 256, 320, 512, 640, 1024)
ROWS = (1560, 6240, 24960, 99840, 399360)
OUTPUTS = {"bf16": data_type.BFLOAT16, "fp8_e4m3": data_type.FP8_E4M3, "nvfp4": data_type.FP4_E2M1}
BLOCK = 16  # elements that share a scale in nvfp4
JUDGED = 20261121  # seed of the random sizes that the heuristic is judged on and not fitted to
MOST_BYTES = 2 << 30  # moved by a random problem: larger ones run at the same speed


class Size(RowCase):
    """rows x columns of bfloat16, to one of OUTPUTS."""

    @property
    def row_bytes(self) -> int:
        """Read and written of one row."""
        scales = self.columns // BLOCK if self.output == "nvfp4" else 0
        return 2 * self.columns + OUTPUTS[self.output].nbytes(self.columns) + scales

    def buffers(self) -> dict[str, Buffer | None]:
        narrow = self.output == "nvfp4"
        scales = Buffer(data_type.FP8_E4M3, (self.rows, self.columns // BLOCK))
        return {
            "x": self.whole(data_type.BFLOAT16, normal()),
            "weight": self.by_column(data_type.BFLOAT16, around_one),
            "out": replace(self.whole(OUTPUTS[self.output]), filled=narrow),
            "block_scale": scales if narrow else None,
        }

    def draw(self, graph, x, weight):
        y, _ = graph.rmsnorm(x, weight, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)
        y = graph.swish(y)
        if self.output != "nvfp4":
            return {"out": y}
        y, scales = graph.block_scale_quantize(y, block_size=BLOCK)
        return {"out": y, "block_scale": scales}

    def fill(self, operands: BufferSet) -> None:
        """Elements of FP4 in pairs, as uint8."""
        if self.output == "nvfp4":
            import torch

            operands.out = operands.x.new_empty(self.rows, self.columns // 2, dtype=torch.uint8)

    def planner(self, handle=None) -> Planner:
        return planner(self.graph(handle), handle)

    def plans(self, device: Device) -> tuple[Plan, ...]:
        """Those plans for a device that need not be there, tables left aside."""
        graph, known = lower(freeze(self.graph())), plugins.installed()
        regions, _ = plan.matches(graph, known)
        return plan.propose(graph, regions, known.engines, device, heur_mode.OPENSOURCE).plans


def planner(graph: pygraph, handle=None) -> Planner:
    """A graph's plans of generated kernels, on the current device or the handle's."""
    made = Planner(freeze(graph), handle, (), ())
    made.create([heur_mode.OPENSOURCE])
    return made


def seeds(columns=COLUMNS, rows=ROWS, outputs=tuple(OUTPUTS)) -> tuple[Size, ...]:
    """The sizes of the cuDNN frontend's engine: all combinations, with those that share a kernel together."""
    return tuple(Size(r, c, o) for o, c, r in itertools.product(outputs, columns, rows))


def off_the_table(count: int = 60, seed: int = JUDGED) -> tuple[Size, ...]:
    """Random sizes that no table has, the same for the same seed.

    columns 32 to 16384 and rows 1 to 1,000,000, both log-uniform, fewer rows where more than
    MOST_BYTES would move. A third of the columns are any number, a third multiples of 8, a
    third of 64; for nvfp4 all are rounded to multiples of 16. The outputs take turns.
    """
    source, found = random.Random(seed), []
    tuned = set(seeds())
    for number in itertools.count():
        if len(found) == count:
            return tuple(found)
        output = tuple(OUTPUTS)[number % len(OUTPUTS)]
        step = (1, 8, 64)[number // len(OUTPUTS) % 3]
        step = max(step, BLOCK) if output == "nvfp4" else step
        columns = max(32, round(2 ** source.uniform(5, 14) / step) * step)
        columns = -(-columns // step) * step
        rows = round(10 ** source.uniform(0, 6))
        size = Size(rows, columns, output)
        size = replace(size, rows=max(1, min(rows, MOST_BYTES // size.row_bytes)))
        if size not in tuned and size not in found:
            found.append(size)
