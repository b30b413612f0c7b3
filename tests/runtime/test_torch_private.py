"""Each private name of torch, and the same without it: where a name is gone, calls take longer and are right."""

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch._inductor.cudagraph_trees
import torch._inductor.custom_graph_pass  # of this and the next one name is in each
import torch.distributed.tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import graphfuse.functional  # noqa: F401 - makes operators
import graphfuse.torch  # noqa: F401
from graphfuse.runtime import torch_private

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(set(re.findall(r'_find\("([\w.]+)"\)', Path(torch_private.__file__).read_text())))
NEWER = {"_inductor.custom_graph_pass.CustomInferenceAwareGraphPass"}
ON_CUDA = {"_C._dynamo.guards._empty_strided_cuda", "_C._cuda_getDevice", "_C._cuda_getCurrentRawStream"}


@pytest.fixture(autouse=True)
def found_anew():
    """What is looked up once per process is looked up by each test, and not kept from one that hides names."""
    torch_private._wrappers.cache_clear()
    yield
    torch_private._wrappers.cache_clear()


@pytest.fixture(params=["with torch's own", "without"])
def way(request, monkeypatch):
    """way(*names): twice, once as if torch had none of them."""

    def without(*names: str) -> None:
        assert {*names} <= {*NAMES}
        if request.param == "without":
            find = torch_private._find
            monkeypatch.setattr(torch_private, "_find", lambda path: None if path in names else find(path))

    return without


def test_this_torch_has_them():
    """So that what is compared below is the two ways; a CPU build lacks those of CUDA, and torch 2.10 newer ones."""
    missing = {name for name in NAMES if torch_private._find(name) is None}
    assert missing <= ON_CUDA | NEWER


