"""Every private name of torch that graphfuse uses, a function each, and what happens where torch has it no more.

torch promises none of these. Each stands for something public that does the same and takes longer, or whose absence
costs speed alone; a test calls each of them, on the oldest and the newest torch that are supported. Nothing here
imports torch: who asks has tensors of it, or uses it already.
"""

import functools
import sys
import types
from collections.abc import Callable, Sequence

Check = Callable[..., bool]
Extents = Sequence[int | None]


def _find(path: str) -> object | None:
    """An attribute of torch by its dotted path, None where it is not there."""
    found = sys.modules.get("torch")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def guard(tensors: Sequence[object], sizes: Sequence[Extents], strides: Sequence[Extents]) -> Check:
    """What tells whether tensors are like those it was made of, wherever their memory is; it keeps none of them.

    Compared are type, data type, device, layout, requires_grad (not whether gradients are on), dispatch keys, rank,
    and all extents and strides (in elements) that are not None. It raises TypeError for another number of arguments,
    and what the comparison does of what is no tensor. Nested tensors must not be given to it: torch would end the
    process.

    Without torch's own (what torch.compile guards its graphs with) Python compares, at ten times the cost.
    """
    made = _find("_C._dynamo.guards.TensorGuards")
    if made is None:
        return _python_guard(tensors, sizes, strides)
    sizes, strides = [list(e) for e in sizes], [list(e) for e in strides]
    return made(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _python_guard(tensors: Sequence[object], sizes: Sequence[Extents], strides: Sequence[Extents]) -> Check:
    torch = sys.modules["torch"]

    def looks(t: object) -> tuple:
        keys = torch._C._dispatch_keys(t) if hasattr(torch._C, "_dispatch_keys") else None
        return type(t), t.dtype, t.device, t.layout, t.requires_grad, t.dim(), t.is_inference(), str(keys)

    models = [looks(t) for t in tensors]

    is_tracing, is_observed = tracing(), observed()

    def check(*given: object) -> bool:
        if is_tracing() or is_observed():
            return False
        if len(given) != len(models):
            raise TypeError(f"{len(models)} tensors are compared, got {len(given)}")
        return all(
            looks(t) == model
            and all(want is None or want == e for want, e in zip(size, t.shape, strict=True))
            and all(want is None or want == s for want, s in zip(stride, t.stride(), strict=True))
            for t, model, size, stride in zip(given, models, sizes, strides, strict=True)
        )

    return check


def empty_cuda(device: object) -> Callable[[tuple, tuple, object], object]:
    """What allocates on a CUDA device, of shape, strides and data type. device: with an index.

    torch's own (what the code allocates with that torch.compile generates) allocates on the current device, in two
    thirds of the time of ``torch.empty_strided``, which takes its place where it is not there.
    """
    torch = sys.modules["torch"]
    general = functools.partial(torch.empty_strided, device=device)
    fast, current = _find("_C._dynamo.guards._empty_strided_cuda"), _find("_C._cuda_getDevice")
    if fast is None or current is None:
        return lambda shape, stride, dtype: general(shape, stride, dtype=dtype)
    ordinal = device.index
    if torch.cuda.device_count() == 1:
        return fast

    def empty(shape: tuple, stride: tuple, dtype: object) -> object:
        return fast(shape, stride, dtype) if current() == ordinal else general(shape, stride, dtype=dtype)

    return empty


def raw_stream() -> Callable[[int], int]:
    """What tells the address of torch's current stream on a CUDA device, by its ordinal.

    ``torch.cuda.current_stream`` makes an object of it first, in thirty times the time, and takes its place.
    """
    found = _find("_C._cuda_getCurrentRawStream")
    if found is not None:
        return found
    torch = sys.modules["torch"]
    return lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream


def tracing() -> Callable[[], bool]:
    """What tells whether ``torch.jit.trace`` is at work in this thread."""
    return _find("_C._is_tracing") or sys.modules["torch"].jit.is_tracing


def observed() -> Callable[[], bool]:
    """What tells whether a mode of ``__torch_dispatch__``, a transform of torch.func or a forward derivative is at work
    in this thread, and so wants to see what is called. Always, where torch cannot tell: then all calls take the
    dispatcher."""
    modes, transforms = _find("_C._len_torch_dispatch_stack"), _find("_C._are_functorch_transforms_active")
    forward_ad = _find("autograd.forward_ad")
    if modes is None or transforms is None or not hasattr(forward_ad, "_current_level"):
        return lambda: True
    return lambda: bool(modes()) or transforms() or forward_ad._current_level >= 0


def dual_levels() -> object:
    """What has a `_current_level` of 0 and more while forward derivatives may be at work. Always, where torch cannot
    tell. To call what answers that would cost a module's forward more than the answer."""
    found = _find("autograd.forward_ad")
    return found if hasattr(found, "_current_level") else types.SimpleNamespace(_current_level=0)


def is_differentiated_by_func() -> bool:
    """Whether the innermost transform of torch.func at work is its grad. False where torch cannot tell: the message
    is then torch's own."""
    peek = _find("_C._functorch.peek_interpreter_stack")
    top = None if peek is None else peek()
    return top is not None and top.key() == sys.modules["torch"]._C._functorch.TransformType.Grad


def any_requires_grad() -> Callable[..., bool]:
    """What tells whether one of some values is a tensor that requires a gradient."""
    found = _find("_C._any_requires_grad")
    return found or (lambda *values: any(getattr(value, "requires_grad", False) for value in values))


def is_plain(value: object) -> bool:
    """Whether nobody else wants to see what is done to a value: a tensor of a class of its own, as fake tensors are,
    or of the vmap that autograd has for ``is_grads_batched``, which is no transform of torch.func."""
    tensor = sys.modules["torch"].Tensor
    disabled = tensor.__torch_dispatch__
    if getattr(type(value), "__torch_dispatch__", disabled) is not disabled:
        return False
    batched = _find("_C._functorch.is_legacy_batchedtensor")
    return batched is None or not isinstance(value, tensor) or not batched(value)


def below_autograd(operator: object, keys: object, *values: object, **named: object) -> object:
    """Run an operator as if autograd were not there. keys: of the dispatcher, as its kernels get them."""
    torch = sys.modules["torch"]
    guard_below, after = _find("_C._AutoDispatchBelowAutograd"), _find("_C._after_autograd_keyset")
    if guard_below is None or after is None:
        with torch.inference_mode():  # which leaves autograd out, too, and makes tensors that it never takes
            made = operator(*values, **named)
        copied = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731
        return tuple(map(copied, made)) if isinstance(made, tuple) else copied(made)
    with guard_below():
        return operator.redispatch(keys & after, *values, **named)


def single_level_apply(function: type) -> Callable[..., object]:
    """``apply`` of a ``torch.autograd.Function`` where no transform of torch.func is at work: it leaves out the
    question whether one is, which takes a tenth of a call."""
    base = _find("_C._FunctionBase")
    return function.apply if base is None else super(sys.modules["torch"].autograd.Function, function).apply


def increment_version() -> Callable[[tuple], None]:
    """What counts up the versions of tensors, given in a tuple, that were written in a way torch does not see."""
    return _find("_C._increment_version") or sys.modules["torch"].autograd.graph.increment_version
