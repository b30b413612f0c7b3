"""Very many calls of shared functions, graphs and modules: by threads, with row counts and addresses at random."""

import gc
import random
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from graphfuse import data_type, functional, heur_mode, norm_forward_phase, pygraph
from graphfuse.torch import RMSNorm

EPS = 1e-6
GRAPH_ROWS = (1, 7, 33, 64)


@dataclass(frozen=True)
class Calls:
    """Ways to normalize rows, on one device, which all threads share.

    memory: rows that calls take some of, one after another. exact: their norms in float64.
    """

    memory: torch.Tensor
    weight: torch.Tensor
    exact: torch.Tensor
    module: RMSNorm
    graphs: dict[int, pygraph]

    @classmethod
    def of(cls, device: str, columns: int, rows: int = 4096) -> "Calls":
        generator = torch.Generator().manual_seed(0)
        memory = torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)
        weight = torch.randn(columns, generator=generator).to(device, torch.bfloat16)
        wide = memory.double()
        exact = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        module = RMSNorm(columns, eps=EPS, device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            module.weight.copy_(weight)
        return cls(memory, weight, exact, module, {n: _graph(n, columns) for n in GRAPH_ROWS})

    def function(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rmsnorm(x, self.weight, EPS)

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        return functional.rmsnorm(x, self.weight, EPS, out=x)

    def by_module(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.module(x)

    def by_graph(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self.graphs[x.shape[0]].execute({"x": x, "weight": self.weight[None], "out": out})
        return out

    def one(self, chosen: random.Random, most: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], int, int]:
        """A way, where its rows begin, and how many they are."""
        way = chosen.choice((self.function, self.in_place, self.by_module, self.by_graph))
        count = chosen.choice(GRAPH_ROWS) if way == self.by_graph else chosen.randrange(1, most)
        return way, chosen.randrange(self.memory.shape[0] - count), count

    def checked(self) -> torch.Tensor:
        """All norms as one call makes them: the bits that any other has to have, within rounding of float64's."""
        norms = self.function(self.memory)
        torch.testing.assert_close(norms.double(), self.exact, rtol=2**-8, atol=1e-6)
        return norms


def _graph(rows: int, columns: int) -> pygraph:
    graph = pygraph(intermediate_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT)
    x = graph.tensor([rows, columns], data_type=data_type.BFLOAT16, name="x")
    weight = graph.tensor([1, columns], data_type=data_type.BFLOAT16, name="weight")
    y = graph.rmsnorm(x, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    y.set_output().set_data_type(data_type.BFLOAT16).set_name("out")
    graph.build([heur_mode.OPENSOURCE])
    return graph


def by_threads(calls: Calls, threads: int, each: int, most: int = 65) -> None:
    """AssertionError unless every call of every thread makes the bits that one call of all rows makes."""
    norms, errors, wrong = calls.checked(), [], []
    cuda = calls.memory.is_cuda
    if cuda:
        torch.cuda.synchronize()

    def some(seed: int) -> None:
        chosen = random.Random(seed)
        stream = torch.cuda.Stream() if cuda and seed % 2 else None
        try:
            with torch.cuda.stream(stream):  # of None: the current one
                found = torch.zeros((), dtype=torch.int64, device=calls.memory.device)
                for n in range(each):
                    way, first, count = calls.one(chosen, most)
                    x = calls.memory[first : first + count]
                    y = way(x.clone() if chosen.random() < 0.5 else x)
                    found += (y != norms[first : first + count]).any()
                    if n % 1000 == 0:
                        torch.testing.assert_close(
                            y.double(), calls.exact[first : first + count], rtol=2**-8, atol=1e-6
                        )
                wrong.append(found.item())
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=some, args=(seed,)) for seed in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    if errors:
        raise errors[0]
    assert wrong == [0] * threads, f"calls of each thread with other bits: {wrong}"


def resident() -> int:
    """Bytes of memory that this process has now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # no Linux: the most that it had
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth(calls: Calls, warm: int, count: int, most: int = 4096) -> tuple[int, int]:
    """By how many bytes this process, and what torch has allocated on the GPU, grow by so many calls, after others."""
    chosen = random.Random(0)
    cuda = calls.memory.is_cuda

    def run(number: int) -> tuple[int, int]:
        for _ in range(number):
            way, first, rows = calls.one(chosen, most)
            way(calls.memory[first : first + rows])
        gc.collect()
        if cuda:
            torch.cuda.synchronize()
        return resident(), torch.cuda.memory_allocated() if cuda else 0

    before, after = run(warm), run(count)
    return after[0] - before[0], after[1] - before[1]