def test_no_other_module_uses_private_names():
    """`torch._C`, `torch._dynamo` and what lies in them; `torch._ops` and `torch._subclasses` only as types."""
    found = {}
    for folder in ("graphfuse", "engines", "patterns"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(torch_private.__file__).resolve():
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Attribute(ast.Name("torch"), attr) if attr.startswith("_") and attr not in (
                        "_ops",
                        "__version__",
                    ):
                        found.setdefault(path.name, []).append(f"torch.{attr}")
                    case ast.ImportFrom(module=module) if module and re.match(r"torch\..*\b_", module):
                        found.setdefault(path.name, []).append(module)
                    case ast.Import(names=names) if any(re.match(r"torch\..*\b_", n.name) for n in names):
                        found.setdefault(path.name, []).append(names[0].name)
    assert not found


# Guards


def meta_of(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


class Subclass(torch.Tensor):
    pass


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.empty(3, 4)


OTHERS = {
    "alike": (lambda: torch.empty(3, 4), True),
    "an extent that is open": (lambda: torch.empty(9, 4), True),
    "a stride that is open": (lambda: torch.empty(3, 8)[:, :4], True),
    "columns": (lambda: torch.empty(3, 5), False),
    "stride of columns": (lambda: torch.empty(3, 8)[:, ::2], False),
    "rank": (lambda: torch.empty(1, 3, 4), False),
    "type": (lambda: torch.empty(3, 4, dtype=torch.float16), False),
    "device": (lambda: meta_of(torch.empty(3, 4)), False),
    "gradient": (lambda: torch.empty(3, 4, requires_grad=True), False),
    "class": (lambda: torch.empty(3, 4).as_subclass(Subclass), False),
    "parameter": (lambda: torch.nn.Parameter(torch.empty(3, 4), requires_grad=False), False),
    "inference": (of_inference, False),
    "conjugate": (lambda: torch.empty(3, 4)._neg_view(), False),
}


@pytest.mark.parametrize("other", OTHERS)
def test_guards(other, way):
    way("_C._dynamo.guards.TensorGuards")
    weight = torch.empty(4)
    check = torch_private.guard([torch.empty(3, 4), weight], [[None, 4], [4]], [[None, 1], [1]])
    make, accepted = OTHERS[other]
    assert check(make(), weight) is accepted and check(torch.empty(3, 4), weight) is True


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("made", [False, True])
def test_guards_compare_requires_grad_whether_gradients_are_on_or_not(made, asked, way):
    way("_C._dynamo.guards.TensorGuards")
    tensors = torch.empty(3), torch.empty(3, requires_grad=True)
    for model, given in itertools.product(tensors, tensors):
        with torch.set_grad_enabled(made):
            check = torch_private.guard([model], [[3]], [[1]])
        with torch.set_grad_enabled(asked):
            assert check(given) is (model is given)


def test_guards_of_what_is_no_tensor_or_too_many(way):
    way("_C._dynamo.guards.TensorGuards")
    check = torch_private.guard([torch.empty(3)], [[3]], [[1]])
    for wrong in (None, 1.0, [1.0]):
        try:
            assert not check(wrong)
        except (AttributeError, TypeError):
            pass
    for many in ((), (torch.empty(3), torch.empty(3))):
        with pytest.raises(TypeError):
            check(*many)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def test_guards_say_no_where_somebody_looks_on(way):
    """A mode, vmap and a trace, of tensors that are as they were."""
    way("_C._dynamo.guards.TensorGuards")
    t, found = torch.empty(3), []
    check = torch_private.guard([t], [[3]], [[1]])
    with Mode():
        found.append(check(t))
    torch.vmap(lambda x: found.append(check(t)) or x)(torch.empty(2, 3))
    torch.vmap(lambda x: found.append(check(x)) or x)(torch.empty(2, 3))
    torch.jit.trace(lambda x: found.append(check(x)) or x, (t,), check_trace=False)
    assert len(found) == 4 and not any(found) and check(t)


def test_guards_keep_no_tensor():
    import weakref

    t = torch.empty(3)
    check, alive = torch_private.guard([t], [[3]], [[1]]), weakref.ref(t)
    del t
    assert alive() is None and check(torch.empty(3))


# What is going on


def test_tracing(way):
    way("_C._is_tracing")
    asked, found = torch_private.tracing(), []
    assert not asked()
    torch.jit.trace(lambda x: found.append(asked()) or x + 1, (torch.ones(2),), check_trace=False)
    assert found == [True] and not asked()


def test_observed():
    asked, found = torch_private.needs_dispatcher(), []
    assert not asked()
    with Mode():
        assert asked()
    torch.vmap(lambda x: found.append(asked()) or x)(torch.ones(2))
    torch.func.grad(lambda x: found.append(asked()) or x)(torch.ones(()))
    with forward_ad.dual_level():
        assert asked()
    assert found == [True, True] and not asked()


@pytest.mark.parametrize(
    "name", ["_C._len_torch_dispatch_stack", "_C._are_functorch_transforms_active", "autograd.forward_ad"]
)
def test_where_it_cannot_be_told_somebody_looks_on(name, monkeypatch):
    find = torch_private._find
    monkeypatch.setattr(torch_private, "_find", lambda path: None if path == name else find(path))
    assert torch_private.needs_dispatcher()()
    assert torch_private.differentiates_forward()() or name != "autograd.forward_ad"


def test_forward_derivatives():
    asked = torch_private.differentiates_forward()
    assert not asked()
    with forward_ad.dual_level():
        assert asked()
    assert not asked()


def test_differentiated_by_func(monkeypatch):
    found = []
    torch.func.grad(lambda x: found.append(torch_private.is_differentiated_by_func()) or x)(torch.ones(()))
    torch.vmap(lambda x: found.append(torch_private.is_differentiated_by_func()) or x)(torch.ones(2))
    assert found == [True, False] and not torch_private.is_differentiated_by_func()
    monkeypatch.setattr(torch_private, "_find", lambda path: None)
    torch.func.grad(lambda x: found.append(torch_private.is_differentiated_by_func()) or x)(torch.ones(()))
    assert found.pop() is False


def test_any_requires_grad(way):
    way("_C._any_requires_grad")
    asked = torch_private.any_requires_grad()
    leaf, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    assert asked(plain, leaf, None, 0.5) and asked(leaf * 2, 0.5)
    assert not asked(plain, None, 0.5) and not asked() and not asked(leaf.detach())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_plain_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain, found = torch.ones(2), []
    for value in (plain, torch.nn.Parameter(plain), plain.as_subclass(Subclass), None, 0.5, [1]):
        assert torch_private.is_plain(value)
    marked = torch._neg_view(plain), torch.complex(plain, plain).conj(), torch._efficientzerotensor(2)
    for value in (FakeTensorMode().from_tensor(plain), plain.to("meta"), torch._to_functional_tensor(plain), *marked):
        assert not torch_private.is_plain(value)
    leaf = torch.ones(2, requires_grad=True)
    y = leaf * 2
    y.register_hook(lambda grad: found.append(torch_private.is_plain(grad)))
    torch.autograd.grad(y, leaf, torch.eye(2), is_grads_batched=True)
    assert found == [False]


# What is done


def test_batches_of_gradients(way, request):
    way("_remove_batch_dim")
    found = torch_private.batches_of_gradients()
    assert (found is None) == ("without" in request.node.callspec.id.split("-"))
    if found is not None:
        split, join = found
        seen, outer = [], torch.arange(6.0).view(3, 2)

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                seen.append(split(grad))
                return join(seen[-1] * 2)

        x = torch.ones(2, requires_grad=True)
        (got,) = torch.autograd.grad(Twice.apply(x), x, outer, is_grads_batched=True)
        assert torch.equal(got, outer * 2) and torch.equal(seen[0], outer) and split(x) is x and split(None) is None


def test_below_autograd(way):
    """The same values; nothing is recorded, and what comes of it autograd may take."""
    way("_C._AutoDispatchBelowAutograd", "_C._after_autograd_keyset")
    operators, x, weight = torch.ops.graphfuse, torch.randn(3, 8), torch.randn(8, requires_grad=True)
    want = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    with torch.no_grad():
        y = operators.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(y, want.detach())
    with torch.no_grad():
        y, total = operators.add_rms_norm(x, torch.zeros(3, 8), weight, 1e-6)
    torch.testing.assert_close((y, total), (want.detach(), x))
    out = torch.empty(3, 8)
    assert operators.rmsnorm.out(x, weight, 1e-6, out=out) is None
    torch.testing.assert_close(out, want.detach())
    assert out._version == 1 and not out.requires_grad and not y.requires_grad and torch.is_grad_enabled()
    leaf = torch.ones(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad((leaf * y * out).sum(), leaf)
    assert torch.equal(grad, y * out)


def test_single_level_apply(way):
    way("_C._FunctionBase")

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    leaf = torch.arange(3.0, requires_grad=True)
    y = torch_private.single_level_apply(Twice)(leaf)
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.equal(y, 2 * leaf) and torch.equal(grad, torch.full((3,), 2.0)) and y.grad_fn.name() == "TwiceBackward"


def test_versions(way):
    way("_C._increment_version")
    a, b = torch.ones(2), torch.ones(2)
    torch_private.increment_version()((a, b))
    torch_private.increment_version()((a,))
    assert (a._version, b._version) == (2, 1)


@pytest.mark.gpu
def test_allocating_on_a_gpu(way):
    way("_C._dynamo.guards._empty_strided_cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    t = torch_private.empty_cuda(device)((2, 3), (4, 1), torch.bfloat16)
    assert (t.shape, t.stride(), t.dtype, t.device) == ((2, 3), (4, 1), torch.bfloat16, device)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_settings_of_products(way, kind):
    way(*(f"_C._{verb}_cublas_allow_{kind}_reduced_precision_reduction" for verb in ("get", "set")))
    module, name = torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"
    read, write = torch_private.setting("cuda.matmul", name)
    before = read()
    try:
        for value in (False, True):
            write(value, *before[1:])
            assert getattr(module, name) is value and read() == (value, *before[1:])
    finally:
        write(*before)
    assert read() == before


def test_settings_without_functions_of_their_own():
    read, write = torch_private.setting("cudnn", "benchmark")
    before = read()
    write(not before[0])
    assert torch.backends.cudnn.benchmark is not before[0]
    write(*before)
    assert read() == before == (torch.backends.cudnn.benchmark,)


@pytest.mark.gpu
def test_streams_of_a_gpu(way):
    way("_C._cuda_getCurrentRawStream")
    asked, ordinal = torch_private.raw_stream(), torch.cuda.current_device()
    stream = torch.cuda.Stream()
    assert asked(ordinal) == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(stream):
        assert asked(ordinal) == stream.cuda_stream


# All of it

WITHOUT_ANY = """
import torch
from graphfuse.runtime import torch_private
torch_private._find = lambda path: None
from graphfuse import functional
from graphfuse.torch import RMSNorm, rms_norm

def exact(x, w):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w

def same(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)

module = RMSNorm(64, eps=1e-6)
torch.nn.init.normal_(module.weight)
for rows in (3, 5, 3, 0, 1):
    x, r, w = torch.randn(rows, 64), torch.randn(rows, 64), torch.randn(64)
    same(functional.rmsnorm(x, w), exact(x.double(), w.double()))
    total = x + r
    functional.fused_add_rmsnorm(x, r, w)
    same(x, exact(total, w)), same(r, total)
    assert x._version == r._version == 1
    with torch.no_grad():
        same(module(x), exact(x, module.weight))
    leaf = x.clone().requires_grad_()
    got = torch.autograd.grad(module(leaf).square().sum(), (leaf, module.weight))
    want = torch.autograd.grad(exact(leaf, module.weight).square().sum(), (leaf, module.weight))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    for f in (torch.ops.graphfuse.fused_add_rmsnorm, functional.fused_add_rmsnorm):
        try:
            f(leaf * 1, r, w, 1e-6)
        except RuntimeError as error:
            assert "requires a gradient" in str(error)
        except ValueError as error:
            assert "requires a gradient" in str(error)
        else:
            raise AssertionError
print("right")
"""


def test_all_calls_are_right_where_torch_has_none_of_them(python):
    assert python(WITHOUT_ANY) == "right"


def test_kernels_end_with_their_context(way):
    way("library._scoped_library")
    x = torch.ones(3)
    with torch_private.registrations("aten") as library:
        library.impl("sin", lambda x: x + 41, "CPU")
        assert torch.sin(x).tolist() == [42.0] * 3
    del library
    assert torch.equal(torch.sin(x), torch.tensor([1.0, 1.0, 1.0]).sin()) and torch.sin(x)[0] < 1


def test_implicit_replication(way):
    from torch.distributed.tensor.experimental import implicit_replication

    way("distributed.tensor.DTensor._op_dispatcher")
    told = torch_private._find("distributed.tensor.DTensor._op_dispatcher") is not None
    assert not torch_private.replicates_implicitly()
    with implicit_replication():
        assert torch_private.replicates_implicitly() is told
    assert not torch_private.replicates_implicitly()


# torch.compile


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_compilers(name, way):
    way("_dynamo.lookup_backend", "_TorchCompileInductorWrapper", "_inductor.list_mode_options")
    graph, x = torch.fx.symbolic_trace(lambda x: (x.sin() + 1,)), torch.randn(3)
    (got,) = torch_private.compiler(name, None, {})(graph, [x])(x)
    torch.testing.assert_close(got, x.sin() + 1)


def test_inductor_with_mode_and_options(way, monkeypatch):
    """What it is called with, in place of calling it."""
    way("_dynamo.lookup_backend", "_TorchCompileInductorWrapper")
    graph = torch.fx.symbolic_trace(lambda x: (x.sin(),))
    made = torch_private.compiler("inductor", "max-autotune-no-cudagraphs", {"epilogue_fusion": False})
    if hasattr(made, "config"):
        found = made.config
    else:
        monkeypatch.setattr(torch, "compile", lambda graph, backend, options: (backend, options))
        name, found = made(graph, [])
        assert name == "inductor"
    assert found == {"max_autotune": True, "coordinate_descent_tuning": True, "epilogue_fusion": False}


def test_compiled_modules():
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.compile(backend="eager")
    assert torch_private.is_compiled(torch.compile(one, backend="eager")) and torch_private.is_compiled(other)
    assert not torch_private.is_compiled(one)


def test_settings_of_inductor():
    assert torch_private.inductor_setting("post_grad_custom_pre_pass") is None
    assert torch_private.inductor_setting("epilogue_fusion") is True
    assert torch_private.inductor_setting("no_such_setting") is None


def test_passes_of_inductor(way):
    names = "CustomGraphPass", "CustomInferenceAwareGraphPass"
    way(*(f"_inductor.custom_graph_pass.{name}" for name in names))
    base, aware = torch_private.graph_pass_classes()
    assert isinstance(base, type) and not isinstance(lambda graph: None, aware)


def test_tensors_with_values_while_torch_traces(way):
    had = torch_private.without_fake_tensors()
    with FakeTensorMode(), had:
        assert type(torch.ones(2)) is torch.Tensor and torch.ones(2).tolist() == [1, 1]
    way("_subclasses.fake_tensor.unset_fake_temporarily")
    with torch_private.without_fake_tensors():
        assert torch.ones(2).tolist() == [1, 1]


def test_resetting_cuda_graphs(way):
    way("_inductor.cudagraph_trees.reset_cudagraph_trees")
    torch_private.reset_cuda_graphs()
