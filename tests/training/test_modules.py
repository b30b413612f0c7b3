"""Modules in the place of torch.nn.RMSNorm and LayerNorm: arguments, state dicts both ways, values."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import graphfuse
from graphfuse.torch import AddRMSNorm, LayerNorm, RMSNorm, RMSNormSiLU

pytestmark = pytest.mark.torch

MODULES = [RMSNorm, RMSNormSiLU, AddRMSNorm, LayerNorm]


def run(module, x):
    made = module(x, torch.zeros_like(x)) if isinstance(module, AddRMSNorm) else module(x)
    return made[0] if isinstance(made, tuple) else made


def like(kind):
    """The module of torch that a kind takes the place of."""
    return torch.nn.LayerNorm if kind is LayerNorm else torch.nn.RMSNorm


def torchs(module, x):
    y = like(type(module)).forward(module, x)
    return torch.nn.functional.silu(y) if isinstance(module, RMSNormSiLU) else y


ARGUMENTS = {
    "a number": {"normalized_shape": 16},
    "a list": {"normalized_shape": [16]},
    "several dimensions": {"normalized_shape": (3, 16)},
    "eps": {"normalized_shape": 16, "eps": 0.1},
    "no weight": {"normalized_shape": 16, "elementwise_affine": False},
    "several dimensions, no weight": {"normalized_shape": (3, 16), "elementwise_affine": False},
    "bfloat16": {"normalized_shape": 16, "dtype": torch.bfloat16},
    "float64": {"normalized_shape": 16, "dtype": torch.float64},
}


@pytest.mark.parametrize("case", ARGUMENTS)
@pytest.mark.parametrize("kind", MODULES)
def test_arguments(kind, case):
    module, other = kind(**ARGUMENTS[case]), like(kind)(**ARGUMENTS[case])
    assert repr(module).removeprefix(kind.__name__) == repr(other).removeprefix(like(kind).__name__)
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype is b.dtype
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    dtype = ARGUMENTS[case].get("dtype", torch.float32)
    x = torch.randn(2, 3, 16, dtype=dtype, requires_grad=True)
    y, want = run(module, x), torchs(module, x)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-2 if dtype is torch.bfloat16 else 1e-6}
    torch.testing.assert_close(y, want, **tolerance)
    asked, outer = (x, *module.parameters()), torch.randn(2, 3, 16, dtype=dtype)
    got, exact = (torch.autograd.grad(z, asked, outer) for z in (y, want))
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=10 * tolerance["atol"])


@pytest.mark.parametrize("kind", MODULES)
def test_state_dicts_go_both_ways(kind):
    other = like(kind)(16)
    torch.nn.init.normal_(other.weight)
    module = kind(16)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module.weight, other.weight)
    torch.nn.init.normal_(module.weight)
    other.load_state_dict(module.state_dict())
    assert torch.equal(module.weight, other.weight)
    assert kind(16, elementwise_affine=False).state_dict() == {}


@pytest.mark.parametrize("kind", MODULES)
def test_copies_and_devices(kind):
    module = kind(16)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(4, 16)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(run(other, x), run(module, x))
    assert kind(16, device="meta").to_empty(device="cpu").weight.shape == (16,)
    assert run(kind(16).bfloat16(), x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [16, (3, 16)])
@pytest.mark.parametrize("kind", MODULES)
def test_shapes_that_do_not_fit(kind, shape, affine):
    module = kind(shape, elementwise_affine=affine)
    for x in (torch.randn(2, 3, 15), torch.randn(15), torch.randn(3, 1, 15)):
        with pytest.raises(graphfuse.VariantPackError, match=r"x has shape \(.*accepted: \(\.\.\., "):
            run(module, x)


@pytest.mark.parametrize("shape", [16, (3, 16)])
def test_residuals_that_do_not_fit(shape):
    """One that has as many elements in other dimensions is no better than one that has too few."""
    module, x = AddRMSNorm(shape), torch.randn(2, 3, 16)
    for residual in (torch.randn(2, 16, 3), torch.randn(48), torch.randn(())):
        with pytest.raises(graphfuse.VariantPackError, match=r"residual has shape \(.*accepted: \(\.\.\., "):
            module(x, residual)
    with pytest.raises(graphfuse.VariantPackError, match="residual has shape"):
        module(x, torch.randn(3, 16))


@pytest.mark.parametrize("shape", [16, (3, 16)])
@pytest.mark.parametrize("kind", MODULES)
def test_what_is_no_tensor(kind, shape):
    with pytest.raises(graphfuse.VariantPackTypeError, match="x must be a torch tensor, got list"):
        kind(shape)([1.0] * 16, *[torch.ones(16)] * (kind is AddRMSNorm))
    with pytest.raises(graphfuse.VariantPackTypeError, match="residual must be a torch tensor, got NoneType"):
        AddRMSNorm(shape)(torch.ones(3, 16), None)


def test_where_they_are():
    """graphfuse.torch comes when it is asked for, and takes nobody's torch."""
    code = (
        "import sys, torch, graphfuse\n"
        "from graphfuse import *\n"
        "assert torch.nn and 'graphfuse.torch' not in sys.modules\n"
        "print(graphfuse.torch.RMSNorm(8)(torch.ones(2, 8)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([2, 8])", done.stderr


def exactly(x, weight, eps):
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_module_is_may_change_between_calls(grad):
    """Epsilon, weight and types, with and without gradients in turns: each call goes by what the module is then."""
    module, x = RMSNorm(16, eps=0.5), torch.randn(4, 16)
    torch.nn.init.normal_(module.weight)
    machine = torch.finfo(torch.float32).eps

    def check(eps: float) -> None:
        for recorded in (grad, False):
            for _ in range(2):
                with torch.set_grad_enabled(recorded):
                    y = module(x)
                torch.testing.assert_close(y.double(), exactly(x, module.weight, eps), rtol=1e-5, atol=1e-5)

    check(0.5)
    for eps in (None, 0.25, None, 0.5):
        module.eps = eps
        check(machine if eps is None else eps)
    module.weight = torch.nn.Parameter(torch.randn(16))
    check(0.5)
    module.weight.data = torch.randn(16, dtype=torch.bfloat16)
    check(0.5)
    module.to(torch.float64)
    check(0.5)
    x = torch.randn(3, 16, dtype=torch.float64)
    module.eps = None
    check(torch.finfo(torch.float64).eps)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_weights_that_something_else_computes():
    """A parametrization, and functional_call with another weight, in turns with the module's own."""
    module, x = RMSNorm(16, eps=0.5), torch.randn(4, 16)
    torch.nn.init.normal_(module.weight)
    own, other = module.weight.detach().clone(), torch.randn(16)
    with torch.no_grad():
        for _ in range(2):
            for weight in (other, own):
                y = torch.func.functional_call(module, {"weight": weight}, (x,))
                torch.testing.assert_close(y.double(), exactly(x, weight, 0.5), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(module(x).double(), exactly(x, own, 0.5), rtol=1e-5, atol=1e-5)
        torch.nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
        for _ in range(2):
            torch.testing.assert_close(module(x).double(), exactly(x, 2 * own, 0.5), rtol=1e-5, atol=1e-5)
            own = own * 3
            module.parametrizations.weight.original.mul_(3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("shape", [16, (3, 16)])
@pytest.mark.parametrize("kind", MODULES)
def test_nested_tensors(kind, shape):
    module = kind(shape)
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 16), torch.randn(3, 3, 16)])
    given = (nested, nested) if kind is AddRMSNorm else (nested,)
    for grad in (False, True):
        run(module, torch.randn(2, 3, 16))
        with torch.set_grad_enabled(grad), pytest.raises(graphfuse.VariantPackTypeError, match="x is a.* nested"):
            module(*given)


