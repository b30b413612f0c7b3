# %% [markdown]
# # Autotuning
#
# Heuristics rank plans; a measurement decides. First as in cuDNN: build all plans, time each, select the fastest. Then
# with `graph.autotune`, which also checks each candidate, measures with a cold L2 cache, and keeps the winner for later
# graphs.

# %%
import time

import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

rows = 8192 if device == "cuda" else 64
x = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)
weight = torch.rand(1, 1024, device=device, dtype=torch.bfloat16) + 0.5
out = torch.empty_like(x)

graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    handle=handle,
)
X, W = graph.tensor_like(x, name="x"), graph.tensor_like(weight, name="weight")
Y, _ = graph.rmsnorm(
    input=X,
    scale=W,
    epsilon=1e-6,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
)
Y.set_output(True)
pack = {X: x, W: weight, Y: out}

# %% [markdown]
# ## By hand
#
# Engines that generate kernels give a plan for each choice of knobs. On a GPU, events on the stream measure it. On the
# emulator the clock of the host does, which says nothing of a GPU: there it shows how, not what.

# %%
graph.validate()
graph.build_operation_graph()
graph.create_execution_plans([cudnn.heur_mode.OPENSOURCE])
graph.deselect_workspace_greater_than(1 << 20)
graph.check_support()
graph.build_plans(cudnn.build_plan_policy.ALL)


def milliseconds(index: int, workspace: torch.Tensor, repeats: int = 5) -> float:
    def run() -> None:
        graph.execute_plan_at_index(pack, workspace, index, handle=handle)

    run()
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) * 1e3 / repeats


exact = torch.nn.functional.rms_norm(x.double(), (1024,), weight[0].double(), 1e-6)
times = {}
for index in range(graph.get_execution_plan_count()):
    size = graph.get_workspace_size_plan_at_index(index)
    times[index] = milliseconds(index, torch.empty(size, device=device, dtype=torch.uint8))
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-30)
    print(f"{times[index]:8.3f} ms  {graph.get_plan_name_at_index(index)}")

# %% [markdown]
# `build_plan_at_index` selects: `execute` runs this plan from now on.

# %%
best = min(times, key=times.get)
graph.build_plan_at_index(best)
graph.execute(pack, torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8), handle=handle)
print(f"selected plan {best}")

# %% [markdown]
# ## `graph.autotune`
#
# It tries all knobs of mode B, within a time budget, and drops what differs from the reference engine. The winner is
# kept in the folder `GRAPHFUSE_TUNING_DIR`, where later graphs of the same problem find it. Without a GPU there is
# nothing to time, and it says so.

# %%
if device == "cuda":
    report = graph.autotune(pack, None, handle, time_budget=5)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-30)
    print(report)
else:
    try:
        graph.autotune(pack, None, handle)
    except cudnn.cudnnGraphNotSupportedError as error:
        print(error)
    else:
        raise AssertionError("the emulator was timed")

# %%
cudnn.destroy_handle(handle)
