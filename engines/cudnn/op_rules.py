"""Translations of ops to ``cudnn.pygraph``, and the reasons why a node has none.

Methods and parameters have the names of the op table.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphfuse.base.enums import convolution_mode
from graphfuse.op_graph.ir import FrozenGraph, Node
from graphfuse.ops import OPS, rmsnorm_axes

Arguments = Mapping[str, object]


@dataclass(frozen=True)
class OpRule:
    """Rule for the translation of an op. arguments(cudnn, node): those of the method besides tensors, name and compute
    type. why_not(graph, node): the first reason against, None if there is none. numbers: input ports that accept a
    Python number. axes: whether axes are meant by number, so that tensors must keep their rank."""

    arguments: Callable[[object, Node], Arguments] = lambda cudnn, node: {}
    why_not: Callable[[FrozenGraph, Node], str | None] = lambda graph, node: None
    numbers: frozenset[str] = frozenset()
    axes: bool = False


def _finite_numbers(cudnn, node: Node) -> Arguments:
    """Attributes that are finite numbers. An infinite clip is omitted, as it clips nothing."""
    return {name: value for name, value in node.attributes if math.isfinite(value)}


def _attributes(cudnn, node: Node) -> Arguments:
    """All attributes, with members of enumerations replaced by cuDNN's of the same name."""
    return {name: _cudnn_value(cudnn, value) for name, value in node.attributes}


def _cudnn_value(cudnn, value: object) -> object:
    if hasattr(type(value), "__members__"):
        return getattr(getattr(cudnn, type(value).__name__), value.name)
    return value


def _window(cudnn, node: Node) -> Arguments:
    # The mode is the default and is omitted, as the package does not export the enumeration. Outputs have their shape.
    return {name: list(value) for name, value in node.attributes if name not in ("convolution_mode", "dim")}


def _conv_reason(graph: FrozenGraph, node: Node) -> str | None:
    if node.attribute("convolution_mode") is convolution_mode.CROSS_CORRELATION:
        return None
    return "convolution_mode is CONVOLUTION, which the package has no name for; accepted: CROSS_CORRELATION"


def _sdpa_reason(graph: FrozenGraph, node: Node) -> str | None:
    if node.input("dropout_seed") is not None:
        return "drops at random, for which cuDNN generates other numbers"
    if node.input("dropout_mask") is not None:
        return "has a mask of dropout, which has no translation"
    given = next((port for port in node.op.given if node.output(port) is not None), None)
    if given is not None:
        return f"makes {given}, which has no translation"
    log2 = dict(node.attributes).get("stats_use_log2")
    return "has stats of base 2, which not all packages make" if log2 else None


def _set_attributes(cudnn, node: Node) -> Arguments:
    return {name: value for name, value in _attributes(cudnn, node).items() if value is not None}


def _norm_reason(*needed: str) -> Callable[[FrozenGraph, Node], str | None]:
    """`why_not` of a norm. needed: optional ports that cuDNN requires."""

    def why_not(graph: FrozenGraph, node: Node) -> str | None:
        why = _missing_reason(node, *needed) or _operand_reason(graph, node)
        if why is not None:
            return why
        scale = graph.tensors[node.input("scale")].dim
        x = graph.tensors[node.input("input")].dim
        return None if rmsnorm_axes(x, scale) else "has a scale of one element, which tells cuDNN no axes"

    return why_not


def _product_reason(graph: FrozenGraph, node: Node) -> str | None:
    # Plans without cuDNN's note of tensor cores were found to multiply with the precision of TF32.
    wide = [(port, graph.tensors[t].dtype.name) for port, t in node.inputs if graph.tensors[t].dtype.bits >= 32]
    if not wide:
        return None
    port, dtype = wide[0]
    return (
        f"reads {port} as {dtype}, which cuDNN's products round: float32 would be read as TF32; accepted: types of 16 "
        f"bits or less. The reference engine multiplies in the node's type"
    )


def _operand_reason(graph: FrozenGraph, node: Node) -> str | None:
    return _twice_reason(graph, node) or _by_value_reason(graph, node, "epsilon")


