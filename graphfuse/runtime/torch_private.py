"""Private names of torch that graphfuse uses, with a function for each name.

These names may change with any version of torch. If torch lacks one, the function returns a public substitute that is
slower, or a result that costs only speed. Nothing here imports torch, as callers have imported it already.
"""

import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

Check = Callable[..., bool]
Extents = Sequence[int | None]


def _find(path: str) -> object | None:
    """An attribute of torch by its dotted path; None if torch lacks it."""
    found = sys.modules.get("torch")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def guard(tensors: Sequence[object], sizes: Sequence[Extents], strides: Sequence[Extents]) -> Check:
    """Function that returns True if its arguments are like these tensors except for their memory. It keeps none alive.

    sizes, strides: in elements, for each tensor; None for an extent or stride that is not compared. The function also
    compares type, data type, device, layout, requires_grad (not the grad mode), dispatch keys and rank. It may return
    False if the same tensor is given twice. It raises TypeError for another number of arguments, and any exception for
    arguments that are no tensors. It must not get nested tensors, with which torch would end the process.

    torch.compile guards its graphs with the same function. The substitute in Python takes ten times as long.
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

    must_dispatch = needs_dispatcher()

    def check(*given: object) -> bool:
        if must_dispatch():
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
    """Function that allocates on a CUDA device, given shape, strides and data type. device: with an index.

    Code that torch.compile generates uses the same function of torch, which allocates on the current device and takes
    two thirds of the time of ``torch.empty_strided``. The latter is used on other devices, and as the substitute.
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
    """Function that returns the address of torch's current stream on a CUDA device, given the device's ordinal.

    The substitute is ``torch.cuda.current_stream``, which makes an object and takes thirty times as long.
    """
    found = _find("_C._cuda_getCurrentRawStream")
    if found is not None:
        return found
    torch = sys.modules["torch"]
    return lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream


def setting(where: str, name: str) -> tuple[Callable[[], tuple], Callable[..., object]]:
    """Functions that read and write a setting of torch: `name` of the module `where` of torch.backends.

    The first returns a tuple, which is unpacked as the arguments of the second. Newer versions of torch have two values
    for one name. The substitutes are attributes of torch.backends, which take four times as long.
    """
    own = {
        "cuda.matmul.allow_bf16_reduced_precision_reduction": (
            _find("_C._get_cublas_allow_bf16_reduced_precision_reduction"),
            _find("_C._set_cublas_allow_bf16_reduced_precision_reduction"),
        ),
        "cuda.matmul.allow_fp16_reduced_precision_reduction": (
            _find("_C._get_cublas_allow_fp16_reduced_precision_reduction"),
            _find("_C._set_cublas_allow_fp16_reduced_precision_reduction"),
        ),
    }
    found, write = own.get(f"{where}.{name}", (None, None))
    if found is not None and write is not None:

        def read() -> tuple:
            values = found()
            return values if isinstance(values, tuple) else (values,)

        return read, write
    module, split = functools.reduce(getattr, where.split("."), sys.modules["torch"].backends), f"{name}_split_k"
    if hasattr(module, split):
        return lambda: (getattr(module, name), getattr(module, split)), lambda *values: setattr(module, name, values)
    return lambda: (getattr(module, name),), lambda value: setattr(module, name, value)


def symmetric(t: object, group: object) -> object | None:
    """The symmetric memory of a CUDA tensor, with `buffer_ptrs`, `rank`, `world_size` and `barrier` of the group.

    None if the tensor is in other memory, or torch has no symmetric memory. The first call for each memory is a
    collective of the group's ranks."""
    module = _symmetric_memory()
    is_one = getattr(module, "is_symm_mem_tensor", None)  # without it, torch warns of other tensors
    return None if module is None or is_one is not None and not is_one(t) else module.rendezvous(t, group)


def symmetric_zeros(count: int, dtype: object, device: object) -> object:
    """Tensor of `count` zeros in symmetric memory, which torch must have."""
    return _symmetric_memory().empty(count, dtype=dtype, device=device).zero_()


