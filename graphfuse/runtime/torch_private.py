"""Private names of torch that graphfuse uses. A function for each, which also has the substitute.

torch promises none of these names. If torch lacks one, the function returns something public that does the same more
slowly, or an answer that costs only speed. Nothing here imports torch: a caller has its tensors, or uses it already.
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
    """An attribute of torch by its dotted path, None where it is not there."""
    found = sys.modules.get("torch")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def guard(tensors: Sequence[object], sizes: Sequence[Extents], strides: Sequence[Extents]) -> Check:
    """Returns a check that tells whether tensors are like these in all but their memory. It keeps none of them.

    sizes, strides: in elements, for each tensor; None for an extent or stride that is not compared. The check also
    compares type, data type, device, layout, requires_grad (not whether gradients are on), dispatch keys and rank. It
    may say no to one tensor that is given twice. It raises TypeError for another number of arguments, and of what is
    no tensor whatever the comparison raises. Nested tensors must not be given to it: torch would end the process.

    torch.compile guards its graphs with the same check. Without it Python compares, at ten times the cost.
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

    is_observed = observed()

    def check(*given: object) -> bool:
        if is_observed():
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
    """Returns what allocates on a CUDA device, given shape, strides and data type. device: with an index.

    Code that torch.compile generates allocates by the same function, on the current device, in two thirds of the time
    of ``torch.empty_strided``. That takes its place on another device, and where torch no longer has it.
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
    """Returns what tells the address of torch's current stream on a CUDA device, given the device's ordinal.

    In its place ``torch.cuda.current_stream``, which makes an object first and takes thirty times as long.
    """
    found = _find("_C._cuda_getCurrentRawStream")
    if found is not None:
        return found
    torch = sys.modules["torch"]
    return lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream


def setting(where: str, name: str) -> tuple[Callable[[], tuple], Callable[..., object]]:
    """Returns what reads and what writes a setting of torch's: `name` of the module `where` of torch.backends. What is
    read is the tuple of arguments that `write` takes. Newer versions of torch have two values under one name.

    In its place the attributes of torch.backends, which take four times as long.
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
    """The symmetric memory that a tensor on a CUDA device lies in, as the group's ranks see it: `buffer_ptrs`, `rank`,
    `world_size`, `barrier`. None if it lies elsewhere, or torch has none. The first call for some memory is collective.
    """
    module = _symmetric_memory()
    is_one = getattr(module, "is_symm_mem_tensor", None)  # without it, torch warns of other tensors
    return None if module is None or is_one is not None and not is_one(t) else module.rendezvous(t, group)


def symmetric_zeros(count: int, dtype: object, device: object) -> object:
    """Zeros in symmetric memory, of a torch that has it. count: how many."""
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
    """The group of ranks that graphs have this name of."""
    return importlib.import_module("torch.distributed.distributed_c10d")._resolve_process_group(name)


@dataclass(frozen=True)
class RowwiseStyle:
    """Layouts of what a module returns that `RowwiseParallel` of torch was applied to. local: as a plain tensor."""

    output_layouts: tuple[object, ...]
    local: bool

    @property
    def is_whole_and_local(self) -> bool:
        return self.local and all(layout.is_replicate() for layout in self.output_layouts)


def rowwise_style(module: object) -> RowwiseStyle | None:
    """Style in which `RowwiseParallel` of torch splits a linear layer; None for other modules, and for those with more
    hooks behind them. The hook that it sets is told by the function in its closure."""
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
    """A weak reference to a tensor's storage, with `cdata`, that no other storage has while it lives, and `expired`."""
    return importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef(t.untyped_storage())


def native_functions() -> object | None:
    """Module of the functions that those of torch.nn.functional call, which Dynamo may write into a graph instead.
    Without it these are unknown operations, which regions end at."""
    return _find("_C._nn")


def tracing() -> Callable[[], bool]:
    """Returns what tells whether ``torch.jit.trace`` is at work in this thread."""
    return _find("_C._is_tracing") or sys.modules["torch"].jit.is_tracing


