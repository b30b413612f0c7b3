"""Operators on DTensors whose columns are split."""

import torch

from graphfuse import functional
from graphfuse import torch as training
from support.sharded.beside import both, gradients_of, tensors
from support.sharded.placed import dtensor, same
from support.training_calls import EPS, OPERATORS, grads, layer_norm, norm


def _exact(name, whole, outer):
    wide = {n: t.detach().double().requires_grad_() for n, t in whole.items()}
    made = OPERATORS[name].exact(wide)
    return dict(zip(("y", "total"), made, strict=False)) | gradients_of(made, wide, [g.double() for g in outer])


def columns(mesh):
    """Forward and backward by two steps, with as few numbers on the way as there are to be."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.debug import CommDebugMode

    for name, operator in OPERATORS.items():
        for shape in ((3, 5, 64), (4, 33)):
            dim = len(shape) - 1
            whole = tensors(mesh, name, shape)
            outer = grads(operator.run(whole))
            exact = _exact(name, whole, outer)
            placed = {n: dtensor(mesh, t, Shard(t.dim() - 1)) for n, t in whole.items()}
            with CommDebugMode() as forward:
                made = operator.run(placed)
            with CommDebugMode() as backward:
                gradients = gradients_of(made, placed, [dtensor(mesh, g, Shard(dim)) for g in outer])
            numbers = 2 if "layer" in name else 1
            for mode in (forward, backward):
                assert mode.get_total_counts() == numbers, (name, mode.get_comm_counts())
            got = dict(zip(("y", "total"), made, strict=False)) | gradients
            for n, value in exact.items():
                assert got[n].placements == (Shard(value.dim() - 1),), (name, n)
                scale = max(1.0, value.abs().max().item())
                torch.testing.assert_close(got[n].full_tensor().double(), value, rtol=1e-6, atol=1e-5 * scale)


def columns_far_from_zero(mesh):
    """The variance of a row is small beside its mean, and the ranks' own means are apart."""
    from torch.distributed.tensor import Shard

    x = torch.randn(4, 64, device=mesh.device_type) + 4096
    x[:, 32:] += 2
    y = training.layer_norm(dtensor(mesh, x, Shard(1)))
    # The mean itself is rounded to 2^-12. A variance by the mean of squares would be wrong by more than 1.
    torch.testing.assert_close(y.full_tensor().double(), layer_norm(x.double(), None), rtol=1e-3, atol=1e-3)


def columns_of_heads(mesh):
    from torch.distributed.tensor import Shard

    got, want = both(mesh, "rms_norm_bias", (3, 4, 32), Shard(2), Shard(1), heads=(4, 32))
    for n, value in want.items():
        torch.testing.assert_close(got[n].full_tensor(), value.detach(), rtol=1e-5, atol=1e-5)


def columns_without_a_gradient_for_x(mesh):
    """Nothing is sent for the gradient of a weight, whose columns are where the weight's are."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.debug import CommDebugMode

    x, weight = torch.randn(4, 64, device=mesh.device_type), torch.randn(64, device=mesh.device_type).requires_grad_()
    split = dtensor(mesh, weight, Shard(0))
    y = training.rms_norm(dtensor(mesh, x, Shard(1)), split, EPS)
    outer = torch.randn_like(x)
    with CommDebugMode() as mode:
        y.backward(dtensor(mesh, outer, Shard(1)))
    assert mode.get_total_counts() == 0
    norm(x.double(), weight.double()).backward(outer.double())
    torch.testing.assert_close(split.grad.full_tensor(), weight.grad, rtol=1e-5, atol=1e-5)


def columns_fewer_than_ranks(mesh):
    """Gathered, as a rank without columns would have nothing to run on."""
    from torch.distributed.tensor import Replicate, Shard

    x = torch.randn(4, 1, device=mesh.device_type)
    y = training.rms_norm(dtensor(mesh, x, Shard(1)), None, EPS)
    assert y.placements == (Replicate(),)
    same(y, training.rms_norm(x, None, EPS))


def columns_gathered(mesh):
    """By operators that need whole rows, as torch's norms do with theirs."""
    from torch.distributed.tensor import Replicate, Shard

    x = torch.randn(4, 64, device=mesh.device_type)
    for function in (training.softmax, training.log_softmax, training.normalize, functional.softmax):
        y = function(dtensor(mesh, x, Shard(1)))
        assert y.placements == (Replicate(),)
        same(y, function(x))
