"""Meaning of the nodes of an FX graph, for all recorders: aten, torch's functions, Python's operators and methods.

Shapes and types are those of ``node.meta["val"]`` (recordings, AOT) or ``["example_value"]`` (Dynamo).
"""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from graphfuse.runtime import torch_private

_MEANINGS = {
    "add": "add iadd radd",
    "sub": "sub subtract isub",
    "mul": "mul multiply imul rmul",
    "div": "div divide truediv true_divide itruediv",
    "length": "linalg_vector_norm vector_norm norm",
    "clamp_min": "clamp_min clip clamp",
    "cast": "to float half bfloat16 double char byte type type_as _to_copy convert_element_type",
    "same": "contiguous clone alias",
    "view": "view reshape _unsafe_view view_as reshape_as unsqueeze squeeze flatten unflatten getitem",
    "cat": "cat concat concatenate",
    "neg": "neg negative",
    "permute": "permute transpose swapaxes swapdims",
    "expand": "expand expand_as broadcast_to",
    "layer_norm": "layer_norm native_layer_norm",
    "rms_norm": "rms_norm _fused_rms_norm",
    "attention": "scaled_dot_product_attention",
    "max": "max amax",
    "repeat": "repeat_interleave",
    "remainder": "remainder mod imod",
    "floor_divide": "floor_divide floordiv ifloordiv",
    "bitwise_and": "bitwise_and and_ iand",
    "bitwise_or": "bitwise_or or_ ior",
    "bitwise_xor": "bitwise_xor xor ixor",
    "bitwise_not": "bitwise_not invert inv",
}
_OF_ONE_NAME = (
    "pow square sqrt rsqrt reciprocal mean sum var var_mean silu sigmoid slice cos sin normalize matmul softmax where "
    "masked_fill abs amin round trunc floor ceil exp2 log2".split()
)
MEANING = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()}
MEANING |= dict(zip(_OF_ONE_NAME, _OF_ONE_NAME, strict=True))
_VIEWS = ("view", "expand", "same", "cast", "permute", "slice")
"""Meanings of operations whose result may share memory with their first argument."""

PARTS = frozenset(
    "select narrow detach chunk split tensor_split unbind diagonal t moveaxis movedim unfold as_strided".split()
)
"""Names of other operations whose result may share memory. Their meaning is not needed."""
IN_PLACE = {
    getattr(operator, f"i{name.rstrip('_')}"): getattr(operator, name)
    for name in "add sub mul truediv floordiv mod pow and_ or_ xor lshift rshift".split()
}
"""Python's operators that work in place, with those that do not."""
OURS = {"graphfuse::keyed_dropout": "dropout", "graphfuse::cross_entropy_loss": "cross_entropy"}
"""graphfuse's own operators that are in graphs until regions are chosen, with torch's names for them."""
KEYS = ("val", "example_value")
"""Keys of ``Node.meta`` under which recorders store the result of a node."""
_USUAL_EXTENT = 64
"""Extent that planning assumes if the real one is known only at run time."""
_WRITING = frozenset(
    form for name in ("idiv", "setitem", *(f.__name__ for f in IN_PLACE)) for form in (name, f"__{name}__")
)
_UNDERSCORED = frozenset({operator.and_, operator.or_, operator.not_, operator.is_})
"""Functions whose names end like those of in-place operations, but which change nothing."""
OWNERS = (torch, torch.nn.functional, operator, torch.linalg, torch.special, torch_private.native_functions())


@dataclass(frozen=True)
class Meaning:
    """An operation by its meaning. args: positional arguments. named: keyword arguments."""

    meaning: str
    args: tuple[object, ...]
    named: dict[str, object]

    def get(self, place: int, name: str, default: object = None) -> object:
        return self.args[place] if place < len(self.args) else self.named.get(name, default)


def called_name(node: Node) -> str:
    """Name of the function that a node calls; "" if it is no operation of torch."""
    target = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        return ""
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        if space in ("aten", "prims"):
            return name
        return target._schema.name if target._schema.name in OURS else ""
    return name_of(target)


def input_name(node: Node) -> str:
    """Name of an input of a graph as its program has it, such as ``x`` or ``self.layers.0.weight``."""
    path = re.sub(r"^L\['(\w+)'\]", r"\1", torch_private.input_path(node))
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", path) or node.name


def arguments(node: Node, *names: str) -> dict[str, object]:
    """Arguments of a call by name. names: of arguments that may be given by position."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def name_of(target: object) -> str:
    """Name of a function of torch; "" for any other object."""
    name = getattr(target, "__name__", "")
    names = {name, name.removeprefix("linalg_"), name.removeprefix("special_")}  # modules omit prefixes
    # Not getattr: for a name that torch lacks, it runs a function that raises an error with a text.
    found = (getattr(owner, "__dict__", {}).get(n) for owner in OWNERS for n in names)
    return name if any(function is target for function in found) else ""


def writes(node: Node) -> bool:
    """True if a node changes its first argument in place, or may do so, or writes to an argument `out`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    place = place_of_inplace(node.target) if node.op == "call_function" else None
    inplace = node.args[place] if place is not None and place < len(node.args) else node.kwargs.get("inplace")
    if inplace is not None and inplace is not False or node.kwargs.get("out") is not None:
        return True
    if node.op == "call_function" and node.target in _UNDERSCORED:
        return False
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _WRITING or str(name).endswith("_") and not str(name).endswith("__")


