"""What autograd watches and the functions would write: refused, and versions of what is written count up."""

import pytest
import torch

from graphfuse import VariantPackError, functional
from support.functional_calls import NAMES, OUTS, Call, call, outs

pytestmark = pytest.mark.torch

WRITTEN = {
    "fused_add_rmsnorm": ("input", "residual"),
    "gemma_fused_add_rmsnorm": ("input", "residual"),
    "fused_add_rmsnorm_quant": ("residual",),
    "fused_add_rmsnorm_quant_dynamic": ("residual",),
    "add_rmsnorm_fp4quant": ("residual",),
    "rmsnorm": ("out",),
    "gemma_rmsnorm": ("out",),
    "qk_rmsnorm": ("q_out", "k_out"),
    "sandwich_rmsnorm": ("out", "residual_out"),
    "gemma_sandwich_rmsnorm": ("out", "residual_out"),
    "fused_rmsnorm_silu": ("out",),
    "rmsnorm_silu_gate": ("out",),
}
CASES = [(name, written) for name, all_ in WRITTEN.items() for written in all_]
MESSAGE = "{} requires a gradient and would be written.*accepted: tensors that require none"


def given(name: str, written: str) -> dict[str, torch.Tensor]:
    """Arguments in float32, of which one, that is written, is given even if the function would allocate it."""
    made = call(name, (4, 64), torch.float32)
    if written in made.tensors:
        return dict(made.tensors)
    return made.tensors | outs(made, {n: torch.float32 for n in OUTS[name]})


def operator(name: str, written: str):
    """The operator that writes what is given; by name, as it takes it."""
    packet = getattr(torch.ops.graphfuse, name)
    chosen = packet.out if written in OUTS.get(name, ()) else packet.default
    options = call(name).options | ({"block_scale": None} if name == "fused_rmsnorm_silu" else {})
    return lambda **arguments: chosen(**arguments, **options)


def function(name: str, written: str):
    options = call(name).options  # made here, for torch.compile would trace that, too
    return lambda **arguments: getattr(functional, name)(**arguments, **options)


def compiled(name: str, written: str):
    torch._dynamo.reset()
    return torch.compile(function(name, written), backend="aot_eager")


WAYS = [function, operator, compiled]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "written"), CASES)
def test_what_requires_a_gradient_is_not_written(name, written, way):
    """A leaf as little as what was computed; by a first call and after one that was right. Nothing is changed."""
    run, wanted = way(name, written), MESSAGE.format(written)
    # torch.compile makes an error of its own of what is said while it traces.
    error = RuntimeError if way is compiled else VariantPackError
    for watched in (lambda t: t.clone().requires_grad_(), lambda t: t.clone().requires_grad_() * 1):
        tensors = given(name, written)
        tensors[written] = watched(tensors[written])
        before = {n: t.detach().clone() for n, t in tensors.items()}
        with pytest.raises(error, match=f"(?s){wanted}"):
            run(**tensors)
        for n, t in tensors.items():
            assert torch.equal(t.detach().view(torch.uint8), before[n].view(torch.uint8)) and t._version <= 1
        for _ in range(2):  # what is accepted with gradients off is not remembered for when they are on
            with torch.no_grad():
                run(**tensors)
            with pytest.raises(error, match=f"(?s){wanted}"):
                run(**tensors)
        run(**given(name, written))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "written"), CASES)
def test_what_is_kept_for_backward_and_written_is_torchs_error(name, written, way):
    run = way(name, written)
    for _ in range(3):
        tensors = given(name, written)
        y = tensors[written].clone().requires_grad_().exp()
        run(**(tensors | {written: y.detach()}))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize(("name", "written"), CASES)
def test_versions_count_up_by_one_a_call(name, written):
    tensors = given(name, written)
    for calls in range(1, 4):
        function(name, written)(**tensors)
        assert tensors[written]._version == calls
    read = {"input", "q", "k", "weight", "q_weight", "k_weight", "gate"} - {*WRITTEN[name]}
    assert all(tensors[n]._version == 0 for n in read & tensors.keys())


def test_a_tensor_that_is_given_twice_counts_once():
    x, weight = torch.randn(4, 64), torch.randn(64)
    for calls in range(1, 4):
        functional.rmsnorm(x, weight, out=x)
        assert x._version == calls


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_inference_have_no_versions(name):
    """They take turns with others."""
    for _ in range(2):
        call(name, (4, 64)).run()
        with torch.inference_mode():
            made: Call = call(name, (4, 64))
            made.run()
            call(name, (4, 64)).run()
        with torch.no_grad():
            made.run()
