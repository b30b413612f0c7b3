"""Prints steps as C++: the scalar form of each, its attributes and one-element operands.

Names of the user's tensors never enter the text. So kernels of equal problems are equal, and nothing that a user writes
is compiled.
"""

import struct
from collections.abc import Callable

from graphfuse.codegen.declared import check_form
from graphfuse.contract.engine import Address, Argument, HostScalar
from graphfuse.ops import OPS
from graphfuse.rows.program import FUSED
from graphfuse.rows.steps import AnyStep, Operand, Scalar, Step


def expression(step: Step, operand: Callable[[Operand], str]) -> str:
    """The scalar form of a step, its operands spelled by `operand`.

    ValueError: it is not a pointwise op, or an attribute is not a number. MalformedError: its form calls what no header
    declares.
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
    """The result of a step, `text`, as those get it who read it."""
    needless = step.rounded is None or isinstance(step, Step) and step.exact
    return text if needless else f"gf::rounded<{step.rounded.facts.ctype}>({text})"


def parameter_type(scalar: Scalar) -> str:
    """The C++ type that a kernel takes a scalar operand as; ``gf::scalar`` reads either kind."""
    return "float" if scalar.by_value else f"const {scalar.dtype.facts.ctype}*"


def argument(scalar: Scalar) -> Argument:
    """Argument that the launch passes for a scalar."""
    return HostScalar(scalar.tensor) if scalar.by_value else Address(scalar.tensor)


def literal(value: object) -> str:
    """A number rounded to float32, as a C++ expression with exactly that value.

    ValueError: not an int or float.
    """
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
