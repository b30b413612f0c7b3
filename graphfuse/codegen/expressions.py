"""Printing of steps as C++: scalar forms, attributes and one-element operands.

The text never contains names of the user's tensors. So equal problems have equal kernels, and no text of a user is
compiled.
"""

import struct
from collections.abc import Callable

from graphfuse.codegen.declarations import check_form
from graphfuse.contract.engine import Address, Argument, HostScalar
from graphfuse.ops import OPS
from graphfuse.rows.program import FUSED
from graphfuse.rows.steps import AnyStep, Operand, Scalar, Step


def expression(step: Step, operand: Callable[[Operand], str]) -> str:
    """The scalar form of a step. operand: prints an operand.

    Raises ValueError if the op is not pointwise or an attribute is not a number, MalformedError if the form calls a
    function that no header declares.
    """
    operands = {port: operand(value) for port, value in step.operands}
    if step.op_name in FUSED:
        return FUSED[step.op_name].cuda.format(**operands)
    op = OPS[step.op_name]
    if op.cuda is None:
        raise ValueError(f"op {op.name!r} has no scalar form: it is not pointwise")
    form = op.narrow.get(step.rounded, op.cuda) if step.narrow else op.cuda
    check_form(op.name, form)
    slots = {a.name: a.default for a in op.attributes} | dict(step.attributes)
    return form.format(**{key: literal(value) for key, value in slots.items()}, **operands)


def rounded(step: AnyStep, text: str) -> str:
    """The result of a step, `text`, with its rounding."""
    needless = step.rounded is None or isinstance(step, Step) and step.exact
    return text if needless else f"gf::rounded<{step.rounded.facts.ctype}>({text})"


def parameter_type(scalar: Scalar) -> str:
    """The C++ type of a kernel's parameter for a scalar operand; ``gf::scalar`` reads either kind."""
    return "float" if scalar.by_value else f"const {scalar.dtype.facts.ctype}*"


def argument(scalar: Scalar) -> Argument:
    """The launch's argument for a scalar operand."""
    return HostScalar(scalar.tensor) if scalar.by_value else Address(scalar.tensor)


def literal(value: object) -> str:
    """A C++ expression with exactly the value of a number rounded to float32. Raises ValueError for other types."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        rounded = float("inf") if value > 0 else float("-inf")
    if rounded - rounded == 0:
        return f"({rounded.hex()}f)"
    (bits,) = struct.unpack("<I", struct.pack("<f", rounded))
    return f"gf::as_float({bits:#x}u)"
