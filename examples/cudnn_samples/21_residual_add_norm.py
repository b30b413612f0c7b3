# %% [markdown]
# # Residual add and norm
#
# Each block of a transformer begins with `residual += branch` and the norm of the sum. The graph is two nodes and one
# kernel: the sum is written for the next block, and normed before it leaves the registers.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

ROWS, COLUMNS, EPSILON = 160, 384, 1e-6
branch = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
residual = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
weight = torch.randn(1, COLUMNS, device=device, dtype=torch.bfloat16) / 8

# %% [markdown]
# An intermediate becomes an output by `set_output(True)`; others may still read it. What they read is then what is
# stored, rounded to its type, so that the norm is that of the residual stream as the next block sees it.
#
# The weight is stored as its difference from one, as Gemma does ("zero-centered gamma"): `1 + weight` is a node.

# %%
graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    handle=handle,
)
BRANCH, RESIDUAL = graph.tensor_like(branch, name="branch"), graph.tensor_like(residual, name="residual")
W = graph.tensor_like(weight, name="weight")
SUM = graph.add(a=BRANCH, b=RESIDUAL, name="sum").set_output(True)
Y, _ = graph.rmsnorm(
    input=SUM,
    scale=graph.add(a=W, b=1.0, name="one_plus"),
    epsilon=EPSILON,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
    name="norm",
)
Y.set_output(True)
graph.build([cudnn.heur_mode.OPENSOURCE])
print(graph.get_plan_name_at_index(0))

# %%
total, y = torch.empty_like(residual), torch.empty_like(residual)
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
graph.execute({BRANCH: branch, RESIDUAL: residual, W: weight, SUM: total, Y: y}, workspace, handle=handle)

assert torch.equal(total, branch + residual)  # one rounding, as torch's
norm64 = torch.nn.functional.rms_norm(total.double(), (COLUMNS,), 1 + weight[0].double(), EPSILON)
torch.testing.assert_close(y.double(), norm64, rtol=2**-8, atol=1e-30)
print("the sum has torch's bits, the norm agrees with float64")

# %% [markdown]
# ## In place
#
# The new residual may be written over the old one: an output may be the memory of an input whose elements lie at the
# same places.

# %%
stream = residual.clone()
graph.execute({BRANCH: branch, RESIDUAL: stream, W: weight, SUM: stream, Y: y.zero_()}, workspace, handle=handle)
assert torch.equal(stream, total)
torch.testing.assert_close(y.double(), norm64, rtol=2**-8, atol=1e-30)
print("in place: the same bits")

# %% [markdown]
# ## What fusing saves

# %%
told = graph.explanation()
print(f"{told.after.total} bytes moved; one kernel for each node would move {told.before.total}")
assert told.after.total < 0.8 * told.before.total
graph.explanation()

# %%
cudnn.destroy_handle(handle)
