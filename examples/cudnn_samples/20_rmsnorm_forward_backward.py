# %% [markdown]
# # RMSNorm, forward and backward
#
# Training keeps the inverse RMS of each row for backward. Forward is one kernel with two outputs. Backward is one with
# the gradients of input, weight and bias: the sums over all rows are part of it.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

ROWS, COLUMNS, EPSILON = 192, 320, 1e-5
x = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
weight = torch.rand(1, COLUMNS, device=device) + 0.5
bias = torch.randn(1, COLUMNS, device=device)
dy = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)


def new_graph(name: str) -> cudnn.pygraph:
    return cudnn.pygraph(
        name=name,
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def run(graph: cudnn.pygraph, pack: dict) -> None:
    graph.build([cudnn.heur_mode.OPENSOURCE])
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)
    print(f"{graph.name}: {graph.get_plan_name_at_index(0)}, {workspace.numel()} bytes of workspace")


# %% [markdown]
# ## Forward, in training phase

# %%
y = torch.empty_like(x)
inverse_rms = torch.empty(ROWS, 1, device=device)

graph = new_graph("forward")
X, W, BIAS = graph.tensor_like(x, "x"), graph.tensor_like(weight, "weight"), graph.tensor_like(bias, "bias")
Y, INVERSE_RMS = graph.rmsnorm(
    input=X,
    scale=W,
    bias=BIAS,
    epsilon=EPSILON,
    norm_forward_phase=cudnn.norm_forward_phase.TRAINING,
    name="norm",
)
Y.set_output(True)
INVERSE_RMS.set_output(True).set_data_type(cudnn.data_type.FLOAT)
run(graph, {X: x, W: weight, BIAS: bias, Y: y, INVERSE_RMS: inverse_rms})

# %% [markdown]
# ## Backward

# %%
dx = torch.empty_like(x)
dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)

graph = new_graph("backward")
DY, X, W = graph.tensor_like(dy, "dy"), graph.tensor_like(x, "x"), graph.tensor_like(weight, "weight")
INVERSE_RMS = graph.tensor_like(inverse_rms, "inverse_rms")
DX, DWEIGHT, DBIAS = graph.rmsnorm_backward(
    grad=DY,
    input=X,
    scale=W,
    inv_variance=INVERSE_RMS,
    has_dbias=True,
    name="norm",
)
DX.set_output(True)
DWEIGHT.set_output(True).set_data_type(cudnn.data_type.FLOAT)
DBIAS.set_output(True).set_data_type(cudnn.data_type.FLOAT)
run(graph, {DY: dy, X: x, W: weight, INVERSE_RMS: inverse_rms, DX: dx, DWEIGHT: dweight, DBIAS: dbias})

# %% [markdown]
# ## Against autograd in float64

# %%
x64, weight64, bias64 = (t.double().requires_grad_() for t in (x, weight, bias))
y64 = torch.nn.functional.rms_norm(x64, (COLUMNS,), weight64[0], EPSILON) + bias64
dx64, dweight64, dbias64 = torch.autograd.grad(y64, (x64, weight64, bias64), dy.double())

torch.testing.assert_close(y.double(), y64.detach(), rtol=2**-8, atol=1e-6)
torch.testing.assert_close(dx.double(), dx64, rtol=2**-8, atol=1e-5)
torch.testing.assert_close(dweight.double(), dweight64, rtol=1e-5, atol=1e-4)
torch.testing.assert_close(dbias.double(), dbias64, rtol=1e-5, atol=1e-4)
print("y, dx, dweight and dbias agree with float64")

# %%
cudnn.destroy_handle(handle)
