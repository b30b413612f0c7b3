# %% [markdown]
# # Products of mixed and quantized types
#
# Operands that are cast on the way, and INT8. Where no library has such a product for the chip, the reference engine
# multiplies the exact values.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

M, N, K = 128, 64, 256
FLOAT, BFLOAT16 = cudnn.data_type.FLOAT, cudnn.data_type.BFLOAT16
INT8, INT32 = cudnn.data_type.INT8, cudnn.data_type.INT32


def new(io_data_type=BFLOAT16):
    return cudnn.pygraph(io_data_type=io_data_type, intermediate_data_type=FLOAT, handle=handle)


def run(graph, pack):
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)


a = torch.randn(1, M, K, device=device, dtype=torch.bfloat16)

# %% [markdown]
# ## Weights of INT8, multiplied as bfloat16
#
# An `identity` casts: its result declares the type. A product multiplies the type that a virtual operand declares, as
# tensor cores do, and adds in float32.

# %%
codes = torch.randint(-128, 128, (1, N, K), device=device, dtype=torch.int8)
per_row = torch.rand(1, 1, N, device=device) / 64
graph = new()
A, B, S = graph.tensor_like(a), graph.tensor_like(codes.mT), graph.tensor_like(per_row)
cast = graph.identity(input=B, compute_data_type=FLOAT).set_data_type(BFLOAT16)
C = graph.mul(graph.matmul(A=A, B=cast, compute_data_type=FLOAT), S).set_output(True)
out = torch.empty(1, M, N, device=device, dtype=torch.bfloat16)
run(graph, {A: a, B: codes.mT, S: per_row, C: out})
want = a.double() @ codes.double().mT * per_row.double()
torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-3)
print("INT8 weights: agrees with float64")

# %% [markdown]
# ## INT8 with INT32
#
# The product computes in INT32 and is exact. Nodes behind it compute in FLOAT: the scales of both sides.

# %%
other = torch.randint(-128, 128, (1, M, K), device=device, dtype=torch.int8)
graph = new(INT8)
A, B, S = graph.tensor_like(other), graph.tensor_like(codes.mT), graph.tensor_like(per_row)
C = graph.matmul(A=A, B=B, compute_data_type=INT32).set_output(True).set_data_type(INT32)
D = graph.mul(C, S).set_output(True).set_data_type(FLOAT)
whole = torch.empty(1, M, N, device=device, dtype=torch.int32)
scaled = torch.empty(1, M, N, device=device)
run(graph, {A: other, B: codes.mT, S: per_row, C: whole, D: scaled})
assert torch.equal(whole.double(), other.double() @ codes.double().mT)
torch.testing.assert_close(scaled.double(), whole.double() * per_row.double(), rtol=1e-6, atol=0)
print("INT8: exact")

# %%
cudnn.destroy_handle(handle)
