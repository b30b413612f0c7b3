"""Modules in the place of torch.nn.RMSNorm: arguments, state dicts both ways, values."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import graphfuse
from graphfuse.torch import AddRMSNorm, RMSNorm, RMSNormSiLU

MODULES = [RMSNorm, RMSNormSiLU, AddRMSNorm]


def run(module, x):
    made = module(x, torch.zeros_like(x)) if isinstance(module, AddRMSNorm) else module(x)
    return made[0] if isinstance(made, tuple) else made


def torchs(module, x):
    y = torch.nn.RMSNorm.forward(module, x)
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
    module, other = kind(**ARGUMENTS[case]), torch.nn.RMSNorm(**ARGUMENTS[case])
    assert repr(module).removeprefix(kind.__name__) == repr(other).removeprefix("RMSNorm")
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype is b.dtype
    if module.weight is not None:
        torch.nn.init.normal_(module.weight)
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
    other = torch.nn.RMSNorm(16)
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
