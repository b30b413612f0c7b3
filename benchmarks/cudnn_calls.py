"""matmul + bias + GELU by cuDNN's engine: what a call costs the host, and how long the GPU takes, beside torch.

    python -m graphfuse.benchmarks.cudnn_calls [--rounds 60]

Host: the wall time of a call of a tiny problem, a sample being 200 calls, all calls in turns. GPU: the time of a call
in a captured graph. Exit 1 where a call by cuDNN's engine costs the host more than the target.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from graphfuse.benchmarks import turns

HOST_TARGET_US = 8.0
"""Of one cuDNN node, by `execute` and by a bound call."""

CALLS = 200
TINY = (64, 64, 64)
SHAPES = ((512, 4096, 4096), (4096, 4096, 4096), (4096, 4096, 14336))
"""(rows, columns of the input, columns of the output)"""


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
    bound = graph.bind(pack, space)
    return {"cudnn, execute": lambda: graph.execute(pack, space), "cudnn, bound": bound, "torch, two calls": by_torch}


def host(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a call on the tiny problem, by name."""
    import torch

    def sampler(call: Callable[[], object]) -> Callable[[], float]:
        def sample() -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            took = time.perf_counter() - start
            torch.cuda.synchronize()
            return took / CALLS * 1e6

        return sample

    taken = turns.take({name: sampler(call) for name, call in calls(TINY).items()}, rounds)
    return {name: turns.quartiles(samples) for name, samples in taken.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args(arguments).rounds
    from graphfuse.runtime import timing

    found = host(rounds)
    for name, figures in found.items():
        print(f"host, {'x'.join(map(str, TINY))}, {name}: {figures} us")
    for shape in SHAPES:
        made = calls(shape)
        captured = [timing.capture([call]) for call in made.values()]
        for name, taken in zip(made, timing.compare(captured), strict=True):
            print(
                f"GPU, {'x'.join(map(str, shape))}, {name}: {taken.median:.2f} us ({taken.low:.2f} - {taken.high:.2f})"
            )
    slow = [name for name, f in found.items() if name.startswith("cudnn") and f["median"] > HOST_TARGET_US]
    print(f"over {HOST_TARGET_US} us: {', '.join(slow) or 'none'}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
