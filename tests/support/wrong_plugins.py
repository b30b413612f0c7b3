"""One plug-in, add -> relu through shared memory, right and with one mistake at a time."""

from dataclasses import dataclass

from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode
from graphfuse.codegen.render import render
from graphfuse.contract.engine import Address, Constant, HostScalar, KernelEngine, Launch, No, NoKnobs
from graphfuse.contract.match import Match, Pattern, PatternGraph
from graphfuse.contract.served import Served
from graphfuse.op_graph.ir import FrozenTensor

THREADS = 64

KERNEL = """
#include "graphfuse/convert.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

GF_DEVICE float at(const float* from, gf::i64 i) { return from[i]; }
GF_DEVICE float at(float from, gf::i64) { return from; }

extern "C" GF_KERNEL(THREADS) staged_add_relu(const float* a, B b, float* out, gf::i64 n) {
  GF_SHARED(float, tile, THREADS);
  const gf::i64 first = gf::i64(gf::block_index()) * THREADS;
  const gf::u32 mine = gf::thread_index(), other = THREADS - 1 - mine;
  if (first + mine < n) {
    tile[mine] = gf::rounded<Total>(a[first + mine] + at(b, first + mine));
  }
  gf::barrier();
  if (first + other < n) {
    out[first + other] = gf::max(tile[other], 0.0f);
  }
}
"""


@dataclass(frozen=True)
class Facts:
    a: FrozenTensor
    b: FrozenTensor
    output: FrozenTensor
    total: data_type


def template(g: PatternGraph):
    total = g.add(g.capture("a"), g.capture("b"))
    return {"output": g.relu(total, negative_slope=0.0, lower_clip=0.0, upper_clip=float("inf"))}


def facts(match: Match) -> Facts:
    found = {name: match.graph.tensors[t] for name, t in match.tensors.items()}
    if found["a"].by_value:
        found |= {"a": found["b"], "b": found["a"]}
    return Facts(**found, total=match.graph.tensors[match.node("add").output("output")].dtype)


PATTERN = Pattern("staged_add_relu", template, facts)


class Right(KernelEngine[Facts, NoKnobs]):
    name = "staged_add_relu"
    facts = Facts
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A, heur_mode.B})
    serves = Served(rounding=True, by_value=True)
    entry = "staged_add_relu"
    kernel = KERNEL

    def why_not(self, facts: Facts, device: Device) -> No | None:
        if not device.runs_kernels:
            return No("it needs a GPU or the emulator")
        arrays = [t for t in (facts.a, facts.b, facts.output) if not t.by_value]
        if facts.a.by_value or any(t.dtype is not data_type.FLOAT or t.dim != facts.output.dim for t in arrays):
            return No("accepted: FLOAT of one shape, and a number for one of the two")
        return None

    def source(self, facts: Facts, knobs: NoKnobs) -> str:
        b = "float" if facts.b.by_value else "const float*"
        prelude = f'#include "graphfuse/types.cuh"\nusing Total = {facts.total.facts.ctype};\nusing B = {b};\n'
        return render(self.kernel, f"{prelude}constexpr int THREADS = {THREADS};", "staged_add_relu.cu")

    def launch(self, facts: Facts, knobs: NoKnobs) -> Launch:
        n = facts.output.elements
        return Launch(self.grid(n), THREADS, (Address(facts.a.id), self.b(facts), Address(facts.output.id), self.n(n)))

    def grid(self, n: int) -> int:
        return -(-n // THREADS)

    def b(self, facts: Facts):
        return (HostScalar if facts.b.by_value else Address)(facts.b.id)

    def n(self, n: int) -> Constant:
        return Constant("int64", n)


class LayoutOrder(Right):
    """Takes any layout without gaps for row-major."""

    serves = Served(layouts=True)

    def why_not(self, facts: Facts, device: Device) -> No | None:
        if any(t.span != t.elements for t in (facts.a, facts.b, facts.output)):
            return No("accepted: no gaps")
        return super().why_not(facts, device)


class RoundingIgnored(Right):
    """Declares rounding, and does not round."""

    kernel = KERNEL.replace("gf::rounded<Total>", "")


class NumberMisread(Right):
    """Takes a number that is given to execute for one that is known when planning."""

    def b(self, facts: Facts):
        return Constant("float32", facts.b.value or 0.0) if facts.b.by_value else super().b(facts)


class TailLost(Right):
    """Starts no CTA for the last elements."""

    def grid(self, n: int) -> int:
        return max(1, n // THREADS)


class TailOverrun(Right):
    """One element too many."""

    kernel = KERNEL.replace("first + other < n", "first + other <= n")


class Race(Right):
    """Reads what other threads wrote without waiting for them."""

    kernel = KERNEL.replace("  gf::barrier();\n", "")


class NegativeGrid(Right):
    def grid(self, n: int) -> int:
        return -3


class WrongArgument(Right):
    """The kernel takes 64 bits."""

    def n(self, n: int) -> Constant:
        return Constant("int32", n)


class HalfOfTheThreads(Right):
    """The kernel is written for more."""

    def launch(self, facts: Facts, knobs: NoKnobs) -> Launch:
        right = super().launch(facts, knobs)
        return Launch(right.grid, THREADS // 2, right.arguments)


class Raises(Right):
    def why_not(self, facts: Facts, device: Device) -> No | None:
        raise KeyError("oops")


class Declines(Right):
    """Nothing is ever run, so nothing is ever wrong."""

    def why_not(self, facts: Facts, device: Device) -> No | None:
        return No("not today")


class DoesNotCompile(Right):
    kernel = KERNEL.replace("gf::max(", "gf::maximum(")


class Spills(Right):
    """A table that is indexed by what is known when running does not fit registers."""

    kernel = KERNEL.replace(
        "gf::max(tile[other], 0.0f);", "table(gf::max(tile[other], 0.0f), int(n % 50), n);"
    ).replace(
        'extern "C"',
        """GF_DEVICE float table(float x, int k, gf::i64 n) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = 0.0f;
  for (gf::i64 i = 1; i < n; i += n) values[n * i % 64] += x;
  return n < 0 ? values[k] : x;
}

extern "C\"""",
    )
