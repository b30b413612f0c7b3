"""A plug-in for a row-wise op, in one file and without a kernel: a pattern whose facts are a row program.

A row-wise op is one whose results depend on one row, as a norm's do. Its pattern says what is computed of a row, in
pointwise steps and reductions; the row engine writes the kernel, with its knobs, layouts and types. Here it is RMS
norm, tanh soft-cap, scale and FP8. The author knows that tanh(t) is 2 sigmoid(2t) - 1, which takes fewer instructions.
"""

from dataclasses import replace

import torch

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase
from graphfuse.plugin import (
    Chain,
    Emitter,
    Match,
    No,
    Number,
    Pattern,
    PatternGraph,
    RowFacts,
    Store,
    renamed,
    row_facts,
)

CAP, SCALE = 2.0, 100.0


def template(g: PatternGraph):
    norm, _ = g.rmsnorm(g.capture("input"), g.capture("scale"), g.capture("epsilon"))
    capped = g.mul(g.tanh(g.mul(norm, g.capture("inverse_cap"))), g.capture("cap"))
    return {"output": g.mul(capped, g.capture("factor"))}


def facts(match: Match) -> RowFacts | No:
    """The rows pattern reads the nodes, from the one that says what a row is: it knows layouts, types and scalars. The
    steps are then the author's own."""
    found = row_facts(replace(match, anchor=match.node("rmsnorm")))
    return found if isinstance(found, No) else replace(found, program=without_tanh(found))


def without_tanh(found: RowFacts):
    """The program with each tanh as 2 sigmoid(2t) - 1. Steps behind it have other numbers then."""
    emitter, moved = Emitter(found.columns), {}
    for number, step in enumerate(found.program.steps):
        step = renamed(step, moved)
        if step.op_name == "tanh":
            twice = emitter.op("mul", a=dict(step.operands)["input"], b=Number(2.0))
            made = emitter.op("fma", a=emitter.op("sigmoid", input=twice), b=Number(2.0), c=Number(-1.0))
        else:
            made = emitter.step(step)
        moved[Chain(number)] = made

    def stored(store: Store) -> Store:
        return replace(store, value=moved[store.value])

    return replace(found.program, steps=tuple(emitter.steps), stores=tuple(map(stored, found.program.stores)))


PATTERN = Pattern("rms_soft_cap", template, facts)


def graph_of(x: torch.Tensor, weight: torch.Tensor):
    graph = graphfuse.pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
    X, WEIGHT = graph.tensor_like(x, "X"), graph.tensor_like(weight, "WEIGHT")
    norm, _ = graph.rmsnorm(X, WEIGHT, 1e-6, norm_forward_phase=norm_forward_phase.INFERENCE)
    capped = graph.mul(graph.tanh(graph.mul(norm, 1 / CAP)), CAP)
    OUT = graph.mul(capped, SCALE).set_output().set_data_type(data_type.FP8_E4M3)
    return graph, X, WEIGHT, OUT


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1000, 512, dtype=torch.bfloat16, device=device)
    weight = torch.rand(1, 512, dtype=torch.bfloat16, device=device) + 0.5
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
    graph, X, WEIGHT, OUT = graph_of(x, weight)
    graph.build([heur_mode.OPENSOURCE], patterns=[PATTERN], engines=[] if device == "cuda" else ["rows", "emulator"])
    graph.execute({X: x, WEIGHT: weight, OUT: out})
    print(graph.explain())
    (source,) = graph.get_kernel_source_at_index(0)
    if source.count("tanhf(") > 1:  # beside its declaration
        raise SystemExit("the kernel is not the plug-in's")
    norm = torch.nn.functional.rms_norm(x.double(), (512,), weight[0].double(), 1e-6)
    wanted = (CAP * torch.tanh(norm / CAP) * SCALE).float()
    error = ((out.float() - wanted).abs() / wanted.abs().clamp(min=1.0)).max().item()
    print(f"largest relative error {error:.3f}, of which FP8's rounding is up to 0.063")
    if error > 0.07:
        raise SystemExit("the result is wrong")


if __name__ == "__main__":
    main()
