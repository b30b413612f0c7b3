"""What one call costs the host: wall time of a call on a tiny problem, ours beside a bare driver launch and peers.

    python -m graphfuse.benchmarks.host_cost [--record FOLDER] [--repeats 7]

2,000 calls, synchronizing every 200. Rows take turns; each shows the median, smallest and largest of its repeats,
and the ratio to a bare launch from Python of the same kernel with prepacked arguments. What cannot run here is
listed as absent, with the reason.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from graphfuse import record
from graphfuse.dtypes import data_type
from graphfuse.enums import heur_mode, norm_forward_phase
from graphfuse.errors import GraphNotSupportedError
from graphfuse.functional import fused_rmsnorm_silu
from graphfuse.graph import pygraph
from graphfuse.runtime.device import check
from graphfuse.runtime.handle import create_handle, current_stream, set_stream

ROWS, COLUMNS, EPS = 16, 512, 1e-6
CALLS, BETWEEN = 2000, 200

Call = Callable[[], object]


class Problem:
    """RMSNorm + SiLU on bfloat16, tiny enough for the GPU to wait for the host."""

    def __init__(self):
        import torch

        self.x = torch.randn(ROWS, COLUMNS, device="cuda").to(torch.bfloat16)
        self.weight = (torch.rand(1, COLUMNS, device="cuda") + 0.5).to(torch.bfloat16)
        self.out = torch.empty_like(self.x)
        self.graph = graph = pygraph(intermediate_data_type=data_type.FLOAT)
        tensors = (
            graph.tensor([ROWS, COLUMNS], data_type=data_type.BFLOAT16, name="x"),
            graph.tensor([1, COLUMNS], data_type=data_type.BFLOAT16, name="weight"),
        )
        y = graph.rmsnorm(*tensors, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        z = graph.swish(y).set_output().set_name("out").set_data_type(data_type.BFLOAT16)
        graph.build([heur_mode.OPENSOURCE])
        self.pack = {"x": self.x, "weight": self.weight, "out": self.out}
        self.uids = tuple(t.get_uid() for t in (*tensors, z))


def bare(problem: Problem) -> dict[str, Call]:
    """The plan's kernel, started without any of this project's code at the time of the call."""
    from cuda.bindings import driver

    (part,) = problem.graph._planner.plans[0].parts
    kernel, launch = _kernel(problem), part.launch
    bound = problem.graph.bind(problem.pack)
    (call,) = bound._calls(current_stream(kernel.device))
    # What execute starts: the addresses of the arguments.
    arguments, stream = call.memory.address, driver.CUstream(current_stream(kernel.device))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
    config.sharedMemBytes, config.hStream = launch.shared_bytes, stream

    def launch_kernel():
        return driver.cuLaunchKernel(
            kernel.function, launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes, stream, arguments, 0
        )

    def launch_kernel_ex():
        return driver.cuLaunchKernelEx(config, kernel.function, arguments, 0)

    launch_kernel.keep = bound
    calls = {BARE: launch_kernel, "bare cuLaunchKernelEx": launch_kernel_ex}
    for name, start in calls.items():  # a launch that is refused is fast, too
        check(start()[0], name)
    return calls


BARE = "bare cuLaunchKernel"


def _kernel(problem: Problem):
    ((freeze, _),) = problem.graph._planner.executable()._parts
    return freeze.__self__._kernel


def cuda_core(problem: Problem) -> Call:
    import ctypes

    import cuda.core

    from graphfuse import engine

    (part,) = problem.graph._planner.plans[0].parts
    kernel, launch = _kernel(problem), part.launch
    bindings = problem.graph._planner.executable().bind(problem.pack, None)
    types = {"pointer": int, "int32": ctypes.c_int32, "int64": int, "float32": ctypes.c_float}
    arguments = [
        types[a.ctype](a.value)
        if isinstance(a, engine.Constant)
        else ctypes.c_float(bindings.scalar(a.tensor))
        if isinstance(a, engine.HostScalar)
        else bindings.address(a.tensor)
        for a in launch.arguments
    ]
    device = cuda.core.Device()
    device.set_current()
    config = cuda.core.LaunchConfig(grid=launch.grid, block=launch.block, shmem_size=launch.shared_bytes)
    code = kernel._code.get_kernel(kernel.entry)
    return lambda: cuda.core.launch(device.default_stream, config, code, *arguments)


def ours(problem: Problem) -> dict[str, Call]:
    import torch

    graph, pack, (x, w, o) = problem.graph, problem.pack, problem.uids
    handle = create_handle("cuda")
    set_stream(handle, torch.cuda.current_stream())
    row = problem.weight.view(COLUMNS)
    calls = {
        "graph.bind": graph.bind(pack),
        "graph.execute": lambda: graph.execute(pack),
        "graph.execute, handle": lambda: graph.execute(pack, None, handle),
        "graph.execute, new dict": lambda: graph.execute(
            {"x": problem.x, "weight": problem.weight, "out": problem.out}
        ),
        "graph.execute, uids": lambda: graph.execute({x: problem.x, w: problem.weight, o: problem.out}),
        "fused_rmsnorm_silu, out=": lambda: fused_rmsnorm_silu(problem.x, row, EPS, out=problem.out),
        "fused_rmsnorm_silu": lambda: fused_rmsnorm_silu(problem.x, row, EPS),
        "torch.empty_like": lambda: torch.empty_like(problem.x),
    }
    try:
        calls["graph.bind, dependent launch"] = graph.bind(pack, programmatic_dependent_launch=True)
        graph.execute(pack, programmatic_dependent_launch=True)
        calls["graph.execute, dependent launch"] = lambda: graph.execute(pack, programmatic_dependent_launch=True)
    except GraphNotSupportedError as error:
        print(error)
    return calls


def eager(problem: Problem) -> Call:
    import torch

    row = problem.weight.view(COLUMNS)
    return lambda: torch.nn.functional.silu(torch.nn.functional.rms_norm(problem.x, (COLUMNS,), row, EPS))


def compiled(problem: Problem) -> Call:
    import torch

    row = problem.weight.view(COLUMNS)

    @torch.compile(dynamic=False)
    def function(x, weight):
        return torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (COLUMNS,), weight, EPS))

    return lambda: function(problem.x, row)


def flashinfer(problem: Problem) -> Call:
    from flashinfer.norm import fused_rmsnorm_silu

    row = problem.weight.view(COLUMNS)
    return lambda: fused_rmsnorm_silu(problem.x, row, EPS)


def quack(problem: Problem) -> Call:
    from quack.rmsnorm import rmsnorm_fwd

    row = problem.weight.view(COLUMNS)
    return lambda: rmsnorm_fwd(problem.x, row, eps=EPS)


def cudnn(problem: Problem) -> Call:
    import cudnn
    import torch

    kind = cudnn.data_type
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=kind.BFLOAT16, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT, handle=handle
    )
    dim = (ROWS, COLUMNS, 1, 1)
    x4, w4, o4 = problem.x.view(dim), problem.weight.view(1, COLUMNS, 1, 1), problem.out.view(dim)
    x, w = graph.tensor_like(x4), graph.tensor_like(w4)
    e4 = torch.full((1, 1, 1, 1), EPS)
    e = graph.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), is_pass_by_value=True, data_type=kind.FLOAT)
    y, _ = graph.rmsnorm(
        name="norm", norm_forward_phase=cudnn.norm_forward_phase.INFERENCE, input=x, scale=w, epsilon=e
    )
    z = graph.swish(input=y, swish_beta=1.0)
    z.set_output(True).set_data_type(kind.BFLOAT16)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    space = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    pack = {x: x4, w: w4, e: e4, z: o4}
    return lambda: graph.execute(pack, space, handle=handle)


PEERS = {
    "cuda.core.launch": cuda_core,
    "torch eager, two kernels": eager,
    "torch.compile": compiled,
    "FlashInfer fused_rmsnorm_silu": flashinfer,
    "Quack rmsnorm_fwd": quack,
    "cuDNN frontend execute": cudnn,
}


def peers(problem: Problem) -> tuple[dict[str, Call], dict[str, str]]:
    """Those that run here, and why the others do not."""
    import torch

    calls, absent = {}, {}
    for name, make in PEERS.items():
        try:
            call = make(problem)
            call(), torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # not installed, or not for this machine: said, not left out
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return calls, absent


def microseconds(call: Call) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS // BETWEEN):
        for _ in range(BETWEEN):
            call()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write host-cost-DEVICE.json into FOLDER")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if reason := record.gpu_needed("host_cost"):
        parser.exit(2, f"{reason}\n")
    problem = Problem()
    others, absent = peers(problem)
    calls = bare(problem) | ours(problem) | others
    for call in calls.values():
        microseconds(call)
    times = {name: [] for name in calls}
    for _ in range(arguments.repeats):
        for name, call in calls.items():
            times[name].append(microseconds(call))
    medians = {name: statistics.median(t) for name, t in times.items()}
    print(f"{'one call on the host':34} {'us':>7} {'low':>7} {'high':>7} {'x bare':>7}")
    for name, us in medians.items():
        low, high = min(times[name]), max(times[name])
        print(f"{name:34} {us:7.2f} {low:7.2f} {high:7.2f} {us / medians[BARE]:7.2f}")
    for name, why in absent.items():
        print(f"{name:34}  absent: {why}")
    if arguments.record:
        rows = [
            {"name": n, "us": {"median": us, "low": min(times[n]), "high": max(times[n])}, "ratio": us / medians[BARE]}
            for n, us in medians.items()
        ]
        content = {
            "problem": {"rows": ROWS, "columns": COLUMNS, "calls": CALLS, "between_synchronizing": BETWEEN},
            "rows": rows + [{"name": name, "absent": why} for name, why in absent.items()],
        }
        print(record.write(arguments.record, "host-cost", record.environment(record.CHECKOUT), content))


if __name__ == "__main__":
    main()