def has_symmetric() -> bool:
    """True if torch has symmetric memory."""
    return _symmetric_memory() is not None


@functools.cache
def _symmetric_memory() -> object | None:
    with suppress(ImportError):
        found = importlib.import_module("torch.distributed._symmetric_memory")
        if hasattr(found, "rendezvous") and hasattr(found, "empty"):
            return found
    return None


def process_group(name: str) -> object:
    """The process group with this name, by which graphs refer to it."""
    return importlib.import_module("torch.distributed.distributed_c10d")._resolve_process_group(name)


@dataclass(frozen=True)
class RowwiseStyle:
    """Layouts of the output of a module to which torch's `RowwiseParallel` was applied. local: whether the output is a
    plain tensor."""

    output_layouts: tuple[object, ...]
    local: bool

    @property
    def is_whole_and_local(self) -> bool:
        return self.local and all(layout.is_replicate() for layout in self.output_layouts)


def rowwise_style(module: object) -> RowwiseStyle | None:
    """Style in which torch's `RowwiseParallel` splits a linear layer; None for other modules, and for those with more
    forward hooks. The style's hook is recognized by the function in its closure."""
    style = getattr(sys.modules.get("torch.distributed.tensor.parallel"), "RowwiseParallel", None)
    hooks = list(module._forward_hooks.values())
    if style is None or len(hooks) != 1 or type(module) is not sys.modules["torch"].nn.Linear:
        return None
    for cell in getattr(hooks[0], "__closure__", None) or ():
        found = cell.cell_contents
        if isinstance(found, functools.partial) and found.func is getattr(style, "_prepare_output_fn", None):
            layouts, local = found.args
            return RowwiseStyle(tuple(layouts), local)
    return None


def weak_storage(t: object) -> object:
    """A weak reference to a tensor's storage, with `expired` and `cdata`. The latter is unique while it lives."""
    return importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef(t.untyped_storage())


def native_functions() -> object | None:
    """Module of the functions that torch.nn.functional calls, which Dynamo may put into a graph instead.

    If torch lacks it, they count as unknown operations, at which regions end."""
    return _find("_C._nn")


def tracing() -> Callable[[], bool]:
    """Function that returns True if ``torch.jit.trace`` is active in this thread."""
    return _find("_C._is_tracing") or sys.modules["torch"].jit.is_tracing


def needs_dispatcher() -> Callable[[], bool]:
    """Function that returns True if calls in this thread must go through torch's dispatcher.

    These are calls under the compiler, ``torch.jit.trace``, a ``__torch_dispatch__`` mode, a transform of torch.func or
    forward-mode differentiation. If torch lacks a name, it always returns True."""
    modes, transforms = _find("_C._len_torch_dispatch_stack"), _find("_C._are_functorch_transforms_active")
    forward_ad, compiling, is_tracing = _find("autograd.forward_ad"), _find("compiler.is_dynamo_compiling"), tracing()
    if modes is None or transforms is None or not hasattr(forward_ad, "_current_level"):
        return lambda: True
    return lambda: compiling() or is_tracing() or modes() > 0 or transforms() or forward_ad._current_level >= 0


def dispatch_modes() -> Callable[[], int]:
    """Function that returns how many ``__torch_dispatch__`` modes are active in this thread. If torch lacks the name,
    it returns 0, and modes do not see calls of plain tensors."""
    return _find("_C._len_torch_dispatch_stack") or (lambda: 0)


def dispatched_to(call: Callable[..., object]) -> AbstractContextManager[object] | None:
    """Context in which call(operator, args, kwargs) replaces each call of an operator; None if torch lacks the name.

    Within `call`, operators are called directly."""
    base = _find("utils._python_dispatch.TorchDispatchMode")
    return None if base is None else _calling(base)(call)