@functools.cache
def place_of_inplace(function: Callable[..., object]) -> int | None:
    """Position of a function's parameter `inplace`; None if it has none."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # a builtin, whose in-place forms have names that end with an underscore
        return None
    return names.index("inplace") if "inplace" in names else None


def may_write(node: Node) -> bool:
    """True if a node changes its arguments, or may do so as it is no operation of torch."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return writes(node) or not (isinstance(node.target, torch._ops.OpOverload) or called_name(node))


def op(node: object) -> Meaning | None:
    """Meaning of the operation of a node; None if it is not known, or works in place."""
    if not isinstance(node, Node) or writes(node):
        return None
    name, args, named = called_name(node), node.args, dict(node.kwargs)
    if name == "getitem" and not _keeps_order(args[1]):
        return None
    if "out" in named or name == "rsub" or named.pop("alpha", 1) != 1 or named.get("rounding_mode") is not None:
        return None
    meaning = MEANING.get(name)
    return None if meaning is None else Meaning(meaning, args, named)


def _keeps_order(index: object) -> bool:
    """True if indexing a tensor with an index makes a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None
        or part is Ellipsis
        or isinstance(part, slice | torch.SymInt)
        or type(part) is int
        # A number that Dynamo has made an input.
        or (isinstance(part, Node) and isinstance(recorded_result(part), torch.SymInt))
        for part in parts
    )


def read_extents_of_inputs(graph: Graph) -> None:
    """Reads extents from inputs instead of computed tensors of the same shape, which then are not needed for their
    extents."""
    given = (node for node in graph.find_nodes(op="placeholder") if not is_changed(node))
    inputs = [(node, t) for node in given if (t := value(node)) is not None]
    for node in graph.nodes:
        of = node.args[0] if called_name(node) in ("size", "sym_size") and node.args else None
        asked = value(of) if isinstance(of, Node) and of.op != "placeholder" else None
        for one, t in inputs if asked is not None else ():
            if t.dim() == asked.dim() and all(map(same, t.shape, asked.shape)):
                node.replace_input_with(of, one)
                break


def write_constant_types(graph: Graph) -> None:
    """Gives casts like ``type_as`` a constant type: the other tensor then is not needed for its type."""
    for node in [*graph.nodes]:
        of, like = map(value, node.args) if called_name(node) == "type_as" and len(node.args) == 2 else (None, None)
        if of is None or like is None or value(node) is None or of.device != like.device:
            continue
        if of.dtype is like.dtype:  # it is the tensor itself
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            node.op, node.target, node.args = "call_method", "to", (node.args[0], like.dtype)


def is_item(node: Node) -> bool:
    """True if a node is one of several results of another."""
    return called_name(node) == "getitem" and isinstance(recorded_result(node.args[0]), list | tuple)


def is_op(node: object, *meanings: str) -> Meaning | None:
    found = op(node)
    return found if found is not None and found.meaning in meanings else None


def recorded_result(node: Node) -> object:
    """Result of a node, as it was recorded with the graph; None if none was."""
    return next((node.meta[key] for key in KEYS if key in node.meta), None)


def as_sequence(made: object) -> Sequence[object]:
    """Results of a node as a sequence, whether it has one or several."""
    return made if isinstance(made, list | tuple) else (made,)


def tensors(made: object) -> list[torch.Tensor]:
    """Tensors in the result of a node, or in the arguments of a call."""
    return [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]


def has_gradient(node: Node) -> bool:
    """True if a tensor of a node requires a gradient."""
    return any(t.requires_grad for t in tensors(recorded_result(node)))


def value(node: object) -> torch.Tensor | None:
    """The recorded tensor of a node, which has its shape and type; None if the node has no single tensor."""
    if not isinstance(node, Node):
        return None
    found = recorded_result(node)
    return found if isinstance(found, torch.Tensor) else None


def number(node: object) -> int | float | torch.SymFloat | None:
    """A number in a graph: a constant, or one that Dynamo has made an input (``dynamic=True``). None for all else, also
    for a number that is read from a tensor, as it is not known when a graph is compiled."""
    if isinstance(node, Node):
        node = recorded_result(node)
    if isinstance(node, torch.SymFloat) and not node.node.has_hint():
        return None
    return node if isinstance(node, int | float | torch.SymFloat) else None


def is_last(dim: object, node: object) -> bool:
    """True if a number is that of the last dimension of a node's tensor."""
    return value(node) is not None and dim in (-1, value(node).dim() - 1)