def observed() -> Callable[[], bool]:
    """Function that says if somebody in this thread wants to see what is called: the compiler, ``torch.jit.trace``, a
    mode of ``__torch_dispatch__``, a transform of torch.func or a forward derivative. Always, where torch cannot tell:
    then all calls take the dispatcher."""
    modes, transforms = _find("_C._len_torch_dispatch_stack"), _find("_C._are_functorch_transforms_active")
    forward_ad, compiling, is_tracing = _find("autograd.forward_ad"), _find("compiler.is_dynamo_compiling"), tracing()
    if modes is None or transforms is None or not hasattr(forward_ad, "_current_level"):
        return lambda: True
    return lambda: compiling() or is_tracing() or modes() > 0 or transforms() or forward_ad._current_level >= 0


def dispatched_to(call: Callable[..., object]) -> AbstractContextManager[object] | None:
    """Context in which call(operator, args, kwargs) is made in the place of each operator; None where torch has none.
    Within it operators are called as they are."""
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
    """The class of modes under which operations make tensors without data; None where there is none."""
    return _find("_subclasses.fake_tensor.FakeTensorMode")


@contextmanager
def tried_quietly() -> Iterator[None]:
    """Context in which torch does not log, as the error of a user, that an operation fails on tensors without data in
    this thread. It raises nevertheless."""
    here, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != here or record.levelno < logging.ERROR

    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


def without_modes() -> AbstractContextManager[object]:
    """Context in which no mode of ``__torch_dispatch__`` sees what is called. Where torch has none, modes see it."""
    return (_find("utils._python_dispatch._disable_current_modes") or nullcontext)()


def python_dispatcher() -> AbstractContextManager[object]:
    """Context in which operators run torch's rules in Python, which know extents that vary. Where torch has none, its
    own in C++, of which some do not."""
    return (_find("_dispatch.python.enable_python_dispatcher") or nullcontext)()


def decomposition(operator: object) -> Callable[..., object] | None:
    """Function that makes what an operator does by calling others, as inductor has it; of a primitive of torch's own
    references, what it is called in aten. None where torch has none."""
    in_aten = getattr(operator, "impl_aten", None)
    if in_aten is not None:
        return in_aten
    with suppress(ImportError):
        importlib.import_module("torch._decomp")
    return (_find("_decomp.decomposition_table") or {}).get(operator)


def differentiates_forward() -> Callable[[], bool]:
    """Function that says if a level of forward derivatives (``torch.autograd.forward_ad.dual_level``) is at work.
    Always, where torch cannot tell."""
    forward_ad = _find("autograd.forward_ad")
    if not hasattr(forward_ad, "_current_level"):
        return lambda: True
    return lambda: forward_ad._current_level >= 0


def is_differentiated_by_func() -> bool:
    """True if the innermost transform of torch.func at work is grad. False where torch cannot tell: the error that
    follows is then torch's own."""
    peek = _find("_C._functorch.peek_interpreter_stack")
    top = None if peek is None else peek()
    return top is not None and top.key() == sys.modules["torch"]._C._functorch.TransformType.Grad


def any_requires_grad() -> Callable[..., bool]:
    """Returns what tells whether one of its arguments is a tensor that requires a gradient."""
    found = _find("_C._any_requires_grad")
    return found or (lambda *values: any(getattr(value, "requires_grad", False) for value in values))


def is_plain(value: object) -> bool:
    """True if a value can be used without the dispatcher. These tensors cannot: those of a class with a
    ``__torch_dispatch__``, as fake tensors are, those on the meta device, those of the vmap that autograd has for
    ``is_grads_batched``, which is no transform of torch.func, and those whose values are not what lies in memory: the
    imaginary part of a conjugate, zeros without memory, and wrappers that make a program functional."""
    tensor = sys.modules["torch"].Tensor
    disabled = tensor.__torch_dispatch__
    if getattr(type(value), "__torch_dispatch__", disabled) is not disabled:
        return False
    if not isinstance(value, tensor):
        return True
    wrapped = _find("_C._functorch.is_legacy_batchedtensor"), _find("_is_functional_tensor")
    elsewhere = value.is_meta or value.is_neg() or value.is_conj() or value._is_zerotensor()
    return not elsewhere and not any(of is not None and of(value) for of in wrapped)


