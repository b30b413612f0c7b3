# %% [markdown]
# # Sequences of different lengths
#
# Two layouts: padded to the longest, with a length for each, or one behind another, with an offset for each. Forward
# and backward of both.

# %%
import math

import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

H, D = 4, 32
scale = 1 / math.sqrt(D)
lengths = [50, 0, 33, 7]  # a sequence may have no rows
B, MOST = len(lengths), 64
MODES = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
PADDED = {"attn_scale": scale, "use_causal_mask": True, "use_padding_mask": True}


def new():
    return cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def column(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device).reshape(-1, 1, 1, 1)


def run(graph, pack):
    graph.build(MODES)
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)


# %% [markdown]
# What is exact: each sequence by itself, with autograd.

# %%
rows = [[torch.randn(n, H, D, device=device, dtype=torch.bfloat16) for n in lengths] for _ in range(4)]


def alone(q, k, v, loss):
    """O and the gradients of q, k and v, [rows, heads, columns]."""
    leaves = [t.double().transpose(0, 1).requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * scale
    o = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ leaves[2]
    gradients = torch.autograd.grad(o, leaves, loss.double().transpose(0, 1))
    return [t.detach().transpose(0, 1) for t in (o, *gradients)]


exact = [alone(*each) for each in zip(*rows, strict=True)]


def hold(made, what):
    """made: rows of each sequence, of O and of each gradient."""
    for b, wanted in enumerate(exact):
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one[b].double(), other, rtol=2e-2, atol=3e-2)
    print(f"{what}: O and gradients agree with float64")


# %% [markdown]
# ## Padded
#
# What lies beyond a sequence's end is not used, whatever it is: here NaN. O and the gradients are zeros there.

# %%
q, k, v, loss = (torch.full((B, MOST, H, D), math.nan, device=device, dtype=torch.bfloat16) for _ in range(4))
for padded, of_all in zip((q, k, v, loss), rows, strict=True):
    for b, t in enumerate(of_all):
        padded[b, : lengths[b]] = t
q, k, v, loss = (t.transpose(1, 2) for t in (q, k, v, loss))
o, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
stats = torch.empty(B, H, MOST, 1, device=device)

graph = new()
Q, K, V = (graph.tensor_like(t) for t in (q, k, v))
SEQ_Q, SEQ_KV = (graph.tensor_like(column(lengths)) for _ in range(2))
OUT, STATS = graph.sdpa(q=Q, k=K, v=V, generate_stats=True, seq_len_q=SEQ_Q, seq_len_kv=SEQ_KV, **PADDED)
OUT.set_output(True).set_dim(o.shape).set_stride(o.stride())
STATS.set_output(True).set_data_type(cudnn.data_type.FLOAT)
run(graph, {Q: q, K: k, V: v, SEQ_Q: column(lengths), SEQ_KV: column(lengths), OUT: o, STATS: stats})

graph = new()
read = {"q": q, "k": k, "v": v, "o": o, "dO": loss, "stats": stats}
read |= {"seq_len_q": column(lengths), "seq_len_kv": column(lengths)}
tensors = {name: graph.tensor_like(t) for name, t in read.items()}
made = graph.sdpa_backward(**tensors, **PADDED)
for T in made:
    T.set_output(True).set_dim(q.shape).set_stride(q.stride())
run(graph, {tensors[name]: t for name, t in read.items()} | dict(zip(made, (dq, dk, dv), strict=True)))

assert all((t[b, :, lengths[b] :] == 0).all() for t in (o, dq, dk, dv) for b in range(B))
hold([[t[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)] for t in (o, dq, dk, dv)], "padded")

# %% [markdown]
# ## One behind another
#
# All rows in one [rows, heads, columns]. A tensor still has the extents of the longest; its ragged offset says where
# each sequence begins and where the last ends, here in rows, as the multiplier says. The log-sum-exps have offsets of
# their own.

# %%
starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
q, k, v, loss = (torch.cat(of_all) for of_all in rows)
o, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
stats = torch.empty(sum(lengths), H, 1, device=device)


def place(T, starts, columns=D):
    """Sets a tensor to such rows."""
    T.set_dim([B, H, MOST, columns]).set_stride([MOST * H * columns, columns, H * columns, 1])
    return T.set_ragged_offset(starts).set_ragged_offset_multiplier(H * columns)


def sequences(graph, starts, columns=D, data_type=cudnn.data_type.BFLOAT16):
    return place(graph.tensor([B, H, MOST, columns], data_type=data_type), starts, columns)


graph = new()
STARTS = graph.tensor_like(column(starts))
Q, K, V = (sequences(graph, STARTS) for _ in range(3))
SEQ_Q, SEQ_KV = (graph.tensor_like(column(lengths)) for _ in range(2))
OUT, STATS = graph.sdpa(q=Q, k=K, v=V, generate_stats=True, seq_len_q=SEQ_Q, seq_len_kv=SEQ_KV, **PADDED)
place(OUT.set_output(True), STARTS)
place(STATS.set_output(True).set_data_type(cudnn.data_type.FLOAT), STARTS, 1)
sizes = {SEQ_Q: column(lengths), SEQ_KV: column(lengths), STARTS: column(starts)}
run(graph, {Q: q, K: k, V: v, OUT: o, STATS: stats} | sizes)

graph = new()
STARTS = graph.tensor_like(column(starts))
read = {"q": q, "k": k, "v": v, "o": o, "dO": loss}
tensors = {name: sequences(graph, STARTS) for name in read} | {
    "stats": sequences(graph, STARTS, 1, cudnn.data_type.FLOAT)
}
SEQ_Q, SEQ_KV = (graph.tensor_like(column(lengths)) for _ in range(2))
made = graph.sdpa_backward(**tensors, seq_len_q=SEQ_Q, seq_len_kv=SEQ_KV, max_total_seq_len_q=sum(lengths), **PADDED)
for T in made:
    place(T.set_output(True), STARTS)
pack = {tensors[name]: t for name, t in (read | {"stats": stats}).items()}
sizes = {SEQ_Q: column(lengths), SEQ_KV: column(lengths), STARTS: column(starts)}
run(graph, pack | sizes | dict(zip(made, (dq, dk, dv), strict=True)))
hold([t.split(lengths) for t in (o, dq, dk, dv)], "one behind another")

# %% [markdown]
# ## Lengths by where sequences begin
#
# `cu_seq_len_q` and `cu_seq_len_kv` have the numbers that packed rows are kept with anyway.

# %%
graph = new()
STARTS, CU = (graph.tensor_like(column(starts)) for _ in range(2))
Q, K, V = (sequences(graph, STARTS) for _ in range(3))
OUT, _ = graph.sdpa(q=Q, k=K, v=V, generate_stats=False, cu_seq_len_q=CU, cu_seq_len_kv=CU, **PADDED)
place(OUT.set_output(True), STARTS)
o.fill_(math.nan)
run(graph, {Q: q, K: k, V: v, OUT: o, STARTS: column(starts), CU: column(starts)})
for one, wanted in zip(o.split(lengths), exact, strict=True):
    torch.testing.assert_close(one.double(), wanted[0], rtol=2e-2, atol=3e-2)
print("the same by cumulative lengths")

# %%
cudnn.destroy_handle(handle)
