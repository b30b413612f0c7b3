# %% [markdown]
# # Introduction
#
# graphfuse has the API of the cuDNN frontend: with `import graphfuse as cudnn`, scripts keep the names that they use.
# This sample computes `SiLU(RMSNorm(x))` twice, with the `Graph` wrapper and with `pygraph`. Both become one generated
# kernel.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
print(cudnn.backend_version())

# %% [markdown]
# `backend_version` is the version of the backend whose graph API is followed. No cuDNN is loaded.
#
# A handle is a device and a stream. Without a GPU it is the emulator's: it compiles the same kernels as C++ and runs
# them on the CPU, with plans as an H200 would get them. All samples begin like this.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

x = torch.randn(256, 512, device=device, dtype=torch.bfloat16)
weight = torch.rand(1, 512, device=device, dtype=torch.bfloat16) + 0.5

# %% [markdown]
# ## With the wrapper
#
# Inside of the `with` block operations take arrays. Only shape, strides and type of them count. The graph is built
# where the block ends. `inputs` and `outputs` say in which order a call takes and returns arrays: `norm::input` is the
# port `input` of the node `norm`.

# %%
with cudnn.Graph(
    handle=handle,
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    compute_data_type=cudnn.data_type.FLOAT,
    inputs=["norm::input", "norm::scale"],
    outputs=["y"],
) as graph:
    normalized, _ = graph.rmsnorm(
        input=x,
        scale=weight,
        epsilon=1e-5,
        norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
        name="norm",
    )
    graph.swish(input=normalized, name="silu").set_output(True).set_name("y")

y = graph(x, weight, handle=handle)

# %% [markdown]
# The exact result, in float64. bfloat16 keeps 8 bits, so rounding alone is up to 2^-9 of a value.

# %%
x64, weight64 = x.double(), weight.double()
exact = torch.nn.functional.silu(x64 * torch.rsqrt(x64.square().mean(1, keepdim=True) + 1e-5) * weight64)
torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-30)
print("the wrapper's result agrees with float64")

# %% [markdown]
# ## With `pygraph`
#
# A `pygraph` has tensors of its own. Dimensions and strides are in elements. A tensor that nodes make is virtual until
# `set_output(True)`: only then does it have memory.

# %%
graph = cudnn.pygraph(
    name="introduction",
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    compute_data_type=cudnn.data_type.FLOAT,
    handle=handle,
)
X = graph.tensor(name="X", dim=[256, 512], stride=[512, 1], data_type=cudnn.data_type.BFLOAT16)
W = graph.tensor(name="W", dim=[1, 512], stride=[512, 1])  # io_data_type
normalized, _ = graph.rmsnorm(
    input=X,
    scale=W,
    epsilon=1e-5,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
)
Y = graph.swish(input=normalized).set_output(True)
graph.build([cudnn.heur_mode.A])

# %% [markdown]
# `execute` takes a dict from tensors to memory, and a workspace. On a GPU it returns before the kernel ends.

# %%
out = torch.empty_like(x)
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
graph.execute({X: x, W: weight, Y: out}, workspace, handle=handle)
assert torch.equal(out, y)
print(f"pygraph gives the same bits, with {graph.get_plan_name_at_index(0)}")

# %% [markdown]
# `explain` says in words, and `explanation` in a flowchart, what fused and why.

# %%
graph.explanation()

# %%
cudnn.destroy_handle(handle)