def batches_of_gradients() -> tuple[Callable[[object], object], Callable[[object], object]] | None:
    """Returns what has the samples of a tensor as its first dimension, where autograd's vmap for ``is_grads_batched``
    maps over it, else the tensor itself; and the way back. None where torch lacks a name: its own error follows, that
    an operator has no rule."""
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
    """True if ``torch.distributed.tensor.experimental.implicit_replication`` is at work, under which plain tensors
    count as DTensors that are replicated. False where torch cannot tell."""
    dispatcher = _find("distributed.tensor.DTensor._op_dispatcher")
    return bool(getattr(dispatcher, "_allow_implicit_replication", False))


def registrations(namespace: str) -> AbstractContextManager[object]:
    """A ``torch.library.Library`` for kernels of operators that are there, until the context ends. Without torch's own
    context, registrations end with the last reference to the library."""
    scoped = _find("library._scoped_library")
    library = sys.modules["torch"].library.Library
    return nullcontext(library(namespace, "IMPL")) if scoped is None else scoped(namespace, "IMPL")


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
    """``apply`` of a ``torch.autograd.Function``, for calls during which no transform of torch.func is at work: it does
    not ask whether one is, which takes a tenth of a call."""
    base = _find("_C._FunctionBase")
    return function.apply if base is None else super(sys.modules["torch"].autograd.Function, function).apply


def increment_version() -> Callable[[tuple], None]:
    """Returns what counts up the versions of tensors, given in a tuple, that were written unseen by torch."""
    return _find("_C._increment_version") or sys.modules["torch"].autograd.graph.increment_version


def called_plainly() -> Callable[[object], bool]:
    """Returns what tells whether calling a module does nothing but to call its forward: it has no hooks, and there are
    none of all modules.

    Where torch no longer has one of these names, no module is said to be called plainly.
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
    """True if a module is what ``torch.compile`` returned, or its own ``compile`` was called. False where torch cannot
    tell: what is fused then is compiled again when it is called."""
    made = _find("_dynamo.OptimizedModule")
    return made is not None and isinstance(module, made) or getattr(module, "_compiled_call_impl", None) is not None


def compiler(name: str, mode: str | None, options: dict[str, object]) -> Callable[[object, object], object]:
    """Returns what torch.compile calls with a graph for this backend: of inductor with its mode and options, of others
    with neither. RuntimeError for those that inductor does not know.

    In its place ``torch.compile`` of the graph, which compiles it when it is first called, and guards again.
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
    """A setting of inductor; None where torch lacks it."""
    return _find(f"_inductor.config.{name}")


def graph_pass_classes() -> tuple[type, type]:
    """The base of inductor's passes over graphs, and that of passes which are told whether there is a backward. Without
    the first, inductor keeps nothing on disk of what had a pass; without the second, no pass is told."""
    with suppress(ImportError):
        importlib.import_module("torch._inductor.custom_graph_pass")
    base = _find("_inductor.custom_graph_pass.CustomGraphPass") or object
    return base, _find("_inductor.custom_graph_pass.CustomInferenceAwareGraphPass") or type(None)


def call_from_inductor(functions: Mapping[object, str]) -> None:
    """Let the Python that inductor writes call functions in place of operators that return lists of tensors: that saves
    torch's dispatcher. functions: by operator, what that Python, which imports torch alone, calls the function. They
    return new tensors, which inductor may rely on to be aligned. Without inductor's names it calls the operators."""
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
        # As inductor does when it meets an operator that it does not know.
        fallback(operator, layout_constraint=constraint(tag(operator, with_default=True)), warn=False)
        lowerings[operator] = lowered(lowerings[operator], name)


def without_fake_tensors() -> AbstractContextManager[object]:
    """A context in which operations make tensors with values, also while torch traces with tensors that have none.
    Without the name they may make such tensors."""
    found = _find("_subclasses.fake_tensor.unset_fake_temporarily")
    return nullcontext() if found is None else found()


def reset_cuda_graphs() -> None:
    """Drop the CUDA graphs that inductor has recorded, if it has; without the name they stay until the process ends."""
    if "torch._inductor.cudagraph_trees" in sys.modules:
        reset = _find("_inductor.cudagraph_trees.reset_cudagraph_trees")
        if reset is not None:
            reset()
