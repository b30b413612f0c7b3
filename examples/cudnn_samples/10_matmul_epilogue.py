# %% [markdown]
# # Matrix product with an epilogue
#
# graphfuse generates no kernels for products. Its engine `cudnn` has cuDNN's own plans run them, with their epilogue
# (bias, activation) in one kernel. It has to be asked for, needs a GPU and `pip install "graphfuse[cudnn]"`. Where one
# of these is missing, the reference engine runs the nodes with torch, and `explain` says why.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

BATCH, M, N, K = 4, 64, 128, 96
a = torch.randn(BATCH, M, K, device=device, dtype=torch.bfloat16)
b = torch.randn(BATCH, K, N, device=device, dtype=torch.bfloat16)
bias = torch.randn(1, 1, N, device=device, dtype=torch.bfloat16)
out = torch.empty(BATCH, M, N, device=device, dtype=torch.bfloat16)
ENGINES = ["rows", "cudnn", "reference"]

# %% [markdown]
# ## Product, bias, GELU
#
# `engines` of `build` are the names of those that may be asked. Without it, all are.

# %%
graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    handle=handle,
)
A, B, BIAS = (graph.tensor_like(t, name=name) for name, t in (("a", a), ("b", b), ("bias", bias)))
product = graph.matmul(A=A, B=B, name="product")
biased = graph.bias(input=product, bias=BIAS, name="bias")
OUT = graph.gelu(input=biased, name="gelu").set_output(True)
graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK], engines=ENGINES)
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
graph.execute({A: a, B: b, BIAS: bias, OUT: out}, workspace, handle=handle)

exact = torch.nn.functional.gelu(a.double() @ b.double() + bias.double())
torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)

# %% [markdown]
# `explanation` has regions in running order, and what every engine said.

# %%
told = graph.explanation()
print(f"agrees with float64; run by {', then '.join(region.engine for region in told.regions)}")
for verdict in told.modes[0].verdicts:
    if verdict.engine == "cudnn" and verdict.why:
        print(f"cudnn declines {told.names(verdict.nodes)}: {verdict.why}")

# %% [markdown]
# ## A norm behind the product
#
# A norm cannot be an epilogue: it needs whole rows. The graph becomes two regions. The product is run by cuDNN or by
# the reference engine, RMSNorm and FP8 by one generated kernel. The residual sum goes to whichever saves more memory
# traffic.

# %%
graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    handle=handle,
)
residual = torch.randn_like(out)
weight = torch.rand(1, 1, N, device=device, dtype=torch.bfloat16) + 0.5
total, codes = torch.empty_like(out), torch.empty(BATCH, M, N, device=device, dtype=torch.float8_e4m3fn)

A, B = graph.tensor_like(a, name="a"), graph.tensor_like(b, name="b")
R, W = graph.tensor_like(residual, name="residual"), graph.tensor_like(weight, name="weight")
product = graph.matmul(A=A, B=B, name="product")
TOTAL = graph.add(a=product, b=R, name="sum").set_output(True)
normalized, _ = graph.rmsnorm(
    input=TOTAL,
    scale=W,
    epsilon=1e-6,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
    name="norm",
)
CODES = graph.mul(a=normalized, b=64.0, name="scale").set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
graph.build([cudnn.heur_mode.A], engines=ENGINES)
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
graph.execute({A: a, B: b, R: residual, W: weight, TOTAL: total, CODES: codes}, workspace, handle=handle)

# %% [markdown]
# What lies between the two is float32, so the sum is rounded once. It is an output, so the norm reads it as stored.

# %%
total64 = a.double() @ b.double() + residual.double()
torch.testing.assert_close(total.double(), total64, rtol=2**-8, atol=1e-4)
norm64 = torch.nn.functional.rms_norm(total.double(), (N,), weight.double().flatten(), 1e-6)
torch.testing.assert_close(codes.double(), (64 * norm64).clamp(-448, 448), rtol=2**-4, atol=2**-9)
told = graph.explanation()
assert told.regions[-1].engine == "rows"
print(f"agrees with float64; run by {', then '.join(region.engine for region in told.regions)}")
graph.explanation()

# %%
cudnn.destroy_handle(handle)
