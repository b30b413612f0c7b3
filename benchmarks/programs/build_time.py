"""How long import and a first build take, in fresh processes: with a cold and a warm kernel cache.

    python -m graphfuse.benchmarks.programs.build_time [--record FOLDER] [--repeats 5]

"build" is `graph.build` alone, from validate to the loaded kernel. What a process pays once
whatever it builds is measured beside it: importing torch and cuda.core, the CUDA context,
and "modules", graphfuse's own modules with the plugins of all installed packages.
"""

import json
import statistics
import subprocess
import sys
import tempfile

from graphfuse.base import settings
from graphfuse.benchmarks.programs.study import Study

STUDY = Study("build-time", __doc__)

CHILD = """
import json, time
t = [time.perf_counter()]
import graphfuse
t.append(time.perf_counter())
import torch, cuda.core
t.append(time.perf_counter())
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
t.append(time.perf_counter())
from graphfuse import data_type, heur_mode, norm_forward_phase
from graphfuse.planning import planner, registry as plugins
from graphfuse.runtime import cache, device, launch, nvrtc
plugins.installed()
t.append(time.perf_counter())
graph = graphfuse.pygraph(intermediate_data_type=data_type.FLOAT)
x = graph.tensor([4096, 512], data_type=data_type.BFLOAT16)
weight = graph.tensor([1, 512], data_type=data_type.BFLOAT16)
y = graph.rmsnorm(x, weight, 1e-6, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
graph.swish(y).set_output().set_data_type(data_type.BFLOAT16)
t.append(time.perf_counter())
graph.build([heur_mode.OPENSOURCE])
t.append(time.perf_counter())
names = ("import_graphfuse", "import_torch_and_cuda", "context", "modules", "graph", "build")
print(json.dumps({**{n: (b - a) * 1e3 for n, a, b in zip(names, t, t[1:])}, "compiled": cache.statistics().compiled}))
"""


def child(directory: str) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        # Installed modules have their bytecode kept, unless the environment forbids it.
        env=settings.environment(GRAPHFUSE_CACHE_DIR=directory, PYTHONDONTWRITEBYTECODE=""),
    )
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = STUDY.parser()
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    STUDY.need_gpu(parser)
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as directory:
            runs["cold"].append(child(directory))
            runs["warm"].append(child(directory))
    results = {
        kind: {name: statistics.median(r[name] for r in group) for name in group[0]} for kind, group in runs.items()
    }
    print(f"median of {arguments.repeats} fresh processes, milliseconds")
    for kind, medians in results.items():
        print(f"{kind:5} " + ", ".join(f"{name} {value:.1f}" for name, value in medians.items()))
    if arguments.record:
        print(STUDY.write(arguments.record, {"medians_ms": results, "runs_ms": runs}))


if __name__ == "__main__":
    main()
