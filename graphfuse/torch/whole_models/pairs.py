"""Norms and the activations that follow them as one call each, in forwards that call both directly one after the other.

They may be consecutive statements of a forward or consecutive modules of a sequence. An activation is a module or a
function of torch. The rest of the forward is arbitrary.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import FunctionType, ModuleType

import torch

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.analysis.symbols import ForwardDeclined
from graphfuse.torch.analysis.trace import CallOperand, CallSequence, TracedCall
from graphfuse.torch.convolutional import group_norm, spatial_norm
from graphfuse.torch.whole_models.forward import joint_call
from graphfuse.torch.whole_models.fused_calls import FusedCalls, fused
from graphfuse.torch.whole_models.statements import Call, joined

_SILU = torch.nn.SiLU()
"""Stands for the function."""
_CALLS = CallSequence(1, (TracedCall(0, (CallOperand(0),), {}), TracedCall(1, (CallOperand(1),), {})), (2,))


def replace(name: str, module: torch.nn.Module, norms: Mapping[str, FusedCalls]) -> Iterator[Entry]:
    """Sets the forward of a module that has such pairs. norms: those of its modules that are one kernel each, by name;
    group norms and spatial norms are recognized here."""
    kind, children = type(module).__name__, dict(module.named_children())
    of_groups = {n for n, m in children.items() if group_norm.is_replaceable(m)}
    of_places = {n for n, m in children.items() if spatial_norm.is_replaceable(m)}
    activations = {n: m for n, m in children.items() if type(m) is torch.nn.SiLU}
    own, may_have_pairs = type(module).forward, of_groups or of_places or norms
    if set_forward.is_set_on(module) or not may_have_pairs or not isinstance(own, FunctionType):
        return
    operations = dict[tuple[str, str], str]()

    def call(norm: str, activation: str, of_first: bool) -> Call | None:
        """The function for a pair of modules; None if they cannot be one call. of_first: whether the activation is of
        the norm's first result."""
        if norm not in of_groups and norm not in of_places and norm not in norms:
            return None
        is_function = activation not in children and _named(own, activation) is group_norm.SILU
        if not is_function and activation not in activations:
            return None
        if of_first:
            return spatial_norm.followed if norm in of_places else None
        if norm in of_groups:
            return group_norm.followed
        found = fused(_CALLS, (children[norm], activations.get(activation, _SILU))) if norm in norms else None
        if not isinstance(found, FusedCalls):
            return None
        operations[norm, activation], run = found.first.program.operations, joint_call(found)
        return lambda norm, activation, x: run(norm, _SILU if activation is group_norm.SILU else activation, x)[0]

    try:
        if own is torch.nn.Sequential.forward:
            function = group_norm.in_sequence
            norms_alone = {n for n in of_groups if type(children[n]) is torch.nn.GroupNorm}
            pairs = [(a, b) for a, b in pairwise(children) if a in norms_alone and b in activations]
        else:
            function, pairs = joined(own, call)
    except ForwardDeclined as why:
        if activations:  # without a source nothing tells of functions
            yield Entry(name, kind, why=f"activations after its norms: {why}")
        return
    if not pairs:
        return
    if not set_forward.is_free(module):
        yield Entry(name, kind, why=set_forward.ALREADY_SET)
        return
    set_forward.set_on(module, function)
    for pair, said in operations.items():
        yield Entry(name, kind, "region", f"{said}; with {' and '.join(pair)}")
    for became, of in ((group_norm.BECAME, of_groups), (spatial_norm.BECAME, of_places)):
        if said := [" and ".join(pair) for pair in pairs if pair[0] in of]:
            yield Entry(name, kind, became, "; ".join(said))


def _named(function: FunctionType, name: str) -> object:
    """Value of a name with dots among the globals of a function, through modules alone; None if there is none."""
    value, *parts = name.split(".")
    value = function.__globals__.get(value)
    for part in parts:
        value = vars(value).get(part) if isinstance(value, ModuleType) else None
    return value