# LayerNorm, which has a bias, too


def torchs_layer_norm(module, x):
    """In float64, with what the module has now."""
    weight, bias = (None if t is None else t.detach().double() for t in (module.weight, module.bias))
    return torch.nn.functional.layer_norm(x.double(), module.normalized_shape, weight, bias, module.eps)


@pytest.mark.parametrize("shape", [16, (3, 16)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_a_layer_norm_may_be_without_a_bias(affine, bias, shape):
    module = LayerNorm(shape, elementwise_affine=affine, bias=bias)
    other = torch.nn.LayerNorm(shape, elementwise_affine=affine, bias=bias)
    assert module.state_dict().keys() == other.state_dict().keys()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    other.load_state_dict(module.state_dict())
    x = (torch.randn(5, 3, 16) + 4).requires_grad_()
    asked, outer = (x, *module.parameters()), torch.randn(5, 3, 16)
    for _ in range(2):
        y, want = module(x), other(x)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        got = torch.autograd.grad(y, asked, outer)
        for a, b in zip(got, torch.autograd.grad(want, (x, *other.parameters()), outer), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            assert torch.equal(module(x), y)


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_layer_norm_is_may_change_between_calls(grad):
    module, x = LayerNorm(16, eps=0.5), torch.randn(4, 16)

    def check() -> None:
        for recorded in (grad, False):
            for _ in range(2):
                with torch.set_grad_enabled(recorded):
                    y = module(x)
                torch.testing.assert_close(y.double(), torchs_layer_norm(module, x), rtol=1e-5, atol=1e-5)

    check()
    for name in ("weight", "bias"):
        setattr(module, name, torch.nn.Parameter(torch.randn(16)))
        check()
        getattr(module, name).data = torch.randn(16).bfloat16()
        check()
    module.eps = 0.25
    check()
    module.bias = None
    check()
    module.bias = torch.nn.Parameter(torch.randn(16))
    check()
    module.weight = None
    check()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_of_a_layer_norm_that_something_else_computes(name):
    module, x = LayerNorm(16, eps=0.5), torch.randn(4, 16)
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        torch.testing.assert_close(module(x).double(), torchs_layer_norm(module, x), rtol=1e-5, atol=1e-5)
        torch.nn.utils.parametrize.register_parametrization(module, name, Doubled())
        for _ in range(2):
            torch.testing.assert_close(module(x).double(), torchs_layer_norm(module, x), rtol=1e-5, atol=1e-5)
            getattr(module.parametrizations, name).original.mul_(3)


def test_a_layer_norm_compiles_to_one_graph():
    module, x = LayerNorm(16), torch.randn(4, 16, requires_grad=True)
    torch._dynamo.reset()
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(x), module(x))
