# %% [markdown]
# # Writing a plug-in
#
# cuDNN's engines are cuDNN's. Here a pattern and an engine of your own take part on equal terms. The fusion of this
# sample is squared ReLU, `relu(x)^2`. A package offers the same two objects to all users; `graphfuse new-plugin NAME`
# writes one.

# %%
from dataclasses import dataclass

import torch

import graphfuse as cudnn
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
    check,
    render,
)

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")


def squared_relu():
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    X = graph.tensor(dim=[100, 96], data_type=cudnn.data_type.BFLOAT16, name="x")
    positive = graph.relu(input=X, name="relu")
    Y = graph.mul(a=positive, b=positive, name="square").set_output(True)
    return graph, X, Y


# %% [markdown]
# ## Before
#
# Mode `OPENSOURCE` asks engines that generate kernels. graphfuse's own takes pointwise nodes that no other does.

# %%
graph, _, _ = squared_relu()
graph.build([cudnn.heur_mode.OPENSOURCE])
print(graph.get_plan_name_at_index(0))

# %% [markdown]
# ## A pattern
#
# Its template is drawn in the same operations. Captures stand for tensors. Attributes that are given must be as they
# are; a clipped or leaky ReLU is another function. The facts are all that the engine looks at.


# %%
@dataclass(frozen=True)
class SquaredReluFacts:
    x: FrozenTensor
    y: FrozenTensor


def template(g: PatternGraph):
    positive = g.relu(g.capture("x"), negative_slope=0.0, lower_clip=0.0, upper_clip=float("inf"))
    return {"y": g.mul(positive, positive)}


def facts(match: Match) -> SquaredReluFacts:
    return SquaredReluFacts(**{name: match.graph.tensors[t] for name, t in match.tensors.items()})


PATTERN = Pattern("squared_relu", template, facts)

# %% [markdown]
# ## A kernel
#
# It is CUDA C++ with graphfuse's headers in place of CUDA's names, so that the emulator runs it, too. What depends on
# the problem is in `generated.cuh`, which `render` fills. The number of elements is an argument, never a constant: one
# kernel serves all shapes.

# %%
KERNEL = """
#include "graphfuse/convert.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/simt.cuh"
#include "generated.cuh"

extern "C" GF_KERNEL(THREADS) squared_relu(const X* x, Y* y, gf::i64 n) {
  const gf::i64 i = gf::i64(gf::block_index()) * THREADS + gf::thread_index();
  if (i < n) {
    const float positive = gf::max(gf::scalar(x + i), 0.0f);
    const gf::u32 bits = gf::encode<Y>(positive * positive);
    gf::store<sizeof(Y), sizeof(Y)>(y + i, gf::Bytes<sizeof(Y)>{{bits}});
  }
}
"""
THREADS = 256
TYPES = (cudnn.data_type.FLOAT, cudnn.data_type.HALF, cudnn.data_type.BFLOAT16)

# %% [markdown]
# ## An engine
#
# `why_not` gives the first reason against a problem. Other layouts, compute types and roundings never come to it: an
# engine that does not declare them in `serves` is not asked.


# %%
class SquaredRelu(KernelEngine[SquaredReluFacts, NoKnobs]):
    name = "squared_relu"
    facts = SquaredReluFacts
    modes = frozenset({cudnn.heur_mode.OPENSOURCE, cudnn.heur_mode.A, cudnn.heur_mode.B})
    entry = "squared_relu"

    def why_not(self, facts: SquaredReluFacts, device: Device) -> No | None:
        if not device.runs_kernels:
            return No(f"it needs a CUDA device or the emulator; planning is for {device}")
        for t in (facts.x, facts.y):
            if t.dtype not in TYPES or t.dim != facts.x.dim:
                return No(f"{t}: accepted: {', '.join(d.name for d in TYPES)}, in the shape of {facts.x}")
        return None

    def source(self, facts: SquaredReluFacts, knobs: NoKnobs) -> str:
        types = f"using X = {facts.x.dtype.facts.ctype};\nusing Y = {facts.y.dtype.facts.ctype};"
        prelude = f'#include "graphfuse/types.cuh"\n{types}\nconstexpr int THREADS = {THREADS};'
        return render(KERNEL, prelude, "squared_relu.cu")

    def launch(self, facts: SquaredReluFacts, knobs: NoKnobs) -> Launch:
        n = facts.y.elements
        arguments = (Address(facts.x.id), Address(facts.y.id), Constant("int64", n))
        return Launch(grid=-(-n // THREADS), block=THREADS, arguments=arguments)


ENGINE = SquaredRelu()

# %% [markdown]
# ## After
#
# The same graph, built with both, is the kernel of this sample.

# %%
graph, X, Y = squared_relu()
graph.build([cudnn.heur_mode.OPENSOURCE], patterns=[PATTERN], engines=[ENGINE])
x = torch.randn(100, 96, device=device, dtype=torch.bfloat16)
y = torch.empty_like(x)
graph.execute({X: x, Y: y}, None, handle=handle)
torch.testing.assert_close(y.double(), x.double().relu().square(), rtol=2**-8, atol=1e-30)
assert ENGINE.name in graph.get_plan_name_at_index(0)
print(f"{graph.get_plan_name_at_index(0)} agrees with float64")

# %% [markdown]
# ## Checking it
#
# `check` runs it on problems drawn from the template, beside the reference and under sanitizers. Without arguments it
# looks at more problems, and compiles for every architecture.

# %%
print(check((PATTERN, ENGINE), problems=6, programs=1, random=2, architectures=()))

# %%
cudnn.destroy_handle(handle)
