"""A pattern and an engine of one's own: add -> relu as one generated kernel, given to `build`.

An installed package offers the same objects through the entry points
``graphfuse.patterns`` and ``graphfuse.engines`` instead. The kernel is written with the
library's headers, not with CUDA's names, so that the emulator runs it too.
"""

from dataclasses import dataclass

import torch

import graphfuse
from graphfuse import data_type, heur_mode
from graphfuse.plugin import (
    Address,
    Constant,
    Device,
    FrozenTensor,
    KernelEngine,
    Launch,
    Match,
    No,
    NoKnobs,
    Pattern,
    PatternGraph,
    render,
)


@dataclass(frozen=True)
class AddReluFacts:
    """All the engine looks at."""

    a: FrozenTensor
    b: FrozenTensor
    output: FrozenTensor


def template(g: PatternGraph):
    total = g.add(g.capture("a"), g.capture("b"))
    return {"output": g.relu(total, negative_slope=0.0, lower_clip=0.0, upper_clip=float("inf"))}


def facts(match: Match) -> AddReluFacts:
    return AddReluFacts(**{name: match.graph.tensors[t] for name, t in match.tensors.items()})


THREADS = 256
KERNEL = """
#include "graphfuse/math.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

extern "C" GF_KERNEL(THREADS) add_relu(const float* a, const float* b, float* out, gf::i64 n) {
  const gf::i64 i = gf::i64(gf::block_index()) * THREADS + gf::thread_index();
  if (i < n) {
    out[i] = gf::max(a[i] + b[i], 0.0f);
  }
}
"""


class AddRelu(KernelEngine[AddReluFacts, NoKnobs]):
    """float32 tensors of one shape, one thread an element.

    It does not declare that it `serves` more than the plain case. So it is asked only where tensors are row-major in
    memory, nodes compute in FLOAT and nothing is rounded between them.
    """

    name = "add_relu"
    facts = AddReluFacts
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    entry = "add_relu"

    def why_not(self, facts: AddReluFacts, device: Device) -> No | None:
        if not device.runs_kernels:
            return No(f"it needs a CUDA device or the emulator; planning is for {device}")
        for t in (facts.a, facts.b, facts.output):
            if t.dtype is not data_type.FLOAT or t.dim != facts.output.dim:
                return No(f"{t}: must be FLOAT, of the shape of {facts.output}")
        return None

    def source(self, facts: AddReluFacts, knobs: NoKnobs) -> str:
        return render(KERNEL, f"constexpr int THREADS = {THREADS};", "add_relu.cu")

    def launch(self, facts: AddReluFacts, knobs: NoKnobs) -> Launch:
        n = facts.output.elements
        arguments = (Address(facts.a.id), Address(facts.b.id), Address(facts.output.id), Constant("int64", n))
        return Launch(grid=-(-n // THREADS), block=THREADS, arguments=arguments)


PATTERN, ENGINE = Pattern("add_relu", template, facts), AddRelu()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = torch.randn(2, 1000, 64, device=device)
    out = torch.empty_like(a)
    graph = graphfuse.pygraph(io_data_type=data_type.FLOAT, intermediate_data_type=data_type.FLOAT)
    A, B = graph.tensor_like(a, "a"), graph.tensor_like(b, "b")
    OUT = graph.relu(graph.add(A, B)).set_output()
    engines = [ENGINE] if device == "cuda" else [ENGINE, "emulator"]
    graph.build([heur_mode.OPENSOURCE], patterns=[PATTERN], engines=engines)
    graph.execute({A: a, B: b, OUT: out})
    print(graph.explain())
    if not torch.equal(out, torch.relu(a + b)):
        raise SystemExit("the result is wrong")


if __name__ == "__main__":
    main()
