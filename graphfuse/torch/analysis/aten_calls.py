"""The calls of aten that a node of an FX graph makes, for all recorders: aten itself, torch's functions, Python's
operators and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from graphfuse.runtime import torch_private
from graphfuse.torch.analysis.meaning import as_sequence, called_name, recorded_result, same, tensors, writes
from graphfuse.torch.analysis.norm_decompositions import DECOMPOSITIONS


@dataclass(frozen=True, eq=False)
class Call:
    """One call of aten. arguments: by the schema's names, defaults included. results: what it returned."""

    overload: torch._ops.OpOverload
    arguments: dict[str, object]
    results: tuple[object, ...]

    @property
    def name(self) -> str:
        """Name and overload of the operator, without torch's namespaces; for an in-place operator, the name of its
        out-of-place form."""
        name = self.overload._schema.name.removeprefix("aten::").removeprefix("prims::")
        return f"{name.removesuffix('_') if self.overload._schema.is_mutable else name}.{self.overload._overloadname}"

    @property
    def computed(self) -> torch._ops.OpOverload:
        """The operator; for an in-place operator, its out-of-place form, if there is one."""
        if not self.overload._schema.is_mutable:
            return self.overload
        packet = getattr(torch.ops.aten, self.name.partition(".")[0], None)
        return getattr(packet, self.overload._overloadname or "default", self.overload)


def _are_alike(made: object, recorded: object) -> bool:
    """True if a call made the types, devices and shapes that were recorded with the graph. Under autocast it may
    not."""
    if not isinstance(made, torch.Tensor):
        are_several = isinstance(made, list | tuple) and isinstance(recorded, list | tuple)
        return are_several and len(made) == len(recorded) and all(map(_are_alike, made, recorded))
    if not isinstance(recorded, torch.Tensor) or made.dim() != recorded.dim():
        return False
    return (made.dtype, made.device) == (recorded.dtype, recorded.device) and all(map(same, made.shape, recorded.shape))


def _has_tensors(node: Node) -> bool:
    """True if the result of a node is one tensor or several, and nothing else."""
    found = as_sequence(recorded_result(node))
    return bool(found) and all(isinstance(t, torch.Tensor) for t in found)


