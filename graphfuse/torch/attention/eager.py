"""Modules whose attention has sinks, in place: what a forward calls for attention, where its model chose "eager".

The attention modules of transformers ask ``ALL_ATTENTION_FUNCTIONS`` for the implementation that the configuration
names, and give their file's ``eager_attention_forward`` for the one that is not there by name. That function is traced;
where it is attention with sinks, the module gets its class's forward with the operator under that name. Other modules,
other implementations and the configuration stay as they are.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphfuse.runtime import torch_private
from graphfuse.torch.attention import sinks_in_graphs as sinks
from graphfuse.torch.attention.sinks import NAME, TYPES, attention_with_sinks
from graphfuse.torch.fusion import surroundings
from graphfuse.torch.fusion.meaning import changes, exact, is_op
from graphfuse.torch.fusion.own_forward import OwnForward, own_forward
from graphfuse.torch.fusion.report import Refused
from graphfuse.torch.fusion.set_forward import RUN_ON
from graphfuse.torch.fusion.source import syntax_tree
from graphfuse.torch.fusion.symbols import ForwardDeclined

EAGER = "eager_attention_forward"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_SCALE = 0.37
_DECIDED = ("attention_mask is not None", "attention_mask is None")
_OTHERWISE = Refused("attention: what its function computes depends on more than it is given")
_GIVEN = ("query", "key", "value", "attention_mask")

_called_plainly, _differentiates_forward = torch_private.called_plainly(), torch_private.differentiates_forward()


@dataclass(frozen=True)
class Attended:
    """A module whose attention has sinks. function: its new forward."""

    function: FunctionType
    operator: str = NAME


def recognized(module: torch.nn.Module) -> Attended | Refused | None:
    """None of a module that has no attention with sinks, as far as can be seen."""
    unwrapped = inspect.unwrap(type(module).forward)
    names = getattr(getattr(unwrapped, "__code__", None), "co_names", ())
    vectors = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 1 and p.is_floating_point()]
    if not vectors or not {EAGER, _REGISTRY}.issubset(names):
        return None
    try:
        eager = unwrapped.__globals__[EAGER]
        ways = [_traced(module, vectors, eager, *way) for way in ((False, True), (True, True), (False, False))]
        found = ways[0] if all(way == ways[0] for way in ways) else _OTHERWISE
    except Exception:  # of a stranger's function, which was written for other inputs
        return None
    if not isinstance(found, str):
        return found
    try:
        own = own_forward(type(module))
    except ForwardDeclined as why:
        return Refused(f"attention: {why}")
    if _reads_more(eager):
        return Refused("attention: its function reads more arguments than a scale and dropout")
    if _decides(eager) or _reads_of_class(type(module), eager):
        return _OTHERWISE
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if chosen not in (None, "eager"):
        return Refused(f"its attention is {chosen}; the operator takes the place of eager")
    read = {n: v for n, v in vars(module).items() if n in eager.__code__.co_names and n != "training"}
    constants = {n: v for n, v in read.items() if isinstance(v, bool | int | float | str | None)}
    if constants.keys() != read.keys():  # whose parts may change
        return _OTHERWISE
    return Attended(_forward_of(own, found, constants))


def _reads_more(eager: FunctionType) -> bool:
    """True if a function may compute something else by other arguments than those that it is traced with."""
    parameters = inspect.signature(eager).parameters.values()
    rest = {p.name for p in parameters if p.kind is p.VAR_KEYWORD}
    if {p.name for p in parameters} - rest - {*_GIVEN, "module", "scaling", "dropout"}:
        return True
    try:
        body = syntax_tree(eager)
    except ForwardDeclined:  # without a source
        return True
    return any(isinstance(node, ast.Name) and node.id in rest for node in ast.walk(body))


def _decides(eager: FunctionType) -> bool:
    """True if a function decides by something else than whether there is a mask."""
    kinds = ast.If | ast.IfExp | ast.While
    tests = (node.test for node in ast.walk(syntax_tree(eager)) if isinstance(node, kinds))
    return any(ast.unparse(test) not in _DECIDED for test in tests)


def _reads_of_class(cls: type, eager: FunctionType) -> bool:
    """True if a function reads what all modules of a class share."""
    own = (vars(base) for base in cls.__mro__ if not issubclass(torch.nn.Module, base))
    return any(n in names and not callable(names[n]) for names in own for n in eager.__code__.co_names)


def _traced(
    module: torch.nn.Module, vectors: list[str], eager: Callable[..., object], training: bool, has_mask: bool
) -> str | Refused | None:
    """The name of the parameter that has the sinks, of a function that is attention with them."""
    heads = {module.get_parameter(name).shape[0] for name in vectors}
    if len(heads) != 1:
        return None
    (count,), groups = heads, getattr(module, "num_key_value_groups", 1)
    shapes = ((2, count, 3, 16), *((2, count // groups, 5, 16),) * 2, (2, 1, 3, 5))

    def attention(given: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        stand_in, tensors = type(module).__new__(type(module)), dict(zip(vectors, values, strict=True))
        stand_in.__dict__ = vars(module) | {"training": training, "_parameters": vars(module)["_parameters"] | tensors}
        masked = given if has_mask else [*given[:3], None]
        return eager(stand_in, *masked, scaling=_SCALE, dropout=0.0)[0]

    with torch.no_grad():
        given = [torch.ones(shape) for shape in shapes], [torch.ones(count) for _ in vectors]
        graph = make_fx(attention, pre_dispatch=True)(*given)
    return _judged(graph, vectors, has_mask)


def _judged(graph: GraphModule, vectors: list[str], has_mask: bool) -> str | Refused | None:
    found = next(sinks.find(graph, surroundings.regions(graph.graph)), None)
    if not isinstance(found, sinks.Attention):
        return None if found is None else Refused(f"attention: {found.why}")
    places = [n for n in graph.graph.nodes if n.op == "placeholder"]
    names = dict(zip(places, (*_GIVEN, *vectors), strict=True))
    given = (found.q, found.k, found.v, found.mask and found.mask.node)
    read = [t and names.get(exact(sinks.whole(t))) for t in given]
    name, (result,) = names.get(found.sinks), graph.graph.output_node().all_input_nodes
    while is_op(result, "same"):
        result = result.args[0]
    is_result = sinks.swapped(result, 1, 2) is found.out
    is_result = is_result and not any(map(changes, graph.graph.nodes))
    wanted = _GIVEN if has_mask else (*_GIVEN[:3], None)
    if tuple(read) != wanted or name not in vectors or not is_result or found.scale != _SCALE:
        return Refused("attention: it computes something beside attention with sinks")
    return name


def _forward_of(own: OwnForward, name: str, constants: Mapping[str, object]) -> FunctionType:
    """A class's forward which calls the operator where it would call its file's function. constants: what that reads of
    the module."""
    code, theirs = own.function.__code__, own.function.__globals__
    read = {n: theirs[n] for names in (code.co_names, theirs[EAGER].__code__.co_names) for n in names if n in theirs}
    # Without the name of a module, in whose place a compiler would look for them.
    names = {n: v for n, v in theirs.items() if n != "__name__"} | {EAGER: _attention(read[EAGER], name, constants)}
    function = FunctionType(code, names, code.co_name, own.function.__defaults__, own.function.__closure__)
    function.__kwdefaults__ = own.function.__kwdefaults__
    return own.replaced(function, lambda module: is_dynamo_compiling() or not _differ(theirs, read))


def _differ(names: Mapping[str, object], read: Mapping[str, object]) -> bool:
    """True if somebody changed since what a forward reads of its file."""
    return any(names.get(n) is not v for n, v in read.items())


def _attention(own: Callable[..., object], name: str, constants: Mapping[str, object]) -> Callable[..., object]:
    """Function in the place of the file's, which calls that where the operator computes something else, or somebody
    may want to see the probabilities."""

    expected = tuple(constants.items())

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **named):
        is_plain = scaling is not None and not dropout and not named.get("output_attentions")
        if is_plain and _called_plainly(module) and all(getattr(module, n, None) == v for n, v in expected):
            vector = getattr(module, name)
            if _are_taken(query, key, value, vector, attention_mask):
                out = attention_with_sinks(query, key, value, vector, attn_mask=attention_mask, scale=scaling)
                return out.transpose(1, 2).contiguous(), None
        return own(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **named)

    return attention


def _are_taken(q: object, k: object, v: object, vector: object, mask: object) -> bool:
    full = (q, k, v, vector, *([] if mask is None else [mask]))
    if not all(isinstance(t, torch.Tensor) and t.dtype in TYPES for t in full):  # a mask of bool would be added
        return False
    if mask is not None and mask.shape[-1] not in (1, k.shape[2]):  # of a longer cache: the file's function cuts it
        return False
    device = q.device.type
    if device not in RUN_ON or any(t.dtype is not q.dtype for t in (k, v, *full[4:])):
        return False
    if any(hasattr(type(t), "__tensor_flatten__") for t in full):  # DTensors, and others that are more than a tensor
        return False
    if torch.is_autocast_enabled(device) or mask is not None and mask.requires_grad:
        return False
    return is_dynamo_compiling() or not (_differentiates_forward() or torch_private.is_differentiated_by_func())
