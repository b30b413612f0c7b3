"""What torch alone makes of a block on two ranks: each step beside float64 in one process. Imports no graphfuse.

For a machine where `examples/sequence_parallel.py` says that torch's own norms differ. It tells whether that is in the
collectives of gloo, in the products of the CPU, or in what DTensors do between them.

    python tests/sharded_steps.py
"""

import copy
import tempfile
import warnings

import torch
from torch import distributed, nn

RANKS, WIDTH = 2, 64
TOKENS = (4, 16, WIDTH)  # samples, sequence, width


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.last(x + self.down(nn.functional.silu(self.up(self.norm(x)))))


def _apart(made, exact):
    """The largest difference, as a part of the largest value."""
    return ((made.double() - exact.double()).abs().max() / exact.double().abs().max()).item()


def collectives(group, rank):
    """Those by which DTensors move rows, along the sequence: in and out of a product."""
    from torch.distributed import _functional_collectives as functional

    of_ranks = torch.randn(RANKS, *TOKENS)
    mine, parts = of_ranks[rank], [t.chunk(RANKS, dim=1)[k].contiguous() for k, t in enumerate(of_ranks)]
    gathered = functional.all_gather_tensor(parts[rank], 1, group)
    scattered = functional.reduce_scatter_tensor(mine, "sum", 1, group)
    summed = functional.all_reduce(mine, "sum", group)
    yield "all-gather", _apart(gathered + 0, torch.cat(parts, dim=1))
    yield "reduce-scatter", _apart(scattered + 0, of_ranks.sum(0).chunk(RANKS, dim=1)[rank])
    yield "all-reduce", _apart(summed + 0, of_ranks.sum(0))


def products():
    """Those of a linear layer, forward and backward, of all columns and of a rank's."""
    x, gradient = torch.randn(TOKENS).flatten(0, 1), torch.randn(TOKENS).flatten(0, 1)
    for columns in (4 * WIDTH, 4 * WIDTH // RANKS):
        up, down, wide = (torch.randn(*shape) for shape in ((columns, WIDTH), (WIDTH, columns), (len(x), columns)))
        pairs = {"x @ up.T": (x, up.T), "dy.T @ wide": (gradient.T, wide), "dy @ down": (gradient, down)}
        pairs |= {"dwide.T @ x": (wide.T, x), "dwide @ up": (wide, up)}
        for name, (a, b) in pairs.items():
            yield f"{name}, {columns} columns", _apart(a @ b, a.double() @ b.double())


def block(mesh):
    """Result and gradients, in one process and on ranks; the gradient of the result from a loss, or given."""
    from torch.distributed.tensor import Shard, distribute_tensor, parallel

    plan = {
        "norm": parallel.SequenceParallel(),
        "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "down": parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": parallel.SequenceParallel(),
    }
    whole, x = _Block(), torch.randn(TOKENS)
    exact, split = copy.deepcopy(whole).double(), parallel.parallelize_module(copy.deepcopy(whole), mesh, plan)
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    want = exact(x.double())
    given = (want.detach() - 1) * 2  # the gradient of the loss
    want.backward(given)
    for way, of_loss in (("of a loss", True), ("given", False)):
        for name, model, read in (("one process", whole, x), ("ranks", split, sharded)):
            model.zero_grad()
            y = model(read)
            if of_loss:
                (y - 1).square().sum().backward()
            else:
                local = given.float()
                y.backward(distribute_tensor(local, mesh, [Shard(1)]) if model is split else local)
            for of, made in {"result": y, **{of: p.grad for of, p in model.named_parameters()}}.items():
                made = made.full_tensor() if model is split else made
                of_exact = want if of == "result" else exact.get_parameter(of).grad
                yield f"{name}, gradient {way}: {of}", _apart(made, of_exact)


def _rank(number, folder):
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore", FutureWarning)  # old names of collectives, which all versions have
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    found = [*collectives(mesh.get_group(), number), *products(), *block(mesh)]
    of_all = [None] * RANKS
    distributed.all_gather_object(of_all, found)
    if number == 0:
        print(f"torch {torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}")
        for (name, _), *by in zip(found, *((by for _, by in of_rank) for of_rank in of_all), strict=True):
            print(f"{max(by):8.1e}  {name}" + "  <--" * (max(by) > 1e-4))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as shared:
        torch.multiprocessing.spawn(_rank, (shared,), nprocs=RANKS)
