"""Notes for users about the numerics of a plan."""

from collections.abc import Iterator

from graphfuse.base.device import Device
from graphfuse.base.dtypes import FP8, data_type
from graphfuse.ops import OPS
from graphfuse.rows.program import RowProgram
from graphfuse.rows.steps import Join

_FP8_INSTRUCTION = 89  # and newer
_FP4_INSTRUCTION = ("sm_100a", "sm_103a", "sm_120a")  # not part of the plain targets


def notes(program: RowProgram, device: Device, scheduled: Iterator[str]) -> Iterator[str]:
    """Notes on the numerics of a row program. scheduled: notes of the schedule."""
    rounded = sorted({step.rounded.name for step in program.steps if step.rounded is not None})
    if rounded:
        yield f"float32 throughout; values of tensors declared as {', '.join(rounded)} are rounded to that"
    else:
        yield "float32 throughout: virtual tensors are not rounded to their data types"
    if program.reductions(Join.SUM):
        yield "sums over a row: a fixed binary tree, the same bits for every row count, knob and run"
    of_ops = (OPS[step.op_name].note for step in program.steps if step.op_name in OPS)
    yield from dict.fromkeys(note for note in of_ops if note)
    yield from scheduled
    instruction, software = "instruction", "software, bit-identical to the instruction"
    if device.kind != "cuda":
        instruction = software
    if any(store.view.dtype in FP8 or store.block_size for store in program.stores):
        yield f"FP8 conversion: {instruction if device.sm >= _FP8_INSTRUCTION else software}"
    if any(store.view.dtype is data_type.FP4_E2M1 for store in program.stores):
        if device.kind == "cuda" and device.arch in _FP4_INSTRUCTION:
            yield "FP4 conversion: instruction, of value * (1 / scale) rounded to float32"
        else:
            yield (
                "FP4 conversion: software, of value * (1 / scale) rounded to float32 and, unlike for the instruction, "
                "then to a multiple of 2^-22 (2^-21 from 2 on, 2^-20 from 4 on)"
            )
        yield "FP4 error |dequantized - value|: at most (1 + 2e-6) max(scale, amax - 6 * scale) of the block"