@functools.cache
def _calling(base: type) -> type:
    class Calling(base):  # type: ignore[misc, valid-type]
        def __init__(self, call: Callable[..., object]) -> None:
            super().__init__()
            self.call = call

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            return self.call(operator, args, kwargs or {})

    return Calling


def fake_mode() -> type | None:
    """The class of modes under which operations make tensors without data; None if torch lacks it."""
    return _find("_subclasses.fake_tensor.FakeTensorMode")


@contextmanager
def without_fake_tensor_logs() -> Iterator[None]:
    """Context in which torch does not log errors of operations on tensors without data in this thread.

    The errors are still raised."""
    here, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != here or record.levelno < logging.ERROR

    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


def without_modes() -> AbstractContextManager[object]:
    """Context in which no ``__torch_dispatch__`` mode intercepts calls. If torch lacks the name, modes still do."""
    return (_find("utils._python_dispatch._disable_current_modes") or nullcontext)()


def function_modes() -> tuple[Callable[..., object], ...] | None:
    """Functions of this thread's modes of ``__torch_function__``: their number, the one at a place, and what adds one
    and removes the innermost. None if torch lacks a name."""
    names = "len_torch_function_stack", "get_function_stack_at", "push_on_torch_function_stack"
    found = tuple(_find(f"_C._{name}") for name in (*names, "pop_torch_function_stack"))
    return None if None in found else found


def python_dispatcher() -> AbstractContextManager[object]:
    """Context in which operators use torch's rules in Python, which support symbolic extents.

    If torch lacks the name, operators use the rules in C++, some of which do not support these."""
    return (_find("_dispatch.python.enable_python_dispatcher") or nullcontext)()


def decomposition(operator: object) -> Callable[..., object] | None:
    """Function that computes an operator by calling others, as in inductor; None if torch has none.

    For a primitive of torch's references (prims), it is the operator of aten."""
    in_aten = getattr(operator, "impl_aten", None)
    if in_aten is not None:
        return in_aten
    with suppress(ImportError):
        importlib.import_module("torch._decomp")
    return (_find("_decomp.decomposition_table") or {}).get(operator)


def differentiates_forward() -> Callable[[], bool]:
    """Function that returns True if a level of forward-mode differentiation (``forward_ad.dual_level``) is active.

    If torch lacks the name, it always returns True."""
    forward_ad = _find("autograd.forward_ad")
    if not hasattr(forward_ad, "_current_level"):
        return lambda: True
    return lambda: forward_ad._current_level >= 0


def is_differentiated_by_func() -> bool:
    """True if the innermost active transform of torch.func is grad. False if torch lacks the name; it then raises its
    own error."""
    peek = _find("_C._functorch.peek_interpreter_stack")
    top = None if peek is None else peek()
    return top is not None and top.key() == sys.modules["torch"]._C._functorch.TransformType.Grad


def any_requires_grad() -> Callable[..., bool]:
    """Function that returns True if one of its arguments is a tensor that requires a gradient."""
    found = _find("_C._any_requires_grad")
    return found or (lambda *values: any(getattr(value, "requires_grad", False) for value in values))


def is_plain(value: object) -> bool:
    """True if a value can be used without torch's dispatcher.

    False for tensors of a class with ``__torch_dispatch__``, such as fake tensors; those on the meta device; those of
    autograd's vmap for ``is_grads_batched``, which is no transform of torch.func; and those whose memory does not hold
    their values: lazily conjugated or negated ones, zeros without memory, and functionalization's wrappers."""
    tensor = sys.modules["torch"].Tensor
    disabled = tensor.__torch_dispatch__
    if getattr(type(value), "__torch_dispatch__", disabled) is not disabled:
        return False
    if not isinstance(value, tensor):
        return True
    if value.is_meta or value.is_neg() or value.is_conj() or value._is_zerotensor():
        return False
    for is_wrapper in _wrappers():
        if is_wrapper(value):
            return False
    return True


