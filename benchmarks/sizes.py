"""The sizes that RMSNorm → SiLU is tuned and judged on: the 120 of the cuDNN frontend's engine, and random ones."""

import itertools
import random
from dataclasses import dataclass, replace

from graphfuse.api import pygraph
from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode, norm_forward_phase
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.planning.plan import Plan
from graphfuse.planning.planner import Planner

EPS = 1e-6
COLUMNS = (64, 128, 160, 256, 320, 512, 640, 1024)
ROWS = (1560, 6240, 24960, 99840, 399360)
OUTPUTS = {"bf16": data_type.BFLOAT16, "fp8_e4m3": data_type.FP8_E4M3, "nvfp4": data_type.FP4_E2M1}
BLOCK = 16  # elements that share a scale in nvfp4
JUDGED = 20261121  # seed of the random sizes that the heuristic is judged on and not fitted to
MOST_BYTES = 2 << 30  # moved by a random problem: larger ones run at the same speed


@dataclass(frozen=True)
class Size:
    """rows x columns of bfloat16, to one of OUTPUTS."""

    rows: int
    columns: int
    output: str

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def row_bytes(self) -> int:
        """Read and written of one row."""
        scales = self.columns // BLOCK if self.output == "nvfp4" else 0
        return 2 * self.columns + OUTPUTS[self.output].nbytes(self.columns) + scales

    @property
    def moved(self) -> int:
        """Bytes read and written, each element once, the weight's among them."""
        return self.rows * self.row_bytes + 2 * self.columns

    def graph(self, handle=None) -> pygraph:
        """Its tensors are named x, weight, out and, for nvfp4, block_scale."""
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        x = graph.tensor([self.rows, self.columns], data_type=data_type.BFLOAT16, name="x")
        weight = graph.tensor([1, self.columns], data_type=data_type.BFLOAT16, name="weight")
        y = graph.swish(graph.rmsnorm(x, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0])
        if self.output == "nvfp4":
            y, scales = graph.block_scale_quantize(y, block_size=BLOCK)
            scales.set_output().set_name("block_scale")
        y.set_output().set_name("out").set_data_type(OUTPUTS[self.output])
        return graph

    def planner(self, handle=None) -> Planner:
        return planner(self.graph(handle), handle)

    def plans(self, device: Device) -> tuple[Plan, ...]:
        """Those plans for a device that need not be there, tables left aside."""
        graph, known = lower(freeze(self.graph())), plugins.installed()
        regions, _ = plan.matches(graph, known)
        return plan.propose(graph, regions, known.engines, device, heur_mode.OPENSOURCE).plans

    def tensors(self, device: str) -> dict[str, object]:
        """Random inputs and memory for the outputs, by name; FP4 elements in pairs, as uint8."""
        import torch

        def empty(columns: int, dtype: str) -> torch.Tensor:
            return torch.empty(self.rows, columns, dtype=getattr(torch, dtype), device=device)

        pack = {
            "x": torch.randn(self.rows, self.columns, dtype=torch.bfloat16, device=device),
            "weight": (torch.rand(self.columns, device=device) + 0.5).to(torch.bfloat16),
        }
        if self.output == "nvfp4":
            pairs, scales = empty(self.columns // 2, "uint8"), empty(self.columns // BLOCK, "float8_e4m3fn")
            return pack | {"out": pairs, "block_scale": scales}
        return pack | {"out": empty(self.columns, OUTPUTS[self.output].facts.torch)}


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
