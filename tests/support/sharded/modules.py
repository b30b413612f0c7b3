"""Modules with sharded parameters: sequence parallel and FSDP2."""

import copy

import torch
from torch import nn

from graphfuse import torch as training
from support.sharded.placed import dtensor, same


class _Block(nn.Module):
    """norm: makes a norm of a width."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second = norm(64), norm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.second(x + self.down(torch.nn.functional.gelu(self.up(self.first(x)))))


NORMS = (training.RMSNorm, training.LayerNorm, training.RMSNormSiLU)


def sequence_parallel(mesh):
    """A block with its norms in rows and its products in columns, against the same in one process."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for kind in NORMS:
        torch.manual_seed(1)
        whole = _Block(kind).to(mesh.device_type)
        plan = {
            "first": SequenceParallel(),
            "second": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        split = parallelize_module(copy.deepcopy(whole), mesh, plan)
        x = torch.randn(2, 6, 64, device=mesh.device_type)
        own, placed = x.clone().requires_grad_(), dtensor(mesh, x, Shard(1)).requires_grad_()
        got, want = split(placed), whole(own)
        assert isinstance(got, DTensor) and got.placements == (Shard(1),)
        outer = torch.randn_like(x)
        got.backward(dtensor(mesh, outer, Shard(1)))
        want.backward(outer)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(placed.grad.full_tensor(), own.grad, rtol=1e-5, atol=1e-5)
        for (name, a), b in zip(split.named_parameters(), whole.parameters(), strict=True):
            made = a.grad.redistribute(placements=[Replicate()]).to_local()
            torch.testing.assert_close(made, b.grad, rtol=1e-4, atol=1e-5, msg=name)
        with torch.no_grad():
            same(split.first(placed), whole.first(own))


def a_residual_beside(mesh):
    """AddRMSNorm, whose residual SequenceParallel leaves to the caller."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    whole = training.AddRMSNorm(64, device=mesh.device_type)
    split = parallelize_module(copy.deepcopy(whole), mesh, SequenceParallel())
    x, residual = (torch.randn(2, 6, 64, device=mesh.device_type) for _ in range(2))
    made = split(dtensor(mesh, x, Shard(1)), residual=dtensor(mesh, residual, Shard(1)))
    for got, want in zip(made, whole(x, residual), strict=True):
        assert got.placements == (Shard(1),)
        same(got.detach(), want.detach())


def fsdp(mesh):
    """Each rank has its own samples; steps of an optimizer are those of one process with all of them."""
    from torch.distributed.fsdp import fully_shard

    for kind in NORMS:
        torch.manual_seed(1)
        whole = _Block(kind).to(mesh.device_type)
        split = copy.deepcopy(whole)
        for module in (split.first, split.second, split):
            fully_shard(module, mesh=mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (split, whole)]
        for _ in range(2):
            x = torch.randn(4, 6, 64, device=mesh.device_type)
            own = x.chunk(mesh.size())[mesh.get_local_rank()]
            got, want = split(own), whole(x)
            torch.testing.assert_close(got, want.chunk(mesh.size())[mesh.get_local_rank()], rtol=1e-4, atol=1e-5)
            got.square().mean().backward()
            want.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, a), b in zip(split.named_parameters(), whole.named_parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b[1], rtol=1e-4, atol=1e-5, msg=name)
