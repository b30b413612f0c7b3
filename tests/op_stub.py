"""Writes graphfuse/op_methods.pyi, what type checkers and editors know of the op methods, from the op table.

    python tests/op_stub.py

``tests/package/test_typing.py`` fails while the file is not what this writes.
"""

import enum
import textwrap
from pathlib import Path

from graphfuse.ops import OPS, Attribute, Op, Port

FILE = Path(__file__).resolve().parent.parent / "graphfuse" / "op_methods.pyi"

HEAD = """\
# Made by tests/op_stub.py from the op table (graphfuse/ops/table.py); do not edit.
#
# Numbers may stand for tensors of one element. A method of several outputs is typed as returning a tuple, which has a
# type for each; it returns a list, as cuDNN's do. An output that is not always made may be None: `Tensor | Any` says
# so without asking for a check where it is known to be there.
from typing import Any

from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase, reduction_mode
from graphfuse.tensor import Tensor

class OpMethods:
"""

WIDTH = 120


def text() -> str:
    return HEAD + "\n".join(_method(op) for op in OPS.values())


def _method(op: Op) -> str:
    # As vocabulary.py: in the table's order, and what stands after an optional port has a default.
    optional = next((i for i, p in enumerate(op.inputs) if p.optional), len(op.inputs))
    parameters = ["self"]
    parameters += [f"{p.name}: Tensor | float" for p in op.inputs[:optional]]
    parameters += [_late(p) for p in op.inputs[optional:]]
    parameters += [_attribute(a) for a in sorted(op.attributes, key=lambda a: not a.required)]
    parameters += ["compute_data_type: data_type | Any = ...", 'name: str = ""']
    wrapped = [short for line in op.doc.splitlines() for short in textwrap.wrap(line, WIDTH - 12) or [""]]
    doc = "\n".join(f"        {line}".rstrip() for line in wrapped).strip()
    head = f"    def {op.name}({', '.join(parameters)}) -> {_returned(op)}:"
    if len(head) > WIDTH:
        lines = "".join(f"        {parameter},\n" for parameter in parameters)
        head = f"    def {op.name}(\n{lines}    ) -> {_returned(op)}:"
    return f'{head}\n        """{doc}"""\n'


def _late(port: Port) -> str:
    return f"{port.name}: Tensor | float{' | None = None' if port.optional else ' = ...'}"


def _attribute(a: Attribute) -> str:
    names = ["float"] if a.types == (float, int) else [t.__name__.replace("NoneType", "None") for t in a.types]
    if a.required:
        return f"{a.name}: {' | '.join(names)} = ..."
    if "None" not in names:  # stands for the default
        names.append("None")
    literal = "..." if isinstance(a.default, enum.Enum) or a.default == float("inf") else repr(a.default)
    return f"{a.name}: {' | '.join(names)} = {literal}"


def _returned(op: Op) -> str:
    types = [f"Tensor{' | Any' if port.optional else ''}" for port in op.outputs]
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"


if __name__ == "__main__":
    FILE.write_text(text())
