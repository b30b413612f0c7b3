# %% [markdown]
# # Attention
#
# `sdpa` is one node: scores, mask, softmax and the second product. On a GPU cuDNN's engine or torch's kernels run it,
# flash attention among them; elsewhere the reference engine does.

# %%
import math

import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

B, H, S, D = 2, 4, 96, 32  # sequences, heads, rows of each, columns of a head
scale = 1 / math.sqrt(D)
TYPES = {
    "io_data_type": cudnn.data_type.HALF,
    "intermediate_data_type": cudnn.data_type.FLOAT,
    "compute_data_type": cudnn.data_type.FLOAT,
}


def heads(count, rows=S):
    """[batch, heads, rows, columns], of which a row has all heads in memory, as a linear layer makes it."""
    return torch.randn(B, rows, count, D, device=device, dtype=torch.half).transpose(1, 2)


q, k, v = (heads(H) for _ in range(3))


def exact(q, k, v, hidden):
    """In float64, and the log-sum-exp of scores."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


causal = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)

# %% [markdown]
# ## With the wrapper

# %%
with cudnn.Graph(**TYPES, handle=handle, inputs=["SDPA::q", "SDPA::k", "SDPA::v"], outputs=["attended"]) as graph:
    OUT, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=scale, is_inference=True, use_causal_mask=True, name="SDPA")
    OUT.set_output(True).set_name("attended").set_dim(q.shape).set_stride(q.stride())

o = graph(q, k, v, handle=handle)
torch.testing.assert_close(o.double(), exact(q, k, v, causal)[0], rtol=3e-3, atol=5e-3)
print(f"the wrapper: {list(o.shape)} with strides {list(o.stride())} agrees with float64")

# %% [markdown]
# ## Step by step, with statistics
#
# Training keeps the log-sum-exp of each row's scores, for the backward. Heads of k and v may be fewer than those of
# q: here each serves two.

# %%
few_k, few_v = heads(H // 2), heads(H // 2)
graph = cudnn.pygraph(**TYPES, handle=handle)
Q, K, V = (graph.tensor_like(t) for t in (q, few_k, few_v))
OUT, STATS = graph.sdpa(q=Q, k=K, v=V, attn_scale=scale, generate_stats=True, use_causal_mask=True, name="sdpa")
OUT.set_output(True).set_dim(q.shape).set_stride(q.stride())
STATS.set_output(True).set_data_type(cudnn.data_type.FLOAT)
graph.validate()
graph.build_operation_graph()
graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
graph.check_support()
graph.build_plans()

o = torch.empty_like(q)
stats = torch.empty(B, H, S, 1, device=device)
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
graph.execute({Q: q, K: few_k, V: few_v, OUT: o, STATS: stats}, workspace, handle=handle)
for made, wanted in zip((o, stats), exact(q, few_k, few_v, causal), strict=True):
    torch.testing.assert_close(made.double(), wanted, rtol=3e-3, atol=5e-3)
print(f"{graph.get_plan_name_at_index(0)}: output and statistics agree with float64")

# %% [markdown]
# ## Other masks
#
# A band says how far to the left and right of the diagonal a row attends. The diagonal ends at the last row and
# column with `BOTTOM_RIGHT`: what a few new queries see of a longer past.

# %%
few = heads(H, rows=8)
graph = cudnn.pygraph(**TYPES, handle=handle)
Q, K, V = (graph.tensor_like(t) for t in (few, k, v))
OUT, _ = graph.sdpa(
    q=Q,
    k=K,
    v=V,
    attn_scale=scale,
    generate_stats=False,
    diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
    diagonal_band_left_bound=17,
    diagonal_band_right_bound=0,
)
OUT.set_output(True)
graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
o = torch.empty(few.shape, device=device, dtype=torch.half)
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
graph.execute({Q: few, K: k, V: v, OUT: o}, workspace, handle=handle)

rows = torch.arange(S - 8, S, device=device)[:, None]
columns = torch.arange(S, device=device)
hidden = (columns > rows) | (columns <= rows - 17)
torch.testing.assert_close(o.double(), exact(few, k, v, hidden)[0], rtol=3e-3, atol=5e-3)
print("a window of 17 columns agrees with float64")

# %%
cudnn.destroy_handle(handle)
