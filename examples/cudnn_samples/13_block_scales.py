# %% [markdown]
# # Block scales
#
# Codes of 8 or 4 bits whose neighbours share a scale. `block_scale_quantize` makes both, `block_scale_dequantize`
# reads both, and a product of two such tensors is a block-scaled one. Where the chip has no such product, the
# reference engine multiplies the exact values that codes and scales stand for.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

M, N, K = 256, 128, 256
FLOAT, HALF, BFLOAT16 = cudnn.data_type.FLOAT, cudnn.data_type.HALF, cudnn.data_type.BFLOAT16
E4M3, E2M1, E8M0 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FP4_E2M1, cudnn.data_type.FP8_E8M0
TILES = cudnn.tensor_reordering.F8_128x4


def new():
    return cudnn.pygraph(io_data_type=BFLOAT16, intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle)


def run(graph, pack):
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)


def memory(*shape):
    return torch.empty(shape, device=device, dtype=torch.uint8)


a, b = (torch.randn(1, rows, K, device=device, dtype=torch.bfloat16) for rows in (M, N))

# %% [markdown]
# ## Codes and scales
#
# MXFP8 has blocks of 32, FP8_E4M3 codes and powers of two as scales. NVFP4 has blocks of 16, FP4_E2M1 codes, two in a
# byte, and FP8_E4M3 scales. Scales lie in tiles of 128 rows by 4 blocks, as tensor cores read them.

# %%
FORMATS = {"MXFP8": (E4M3, E8M0, 32), "NVFP4": (E2M1, E4M3, 16)}


def quantized(values, element, scale, size):
    """(codes, scales) of values [1, rows, K], in blocks along K."""
    graph = new()
    X = graph.tensor_like(values)
    Y, SCALE = graph.block_scale_quantize(X, block_size=size, axis=2)
    Y.set_output(True).set_data_type(element)
    SCALE.set_output(True).set_data_type(scale).set_reordering_type(TILES)
    rows = values.shape[1]
    codes, scales = memory(1, rows, K // 2 if element is E2M1 else K), memory(rows, K // size)
    run(graph, {X: values, Y: codes, SCALE: scales})
    return codes, scales


# %% [markdown]
# What they stand for, by torch alone. In a tile, row `32 i + j` and block `n` are at `16 j + 4 i + n`.

# %%
HALVES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device, dtype=torch.float64)


