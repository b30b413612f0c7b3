"""Writes graphfuse/op_graph/op_methods.pyi, what type checkers and editors know of the op methods, from the op table.

    python tests/op_stub.py

``tests/package/test_typing.py`` fails while the file is not what this writes.
"""

import enum
import textwrap
from pathlib import Path

from graphfuse.op_graph.positions import TRAILING
from graphfuse.ops import OPS, SPELLINGS, Attribute, Op, Port, Spelling

FILE = Path(__file__).resolve().parent.parent / "graphfuse" / "op_graph" / "op_methods.pyi"

HEAD = """\
# Made by tests/op_stub.py from the op table (graphfuse/ops/table.py); do not edit.
#
# Numbers may stand for tensors of one element. A method of several outputs is typed as returning a tuple, which has a
# type for each; it returns a list, as cuDNN's do. An output that is not always made may be None: `Tensor | Any` says
# so without asking for a check where it is known to be there. Options of cuDNN's that are not offered stand behind the
# star: they may be given where they ask for nothing.
import builtins
from collections.abc import Sequence
from typing import Any

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import (
    attention_implementation,
    convolution_mode,
    diagonal_alignment,
    moe_grouped_matmul_mode,
    norm_forward_phase,
    reduction_mode,
    reshape_mode,
)
from graphfuse.op_graph.tensor import Tensor

class OpMethods:
"""

WIDTH = 120


def text() -> str:
    methods = (_method(op, op.name, op.doc) for op in OPS.values())
    return HEAD + "\n".join([*methods, *map(_spelling, SPELLINGS.values())])


def _method(op: Op, name: str, doc: str) -> str:
    # As vocabulary.py: in the table's order, and what stands after an optional port has a default.
    in_order = [port for port in op.inputs if not port.by_name]
    optional = next((i for i, p in enumerate(in_order) if p.optional), len(in_order))
    parameters = ["self"]
    parameters += [f"{p.name}: Tensor | float" for p in in_order[:optional]]
    parameters += [_late(p) for p in in_order[optional:]]
    parameters += [_attribute(a) for a in sorted(op.attributes, key=lambda a: not a.required)]
    refused = {n: (f"{n}: {_NAMES.get(type(only), type(only).__name__)}", only) for n, only in op.inert_options.items()}
    places = TRAILING.get(op.name, tuple(_TRAILING))
    parameters += [_TRAILING.get(n) or "{} = {!r}".format(*refused[n]) for n in places]
    keywords = [f"{text} = ..." for name, (text, _) in refused.items() if name not in places]
    keywords += [f"{name}: Sequence[Any] | None = None" for name in op.tuples]
    keywords += [f"{name}: Tensor | None = None" for name in op.given]
    keywords += [f"{name}: Tensor | float | None = None" for name in op.by_name]
    parameters += ["*", *keywords] if keywords else []
    return _written(name, doc, parameters, _returned(op))


def _spelling(spelling: Spelling) -> str:
    """Its parameters are its op's, or some of its ports and attributes, all of which must be given."""
    op = OPS[spelling.op]
    if spelling.parameters is None:
        return _method(op, spelling.name, spelling.doc)
    kinds = {p.name: "Tensor | float" for p in op.inputs} | {a.name: _kinds(a) for a in op.attributes}
    parameters = [
        "self",
        *(f"{name}: {kinds[of]}" for name, of in spelling.parameters),
        *(_TRAILING[name] for name in TRAILING.get(spelling.name, tuple(_TRAILING))),
    ]
    return _written(spelling.name, spelling.doc, parameters, _returned(op))


_TRAILING = {"compute_data_type": "compute_data_type: data_type | Any = ...", "name": 'name: str = ""'}


def _written(name: str, doc: str, parameters: list[str], returned: str) -> str:
    wrapped = [short for line in doc.splitlines() for short in textwrap.wrap(line, WIDTH - 12) or [""]]
    text = "\n".join(f"        {line}".rstrip() for line in wrapped).strip()
    head = f"    def {name}({', '.join(parameters)}) -> {returned}:"
    if len(head) > WIDTH:
        lines = "".join(f"        {parameter},\n" for parameter in parameters)
        head = f"    def {name}(\n{lines}    ) -> {returned}:"
    return f'{head}\n        """{text}"""\n'


def _late(port: Port) -> str:
    return f"{port.name}: Tensor | float{' | None = None' if port.optional else ' = ...'}"


def _attribute(a: Attribute) -> str:
    kinds = _kinds(a)
    if a.required:
        return f"{a.name}: {kinds} = ..."
    if "None" not in kinds:  # stands for the default
        kinds += " | None"
    literal = "..." if isinstance(a.default, enum.Enum) or a.default == float("inf") else repr(a.default)
    return f"{a.name}: {kinds} = {literal}"


_NAMES = {type(None): "None", list: "list[Any]", slice: "builtins.slice"}  # a method is named slice, too


def _kinds(a: Attribute) -> str:
    names = ["float"] if a.types == (float, int) else [_NAMES.get(t, t.__name__) for t in a.types]
    kinds = " | ".join(names)
    return f"Sequence[{kinds}]" if a.several else kinds


def _returned(op: Op) -> str:
    types = [f"Tensor{' | Any' if port.optional else ''}" for port in op.returned]
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"


if __name__ == "__main__":
    FILE.write_text(text())
