# %% [markdown]
# # Products of mixed and quantized types
#
# Operands that are cast on the way, block-scaled products (MXFP8, NVFP4), and INT8. Where no library has such a product
# for the chip, the reference engine multiplies the exact values that codes and scales stand for.

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
E4M3, E2M1, E8M0 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FP4_E2M1, cudnn.data_type.FP8_E8M0
TILES = cudnn.tensor_reordering.F8_128x4


def new(io_data_type=BFLOAT16):
    return cudnn.pygraph(io_data_type=io_data_type, intermediate_data_type=FLOAT, handle=handle)


def run(graph, pack):
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)


a = torch.randn(1, M, K, device=device, dtype=torch.bfloat16)
b = torch.randn(1, N, K, device=device, dtype=torch.bfloat16)
exact = a.double() @ b.double().mT

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
# ## MXFP8 and NVFP4
#
# `block_scale_quantize` makes codes, and scales that lie in the tiles that block-scaled products read. Behind it
# `block_scale_dequantize` reads both. Its block size has an extent for each of the last axes, so that blocks run along
# K on either side.


# %%
def quantized(values, element, scale, size):
    """(codes, scales) of values [1, rows, K], in blocks along K."""
    graph = new()
    X = graph.tensor_like(values)
    Y, SCALE = graph.block_scale_quantize(X, block_size=size, axis=2)
    Y.set_output(True).set_data_type(element)
    SCALE.set_output(True).set_data_type(scale).set_reordering_type(TILES)
    width = K // 2 if element is E2M1 else K  # bytes of a row
    made = torch.empty(1, values.shape[1], width, device=device, dtype=torch.uint8)
    scales = torch.empty(128, K // size, device=device, dtype=torch.uint8)  # whole tiles
    run(graph, {X: values, Y: made, SCALE: scales})
    return made, scales


def product(element, scale, size):
    (left, left_scales), (right, right_scales) = (quantized(t, element, scale, size) for t in (a, b))
    graph = new()
    A = graph.tensor([1, M, K], [M * K, K, 1], element)
    B = graph.tensor([1, K, N], [K * N, 1, K], element)
    blocks = K // size
    SA = graph.tensor([1, M, blocks], [M * blocks, blocks, 1], scale, reordering_type=TILES)
    SB = graph.tensor([1, blocks, 128], [blocks * 128, 1, blocks], scale, reordering_type=TILES)
    dequantized_a = graph.block_scale_dequantize(input=A, descale=SA, block_size=[1, size])
    dequantized_b = graph.block_scale_dequantize(input=B, descale=SB, block_size=[size, 1])
    C = graph.matmul(A=dequantized_a, B=dequantized_b, compute_data_type=FLOAT)
    C.set_output(True).set_data_type(FLOAT)
    made = torch.empty(1, M, N, device=device)
    run(graph, {A: left, B: right.mT, SA: left_scales, SB: right_scales, C: made})
    return made


for name, kinds, bound in (("MXFP8", (E4M3, E8M0, 32), 0.05), ("NVFP4", (E2M1, E4M3, 16), 0.2)):
    made = product(*kinds)
    error = (made.double() - exact).norm() / exact.norm()
    assert error < bound
    print(f"{name}: off by {error:.3f} of the product, which is what the codes lost")

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
