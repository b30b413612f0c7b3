# %% [markdown]
# # Quantized ends
#
# A matrix product in FP8 or FP4 wants its input with scales. They are the end of the kernel before it: what is normed
# is quantized before it leaves the registers. Four ways, all behind the same RMSNorm: a scale per row, per 128
# elements (DeepSeek's), MXFP8, and NVFP4 with scales in the order that Blackwell's tensor cores read.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

ROWS, COLUMNS, EPSILON = 130, 256, 1e-6
x = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
weight = torch.rand(1, COLUMNS, device=device, dtype=torch.bfloat16) + 0.5
exact = torch.nn.functional.rms_norm(x.double(), (COLUMNS,), weight[0].double(), EPSILON)


def start():
    """A graph, its inputs by what they are given, and RMSNorm(x)."""
    graph = cudnn.pygraph(intermediate_data_type=cudnn.data_type.FLOAT, handle=handle)
    X, W = graph.tensor_like(x, name="x"), graph.tensor_like(weight, name="weight")
    normalized, _ = graph.rmsnorm(
        input=X,
        scale=W,
        epsilon=EPSILON,
        norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
    )
    return graph, {X: x, W: weight}, normalized


def run(graph, pack) -> None:
    graph.build([cudnn.heur_mode.OPENSOURCE])  # one kernel, or an error
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)


def report(what: str, values: torch.Tensor, most: float) -> None:
    error = ((values - exact).norm() / exact.norm()).item()
    print(f"{what}: relative error {error:.4f}")
    assert error < most


def by_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of codes whose neighbours share a scale."""
    blocks = codes.double().unflatten(1, (scales.shape[1], -1))
    return (blocks * scales.double().unsqueeze(-1)).flatten(1)


codes = torch.empty(ROWS, COLUMNS, device=device, dtype=torch.float8_e4m3fn)

# %% [markdown]
# ## FP8, a scale per row
#
# Written in nodes: the largest magnitude of a row, divided by 448, is its scale. The reduction is along the same axis
# as the norm's, so all of it is one kernel.

# %%
scales = torch.empty(ROWS, 1, device=device)
graph, pack, Y = start()
amax = graph.reduction(input=Y, mode=cudnn.reduction_mode.AMAX).set_dim([ROWS, 1]).set_stride([1, 1])
SCALES = graph.max(graph.mul(a=amax, b=1 / 448), 1e-12).set_output(True).set_data_type(cudnn.data_type.FLOAT)
CODES = graph.mul(a=Y, b=graph.reciprocal(input=SCALES))
CODES.set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
run(graph, {**pack, SCALES: scales, CODES: codes})
torch.testing.assert_close(scales.double(), exact.abs().amax(1, keepdim=True) / 448, rtol=1e-5, atol=0)
report("FP8, a scale per row", by_blocks(codes, scales), 0.04)

# %% [markdown]
# ## FP8, a scale per 128 elements
#
# `block_scale_quantize` makes both. The type of the scales is chosen at the tensor: float32 here.

# %%
scales = torch.empty(ROWS, COLUMNS // 128, device=device)
graph, pack, Y = start()
CODES, SCALES = graph.block_scale_quantize(input=Y, block_size=128, axis=1)
CODES.set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
SCALES.set_output(True).set_data_type(cudnn.data_type.FLOAT)
run(graph, {**pack, CODES: codes, SCALES: scales})
report("FP8, a scale per 128", by_blocks(codes, scales), 0.04)

# %% [markdown]
# ## MXFP8
#
# Blocks of 32, whose scale is a power of two, in E8M0.

# %%
scales = torch.empty(ROWS, COLUMNS // 32, device=device, dtype=torch.float8_e8m0fnu)
graph, pack, Y = start()
CODES, SCALES = graph.block_scale_quantize(input=Y, block_size=32, axis=1)
CODES.set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
SCALES.set_output(True).set_data_type(cudnn.data_type.FP8_E8M0)
run(graph, {**pack, CODES: codes, SCALES: scales})
assert (scales.float().log2() % 1 == 0).all()
report("MXFP8", by_blocks(codes, scales), 0.04)

# %% [markdown]
# ## NVFP4, scales in tiles
#
# Blocks of 16, whose scale is E4M3. With `tensor_reordering.F8_128x4` scales lie in tiles of 128 rows by 4 blocks, as
# block-scaled products read them. Memory is for whole tiles: 130 rows take that of 256.

# %%
packed = torch.empty(ROWS, COLUMNS // 2, device=device, dtype=torch.uint8)
tiles = torch.zeros(256, COLUMNS // 16, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn)
graph, pack, Y = start()
CODES, SCALES = graph.block_scale_quantize(input=Y, block_size=16, axis=1)
CODES.set_output(True).set_data_type(cudnn.data_type.FP4_E2M1)
SCALES.set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
SCALES.set_reordering_type(cudnn.tensor_reordering.F8_128x4)
run(graph, {**pack, CODES: packed, SCALES: tiles})

# %% [markdown]
# In a tile, row `32 i + j` and block `b` are at `16 j + 4 i + b`: reading it back is a permutation.

# %%
in_rows = tiles.double().view(2, COLUMNS // 64, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(256, COLUMNS // 16)[:ROWS]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=device)
values = E2M1[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()]
report("NVFP4, scales in tiles", by_blocks(values, in_rows), 0.15)

# %%
cudnn.destroy_handle(handle)
