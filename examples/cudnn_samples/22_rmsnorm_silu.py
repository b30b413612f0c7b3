# %% [markdown]
# # RMSNorm and SiLU, in bf16, FP8 and NVFP4
#
# cuDNN has a kernel of its own for RMSNorm followed by SiLU, as VAEs of video models use it. Here it is a graph of two
# nodes, and the output's type says which of three kernels is generated. Tensors are `[tokens, C, 1, 1]`, as there.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

TOKENS, C, EPSILON = 1560 if device == "cuda" else 96, 256, 1e-5
x = torch.randn(TOKENS, C, 1, 1, device=device, dtype=torch.bfloat16)
weight = torch.rand(1, C, 1, 1, device=device, dtype=torch.bfloat16) + 0.5

norm64 = torch.nn.functional.rms_norm(x.double().flatten(1), (C,), weight.double().flatten(), EPSILON)
exact = torch.nn.functional.silu(norm64)


def start():
    """A graph, its inputs by what they are given, and SiLU(RMSNorm(x))."""
    graph = cudnn.pygraph(
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    X = graph.tensor(name="X", dim=[TOKENS, C, 1, 1], stride=[C, 1, 1, 1], data_type=cudnn.data_type.BFLOAT16)
    W = graph.tensor(name="W", dim=[1, C, 1, 1], stride=[C, 1, 1, 1], data_type=cudnn.data_type.BFLOAT16)
    epsilon = graph.tensor(
        name="epsilon",
        dim=[1, 1, 1, 1],
        stride=[1, 1, 1, 1],
        data_type=cudnn.data_type.FLOAT,
        is_pass_by_value=True,
    )
    normalized, _ = graph.rmsnorm(
        input=X,
        scale=W,
        epsilon=epsilon,
        norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
    )
    given = {X: x, W: weight, epsilon: torch.full((1, 1, 1, 1), EPSILON)}  # in memory of the host
    return graph, given, graph.swish(input=normalized, swish_beta=1.0)


def run(graph, pack) -> None:
    graph.build([cudnn.heur_mode.OPENSOURCE])
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)


def report(what: str, values: torch.Tensor, most: float) -> None:
    error = ((values.double() - exact).norm() / exact.norm()).item()
    print(f"{what}: relative error {error:.4f}")
    assert error < most


# %% [markdown]
# ## bf16

# %%
out = torch.empty(TOKENS, C, 1, 1, device=device, dtype=torch.bfloat16)
graph, pack, Z = start()
Z.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)
run(graph, {**pack, Z: out})
torch.testing.assert_close(out.double().flatten(1), exact, rtol=2**-8, atol=1e-30)
report("bf16", out.flatten(1), 2**-8)

# %% [markdown]
# ## FP8, with a static scale
#
# The scale is a node of its own. E4M3 saturates at 448. It keeps 4 bits, so an element is up to 2^-4 off.

# %%
SCALE = 100.0
codes = torch.empty(TOKENS, C, 1, 1, device=device, dtype=torch.float8_e4m3fn)
graph, pack, Z = start()
scaled = graph.mul(a=Z, b=SCALE).set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
run(graph, {**pack, scaled: codes})
report("FP8", codes.double().flatten(1) / SCALE, 0.04)

# %% [markdown]
# ## NVFP4
#
# `block_scale_quantize` gives codes and scales: 16 elements, two to a byte, share a scale of type E4M3. The axis of the
# blocks is that of the channels, 1.

# %%
packed = torch.empty(TOKENS, C // 2, device=device, dtype=torch.uint8)
scales = torch.empty(TOKENS, C // 16, device=device, dtype=torch.float8_e4m3fn)
graph, pack, Z = start()
CODES, SCALES = graph.block_scale_quantize(input=Z, block_size=16, axis=1)
CODES.set_output(True).set_data_type(cudnn.data_type.FP4_E2M1)
SCALES.set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
run(graph, {**pack, CODES: packed.view(TOKENS, C // 2, 1, 1), SCALES: scales.view(TOKENS, C // 16, 1, 1)})

# %% [markdown]
# Reading it back: the lower half of a byte is the first element, and a code is one of sixteen values.

# %%
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=device)
values = E2M1.double()[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()]
report("NVFP4", (values.unflatten(1, (-1, 16)) * scales.double().unsqueeze(-1)).flatten(1), 0.15)

# %% [markdown]
# `fused_rmsnorm_silu` is the same as one call, for all three.

# %%
again = cudnn.fused_rmsnorm_silu(x.flatten(1), weight.flatten(), EPSILON)
report("one call, bf16", again, 2**-8)

# %%
cudnn.destroy_handle(handle)
