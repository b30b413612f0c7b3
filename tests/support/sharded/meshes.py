"""Meshes beside the plain one, and compiled calls."""

import torch

from graphfuse import torch as training
from support.sharded.placed import dtensor
from support.training_calls import EPS


def a_mesh_after_another(mesh):
    """Calls like earlier ones, on a mesh of the same ranks with groups of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    x = torch.randn(4, 64, device=mesh.device_type)
    for _ in range(2):
        own = init_device_mesh(mesh.device_type, (1, 2), mesh_dim_names=("one", "two"))["two"]
        y = training.rms_norm(dtensor(own, x, Shard(1)), None, EPS)
        torch.testing.assert_close(y.full_tensor(), training.rms_norm(x, None, EPS), rtol=1e-6, atol=1e-6)
        assert y.device_mesh is own


def two_dimensions_of_the_mesh(mesh):
    """Rows along one, columns along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    x, weight = (torch.randn(s, device=mesh.device_type) for s in ((4, 64), (64,)))
    for shape in ((2, 1), (1, 2)):
        grid = init_device_mesh(mesh.device_type, shape)
        y = training.rms_norm(dtensor(grid, x, Shard(0), Shard(1)), dtensor(grid, weight, Replicate(), Shard(0)), EPS)
        assert y.placements == (Shard(0), Shard(1))
        torch.testing.assert_close(y.full_tensor(), training.rms_norm(x, weight, EPS), rtol=1e-6, atol=1e-6)
        # Columns twice: gathered along the second.
        y = training.rms_norm(dtensor(grid, x, Shard(1), Shard(1)), None, EPS)
        assert y.placements == (Shard(1), Replicate())
        torch.testing.assert_close(y.full_tensor(), training.rms_norm(x, None, EPS), rtol=1e-6, atol=1e-6)


def compiled(mesh):
    """One graph, of rows and of columns."""
    from torch.distributed.tensor import Shard

    def function(x, weight):
        return training.rms_norm(x * 2, weight, EPS) * 3

    x, weight = (torch.randn(s, device=mesh.device_type) for s in ((4, 64), (64,)))
    outer = torch.randn_like(x)
    for dim in (0, 1):
        found = []
        for made in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            split = dtensor(mesh, x, Shard(dim)).requires_grad_()
            scale = dtensor(mesh, weight, *[Shard(0)] * dim).requires_grad_()
            y = made(split, scale)
            y.backward(dtensor(mesh, outer, Shard(dim)))
            found.append([t.full_tensor() for t in (y, split.grad, scale.grad)])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
