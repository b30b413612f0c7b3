"""``fuse`` and ``unfuse``: replace a model's norms, residual sums and attention with sinks in place, and restore
them."""

from collections.abc import Iterator
from types import FunctionType
from weakref import WeakSet

import torch

from graphfuse.base.errors import ModelError, ModelTypeError
from graphfuse.base.wording import with_article
from graphfuse.runtime import torch_private
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry, FuseReport
from graphfuse.torch.analysis.symbols import ForwardDeclined
from graphfuse.torch.attention import eager_attention, sinks
from graphfuse.torch.convolutional import (
    channels_last,
    convolution_layer,
    group_norm,
    masked_attention,
    repeated_edges,
    spatial_norm,
)
from graphfuse.torch.convolutional import replacement as autoencoders
from graphfuse.torch.whole_models import forward, layer, pairs, tensor_parallel
from graphfuse.torch.whole_models.fused_calls import FusedCalls

_DEVICES = ("cuda", "cpu", "meta")
_REGION = "region"


def fuse(model: torch.nn.Module) -> FuseReport:
    """Replaces the norms of a model by operators of ``graphfuse.torch``, with the residual sums before them if a
    layer's forward shows these. Returns a report with an entry for each.

    A norm is a module whose own forward computes what an operator does, with the same rounding. Classes are recognized
    by what they compute, also norms with a gate, of groups of a row, or along channels. Only ``forward`` is set, on the
    modules themselves: parameters, state dict, hooks, classes, types and devices stay. Calls that an operator would
    compute differently (other types, autocast) run the module's own forward, and norms with hooks are called as before.
    Fusing again finds the same. ``unfuse`` restores everything. Attention with sinks is replaced in the same way if a
    module calls its file's eager attention. ``torch.nn.GroupNorm``, alone or followed by SiLU, becomes three kernels
    for inference with large tensors. Convolutions with bias run on cuDNN's engine if that is there, for inference in
    16 bits with channels-last inputs. Modules of WAN's VAE are recognized by their source. They compute in
    channels-last, and the strides of their weights are changed for that, as those of other autoencoders. Linear layers
    of ``RowwiseParallel`` defer their sum over ranks, without gradients, until the norm that reads it.

    Outputs differ only by the order of sums over a row, and by attention, which is rounded once. Gradients are computed
    in float32 and rounded once.
    Raises ModelTypeError if `model` is no module, and ModelError if it is compiled, scripted, or on another device than
    "cuda", "cpu" or "meta", before anything is replaced.
    """
    _check(model)
    _remove(model)
    norms: dict[str, FusedCalls] = {}
    entries, made, visited = [], dict[torch.nn.Module, Entry](), WeakSet[torch.nn.Module]()

    def later(norm: torch.nn.Module) -> None:
        """Fuses a norm inside a replaced module, before a call that runs the module's own forward."""
        if norm not in visited:
            visited.add(norm)
            _norm("", norm, {})

    for name, module in model.named_modules():
        entry = autoencoders.replace(name, module, later) or masked_attention.replace(name, module)
        if entry is not None:
            made[module] = entry
    bypassed = {
        norm for module, entry in made.items() if entry.is_replaced for norm in autoencoders.bypassed_norms(module)
    }
    for name, module in model.named_modules():
        entry = _norm(name, module, norms) if module not in bypassed else None
        if entry is not None:
            entries.append(entry)
    for name, module in model.named_modules():
        if module in made:
            entries.append(made[module])
            continue
        if (entry := tensor_parallel.replace(name, module)) is not None:
            entries.append(entry)
            continue
        own = {n: norms[path] for n, _ in module.named_children() if (path := f"{name}.{n}" if name else n) in norms}
        if own:
            entries += _sums(name, module, own)
        entries += _attention(name, module)
        for replace in (group_norm.replace, convolution_layer.replace, spatial_norm.replace, repeated_edges.replace):
            if (entry := replace(name, module)) is not None:
                entries.append(entry)
        entries += pairs.replace(name, module, own)
        if (entry := channels_last.replace(name, module)) is not None:
            entries.append(entry)
    return FuseReport(type(model).__name__, tuple(entries))


def unfuse(model: torch.nn.Module) -> tuple[str, ...]:
    """Restores what ``fuse`` replaced in a model or a part of one. Returns the names of the modules. Raises
    ModelTypeError if `model` is no module."""
    _check_module("unfuse", model)
    return _remove(model)


def _check_module(name: str, model: object) -> None:
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise ModelTypeError(f"{name}: model is the class {model.__name__}; accepted: a torch.nn.Module made of it")
    if not isinstance(model, torch.nn.Module):
        raise ModelTypeError(f"{name}: model is {with_article(type(model).__name__)}; accepted: a torch.nn.Module")


def _check(model: object) -> None:
    _check_module("fuse", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("fuse: the model is a ScriptModule; accepted: one that is not scripted")
    for name, module in model.named_modules():
        if torch_private.is_compiled(module):
            where = f"module {name}" if name else "the model"
            raise ModelError(f"fuse: {where} is compiled; accepted: a model before torch.compile")
    for name, t in model.named_parameters():
        if t.device.type not in _DEVICES:
            raise ModelError(f"fuse: parameter {name} is on {t.device}; accepted: {', '.join(_DEVICES)}")


def _remove(model: torch.nn.Module) -> tuple[str, ...]:
    found = [(name, module) for name, module in model.named_modules() if set_forward.is_set_on(module)]
    for _, module in found:
        autoencoders.restore_weights(module)
        del module.forward
    return tuple(name for name, _ in found)


def _norm(name: str, module: torch.nn.Module, norms: dict[str, FusedCalls]) -> Entry | None:
    found, cls = forward.recognized(module), type(module)
    if found is None:
        return None
    if isinstance(found, FusedCalls) and not set_forward.is_free(module):
        found = set_forward.ALREADY_SET
    if isinstance(found, str):
        return Entry(name, cls.__name__, why=found)
    norms[name] = found
    set_forward.set_on(module, forward.forward_of(found, cls))
    return Entry(name, cls.__name__, _REGION, found.first.program.operations)


def _sums(name: str, module: torch.nn.Module, norms: dict[str, FusedCalls]) -> Iterator[Entry]:
    kind = type(module).__name__
    if not set_forward.is_free(module):
        yield Entry(name, kind, why=set_forward.ALREADY_SET)
        return
    try:
        found = layer.fused_layer(module, norms)
    except ForwardDeclined as why:
        if layer.sums_into(type(module).forward, norms):
            yield Entry(name, kind, why=f"residual sums: {why}")
        return
    if found.function is not None:
        set_forward.set_on(module, found.function)
    for unit in found.units:
        yield Entry(name, kind, _REGION, unit)
    for why in found.kept:
        yield Entry(name, kind, why=why)


def _attention(name: str, module: torch.nn.Module) -> Iterator[Entry]:
    found, kind = eager_attention.recognized(module), type(module).__name__
    if isinstance(found, FunctionType) and not set_forward.is_free(module):
        found = "its forward is set on the module already"
    if isinstance(found, str):
        yield Entry(name, kind, why=found)
    elif found is not None:
        set_forward.set_on(module, found)
        yield Entry(name, kind, sinks.NAME)