@contextmanager
def fake_context(given: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context for operations on tensors without memory (fake tensors). Tensors made of numbers are then fake, too, and
    questions about extents that vary add no guards."""
    modes = (getattr(t, "fake_mode", None) for t in given)
    mode = next((mode for mode in modes if mode is not None), None)
    extents = getattr(mode, "shape_env", None)
    # torch's rules in C++ support only extents that are numbers.
    vary = any(isinstance(n, torch.SymInt) for t in given for n in t.shape)
    rules = torch_private.python_dispatcher() if vary else nullcontext()
    unguarded = nullcontext() if extents is None else extents.suppress_guards()
    with nullcontext() if mode is None else mode, unguarded, rules:
        yield


def calls_of(
    node: Node, aliases: dict[torch.Tensor, torch.Tensor], recorded: Callable[[Node], object]
) -> tuple[Sequence[Call], object] | None:
    """Calls of a node that computes tensors from tensors, and what it returns. None for any other node, and for one
    that changes its arguments.

    aliases: receives, by each recorded tensor, the tensor that the calls get instead, as some operations change shapes
    in place, and back. recorded: function that returns the recorded result of a node.
    """
    if (
        node.op not in ("call_function", "call_method")
        or not called_name(node)
        or writes(node)
        or not _has_tensors(node)
    ):
        return None
    if not any(map(_has_tensors, node.all_input_nodes)) or any(recorded(a) is None for a in node.all_input_nodes):
        return None
    try:
        with torch.no_grad():
            aliases |= {t: t.detach() for t in tensors([*map(recorded, node.all_input_nodes)])}
    except RuntimeError:  # a tensor of a transform that has ended
        return None

    def given(a: Node) -> object:
        return map_aggregate(recorded(a), lambda t: aliases.get(t, t) if isinstance(t, torch.Tensor) else t)

    args, kwargs = map_arg(node.args, given), map_arg(dict(node.kwargs), given)
    function = _method(node.target) if node.op == "call_method" else DECOMPOSITIONS.get(node.target, node.target)
    found = _logged(function, args, kwargs)
    return found if found is not None and _are_alike(found[1], recorded(node)) else None


def parts_of(call: Call) -> tuple[Sequence[Call], Sequence[object]] | None:
    """Calls that torch's decomposition of a call makes, and what it returns. None if torch has no decomposition, and
    for a view, which may do more for autograd than its parts (detach)."""
    function = None if is_view(call) else torch_private.decomposition(call.computed)
    if function is None:
        return None
    args, named = given(call)
    found = _logged(function, args, named)
    if found is None:
        return None
    calls, made = found[0], as_sequence(found[1])
    return (calls, made) if len(made) == len(call.results) and _are_alike(made[0], call.results[0]) else None


def is_view(call: Call) -> bool:
    """True if a call returns a tensor that shares memory with an argument."""
    return any(made.alias_info is not None for made in call.computed._schema.returns)


def given(call: Call) -> tuple[list[object], dict[str, object]]:
    """Arguments of a call, by position and by name."""
    found = [(a, call.arguments[a.name]) for a in call.overload._schema.arguments]
    named = {a.name: v for a, v in found if a.kwarg_only and v is not None}
    return [v for a, v in found if not a.kwarg_only], named


def _method(name: str) -> Callable[..., object]:
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)


def _logged(
    function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]
) -> tuple[Sequence[Call], object] | None:
    """Calls of aten that a function makes, and what it returns; None if it does not run on these arguments."""
    calls = list[Call]()

    def log(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        made = func(*args, **kwargs)
        arguments = {}
        for place, a in enumerate(func._schema.arguments):
            arguments[a.name] = args[place] if place < len(args) else kwargs.get(a.name, a.default_value)
        results = tuple(as_sequence(made))
        if any(isinstance(t, torch.Tensor) for t in results):
            calls.append(Call(func, arguments, results))
        return made

    seen = torch_private.dispatched_to(log)
    if seen is None:
        return None
    try:
        with torch.no_grad(), fake_context(tensors((args, kwargs))), torch_private.without_fake_tensor_logs(), seen:
            return calls, function(*args, **kwargs)
    except Exception:  # an operation that torch cannot run on such tensors is not translated
        return None


def wrongly_typed(graph: Graph) -> set[Node]:
    """Nodes whose types in eager mode differ from the recorded ones, and all nodes that depend on them. On tensors
    without memory, some operators promote types that their kernels do not promote (huber_loss, soft_margin_loss)."""
    found: set[Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if not found.isdisjoint(read) or _are_mixed([*map(recorded_result, read)]) and not _is_rightly_typed(node):
            found.add(node)
    return found


def _are_mixed(given: object) -> bool:
    """True if floating-point tensors, other than those without dimensions, have several types."""
    return len({t.dtype for t in tensors(given) if t.dim() and t.is_floating_point()}) > 1


def _is_rightly_typed(node: Node) -> bool:
    calls, _ = calls_of(node, {}, recorded_result) or ((), None)
    return all(map(_makes_recorded_types, calls))


def _makes_recorded_types(call: Call) -> bool:
    """True if a call on tensors of one element makes the recorded types, or cannot be tried."""
    varies = any(isinstance(v, torch.SymInt | torch.SymFloat) for v in pytree.tree_leaves(call.arguments))
    changes = call.overload._schema.is_mutable or torch.Tag.nondeterministic_seeded in call.overload.tags
    if varies or changes or call.overload.namespace != "aten" or not _are_mixed(call.arguments):
        return True
    with torch.no_grad(), torch_private.without_modes():
        given = pytree.tree_map_only(torch.Tensor, _one_element, call.arguments)
        try:
            made = as_sequence(call.overload(**given))
        except Exception:  # it does not run on tensors of one element
            return True
    pairs = zip(made, call.results, strict=False)
    return all(a.dtype is b.dtype for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def _one_element(t: torch.Tensor) -> torch.Tensor:
    return torch.ones((1,) * t.dim(), dtype=t.dtype, device="cpu")
