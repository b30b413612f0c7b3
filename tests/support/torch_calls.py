"""Graphs for torch's kernels as an engine, called on CPU tensors."""

import torch

from graphfuse.base.device import CPU, for_arch
from graphfuse.engines.torch_calls import TorchEngine
from graphfuse.engines.torch_calls import engine as calls
from graphfuse.engines.torch_calls.call import TorchCall
from graphfuse.op_graph.ir import Subgraph
from graphfuse.patterns import epilogues
from graphfuse.runtime import torch_private
from support import graphs
from support.graphs import BF16, FLOAT, HALF
from support.products import lowered

H200 = for_arch("sm_90a")
TORCH = {BF16: torch.bfloat16, HALF: torch.float16, FLOAT: torch.float32}


class Drawn:
    """A graph and what its tensors are bound to."""

    def __init__(self):
        self.g, self.pack = graphs.new(), {}

    def read(self, data, name, dtype=BF16):
        data = data if data.dtype is TORCH[dtype] else data.to(TORCH[dtype])
        self.pack[name] = data
        return self.g.tensor(data.shape, data.stride(), dtype, name=name)

    def write(self, t, like, name="out", dtype=BF16):
        t.set_output().set_name(name).set_data_type(dtype).set_dim(like.shape).set_stride(like.stride())
        self.pack[name] = like.fill_(float("nan"))

    def facts(self):
        low = lowered(self.g)
        return Subgraph(low, tuple(range(len(low.nodes))))

    def run(self, **numbers):
        facts = self.facts()
        call = calls.torch_call(facts)
        assert isinstance(call, TorchCall), call
        by_id = {t.id: self.pack.get(t.name) for t in facts.graph.tensors}
        names = {t.id: t.name for t in facts.graph.tensors}
        addresses = [by_id[seen.tensor].data_ptr() for seen in call.views]
        calls.by_address(call, CPU, lambda device: 0, torch_private.setting)(
            0, *addresses, *(numbers[names[t]] for t in call.numbers)
        )
        return self.pack["out"]

    def declined(self):
        facts = self.facts()
        return str(TorchEngine().why_not(epilogues.EpilogueFacts("node", facts), H200))


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(*shape, seed=0):
    """Small ones: their sums are exact, wherever a kernel rounds to bfloat16. Torch's gradients of convolutions round
    partial sums on processors without instructions for bfloat16."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def hold(got, exact, dtype=BF16):
    """One rounding of the exact value, and what sums in float32 may lose."""
    tolerance = {BF16: 2**-8, HALF: 2**-11, FLOAT: 2e-6}[dtype]
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=4e-6)


BATCHES = {
    "none": ((), (), 0),
    "one": ((5,), (5,), 1),
    "two": ((2, 3), (2, 3), 1),
    "weights": ((2, 3), (1, 1), 0),
    "weights of one row": ((2, 3), (1, 1), 0),
    "broadcast rows": ((1,), (4,), 1),
    "each": ((2, 3), (1, 3), 2),
}


def product(case, batch, dtype=BF16, rows=8):
    of_a, of_b, axes = BATCHES[batch]
    rows = 1 if batch.endswith("one row") else rows
    a, b = values(*of_a, rows, 16), values(*of_b, 16, 6, seed=1)
    y = case.g.matmul(case.read(a, "a", dtype), case.read(b, "b", dtype), name="product")
    return y, axes


def exactly(case):
    return case.pack["a"].double() @ case.pack["b"].double()