@functools.cache
def _wrappers() -> tuple[Check, ...]:
    """Functions that return True for tensors that wrap others, but are of no class of their own."""
    found = _find("_C._functorch.is_legacy_batchedtensor"), _find("_is_functional_tensor")
    return tuple(of for of in found if of is not None)


def batches_of_gradients() -> tuple[Callable[[object], object], Callable[[object], object]] | None:
    """Two functions for tensors that autograd's vmap for ``is_grads_batched`` maps over.

    The first makes the mapped dimension the first one, and returns other tensors unchanged; the second is its inverse.
    None if torch lacks a name; torch then raises its own error that an operator has no batching rule."""
    mapped = _find("_C._functorch.is_legacy_batchedtensor")
    split, join = _find("_remove_batch_dim"), _find("_add_batch_dim")
    enter, leave = _find("_C._vmapmode_increment_nesting"), _find("_C._vmapmode_decrement_nesting")
    if None in (mapped, split, join, enter, leave):
        return None

    def level() -> int:
        found = enter() - 1
        leave()
        return found

    tensor = sys.modules["torch"].Tensor
    return lambda t: split(t, level(), 1, 0) if isinstance(t, tensor) and mapped(t) else t, lambda t: join(
        t, 0, level()
    )


def replicates_implicitly() -> bool:
    """True if ``torch.distributed.tensor.experimental.implicit_replication`` is active, under which plain tensors count
    as replicated DTensors. False if torch lacks the name."""
    dispatcher = _find("distributed.tensor.DTensor._op_dispatcher")
    return bool(getattr(dispatcher, "_allow_implicit_replication", False))


def registrations(namespace: str) -> AbstractContextManager[object]:
    """Context with a ``torch.library.Library`` for kernels of existing operators, which are removed when it ends.

    If torch lacks the name, they are removed with the last reference to the library."""
    scoped = _find("library._scoped_library")
    library = sys.modules["torch"].library.Library
    return nullcontext(library(namespace, "IMPL")) if scoped is None else scoped(namespace, "IMPL")


def below_autograd(operator: object, keys: object, *values: object, **named: object) -> object:
    """Run an operator below autograd. keys: the dispatch keys that the operator's kernel got."""
    torch = sys.modules["torch"]
    guard_below, after = _find("_C._AutoDispatchBelowAutograd"), _find("_C._after_autograd_keyset")
    if guard_below is None or after is None:
        with torch.inference_mode():  # skips autograd, too, but makes inference tensors, which are cloned
            made = operator(*values, **named)
        copied = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731
        return tuple(map(copied, made)) if isinstance(made, tuple) else copied(made)
    with guard_below():
        return operator.redispatch(keys & after, *values, **named)


def single_level_apply(function: type) -> Callable[..., object]:
    """``apply`` of a ``torch.autograd.Function``, for calls while no transform of torch.func is active.

    It does not check for these transforms, which takes a tenth of a call."""
    base = _find("_C._FunctionBase")
    return function.apply if base is None else super(sys.modules["torch"].autograd.Function, function).apply


def increment_version() -> Callable[[tuple], None]:
    """Function that increments the versions of a tuple of tensors, which were written without torch's knowledge."""
    return _find("_C._increment_version") or sys.modules["torch"].autograd.graph.increment_version


def only_calls_forward() -> Callable[[object], bool]:
    """Function that returns True if calling a module only calls its forward, as neither it nor all modules have hooks.

    If torch lacks one of the names, it returns False.
    """
    any_global = _find("nn.modules.module._has_any_global_hook")
    if any_global is None:
        return lambda module: False

    def check(module: object) -> bool:
        try:
            of = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
            return not (of or module._backward_pre_hooks or any_global())
        except AttributeError:
            return False

    return check


def is_compiled(module: object) -> bool:
    """True if ``torch.compile`` returned the module, or its ``compile`` method was called.

    False if torch lacks the name; a fused module is then compiled again when it is called."""
    made = _find("_dynamo.OptimizedModule")
    return made is not None and isinstance(module, made) or getattr(module, "_compiled_call_impl", None) is not None