def dtype(node: object) -> torch.dtype | None:
    found = value(node)
    return None if found is None else found.dtype


def norm_type(kind: torch.dtype | None) -> torch.dtype | None:
    """Type in which norms of a type are computed."""
    return {torch.bfloat16: torch.float32, torch.float16: torch.float32}.get(kind, kind)


def without_casts(node: object) -> object:
    """The node with the same values before casts to a wider type, and copies."""
    while (found := is_op(node, "cast", "same")) and isinstance(found.args[0], Node):
        source = found.args[0]
        if dtype(source) is None or dtype(node) not in (dtype(source), norm_type(dtype(source))):
            break
        if value(source).device != value(node).device:
            break
        node = source
    return node


def without_views(node: object) -> object:
    """The node with the same elements in the same order, before views that move none."""
    while (found := is_op(node, "view", "expand")) and value(found.args[0]) is not None:
        source = found.args[0]
        old, new = ([n for n in value(t).shape if not same(n, 1)] for t in (source, node))
        if dtype(source) is not dtype(node) or len(old) != len(new) or not all(map(same, old, new)):
            break
        node = source
    return node


def same(a: object, b: object) -> bool:
    """True if two extents are known to be equal. Adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def permutation(found: Meaning, rank: int) -> tuple[int, ...] | None:
    """Dimensions of the argument, one for each dimension of the permuted or transposed result; None if they are not
    known. They are not known for a matrix: two numbers may be a permutation or a transposition."""
    dims = found.args[1:] or tuple(n for name, n in found.named.items() if name not in ("input", "self"))
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if rank == 2 or not all(isinstance(d, int) for d in dims):
        return None
    dims = tuple(d % rank for d in dims)
    if len(dims) == 2:
        swapped = list(range(rank))
        swapped[dims[0]], swapped[dims[1]] = dims[1], dims[0]
        dims = tuple(swapped)
    return dims if sorted(dims) == list(range(rank)) else None


def slice_of_last_dim(node: object) -> tuple[Node, slice] | None:
    """Source and slice of a node that slices the last dimension alone; None for any other node."""
    found = is_op(node, "slice", "view")
    source = found.args[0] if found and found.args else None
    if value(source) is None:
        return None
    if found.meaning == "slice":  # aten's
        taken = slice(found.get(2, "start"), found.get(3, "end"), found.get(4, "step"))
        return (source, taken) if is_last(found.get(1, "dim", 0), source) else None
    index = found.args[1] if called_name(node) == "getitem" else ()
    if not isinstance(index, tuple) or not index or not isinstance(index[-1], slice):
        return None
    whole = (slice(None),) * (value(source).dim() - 1)
    return (source, index[-1]) if index[:-1] in ((Ellipsis,), whole) else None


def column_of_pairs(index: object, rank: int = 0) -> int | None:
    """0 for an index of the even-numbered columns, 1 for one of the odd-numbered columns, None for any other. rank: of
    the indexed tensor; 0 if unknown."""
    if not isinstance(index, tuple) or index[:-1] not in ((Ellipsis,), (slice(None),) * (rank - 1) or (Ellipsis,)):
        return None
    taken = index[-1]
    is_half = isinstance(taken, slice) and taken.step == 2 and taken.stop is None and taken.start in (None, 0, 1)
    return (taken.start or 0) if is_half else None


def concatenated(node: object) -> Sequence[Node]:
    """Tensors that a node concatenates along the last dimension; none for any other node."""
    found = is_op(node, "cat")
    is_at_end = found is not None and is_last(found.get(1, "dim", found.named.get("axis", 0)), node)
    return found.get(0, "tensors") if is_at_end else ()


def operands(found: Meaning) -> Iterator[tuple[object, object]]:
    """The two operands of an operation, in both orders."""
    a, b = found.get(0, "input"), found.get(1, "other")
    yield a, b
    yield b, a


def is_changed(node: object) -> bool:
    """True if something changes a node's values in place, also through a tensor that may share its memory."""
    while isinstance(node, Node):
        if _is_written(node):
            return True
        node = node.args[0] if _is_the_same_tensor(node) else None
    return False


def _is_written(node: Node) -> bool:
    return any(
        (writes(user) and node in (*user.args[:1], user.kwargs.get("out")))
        or (_may_be_a_view(user) and _is_written(user))
        for user in node.users
    )


def _may_be_a_view(node: Node) -> bool:
    return is_op(node, *_VIEWS) is not None and called_name(node) != "clone" or called_name(node) in PARTS


def _is_the_same_tensor(node: Node) -> bool:
    """True if a node may return its argument itself: a cast to the argument's type, for example."""
    found = is_op(node, "cast", "same")
    return found is not None and dtype(found.args[0]) is dtype(node) and called_name(node) != "clone"


def hint(n: object) -> int:
    """An extent as a number. For one that varies, its value when the graph was recorded, or a usual one if that is
    unknown."""
    return n if isinstance(n, int) else int(n.node.hint) if n.node.has_hint() else _USUAL_EXTENT
