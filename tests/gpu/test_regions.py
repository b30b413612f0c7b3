"""The functions of the bench of what stands around norms, compiled on a GPU: what they become, against float32."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.benchmarks.programs import follower_session, model_check
from graphfuse.benchmarks.programs.follower_cases import BOTH, FORWARD, FUNCTIONS, FollowerCase
from graphfuse.benchmarks.programs.follower_functions import RUNS, tensors
from graphfuse.torch import compile_report

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("regions")]
# These have operators of their own, or are left to inductor.
OTHERS = frozenset("rms rms-half rms-fp8-block add-rms add-layer layer rms-add-rms".split())
OTHERS |= frozenset(("add-adaptive", "cross-entropy"))


@pytest.mark.parametrize("rows", [1000, 4096])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in OTHERS])
def test_regions(name, rows):
    function = FUNCTIONS[name]
    case = FollowerCase(name, BOTH if function.has_gradients else FORWARD, rows, 2048)
    given = tensors(function, case, 0, "cuda")
    reference = follower_session.Reference(function, given)
    eager = follower_session.values(RUNS[name], given)
    own = model_check.distances(eager, reference.of(eager))
    torch.compiler.reset()
    found = follower_session.values(torch.compile(RUNS[name], backend="graphfuse"), given)
    assert model_check.wrong(found, reference.of(found), own) is None
    assert {entry.became for entry in compile_report().replaced} <= {
        "region",
        "add_layer_norm_bias",
        "llama_add_rms_norm",
    }
    assert compile_report().replaced


def dropped(x, r, w):
    total = r + F.dropout(x, 0.25)
    return F.dropout(F.rms_norm(total, x.shape[-1:], w), 0.25), total


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_each_call_drops_others(mode):
    """Also where calls are replayed as a CUDA graph."""
    torch.compiler.reset()
    run = torch.compile(dropped, backend="graphfuse", mode=mode)
    given = [torch.randn(shape, device="cuda").add(3).bfloat16() for shape in ((4096, 2048), (4096, 2048), (2048,))]
    kept = []
    for seed in (0, 1, 2, 3, 3):
        torch.manual_seed(seed)
        torch.compiler.cudagraph_mark_step_begin()
        kept.append(run(*given)[0].clone() != 0)
    assert "dropout" in str(compile_report())
    assert torch.equal(kept[-1], kept[-2]) and not any(map(torch.equal, kept[:-2], kept[1:-1]))
    assert all(abs(one.double().mean() - 0.75) < 1e-3 for one in kept)
    # Which ones are dropped in a call says nothing of the next.
    both = (kept[2] & kept[3]).double().mean()
    assert abs(both - 0.75**2) < 1e-3


@pytest.mark.parametrize("rows", [(7,), (3, 1000), (2, 5, 300)])
def test_backward_drops_what_forward_has_dropped(rows):
    torch.compiler.reset()
    run = torch.compile(dropped, backend="graphfuse", options={"decline": False})
    shapes = (*rows, 4096), (*rows, 4096), (4096,)
    given = [torch.randn(s, device="cuda").add(9).bfloat16().requires_grad_() for s in shapes]
    made, total = run(*given)
    with torch.no_grad():
        first, last = ((total.float() - given[1].float()).abs() > 0.5, made != 0)
    exact = [t.detach().double().requires_grad_() for t in given]
    sums = exact[1] + exact[0] * first / 0.75
    outs = F.rms_norm(sums, sums.shape[-1:], exact[2]) * last / 0.75, sums
    grads = [torch.randn_like(t) for t in (made, total)]
    found = torch.autograd.grad((made, total), given, grads)
    for one, other in zip(found, torch.autograd.grad(outs, exact, [g.double() for g in grads]), strict=True):
        assert (one.double() - other).norm() <= 2**-6 * other.norm()
    assert {entry.became for entry in compile_report().replaced} == {"region"}


def of_channels(x, w, b):
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return w.view(-1, 1, 1) * ((x - mean) / torch.sqrt(variance + 1e-5)) + b.view(-1, 1, 1)


def of_samples(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (of_channels, [(4, 96, 56, 56), (96,), (96,)]),
        (of_channels, [(2, 64, 33, 35), (64,), (64,)]),
        (of_samples, [(16, 256, 1152), (16, 1, 1152), (16, 1, 1152)]),
    ],
)
def test_sums_along_axes_apart_in_gradients(function, shapes):
    torch.compiler.reset()
    run = torch.compile(function, backend="graphfuse", options={"decline": False})
    given = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    made = run(*given)
    loss = torch.randn_like(made)
    found = made, *torch.autograd.grad(made, given, loss)
    exact = [t.detach().double().requires_grad_() for t in given]
    wanted = function(*exact)
    wanted = wanted, *torch.autograd.grad(wanted, exact, loss.double())
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= 2**-6 * other.norm()
    assert {entry.became for entry in compile_report().replaced} == {"region"}
