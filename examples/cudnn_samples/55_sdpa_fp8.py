# %% [markdown]
# # Attention of FP8 and MXFP8
#
# `sdpa_fp8` has a scale for each tensor, `sdpa_mxfp8` one for each block of 32 elements. The reference engine runs
# both: it multiplies the exact values that codes and scales stand for, and rounds where the operation says.

# %%
import math

import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

B, H, S, D = 1, 2, 128, 64
scale = 1 / math.sqrt(D)
FLOAT, E4M3, E8M0 = cudnn.data_type.FLOAT, cudnn.data_type.FP8_E4M3, cudnn.data_type.FP8_E8M0
q, k, v, loss = (torch.randn(B, H, S, D, device=device) for _ in range(4))
hidden = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)


def new():
    return cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle
    )


def run(graph, pack):
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)


def softmax(q, k):
    return (q.double() @ k.double().mT * scale).masked_fill(hidden, -math.inf).softmax(-1)


# %% [markdown]
# ## FP8: a scale for each tensor
#
# The largest magnitude becomes 448, FP8_E4M3's largest. Softmax makes numbers up to 1, so its scale is known before.
# That of O is what the last step's largest magnitude, `Amax_O`, said; here it is guessed.

# %%
LARGEST = 448.0


def one(number):
    return torch.full((1, 1, 1, 1), number, device=device)


def to_fp8(t):
    """Codes, and the number that they are to be multiplied by."""
    descale = t.abs().max().item() / LARGEST
    return (t / descale).to(torch.float8_e4m3fn), descale


(q8, by_q), (k8, by_k), (v8, by_v), (loss8, by_loss) = map(to_fp8, (q, k, v, loss))
by_s, by_o, by_dp = 1 / LARGEST, 4 / LARGEST, 1 / LARGEST
descales = {"descale_q": one(by_q), "descale_k": one(by_k), "descale_v": one(by_v), "descale_s": one(by_s)}
scales = {"scale_s": one(1 / by_s), "scale_o": one(1 / by_o)}
read = {"q": q8, "k": k8, "v": v8} | descales | scales

graph = new()
tensors = {
    name: graph.tensor(t.shape, t.stride(), E4M3 if t.dtype is torch.float8_e4m3fn else FLOAT)
    for name, t in read.items()
}
OUT, STATS, AMAX_S, AMAX_O = graph.sdpa_fp8(**tensors, attn_scale=scale, use_causal_mask=True, generate_stats=True)
OUT.set_output(True).set_data_type(E4M3)
for T in (STATS, AMAX_S, AMAX_O):
    T.set_output(True).set_data_type(FLOAT)
o8 = torch.empty_like(q8)
stats, amax_s, amax_o = torch.empty(B, H, S, 1, device=device), one(0.0), one(0.0)
made = {OUT: o8, STATS: stats, AMAX_S: amax_s, AMAX_O: amax_o}
run(graph, {tensors[name]: t for name, t in read.items()} | made)

# %% [markdown]
# Codes are what they stand for. Rounded to 3 bits behind the leading one, a number is off by up to 2^-4 of itself.

# %%
q64, k64, v64, loss64 = (t.double() * by for t, by in ((q8, by_q), (k8, by_k), (v8, by_v), (loss8, by_loss)))
weights = softmax(q64, k64)
exact = weights @ v64
torch.testing.assert_close(o8.double() * by_o, exact, rtol=2**-4, atol=2**-4)
torch.testing.assert_close(amax_s.double(), weights.max().reshape(1, 1, 1, 1), rtol=1e-5, atol=0)
print(f"FP8: off by {((o8.double() * by_o - exact).norm() / exact.norm()).item():.3f} of the exact result")

# %% [markdown]
# Its gradients, each with a scale and a largest magnitude.

