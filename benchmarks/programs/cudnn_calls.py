"""matmul + bias + GELU by cuDNN's engine: what a call costs the host, and how long the GPU takes, beside torch.

    python -m graphfuse.benchmarks.programs.cudnn_calls [--record FOLDER] [--rounds 60]

Host: the wall time of a call of a tiny problem, a sample being 200 calls, all calls in turns; beside them the package's
own `execute` of the same graph. GPU: the time of a call in a captured
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs import turns
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.target import Target
from graphfuse.benchmarks.untuned import untuned

EXECUTE, BOUND, TORCH, PACKAGE = "graph.execute", "graph.bind", "torch, two calls", "cuDNN frontend execute"
CALLS = 200
TINY = (64, 64, 64)
SHAPES = ((512, 4096, 4096), (4096, 4096, 4096), (4096, 4096, 14336))
"""(rows, columns of the input, columns of the output)"""


def _host(name: str, limit: float) -> Target:
    """Microseconds of one cuDNN node."""

    def figures(content: dict):
        found = content["host_us"].get(name)
        return [(found["median"], "")] if found else []

    return Target(f"host time of {name}, us", limit, False, figures)


TARGETS = (_host(EXECUTE, 8.0), _host(BOUND, 8.0))


def calls(shape: Sequence[int]) -> dict[str, Callable[[], object]]:
    """The same product by name. RuntimeError where cuDNN does not run it."""
    import torch

    import graphfuse as gf

    rows, inner, columns = shape
    x = torch.randn(rows, inner, device="cuda").bfloat16()
    w = (torch.randn(inner, columns, device="cuda") * inner**-0.5).bfloat16()
    bias, out = torch.randn(1, columns, device="cuda").bfloat16(), torch.empty(rows, columns, device="cuda").bfloat16()
    graph = gf.pygraph("product", io_data_type=gf.data_type.BFLOAT16, intermediate_data_type=gf.data_type.FLOAT)
    X, W, B = graph.tensor_like(x), graph.tensor_like(w), graph.tensor_like(bias)
    OUT = graph.gelu_approx_tanh(graph.bias(graph.matmul(X, W), B)).set_output()
    graph.build([gf.heur_mode.A], engines=["cudnn", "reference"])
    plan = graph.get_plan_name_at_index(0)
    if not plan.startswith("cudnn"):
        raise RuntimeError(f"cuDNN does not run it:\n{graph.explain()}")
    size, pack = graph.get_workspace_size(), {X: x, W: w, B: bias, OUT: out}
    space = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    flat = bias.flatten()

    def by_torch():
        return torch.nn.functional.gelu(torch.addmm(flat, x, w), approximate="tanh")

    graph.execute(pack, space)
    torch.testing.assert_close(out, by_torch(), rtol=3e-2, atol=3e-2)
    return {EXECUTE: lambda: graph.execute(pack, space), BOUND: graph.bind(pack, space), TORCH: by_torch}


def package(shape: Sequence[int]) -> Callable[[], object]:
    """The same product by the package cudnn alone, as its samples call it."""
    import cudnn
    import torch

    rows, inner, columns = shape
    x, w = (
        torch.randn(1, rows, inner, device="cuda").bfloat16(),
        torch.randn(1, inner, columns, device="cuda").bfloat16(),
    )
    bias, out = torch.randn(1, 1, columns, device="cuda").bfloat16(), x.new_empty(1, rows, columns)
    half, single = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    g = cudnn.pygraph(
        handle=handle, io_data_type=half, intermediate_data_type=single, compute_data_type=single, name="product"
    )
    X, W, B = g.tensor_like(x), g.tensor_like(w), g.tensor_like(bias)
    OUT = g.gelu_approx_tanh(g.bias(g.matmul(X, W), B)).set_output(True).set_data_type(half)
    g.build([cudnn.heur_mode.A])
    space, pack = torch.empty(max(g.get_workspace_size(), 1), dtype=torch.uint8, device="cuda"), {X: x, W: w, B: bias}
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    pack[OUT] = out
    return lambda: g.execute(pack, space, handle=handle)


def host(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a call on the tiny problem, by name."""
    made = calls(TINY) | {PACKAGE: package(TINY)}
    taken = turns.take({name: turns.on_host(call, CALLS) for name, call in made.items()}, rounds)
    return {name: turns.quartiles(samples) for name, samples in taken.items()}


def gpu(shape: Sequence[int]) -> dict:
    """The record's entry of one shape."""
    from graphfuse.runtime import timing

    made = calls(shape)
    del made[EXECUTE]  # on the GPU it is what a bound call is
    times = timing.compare([timing.capture([call]) for call in made.values()])
    return {
        "name": "x".join(map(str, shape)),
        "us": {name: vars(t) for name, t in zip(made, times, strict=True)},
    }


def on_host(content: dict) -> tables.Table:
    rows = [(name, tables.spread(us, 2)) for name, us in content["host_us"].items()]
    return tables.Table("microseconds of a call on the host: median (quartiles)", ("", "us"), rows)


def on_gpu(content: dict) -> tables.Table:
    return tables.Table(
        "microseconds of a call on the GPU: median (least to most)",
        ("rows x columns read x columns written", BOUND, TORCH),
        [(case["name"], *(tables.spread(case["us"][who], 1) for who in (BOUND, TORCH))) for case in content["cases"]],
    )


STUDY = Study(
    name="cudnn-calls",
    about=__doc__,
    tables=lambda content: (on_host(content), on_gpu(content)),
    targets=TARGETS,
    distributions=("torch", "nvidia-cudnn-frontend"),
    rounds=60,
)


def main(arguments: Sequence[str] | None = None) -> None:
    given = STUDY.asked(arguments)
    with untuned():
        content = {
            "versions": STUDY.versions(),
            "rounds": given.rounds,
            "host_us": host(given.rounds),
            "cases": [gpu(shape) for shape in SHAPES],
        }
    STUDY.report(content, given.record)


if __name__ == "__main__":
    main()
