"""What the engine takes, with which knobs, and how its kernel is made and launched."""

from collections.abc import Sequence

from graphfuse import data_type, heur_mode
from graphfuse.plugin import Address, Constant, Device, KernelEngine, Launch, No, Served, render, template

from .facts import Facts
from .knobs import ALL, Knobs

TYPES = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)


class Engine(KernelEngine[Facts, Knobs]):
    """x and output of one shape, a bias along the last axis; float32, half and bfloat16 in any combination."""

    name = "bias_gelu"
    facts = Facts
    knobs = Knobs
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    # Declare nothing that the kernel does not do: planning declines the rest. Tensors are row-major without gaps and in
    # memory, nodes compute in FLOAT.
    serves = Served(rounding=True)
    entry = "bias_gelu_kernel"

    def why_not(self, facts: Facts, device: Device) -> No | None:
        if not device.runs_kernels:
            return No(f"it needs a CUDA device or the emulator; planning is for {device}")
        accepted = ", ".join(dtype.name for dtype in TYPES)
        for t in (facts.x, facts.bias, facts.output):
            if t.dtype not in TYPES:
                return No(f"{t}: accepted: {accepted}")
        if facts.total not in TYPES:
            return No(f"the sum is rounded to {facts.total.name}; accepted: {accepted}")
        if facts.x.dim != facts.output.dim:
            return No(f"{facts.x}: accepted: the shape of {facts.output}")
        if facts.bias.elements != facts.columns or facts.bias.dim[-1] != facts.columns:
            return No(f"{facts.bias}: accepted: {facts.columns} elements along the last axis")
        return None

    def propose(self, facts: Facts, device: Device, mode: heur_mode) -> Sequence[Knobs]:
        return ALL if mode is heur_mode.B else ALL[:1]

    def illegal(self, facts: Facts, knobs: Knobs, device: Device) -> No | None:
        return None if knobs in ALL else No(f"accepted: {', '.join(map(str, ALL))}")

    def source(self, facts: Facts, knobs: Knobs) -> str:
        types = {"X": facts.x.dtype, "Bias": facts.bias.dtype, "Output": facts.output.dtype, "Total": facts.total}
        prelude = '#include "graphfuse/types.cuh"\n'
        prelude += "".join(f"using {name} = {dtype.facts.ctype};\n" for name, dtype in types.items())
        prelude += f"constexpr int THREADS = {knobs.threads}, STEPS = {knobs.steps};"
        return render(template("bias_gelu", "bias_gelu.cu"), prelude, "bias_gelu.cu")

    def launch(self, facts: Facts, knobs: Knobs) -> Launch:
        tensors = (Address(t.id) for t in (facts.x, facts.bias, facts.output))
        numbers = (Constant("int64", number) for number in (facts.output.elements, facts.columns))
        grid = -(-facts.output.elements // (knobs.threads * knobs.steps))
        return Launch(grid=grid, block=knobs.threads, arguments=(*tensors, *numbers))


ENGINE = Engine()
