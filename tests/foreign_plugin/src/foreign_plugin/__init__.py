"""add -> relu on packed float32 tensors of one shape and order: what a package of a third party looks like."""

import ctypes
from dataclasses import dataclass

from graphfuse.plugin import (
    Address,
    Buffers,
    Constant,
    Device,
    FrozenTensor,
    HostEngine,
    KernelEngine,
    Launch,
    Match,
    No,
    NoKnobs,
    Pattern,
    PatternGraph,
    Served,
    data_type,
    heur_mode,
)


@dataclass(frozen=True)
class AddReluFacts:
    """All that the engines look at."""

    a: FrozenTensor
    b: FrozenTensor
    output: FrozenTensor


def template(g: PatternGraph):
    total = g.add(g.capture("a"), g.capture("b"))
    return {"output": g.relu(total, negative_slope=0.0, lower_clip=0.0, upper_clip=float("inf"))}


def facts(match: Match) -> AddReluFacts:
    return AddReluFacts(**{name: match.graph.tensors[t] for name, t in match.tensors.items()})


def layout(t: FrozenTensor) -> list[tuple[int, int]]:
    """Extents and strides; those of one element say nothing about where elements are."""
    return [(extent, stride) for extent, stride in zip(t.dim, t.stride, strict=True) if extent != 1]


def mismatch(facts: AddReluFacts, kind: str, device: Device) -> No | None:
    if device.kind != kind:
        return No(f"needs a device of kind {kind}; got {device}")
    for t in (facts.a, facts.b, facts.output):
        if t.dtype is not data_type.FLOAT or t.span != t.elements:
            return No(f"{t}: accepted: packed FLOAT")
        if t.dim != facts.output.dim or layout(t) != layout(facts.output):
            return No(f"{t}: accepted: the shape and order of {facts.output}")
    return None


MODES = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
SERVES = Served(layouts=True)
"""Any order of elements, as `mismatch` looks at it. The rest is the plain case: FLOAT, in memory, nothing rounded."""


class HostAddRelu(HostEngine[AddReluFacts, NoKnobs]):
    name = "foreign_add_relu_cpu"
    facts = AddReluFacts
    modes = MODES
    serves = SERVES

    def why_not(self, facts: AddReluFacts, device: Device) -> No | None:
        return mismatch(facts, "cpu", device)

    def run(self, facts: AddReluFacts, knobs: NoKnobs, device: Device, buffers: Buffers, stream: int) -> None:
        n = facts.output.elements
        a, b, out = ((ctypes.c_float * n).from_address(buffers.address(t.id)) for t in (facts.a, facts.b, facts.output))
        for i in range(n):
            total = a[i] + b[i]
            out[i] = total if not total <= 0 else 0.0


class CudaAddRelu(KernelEngine[AddReluFacts, NoKnobs]):
    name = "foreign_add_relu_cuda"
    facts = AddReluFacts
    modes = MODES
    serves = SERVES
    entry = "foreign_add_relu"

    def why_not(self, facts: AddReluFacts, device: Device) -> No | None:
        return mismatch(facts, "cuda", device)

    def source(self, facts: AddReluFacts, knobs: NoKnobs) -> str:
        return """
extern "C" __global__ void foreign_add_relu(const float* a, const float* b, float* out, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) {
    const float total = a[i] + b[i];
    out[i] = total <= 0.0f ? 0.0f : total;
  }
}
"""

    def launch(self, facts: AddReluFacts, knobs: NoKnobs) -> Launch:
        n = facts.output.elements
        arguments = (Address(facts.a.id), Address(facts.b.id), Address(facts.output.id), Constant("int64", n))
        return Launch(grid=-(-n // 256), block=256, arguments=arguments)


PATTERN = Pattern("foreign_add_relu", template, facts)
ENGINES = (CudaAddRelu(), HostAddRelu())
