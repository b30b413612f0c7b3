"""A block of a decoder on two ranks: norms on rows, products on columns, its parameters sharded or not.

Each norm runs on the part of the sequence that its rank has. `SequenceParallel` is torch's, as it is for torch's own
norms. Around it, `fully_shard` (FSDP2) gives each rank samples and a part of the parameters of its own. Both are
compared with one process.
"""

import tempfile

import torch
from torch import distributed, nn

from graphfuse.torch import RMSNorm

RANKS, WIDTH = 2, 64
EXACT = 1e-5


class Block(nn.Module):
    """norm: class of its norms."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.last = (norm(WIDTH, eps=1e-6) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.last(x + self.down(nn.functional.silu(self.up(self.norm(x)))))


def sequence_parallel(norm, mesh, x):
    """Differences of the result and of gradients from one process, by name, as parts of the largest of each."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole, split = Block(norm), Block(norm)
    split.load_state_dict(whole.state_dict())
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": SequenceParallel(),
    }
    parallelize_module(split, mesh, plan)
    got, want = split(distribute_tensor(x, mesh, [Shard(1)])), whole(x)
    for y in (got, want):
        (y - 1).square().sum().backward()  # of squares alone the last norm has no gradient but for rounding
    found = {"result": difference(got, want)}
    return found | {name: difference(split.get_parameter(name).grad, p.grad) for name, p in whole.named_parameters()}


def fsdp(norm, mesh, x):
    """The same of parameters after a step of training, each rank with its own samples."""
    from torch.distributed.fsdp import fully_shard

    whole, split = Block(norm), Block(norm)
    split.load_state_dict(whole.state_dict())
    for module in (split.norm, split.last, split):
        fully_shard(module, mesh=mesh)
    for model, samples in ((split, x.chunk(RANKS)[mesh.get_local_rank()]), (whole, x)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(samples) - 1).square().mean().backward()
        optimizer.step()
    return {name: difference(split.get_parameter(name), p) for name, p in whole.named_parameters()}


def difference(a, b):
    return ((a.full_tensor() - b).abs().max() / b.abs().max()).item()


def rank(number, folder):
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    x = torch.randn(4, 16, WIDTH)  # samples, sequence, width
    for name, run in (("sequence parallel", sequence_parallel), ("FSDP", fsdp)):
        ours, theirs = (run(norm, mesh, x) for norm in (RMSNorm, nn.RMSNorm))
        apart = {of for of, by in theirs.items() if by > EXACT}  # with torch's norms
        wrong = {of: by for of, by in ours.items() if by > EXACT and of not in apart}
        assert not wrong, f"{name} differs by {wrong}, and with torch's norms by {theirs}"
        if number == 0:
            print(f"{name}: {RANKS} ranks and one process agree to {max(ours[of] for of in {*ours} - apart):.1e}")
            for of in sorted(apart):
                print(f"  but not in {of}: {ours[of]:.1e}, with torch's norms {theirs[of]:.1e}")
    distributed.barrier()  # nobody leaves while others still talk to it
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as shared:
        torch.multiprocessing.spawn(rank, (shared,), nprocs=RANKS)