# %%
descales |= {"descale_o": one(by_o), "descale_dO": one(by_loss), "descale_dP": one(by_dp)}
scales = {name: one(1.0) for name in ("scale_dQ", "scale_dK", "scale_dV")}
scales |= {"scale_s": one(1 / by_s), "scale_dP": one(1 / by_dp)}
read = {"q": q8, "k": k8, "v": v8, "o": o8, "dO": loss8, "stats": stats} | descales | scales
graph = new()
tensors = {
    name: graph.tensor(t.shape, t.stride(), E4M3 if t.dtype is torch.float8_e4m3fn else FLOAT)
    for name, t in read.items()
}
*GRADIENTS, AMAX_DQ, AMAX_DK, AMAX_DV, AMAX_DP = graph.sdpa_fp8_backward(
    **tensors, attn_scale=scale, use_causal_mask=True
)
gradients = [torch.empty(B, H, S, D, device=device, dtype=torch.bfloat16) for _ in GRADIENTS]
largest = [one(0.0) for _ in range(4)]
for T in GRADIENTS:
    T.set_output(True)
for T in (AMAX_DQ, AMAX_DK, AMAX_DV, AMAX_DP):
    T.set_output(True).set_data_type(FLOAT)
made = dict(zip((*GRADIENTS, AMAX_DQ, AMAX_DK, AMAX_DV, AMAX_DP), (*gradients, *largest), strict=True))
run(graph, {tensors[name]: t for name, t in read.items()} | made)

leaves = [t.clone().requires_grad_() for t in (q64, k64, v64)]
wanted = torch.autograd.grad(softmax(*leaves[:2]) @ leaves[2], leaves, loss64)
for name, found, other in zip(("dQ", "dK", "dV"), gradients, wanted, strict=True):
    error = ((found.double() - other).norm() / other.norm()).item()
    assert error < 0.1
    print(f"{name}: off by {error:.3f} of the exact gradient")

# %% [markdown]
# ## MXFP8: a scale for each block of 32
#
# Products run over columns of q and k, and over rows of v. So blocks of v run along rows. `block_scale_quantize`
# makes codes and scales, powers of two.


# %%
def quantized(values, axis):
    graph = new()
    X = graph.tensor_like(values)
    Y, SCALE = graph.block_scale_quantize(X, block_size=32, axis=axis)
    Y.set_output(True).set_data_type(E4M3)
    SCALE.set_output(True).set_data_type(E8M0)
    codes = torch.empty(values.shape, device=device, dtype=torch.float8_e4m3fn)
    extents = [extent // 32 if a == axis else extent for a, extent in enumerate(values.shape)]
    made = torch.empty(extents, device=device, dtype=torch.float8_e8m0fnu)
    run(graph, {X: values, Y: codes, SCALE: made})
    return codes, made


def meant(codes, scales, axis):
    return codes.double() * scales.double().repeat_interleave(32, axis)


along = {"q": 3, "k": 3, "v": 2}
codes, scales = {}, {}
for (name, axis), values in zip(along.items(), (q, k, v), strict=True):
    codes[name], scales[name] = quantized(values, axis)
graph = new()
tensors = {name: graph.tensor_like(t) for name, t in codes.items()}
tensors |= {f"descale_{name}": graph.tensor_like(t) for name, t in scales.items()}
OUT, _, AMAX_O = graph.sdpa_mxfp8(**tensors, attn_scale=scale, generate_stats=False, use_causal_mask=True)
OUT.set_output(True)
AMAX_O.set_output(True).set_data_type(FLOAT)
o = torch.empty(B, H, S, D, device=device, dtype=torch.bfloat16)
pack = {tensors[name]: t for name, t in codes.items()} | {tensors[f"descale_{n}"]: t for n, t in scales.items()}
run(graph, pack | {OUT: o, AMAX_O: amax_o})

q64, k64, v64 = (meant(codes[name], scales[name], axis) for name, axis in along.items())
exact = softmax(q64, k64) @ v64
torch.testing.assert_close(o.double(), exact, rtol=2**-8, atol=1e-5)
torch.testing.assert_close(amax_o.double(), exact.abs().max().reshape(1, 1, 1, 1), rtol=1e-5, atol=0)
print("MXFP8: the exact product of what codes and scales stand for, rounded once")

# %%
cudnn.destroy_handle(handle)
