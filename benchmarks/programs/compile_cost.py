"""What `torch.compile` costs with our backend: seconds until a function has run once, and microseconds of a call.

    python -m graphfuse.benchmarks.programs.compile_cost [--record FOLDER] [--rounds 40]

Compiling: functions one after another, in a fresh process with empty caches that has compiled another before. So what a
process pays once, as for starting compilers, is not counted. Calls: of a tiny problem, a sample being 200 calls, all in
turns. Compiled code calls a region past torch's dispatcher, as `graphfuse.torch.rms_norm` goes past it where nobody
listens; both are also called by way of it.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence

from graphfuse.base import settings
from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs import turns
from graphfuse.benchmarks.programs.follower_cases import FORWARD, FUNCTIONS, FollowerCase
from graphfuse.benchmarks.programs.model_ways import BACKEND
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.target import Target

INDUCTOR = "inductor"
FIRST, *COMPILED = "l2", "rms", "rms-gelu", "rms-fp8-row", "add-rms", "layer", "softmax", "cross-entropy"
"""The function that is not counted, and those that are."""
CALLS = 200
ROWS, COLUMNS = 4096, 4096
TINY = (16, 256)
REGION, FUNCTION = "a region, as compiled code calls it", "graphfuse.torch.rms_norm"
DISPATCHED_REGION, DISPATCHED_OPERATOR = "torch.ops.graphfuse.region", "torch.ops.graphfuse.rms_norm"
OURS, THEIRS = "compiled, our backend", "compiled"


def _compiling(content: dict) -> list[tuple[float, str]]:
    """Seconds over inductor's, of all functions together."""
    ours, theirs = (sum(found[b] for found in content["compile_s"].values()) for b in (BACKEND, INDUCTOR))
    return [(ours / theirs, "")]


def _calling(content: dict) -> list[tuple[float, str]]:
    us = content["host_us"]
    pairs = (REGION, FUNCTION), (DISPATCHED_REGION, DISPATCHED_OPERATOR)
    return [(us[region]["median"] / us[operator]["median"], region) for region, operator in pairs]


TARGETS = (
    Target("time to compile over inductor's, all functions", 1.05, False, _compiling),
    Target("host time of a region over rms_norm's, at worst", 1.0, False, _calling),
)


def child(backend: str) -> None:
    """Prints as JSON the seconds of the first call of each function."""
    import time

    import torch

    from graphfuse.benchmarks.programs.follower_functions import RUNS, tensors

    found = {}
    for name in (FIRST, *COMPILED):
        given = tensors(FUNCTIONS[name], FollowerCase(name, FORWARD, ROWS, COLUMNS), 0, "cuda")
        compiled = torch.compile(RUNS[name], backend=backend)
        torch.cuda.synchronize()
        start = time.perf_counter()
        compiled(**given)
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - start
    print(json.dumps(found))


def compiling(backend: str) -> dict[str, float]:
    """Seconds of each function in a process with empty caches."""
    code = f"from graphfuse.benchmarks.programs.compile_cost import child; child({backend!r})"
    with tempfile.TemporaryDirectory() as folder:
        names = ("GRAPHFUSE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        environment = settings.environment(**{name: f"{folder}/{name}" for name in names})
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def calls() -> dict[str, Callable[[], object]]:
    """RMSNorm of the tiny problem by name. RuntimeError where it is no region."""
    import torch

    from graphfuse.benchmarks.programs.follower_functions import EPS, RUNS, tensors
    from graphfuse.torch import rms_norm
    from graphfuse.torch.compile_backend import compiled_graphs

    given = tensors(FUNCTIONS["rms"], FollowerCase("rms", FORWARD, *TINY), 0, "cuda")
    found: dict[str, Callable[[], object]] = {}

    def backend(graph: torch.fx.GraphModule, example: Sequence[object]) -> torch.fx.GraphModule:
        compiled_graphs.replace_in(graph, declines=False)
        order = dict(zip(graph.graph.find_nodes(op="placeholder"), example, strict=True))
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.graphfuse.region.default):
            inputs, text = node.args
            tensors = [order[n] for n in inputs]
            found[REGION] = lambda: torch.ops.graphfuse.region_by_inductor([*tensors], text)
            found[DISPATCHED_REGION] = lambda: torch.ops.graphfuse.region.default([*tensors], text)
        return graph

    torch.compile(RUNS["rms"], backend=backend)(**given)
    if not found:
        raise RuntimeError("RMSNorm became no region")
    x, w = given["x"], given["w"]
    operator = torch.ops.graphfuse.rms_norm.default
    made = found | {FUNCTION: lambda: rms_norm(x, w, EPS), DISPATCHED_OPERATOR: lambda: operator(x, w, EPS)}
    for name, how in ((THEIRS, INDUCTOR), (OURS, BACKEND)):
        # Compiled calls are found by the code: each way gets its own.
        code = RUNS["rms"].__code__.replace(co_name=how)
        own = types.FunctionType(code, RUNS["rms"].__globals__, how)
        made[name] = functools.partial(torch.compile(own, backend=how), **given)
    for call in made.values():
        call()
    return made


def table(content: dict) -> tables.Table:
    rows = [
        (FUNCTIONS[name].title, *(f"{found[b]:.2f}" for b in (INDUCTOR, BACKEND)))
        for name, found in content["compile_s"].items()
    ]
    return tables.Table("seconds until a function has run once", ("function", "torch.compile", "our backend"), rows)


def on_host(content: dict) -> tables.Table:
    rows = [(name, tables.spread(us, 2)) for name, us in content["host_us"].items()]
    return tables.Table("microseconds of a call on the host: median (quartiles)", ("RMSNorm", "us"), rows)


STUDY = Study(
    name="compile-cost",
    about=__doc__,
    tables=lambda content: (table(content), on_host(content)),
    targets=TARGETS,
    distributions=("torch", "triton"),
    rounds=40,
)


def main(arguments: Sequence[str] | None = None) -> None:
    given = STUDY.asked(arguments)
    runs = {b: compiling(b) for b in (INDUCTOR, BACKEND)}
    seconds = {n: {b: found[n] for b, found in runs.items()} for n in COMPILED}
    taken = turns.take({name: turns.on_host(call, CALLS) for name, call in calls().items()}, given.rounds)
    content = {
        "versions": STUDY.versions(),
        "rounds": given.rounds,
        "compile_s": seconds,
        "host_us": {name: turns.quartiles(samples) for name, samples in taken.items()},
    }
    STUDY.report(content, given.record)


if __name__ == "__main__":
    main()
