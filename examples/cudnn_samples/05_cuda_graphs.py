# %% [markdown]
# # CUDA graphs
#
# A CUDA graph replays launches without the host's work. `execute` and bound callables allocate nothing, so they can be
# captured. `populate_cuda_graph` needs no capture: it puts the kernels of a plan into a graph of the driver's, and
# `update_cuda_graph` gives them other buffers. All this needs a GPU; elsewhere the sample shows `bind` and what is
# refused.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

x = torch.randn(128, 512, device=device, dtype=torch.bfloat16)
weight = torch.rand(1, 512, device=device, dtype=torch.bfloat16) + 0.5
out = torch.empty_like(x)

graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    handle=handle,
    is_cuda_graph_replay_expected=True,
)
X, W = graph.tensor_like(x, name="x"), graph.tensor_like(weight, name="weight")
normalized, _ = graph.rmsnorm(
    input=X,
    scale=W,
    epsilon=1e-6,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
)
Y = graph.relu(input=normalized).set_output(True)
graph.build([cudnn.heur_mode.OPENSOURCE])
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)


def check(given: torch.Tensor, made: torch.Tensor) -> None:
    exact = torch.nn.functional.rms_norm(given.double(), (512,), weight[0].double(), 1e-6).relu()
    torch.testing.assert_close(made.double(), exact, rtol=2**-8, atol=1e-30)


# %% [markdown]
# ## Bound buffers
#
# `bind` checks buffers once. Calling what it returns is the launch alone. New values go into the same memory.

# %%
run = graph.bind({X: x, W: weight, Y: out}, workspace, handle)
run()
check(x, out)
x.normal_()
run()
check(x, out)
print("bound: two launches")

# %% [markdown]
# ## Captured by torch
#
# torch captures on a stream of its own. A handle without a stream follows torch's current one.

# %%
if device == "cuda":
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph.execute({X: x, W: weight, Y: out}, workspace, handle=handle)
    x.normal_()
    captured.replay()
    check(x, out)
    print("captured by torch, and replayed")

# %% [markdown]
# ## A node of a graph of one's own
#
# The plan fills a CUDA graph, which becomes a child of another. To replay it on other buffers, the child is updated,
# then the executable graph. `cuda.bindings` is CUDA's own API in Python.

# %%
if device == "cuda":
    from cuda.bindings import driver

    def done(result):
        error, *values = result
        assert error == driver.CUresult.CUDA_SUCCESS, error
        return values[0] if values else None

    def replay(executable) -> None:
        done(driver.cuGraphLaunch(executable, driver.CUstream(torch.cuda.current_stream().cuda_stream)))
        torch.cuda.synchronize()

    own, main = done(driver.cuGraphCreate(0)), done(driver.cuGraphCreate(0))
    graph.populate_cuda_graph(handle, {X: x, W: weight, Y: out}, workspace, int(own))
    node = done(driver.cuGraphAddChildGraphNode(main, None, 0, own))
    executable = done(driver.cuGraphInstantiate(main, 0))
    x.normal_()
    replay(executable)
    check(x, out)

    other, other_out = torch.randn_like(x), torch.empty_like(out)
    child = done(driver.cuGraphChildGraphNodeGetGraph(node))
    graph.update_cuda_graph(handle, {X: other, W: weight, Y: other_out}, workspace, int(child))
    done(driver.cuGraphExecChildGraphNodeSetParams(executable, node, child))
    replay(executable)
    check(other, other_out)

    done(driver.cuGraphExecDestroy(executable))
    done(driver.cuGraphDestroy(main))
    done(driver.cuGraphDestroy(own))
    print("populated, replayed, updated, and replayed on other buffers")
else:
    try:
        graph.populate_cuda_graph(handle, {X: x, W: weight, Y: out}, workspace, 1)
    except cudnn.cudnnGraphNotSupportedError as error:
        print(error)
    else:
        raise AssertionError("there is no CUDA graph without a GPU")

# %%
cudnn.destroy_handle(handle)
