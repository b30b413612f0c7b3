"""Printing of a user's graph as Python code that builds it again."""

import builtins
import keyword
import math
import re

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph.graph_record import GraphRecord, NodeRecord
from graphfuse.op_graph.tensor import Tensor


def to_python(graph: GraphRecord) -> str:
    """Runnable source, which imports graphfuse and builds the graph in `graph`, its tensors in variables."""
    names = _variables(graph)
    made = {id(t) for node in graph.nodes for port, t in node.outputs.items() if port not in node.op.given}
    lines = ["import graphfuse", "", "graph = graphfuse.pygraph("]
    lines += [f"    name={graph.name!r},"]
    for field in ("io_data_type", "intermediate_data_type", "compute_data_type"):
        lines.append(f"    {field}={_type(getattr(graph, field))},")
    lines.append(f"    intermediate_rounding={graph.intermediate_rounding!r},")
    lines.append(")")
    lines += [_leaf(t, names) for t in graph.tensors if id(t) not in made]
    for node in graph.needed:
        lines += _node(node, names)
    lines += [_ragged(t, names) for t in graph.tensors if t.get_ragged_offset() is not None]
    return "\n".join(lines) + "\n"


def _variables(graph: GraphRecord) -> dict[int, str]:
    names: dict[int, str] = {}
    for t in graph.tensors:
        base = re.sub(r"\W+", "_", t.get_name(), flags=re.ASCII).strip("_") or "tensor"
        if base[0].isdigit() or keyword.iskeyword(base) or hasattr(builtins, base) or base in ("graph", "graphfuse"):
            base = f"t_{base}"
        name, n = base, 2
        while name in names.values():
            name, n = f"{base}_{n}", n + 1
        names[id(t)] = name
    return names


def _type(dtype: data_type) -> str:
    return f"graphfuse.data_type.{dtype.name}"


def _leaf(t: Tensor, names: dict[int, str]) -> str:
    common = f"name={t.get_name()!r}, uid={t.current_uid}, byte_alignment={t.get_byte_alignment()}"
    if t.value is not None:
        layout = f".set_dim({t.get_dim()}).set_stride({t.get_stride()})" if t.get_dim() else ""
        layout += f".set_uid({t.current_uid})"
        arguments = f"{_value(t.value)}, {_type(t.get_data_type())}, {t.get_name()!r}"
        return f"{names[id(t)]} = graph.tensor_scalar({arguments}){layout}"
    return (
        f"{names[id(t)]} = graph.tensor({t.get_dim()}, {t.get_stride()}, {_type(t.get_data_type())}, "
        f"is_virtual={t.get_is_virtual()}, is_pass_by_value={t.get_is_pass_by_value()}, "
        f"reordering_type={_value(t.get_reordering_type())}, {common})"
    )


def _node(node: NodeRecord, names: dict[int, str]) -> list[str]:
    arguments = [f"{port}={names[id(t)]}" for port, t in node.inputs.items()]
    arguments += [f"{port}={names[id(node.outputs[port])]}" for port in node.op.given if port in node.outputs]
    arguments += [f"{name}={_value(value)}" for name, value in node.attributes.items()]
    arguments += [f"compute_data_type={_type(node.compute)}", f"name={node.name!r}"]
    returned = {port: t for port, t in node.outputs.items() if port not in node.op.given}
    targets = ["_" if port in node.absent else names[id(t)] for port, t in returned.items()]
    lines = [f"{', '.join(targets)} = graph.{node.op.name}({', '.join(arguments)})"]
    lines += [f"{names[id(t)]}{_setters(t)}" for port, t in returned.items() if port not in node.absent]
    return lines


def _ragged(t: Tensor, names: dict[int, str]) -> str:
    calls = f"set_ragged_offset({names[id(t.get_ragged_offset())]})"
    return f"{names[id(t)]}.{calls}.set_ragged_offset_multiplier({t.get_ragged_offset_multiplier()})"


def _setters(t: Tensor) -> str:
    calls = [f"set_name({t.get_name()!r})", f"set_uid({t.current_uid})", f"set_is_virtual({t.get_is_virtual()})"]
    if t.get_dim():
        calls.append(f"set_dim({t.get_dim()})")
    if t.get_stride():
        calls.append(f"set_stride({t.get_stride()})")
    if t.get_data_type() is not data_type.NOT_SET:
        calls.append(f"set_data_type({_type(t.get_data_type())})")
    calls.append(f"set_byte_alignment({t.get_byte_alignment()})")
    calls.append(f"set_reordering_type({_value(t.get_reordering_type())})")
    return "".join(f".{call}" for call in calls)


def _value(value: object) -> str:
    if hasattr(value, "name") and hasattr(type(value), "__members__"):
        return f"graphfuse.{type(value).__name__}.{value.name}"
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)