def compiler(name: str, mode: str | None, options: dict[str, object]) -> Callable[[object, object], object]:
    """Function that torch.compile calls with a graph for this backend. mode, options: only for inductor.

    Raises RuntimeError for a mode or options that inductor does not know. The substitute is ``torch.compile`` of the
    graph, which compiles at the first call and guards again.
    """
    inductor, lookup = _find("_TorchCompileInductorWrapper"), _find("_dynamo.lookup_backend")
    if name == "inductor" and inductor is not None:
        return inductor(mode, options, None)
    if name != "inductor" and lookup is not None:
        return lookup(name)
    modes = _find("_inductor.list_mode_options")
    given = {**(modes(mode) if mode and modes else {}), **options} or None
    return lambda graph, inputs: sys.modules["torch"].compile(graph, backend=name, options=given)


def inductor_setting(name: str) -> object | None:
    """A setting of inductor; None if torch lacks it."""
    return _find(f"_inductor.config.{name}")


def graph_pass_classes() -> tuple[type, type]:
    """Base classes of inductor's graph passes, and of passes that are informed whether there is a backward.

    If torch lacks the first, inductor does not cache graphs with a pass on disk. If it lacks the second, no pass is
    informed."""
    with suppress(ImportError):
        importlib.import_module("torch._inductor.custom_graph_pass")
    base = _find("_inductor.custom_graph_pass.CustomGraphPass") or object
    return base, _find("_inductor.custom_graph_pass.CustomInferenceAwareGraphPass") or type(None)


def call_from_inductor(functions: Mapping[object, str]) -> None:
    """Make code that inductor generates call functions instead of operators, which avoids torch's dispatcher.

    functions: for each operator, which returns a list of tensors, the name of the function in generated code, which
    imports only torch. The functions return new tensors, which must be aligned. If torch lacks a name, inductor calls
    the operators."""
    with suppress(ImportError):
        importlib.import_module("torch._inductor.lowering")
    fallback, lowerings = _find("_inductor.lowering.make_fallback"), _find("_inductor.lowering.lowerings")
    tag, constraint = (
        _find("_library.utils.get_layout_constraint_tag"),
        _find("_inductor.lowering.tag_to_layout_constraint"),
    )
    virtual = _find("_inductor.virtualized.V")
    if None in (fallback, lowerings, constraint, tag, virtual):
        return

    def lowered(by_operator: Callable[..., list], name: str) -> Callable[..., list]:
        def lower(*args: object, **kwargs: object) -> list:
            made = by_operator(*args, **kwargs)
            with suppress(AttributeError, IndexError):
                if not virtual.graph.cpp_wrapper and not virtual.graph.fx_wrapper:
                    made[0].get_defining_op().inputs[0].python_kernel_name = name
                for one in made:
                    virtual.graph.unaligned_buffers.discard(one.get_name())
            return made

        return lower

    for operator, name in functions.items():
        # As inductor does for an operator that it does not know.
        fallback(operator, layout_constraint=constraint(tag(operator, with_default=True)), warn=False)
        lowerings[operator] = lowered(lowerings[operator], name)


def without_fake_tensors() -> AbstractContextManager[object]:
    """Context in which operations make tensors with data, also while torch traces with fake tensors.

    If torch lacks the name, they may make fake tensors."""
    found = _find("_subclasses.fake_tensor.unset_fake_temporarily")
    return nullcontext() if found is None else found()


def reset_cuda_graphs() -> None:
    """Free the CUDA graphs that inductor has recorded. If torch lacks the name, they stay until the process ends."""
    if "torch._inductor.cudagraph_trees" in sys.modules:
        reset = _find("_inductor.cudagraph_trees.reset_cudagraph_trees")
        if reset is not None:
            reset()


def input_path(node: object) -> str:
    """Python expression for an input of a graph of Dynamo; "" if torch does not have it."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a method until torch 2.10
