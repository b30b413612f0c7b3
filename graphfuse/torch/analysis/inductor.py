"""Classification of FX nodes: those that inductor generates kernels for, and so fuses with their neighbours; views,
which cost nothing; and others, which call libraries and operators.

torch itself tags pointwise operations, and decomposes others. What it does not say is listed here.
"""

import functools
from collections.abc import Iterable

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from graphfuse.runtime.bounded_dict import make_room
from graphfuse.torch.analysis.aten_calls import Call, calls_of, is_view, parts_of
from graphfuse.torch.analysis.meaning import (
    MEANING,
    OURS,
    PARTS,
    arguments,
    as_sequence,
    called_name,
    dtype,
    is_item,
    is_op,
    recorded_result,
    same,
    tensors,
    value,
    writes,
)

_REDUCTIONS = frozenset(
    "sum mean var std var_mean std_mean max min amax amin aminmax argmax argmin any all prod logsumexp length "
    "normalize softmax log_softmax _softmax _log_softmax softmin layer_norm rms_norm batch_norm group_norm "
    "instance_norm graphfuse::cross_entropy_loss".split()
)
_MOVES = frozenset(
    "cast clone cat constant_pad_nd roll flip repeat embedding index gather dropout graphfuse::keyed_dropout "
    "native_dropout feature_alpha_dropout bernoulli fake_quantize_per_tensor_affine".split()
)
"""Operations that torch does not tag as pointwise, and that inductor computes element by element."""
_BY_NUMBER = frozenset({"gather", "take_along_dim"})
"""Operations that take elements along a dimension by an index."""
_IDENTICAL = ("add", "sub", "cat", "same")


def is_generated(node: Node) -> bool:
    """True if inductor generates the kernel of an operation."""
    name = _name(node)
    return bool(name) and (_is_known(name) or not reads(node) or bool(_made_of(node)))


def is_fused(node: Node) -> bool:
    """True if inductor computes a node in one kernel with its neighbours, or need not compute it."""
    return is_free(node) or is_generated(node)


def is_pointwise(node: Node) -> bool:
    """True if an operation computes each element independently of the others."""
    return _is_pointwise(_name(node))


def is_repeatable(name: str) -> bool:
    """True if an operation of this name returns the same for the same arguments, and changes nothing."""
    return not name.endswith("_") and (name in MEANING or name in _REDUCTIONS or _is_pointwise(name))


def is_reduction(node: Node) -> bool:
    """True if an operation reduces: its result, or an intermediate one, has fewer numbers than it reads."""
    return _name(node) in _REDUCTIONS or not _REDUCTIONS.isdisjoint(_made_of(node))


def takes_by_number(node: Node) -> bool:
    """True if an operation takes elements along a dimension by an index."""
    return _name(node) in _BY_NUMBER


def is_free(node: Node) -> bool:
    """True if a node moves no data: a view, a part, or an operation that returns its argument."""
    source = value(node.args[0]) if node.args else None
    if called_name(node) == "dropout":
        return rate_of_dropout(node) == 0
    if is_op(node, "view", "expand", "permute", "slice") or called_name(node) in PARTS or is_item(node):
        return True
    if called_name(node) == "clone" or not is_op(node, "cast", "same") or source is None:
        return False
    return dtype(node) is source.dtype and all(map(same, value(node).stride(), source.stride()))


def rate_of_dropout(node: Node) -> object:
    """Fraction of the elements that a dropout drops."""
    given = arguments(node, "input", "p", "training")
    return given.get("p", 0.5) if given.get("training", given.get("train", True)) else 0


def is_of_rows(node: Node, operand: Node, columns: int = 1) -> bool:
    """True if the result of a node has the leading extents of an operand: elements, or reductions, of its rows.
    columns: number of dimensions that rows lie along."""
    made, read = value(node), value(operand)
    if made is None or read is None:
        return True
    leading = read.shape[:-columns]
    return made.dim() >= len(leading) and all(map(same, made.shape, leading))


def is_cast_by_autocast(node: Node, operand: Node) -> bool:
    """True if the result of a product is narrower than an operand: autocast casts the operand before it."""
    made, read = value(node), value(operand)
    if made is None or read is None or node.op == "output":
        return False
    return made.dtype.is_floating_point and made.dtype.itemsize < read.dtype.itemsize and not is_generated(node)


def passes_gradients(node: Node) -> bool:
    """True if the gradient of a node's result is unchanged that of its arguments: the backward moves no data."""
    return _name(node) in _IDENTICAL


def reads(node: Node) -> bool:
    """True if a node reads the elements of its arguments, not just their extents."""
    made = recorded_result(node)
    if _is_of_extents(called_name(node)):
        return False
    return node.op == "output" or made is None or bool(tensors(made))


def title(node: Node) -> str:
    """Name of an operation in reports."""
    if is_op(node, "cast"):
        return f"cast to {str(dtype(node)).removeprefix('torch.')}"
    return OURS.get(_name(node), _name(node)) or node.name


def _name(node: Node) -> str:
    name = called_name(node)
    name = name.removesuffix("_") if writes(node) and not name.endswith("__") else name
    return MEANING.get(name, name)


@functools.cache
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    tags = {tag for one in overloads for tag in getattr(packet, one).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _is_known(name: str) -> bool:
    """True if inductor generates kernels for operations of this name."""
    return name in _REDUCTIONS or name in _MOVES or _is_pointwise(name)


def _is_of_extents(name: str) -> bool:
    """True for an operation that makes a tensor with the extents of another."""
    return name.endswith("_like") or name.startswith("new_")


_MOST = 1024
_made = dict[object, frozenset[str]]()
"""Names of operations, by function and arguments."""


def _made_of(node: Node) -> frozenset[str]:
    """Names of the operations that torch decomposes a node into, if inductor generates them all; none otherwise, and
    for nodes whose own name says more."""
    if not called_name(node) or _name(node) in MEANING or called_name(node) in PARTS or _is_known(_name(node)):
        return frozenset()
    asked = node.target, str(map_arg((node.args, node.kwargs), _described))
    if asked not in _made:
        calls, _ = calls_of(node, {}, recorded_result) or ((), None)
        make_room(_made, _MOST)
        _made[asked] = frozenset(_names(calls) or ())
    return _made[asked]


def _described(node: Node) -> object:
    """Ranks and types of a node's result, which determine the operations that read it."""
    return [(t.dim(), t.dtype) if isinstance(t, torch.Tensor) else type(t) for t in as_sequence(recorded_result(node))]


def _names(calls: Iterable[Call], within: tuple[object, ...] = ()) -> set[str] | None:
    """Names of the calls, or of their parts; None if inductor does not generate one of them."""
    found = set[str]()
    for call in calls:
        name = call.name.partition(".")[0]
        if _is_known(name) or _is_known(MEANING.get(name, name)) or _moves_nothing(call):
            found.add(MEANING.get(name, name))
            continue
        parts = None if call.computed in within else parts_of(call)
        names = None if parts is None else _names(parts[0], (*within, call.computed))
        if names is None:
            return None
        found |= names
    return found


def _moves_nothing(call: Call) -> bool:
    """True for a view, and for a call that reads no elements."""
    return is_view(call) or not tensors(call.arguments) or _is_of_extents(call.name.partition(".")[0])
