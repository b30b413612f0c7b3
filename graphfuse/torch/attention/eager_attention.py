"""A forward with the operator of attention with sinks, for modules whose model has chosen "eager" attention.

The attention modules of transformers look up ``ALL_ATTENTION_FUNCTIONS`` by the implementation that the configuration
names. The default is ``eager_attention_forward`` of the model's file. This function is traced. If it computes attention
with sinks, the module gets its class's forward with the operator in place of the function. Other modules, other
implementations and the configuration stay as they are.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphfuse.runtime import torch_private
from graphfuse.torch.analysis import surroundings
from graphfuse.torch.analysis.meaning import is_op, without_casts, writes
from graphfuse.torch.analysis.set_forward import RUN_ON
from graphfuse.torch.analysis.source import syntax_tree
from graphfuse.torch.analysis.symbols import ForwardDeclined
from graphfuse.torch.analysis.unwrapped_forward import UnwrappedForward, unwrapped_forward
from graphfuse.torch.attention import sinks_pass as sinks
from graphfuse.torch.attention.operator import is_wrapper
from graphfuse.torch.attention.sinks import TYPES, attention_with_sinks

EAGER = "eager_attention_forward"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_SCALE = 0.37
_ALLOWED_TESTS = ("attention_mask is not None", "attention_mask is None")
_OTHERWISE = "attention: what its function computes depends on more than it is given"
_READS_MORE = "attention: its function reads more arguments than a scale and dropout"
_GIVEN = ("query", "key", "value", "attention_mask")

_called_plainly, _differentiates_forward = torch_private.only_calls_forward(), torch_private.differentiates_forward()


def recognized(module: torch.nn.Module) -> FunctionType | str | None:
    """The new forward of a module whose attention has sinks, or the reason why the module keeps its own. None if the
    module does not seem to have attention with sinks."""
    unwrapped = inspect.unwrap(type(module).forward)
    names = getattr(getattr(unwrapped, "__code__", None), "co_names", ())
    vectors = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 1 and p.is_floating_point()]
    if not vectors or not {EAGER, _REGISTRY}.issubset(names):
        return None
    try:
        eager = unwrapped.__globals__[EAGER]
        traces = [
            _traced(module, vectors, eager, *options) for options in ((False, True), (True, True), (False, False))
        ]
    except Exception:  # any error of a foreign function, which was not written for these inputs
        return None
    if any(trace != traces[0] for trace in traces):
        return _OTHERWISE
    if traces[0] is None or traces[0] not in vectors:
        return traces[0]
    try:
        own = unwrapped_forward(type(module))
    except ForwardDeclined as why:
        return f"attention: {why}"
    if why := _why_not_replaced(type(module), eager):
        return why
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if chosen not in (None, "eager"):
        return f"its attention is {chosen}; the operator takes the place of eager"
    read = {n: v for n, v in vars(module).items() if n in eager.__code__.co_names and n != "training"}
    constants = {n: v for n, v in read.items() if isinstance(v, bool | int | float | str | None)}
    if constants.keys() != read.keys():  # the parts of other values may change
        return _OTHERWISE
    return _forward_of(own, traces[0], constants)


def _why_not_replaced(cls: type, eager: FunctionType) -> str:
    """The reason why a function may compute something else than its traces show; "" if it cannot."""
    parameters = inspect.signature(eager).parameters.values()
    rest = {p.name for p in parameters if p.kind is p.VAR_KEYWORD}
    others = {p.name for p in parameters} - rest - {*_GIVEN, "module", "scaling", "dropout"}
    try:
        nodes = [*ast.walk(syntax_tree(eager))]
    except ForwardDeclined:
        return _READS_MORE
    if others or any(isinstance(node, ast.Name) and node.id in rest for node in nodes):
        return _READS_MORE
    tests = (node.test for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.While))
    shared = (vars(base) for base in cls.__mro__ if not issubclass(torch.nn.Module, base))
    reads_shared = any(n in names and not callable(names[n]) for names in shared for n in eager.__code__.co_names)
    return _OTHERWISE if reads_shared or any(ast.unparse(test) not in _ALLOWED_TESTS for test in tests) else ""


def _traced(
    module: torch.nn.Module, vectors: list[str], eager: Callable[..., object], training: bool, has_mask: bool
) -> str | None:
    """The name of the parameter with the sinks, if a function computes attention with them. Otherwise the reason why
    not, or None if nothing in its trace is attention with sinks."""
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
    return _sinks_name(graph, vectors, has_mask)


def _sinks_name(graph: GraphModule, vectors: list[str], has_mask: bool) -> str | None:
    _, found = next(sinks.find(graph, surroundings.graph_parts(graph.graph)), (None, None))
    if not isinstance(found, sinks.Attention):
        return None if found is None else f"attention: {found}"
    places = [n for n in graph.graph.nodes if n.op == "placeholder"]
    names = dict(zip(places, (*_GIVEN, *vectors), strict=True))
    given = (found.q, found.k, found.v, found.mask and found.mask.node)
    read = [t and names.get(without_casts(sinks.whole(t))) for t in given]
    name, (result,) = names.get(found.sinks), graph.graph.output_node().all_input_nodes
    while is_op(result, "same"):
        result = result.args[0]
    is_result = sinks.swapped(result, 1, 2) is found.out
    is_result = is_result and not any(map(writes, graph.graph.nodes))
    wanted = _GIVEN if has_mask else (*_GIVEN[:3], None)
    if tuple(read) != wanted or name not in vectors or not is_result or found.scale != _SCALE:
        return "attention: it computes more than attention with sinks"
    return name


def _forward_of(own: UnwrappedForward, name: str, constants: Mapping[str, object]) -> FunctionType:
    """A class's forward, with the operator in place of its file's function. constants: values that the file's function
    reads from the module."""
    code, theirs = own.function.__code__, own.function.__globals__
    read = {n: theirs[n] for names in (code.co_names, theirs[EAGER].__code__.co_names) for n in names if n in theirs}
    # Without the module's name, under which a compiler would look these globals up.
    names = {n: v for n, v in theirs.items() if n != "__name__"} | {EAGER: _attention(read[EAGER], name, constants)}
    function = FunctionType(code, names, code.co_name, own.function.__defaults__, own.function.__closure__)
    function.__kwdefaults__ = own.function.__kwdefaults__

    def holds(_: torch.nn.Module) -> bool:
        """True if the globals that the forward reads are unchanged."""
        return is_dynamo_compiling() or all(theirs.get(n) is v for n, v in read.items())

    return own.replaced(function, holds)


def _attention(own: Callable[..., object], name: str, constants: Mapping[str, object]) -> Callable[..., object]:
    """A function that runs the operator in place of the file's function. The file's function still runs if it would
    compute something else, or if the probabilities may be requested."""

    expected = tuple(constants.items())

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **named):
        is_plain = scaling is not None and not dropout and not named.get("output_attentions")
        if is_plain and _called_plainly(module) and all(getattr(module, n, None) == v for n, v in expected):
            vector = getattr(module, name)
            if _are_supported(query, key, value, vector, attention_mask):
                out = attention_with_sinks(query, key, value, vector, attn_mask=attention_mask, scale=scaling)
                return out.transpose(1, 2).contiguous(), None
        return own(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **named)

    return attention


def _are_supported(q: object, k: object, v: object, vector: object, mask: object) -> bool:
    full = (q, k, v, vector, *([] if mask is None else [mask]))
    # the file's function would add a boolean mask
    if not all(isinstance(t, torch.Tensor) and t.dtype in TYPES for t in full):
        return False
    # mask of a longer cache, which the file's function slices
    if mask is not None and mask.shape[-1] not in (1, k.shape[2]):
        return False
    device = q.device.type
    if device not in RUN_ON or any(t.dtype is not q.dtype for t in (k, v, *full[4:])):
        return False
    if any(is_wrapper(t) for t in full):
        return False
    if torch.is_autocast_enabled(device) or mask is not None and mask.requires_grad:
        return False
    return is_dynamo_compiling() or not (_differentiates_forward() or torch_private.is_differentiated_by_func())
