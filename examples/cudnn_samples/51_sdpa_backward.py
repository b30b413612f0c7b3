# %% [markdown]
# # Gradients of attention
#
# `sdpa_backward` takes what `sdpa` was given, what it made, and the gradient of O. It makes the scores again.

# %%
import math

import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

B, H, S, D = 2, 4, 96, 32
scale = 1 / math.sqrt(D)
MODES = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
TYPES = {
    "io_data_type": cudnn.data_type.HALF,
    "intermediate_data_type": cudnn.data_type.FLOAT,
    "compute_data_type": cudnn.data_type.FLOAT,
}

q, k, v, loss = (torch.randn(B, S, H, D, device=device, dtype=torch.half).transpose(1, 2) for _ in range(4))
bias = torch.randn(1, H, S, S, device=device, dtype=torch.half)


def close(made, wanted, what):
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=1e-2)
    print(f"{what} agrees with autograd in float64")


# %% [markdown]
# ## With the wrapper
#
# The graphs are built from arrays of the right shapes. What the first makes is what the second is given. One
# workspace does for both, as they run one after the other.

# %%
with cudnn.Graph(
    **TYPES,
    handle=handle,
    workspace_alloc=False,
    inputs=["sdpa::q", "sdpa::k", "sdpa::v"],
    outputs=["o", "stats"],
) as forward:
    OUT, STATS = forward.sdpa(q=q, k=k, v=v, attn_scale=scale, is_inference=False, use_causal_mask=True, name="sdpa")
    OUT.set_output(True).set_name("o").set_dim(q.shape).set_stride(q.stride())
    STATS.set_output(True).set_name("stats").set_data_type(cudnn.data_type.FLOAT)

o, stats = torch.empty_like(q), torch.empty(B, H, S, 1, device=device)
with cudnn.Graph(
    **TYPES,
    handle=handle,
    workspace_alloc=False,
    inputs=[f"back::{port}" for port in ("q", "k", "v", "o", "stats", "dO")],
    outputs=["dQ", "dK", "dV"],
) as backward:
    made = backward.sdpa_backward(
        q=q, k=k, v=v, o=o, dO=loss, stats=stats, attn_scale=scale, use_causal_mask=True, name="back"
    )
    for name, T in zip(("dQ", "dK", "dV"), made, strict=True):
        T.set_output(True).set_name(name).set_dim(q.shape).set_stride(q.stride())

size = max(forward.get_workspace_size(), backward.get_workspace_size())
workspace = torch.empty(size, device=device, dtype=torch.uint8)
o, stats = forward(q, k, v, workspace=workspace, handle=handle)
gradients = backward(q, k, v, o, stats, loss, workspace=workspace, handle=handle)

leaves = [t.double().requires_grad_() for t in (q, k, v)]
hidden = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)
scores = (leaves[0] @ leaves[1].mT * scale).masked_fill(hidden, -math.inf)
close(gradients, torch.autograd.grad(scores.softmax(-1) @ leaves[2], leaves, loss.double()), "a causal mask")

# %% [markdown]
# ## Step by step, with the gradient of a bias
#
# A tensor for the bias's gradient is given as `dBias`. The bias is the same for all sequences, so its gradient is the
# sum over them.

# %%
forward = cudnn.pygraph(**TYPES, handle=handle)
Q, K, V, BIAS = (forward.tensor_like(t) for t in (q, k, v, bias))
OUT, STATS = forward.sdpa(q=Q, k=K, v=V, bias=BIAS, attn_scale=scale, generate_stats=True)
OUT.set_output(True).set_dim(q.shape).set_stride(q.stride())
STATS.set_output(True).set_data_type(cudnn.data_type.FLOAT)
forward.build(MODES)
o, stats = torch.empty_like(q), torch.empty(B, H, S, 1, device=device)
workspace = torch.empty(forward.get_workspace_size(), device=device, dtype=torch.uint8)
forward.execute({Q: q, K: k, V: v, BIAS: bias, OUT: o, STATS: stats}, workspace, handle=handle)

backward = cudnn.pygraph(**TYPES, handle=handle)
read = {"q": q, "k": k, "v": v, "o": o, "dO": loss, "stats": stats, "bias": bias}
tensors = {name: backward.tensor_like(t) for name, t in read.items()}
DBIAS = backward.tensor_like(bias).set_output(True)
made = backward.sdpa_backward(**tensors, dBias=DBIAS, attn_scale=scale, use_deterministic_algorithm=True)
for T in made:
    T.set_output(True).set_dim(q.shape).set_stride(q.stride())
backward.build(MODES)
gradients = [torch.empty_like(t) for t in (q, k, v, bias)]
pack = {tensors[name]: t for name, t in read.items()} | dict(zip((*made, DBIAS), gradients, strict=True))
workspace = torch.empty(backward.get_workspace_size(), device=device, dtype=torch.uint8)
backward.execute(pack, workspace, handle=handle)

leaves = [t.double().requires_grad_() for t in (q, k, v, bias)]
scores = leaves[0] @ leaves[1].mT * scale + leaves[3]
close(gradients, torch.autograd.grad(scores.softmax(-1) @ leaves[2], leaves, loss.double()), "a bias")

# %%
cudnn.destroy_handle(handle)
