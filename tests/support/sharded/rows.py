"""Operators on DTensors whose rows are split, or whole, or sums that are due."""

import torch

from graphfuse import torch as training
from support.sharded.beside import both
from support.sharded.placed import dtensor, near, same
from support.training_calls import EPS, OPERATORS


def _rows(mesh, dtype):
    from torch.distributed.tensor import Partial, Replicate, Shard

    for name in OPERATORS:
        for shape, dim in (((4, 6, 64), 0), ((3, 5, 32), 1), ((1, 5, 32), 0)):
            got, want = both(mesh, name, shape, Shard(dim), dtype=dtype)
            for n, value in want.items():
                sums = n in ("dweight", "dbias")
                assert got[n].placements == ((Partial("sum"),) if sums else (Shard(dim),)), (name, n)
                (near if sums else same)(got[n], value.detach())
    got, want = both(mesh, "rms_norm", (4, 64), Replicate(), dtype=dtype)
    for n, value in want.items():
        assert got[n].placements == (Replicate(),)
        same(got[n], value.detach())


def rows_of_float32(mesh):
    """Also of extents that do not divide, and of a rank without any."""
    _rows(mesh, torch.float32)


def rows_of_bfloat16(mesh):
    _rows(mesh, torch.bfloat16)


def heads(mesh):
    """A weight for each head is split with the heads, and whole where other rows are."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    for name in ("rms_norm", "layer_norm_bias", "rms_norm_bias"):
        for dim, scales, made in ((1, Shard(0), Shard(0)), (0, Replicate(), Partial("sum"))):
            got, want = both(mesh, name, (3, 4, 32), Shard(dim), scales, heads=(4, 32))
            for n, value in want.items():
                sums = n in ("dweight", "dbias")
                assert got[n].placements == ((made if sums else Shard(dim)),), (name, n)
                (near if sums else same)(got[n], value.detach())


def partial(mesh):
    """Sums that are due are made first: where they go is what other tensors say."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x, residual = (torch.randn(4, 64, device=mesh.device_type) for _ in range(2))
    share = x.clone() if mesh.get_local_rank() == 0 else torch.zeros_like(x)
    due = DTensor.from_local(share, mesh, [Partial("sum")], run_check=False)
    weight = torch.randn(64, device=mesh.device_type)
    y = training.rms_norm(due, dtensor(mesh, weight), EPS)
    assert y.placements == (Replicate(),)
    same(y, training.rms_norm(x, weight, EPS))
    made = training.add_rms_norm(due, dtensor(mesh, residual, Shard(0)), dtensor(mesh, weight), EPS)
    for got, want in zip(made, training.add_rms_norm(x, residual, weight, EPS), strict=True):
        assert got.placements == (Shard(0),)
        same(got, want)


def others(mesh):
    """Adaptive layer norm, normalization, softmax and its logarithm, cross entropy, each with gradients."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, scale, shift = (torch.randn(s, device=mesh.device_type) for s in ((4, 3, 64), (4, 1, 64), (4, 1, 64)))
    target = torch.randint(64, (4, 3), device=mesh.device_type)
    target[0, 0] = -100
    calls = {
        "ada": (training.ada_layer_norm, (x, scale, shift)),
        "normalize": (training.normalize, (x,)),
        "softmax": (training.softmax, (x,)),
        "log_softmax": (training.log_softmax, (x,)),
        "loss of rows": (lambda x, t: training.cross_entropy(x, t, reduction="none"), (x, target)),
        "loss": (training.cross_entropy, (x, target)),
    }
    for name, (function, given) in calls.items():
        for dim in (0, 1):
            whole = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
            placed = [dtensor(mesh, t, Shard(dim) if t.shape[dim] > 1 else Replicate()) for t in whole]
            made, want = function(*placed), function(*whole)
            outer = torch.randn_like(want)
            made.backward(dtensor(mesh, outer, Shard(dim) if want.dim() else Replicate()))
            want.backward(outer)
            (same if name != "loss" else near)(made.detach(), want.detach())
            for a, b in zip(placed, whole, strict=True):
                if b.requires_grad:
                    added = name == "ada" and dim == 1 and b.shape[1] == 1
                    assert a.grad.placements == ((Partial("sum") if added else Shard(dim)),), (name, dim)
                    (near if added else same)(a.grad, b.grad)