def _missing_reason(node: Node, *needed: str) -> str | None:
    return next((f"has no {port}, which cuDNN requires" for port in needed if node.input(port) is None), None)


def _twice_reason(graph: FrozenGraph, node: Node) -> str | None:
    ports: dict[int, str] = {}
    for port, t in node.inputs:
        if t in ports:
            return f"has one tensor as {ports[t]} and {port}, of which cuDNN binds one alone"
        ports[t] = port
    return None


def _batchnorm_reason(graph: FrozenGraph, node: Node) -> str | None:
    # cuDNN's Python frontend omits arguments that are None, and its library then fails.
    absent = _missing_reason(node, "in_running_mean", "in_running_var", "momentum")
    return absent or _twice_reason(graph, node) or _by_value_reason(graph, node, "epsilon", "momentum")


def _by_value_reason(graph: FrozenGraph, node: Node, *ports: str) -> str | None:
    given = ((port, node.input(port)) for port in ports)
    stored = [port for port, t in given if t is not None and not graph.tensors[t].by_value]
    return f"reads {stored[0]} from memory; cuDNN takes it by value" if stored else None


def _default_reason(graph: FrozenGraph, node: Node) -> str | None:
    """Reason against an attribute other than the default, as cuDNN's method has no parameter for it."""
    defaults = {a.name: a.default for a in OPS[node.op_name].attributes}
    other = [(name, value) for name, value in node.attributes if value != defaults[name]]
    return f"has {other[0][0]} {other[0][1]!r}; accepted: {defaults[other[0][0]]!r}, as cuDNN has it" if other else None


_MASK_OPS = {
    *("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "binary_select"),
    *("logical_and", "logical_or", "logical_not"),
}
"""Pointwise ops of masks. cuDNN's masks are BOOLEAN, those of this package are numbers."""

OP_RULES: Mapping[str, OpRule] = {
    **{name: OpRule(_finite_numbers) for name, op in OPS.items() if op.pointwise and name not in _MASK_OPS},
    **dict.fromkeys(("elu", "elu_backward", "softplus", "softplus_backward"), OpRule(why_not=_default_reason)),
    "matmul": OpRule(why_not=_product_reason),
    **dict.fromkeys(("conv_fprop", "conv_dgrad", "conv_wgrad"), OpRule(_window, _conv_reason, axes=True)),
    **dict.fromkeys(
        ("sdpa", "sdpa_backward"),
        OpRule(_set_attributes, _sdpa_reason, numbers=frozenset({"attn_scale"}), axes=True),
    ),
    # The axes follow from the output's extents.
    "reduction": OpRule(lambda cudnn, node: {"mode": _cudnn_value(cudnn, node.attribute("mode"))}),
    "rmsnorm": OpRule(_attributes, _norm_reason("scale")),
    **dict.fromkeys(("layernorm", "adalayernorm"), OpRule(_attributes, _norm_reason("scale", "bias"))),
    **{
        f"{norm}_backward": OpRule(_attributes, _norm_reason("scale"))
        for norm in ("rmsnorm", "layernorm", "adalayernorm")
    },
    "instancenorm": OpRule(_attributes, _operand_reason, axes=True),
    "batchnorm": OpRule(why_not=_batchnorm_reason, axes=True),
    **dict.fromkeys(
        ("instancenorm_backward", "batchnorm_inference", "batchnorm_backward"),
        OpRule(why_not=_twice_reason, axes=True),
    ),
    "transpose": OpRule(lambda cudnn, node: {"permutation": list(node.attribute("permutation"))}, axes=True),
    "slice": OpRule(lambda cudnn, node: {"slices": [slice(*s) for s in node.attribute("slices")]}, axes=True),
    # The shape is the output's.
    "reshape": OpRule(lambda cudnn, node: {"reshape_mode": cudnn.reshape_mode.LOGICAL}),
}
"""Translations by op. Ops that cuDNN does not have, or has with other results, are missing."""