def meant(codes, scales, element, scale, size):
    rows = codes.shape[1]
    if element is E4M3:
        values = codes.view(torch.float8_e4m3fn).double()[0]
    else:
        bits = torch.stack((codes[0] & 15, codes[0] >> 4), dim=-1).flatten(1).long()
        values = HALVES[bits & 7] * (1 - 2 * (bits >> 3))
    stored = scales.view(torch.float8_e8m0fnu if scale is E8M0 else torch.float8_e4m3fn).double()
    of_tiles = stored.view(rows // 128, -1, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, -1)
    return values * of_tiles.repeat_interleave(size, dim=1)


for name, kinds in FORMATS.items():
    error = ((meant(*quantized(a, *kinds), *kinds) - a[0].double()).norm() / a.double().norm()).item()
    assert error < 0.12
    print(f"{name}: codes and scales lose {error:.3f} of the values")

# %% [markdown]
# ## Block-scaled products
#
# A block has an extent for each of the last axes, so that blocks run along K on either side: `[1, size]` of A,
# `[size, 1]` of B.


# %%
def product(name, out):
    """The result, and what it is of."""
    element, scale, size = kinds = FORMATS[name]
    (left, left_scales), (right, right_scales) = (quantized(t, *kinds) for t in (a, b))
    graph = new()
    A = graph.tensor([1, M, K], [M * K, K, 1], element)
    B = graph.tensor([1, K, N], [K * N, 1, K], element)
    blocks = K // size
    SA = graph.tensor([1, M, blocks], [M * blocks, blocks, 1], scale, reordering_type=TILES)
    SB = graph.tensor([1, blocks, N], [blocks * N, 1, blocks], scale, reordering_type=TILES)
    dequantized_a = graph.block_scale_dequantize(input=A, descale=SA, block_size=[1, size])
    dequantized_b = graph.block_scale_dequantize(input=B, descale=SB, block_size=[size, 1])
    C = graph.matmul(A=dequantized_a, B=dequantized_b, compute_data_type=FLOAT)
    pack = {A: left, B: right.mT, SA: left_scales, SB: right_scales}
    made = out(graph, C)
    run(graph, pack | made)
    return made, meant(left, left_scales, *kinds) @ meant(right, right_scales, *kinds).T


def in_float(graph, C):
    C.set_output(True).set_data_type(FLOAT)
    return {C: torch.empty(1, M, N, device=device)}


for name in FORMATS:
    made, exact = product(name, in_float)
    (c,) = made.values()
    torch.testing.assert_close(c[0].double(), exact, rtol=1e-5, atol=1e-4)
    error = ((exact - a[0].double() @ b[0].double().T).norm() / exact.norm()).item()
    print(f"{name}: the product of what codes stand for, which is off by {error:.3f} of that of the values")

# %% [markdown]
# ## A product that is quantized again
#
# The next product wants codes, too. A node behind the product makes them.


# %%
def in_codes(graph, C):
    Y, SCALE = graph.block_scale_quantize(C, block_size=32, axis=2)
    Y.set_output(True).set_data_type(E4M3)
    SCALE.set_output(True).set_data_type(E8M0).set_reordering_type(TILES)
    return {Y: memory(1, M, N), SCALE: memory(M, N // 32)}


made, exact = product("MXFP8", in_codes)
codes, scales = made.values()
error = ((meant(codes, scales, E4M3, E8M0, 32) - exact).norm() / exact.norm()).item()
assert error < 0.05
print(f"MXFP8 of MXFP8: the result's codes lose {error:.3f}")

# %% [markdown]
# ## Blocks of any size
#
# Scales of FP8 weights are often one for 128 x 128 elements, and one for 128 of a row of what they are multiplied
# with. Elements and scales may be of any type, and blocks need not divide the extents. What is dequantized declares
# the type that is multiplied.


# %%
def dequantized(values, scales, size):
    """In float64; the last blocks may be cut off."""
    whole = scales.double()
    for axis, extent in enumerate(size, 1):
        whole = whole.repeat_interleave(extent, axis).narrow(axis, 0, values.shape[axis])
    return values.double() * whole


for sizes, dtype in ((([1, 128], [128, 128]), torch.float8_e4m3fn), (([47, 32], [32, 17]), torch.bfloat16)):
    left, right = torch.randn(2, M, K, device=device).to(dtype), torch.randn(2, N, K, device=device).to(dtype).mT
    of_left, of_right = (
        torch.rand(2, *(-(-e // s) for e, s in zip(t.shape[1:], size, strict=True)), device=device)
        for t, size in zip((left, right), sizes, strict=True)
    )
    graph = new()
    A, B, SA, SB = (graph.tensor_like(t) for t in (left, right, of_left, of_right))
    operands = [
        graph.block_scale_dequantize(input=T, descale=S, block_size=size).set_data_type(HALF)
        for T, S, size in zip((A, B), (SA, SB), sizes, strict=True)
    ]
    C = graph.matmul(*operands, compute_data_type=FLOAT).set_output(True).set_data_type(FLOAT)
    c = torch.empty(2, M, N, device=device)
    run(graph, {A: left, B: right, SA: of_left, SB: of_right, C: c})
    halves = (
        dequantized(t, scales, size).half()
        for t, scales, size in zip((left, right), (of_left, of_right), sizes, strict=True)
    )
    one, other = (t.double() for t in halves)
    torch.testing.assert_close(c.double(), one @ other, rtol=1e-4, atol=1e-2)
    print(f"blocks of {sizes[0]} and {sizes[1]}: agrees with float64")

# %%
cudnn.destroy_handle(handle)
