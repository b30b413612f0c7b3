# %% [markdown]
# # What happens to scores
#
# A bias, ALiBi, dropout, a sink, tiles that are masked, and functions of scores. Torch's kernels take a bias and
# tiles; the other options are for cuDNN's engine or the reference engine.

# %%
import math

import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

B, H, S, D = 2, 4, 160, 32
scale = 1 / math.sqrt(D)
q, k, v = (torch.randn(B, H, S, D, device=device, dtype=torch.bfloat16) for _ in range(3))
rows, columns = torch.arange(S, device=device)[:, None], torch.arange(S, device=device)
plain = q.double() @ k.double().mT * scale


def new():
    return cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def run(graph, pack):
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)


def attend(options=(), tensors=(), outputs=()):
    """O, with further options, tensors that are read, and tensors that are written, by name."""
    graph = new()
    read = {"q": q, "k": k, "v": v, **dict(tensors)}
    given = {name: graph.tensor_like(t) for name, t in read.items()}
    made = {name: graph.tensor_like(t).set_output(True) for name, t in dict(outputs).items()}
    OUT, _ = graph.sdpa(**given, **made, **dict(options), attn_scale=scale, generate_stats=False)
    OUT.set_output(True)
    o = torch.empty_like(q)
    pack = {given[name]: t for name, t in read.items()} | {made[name]: t for name, t in dict(outputs).items()}
    run(graph, pack | {OUT: o})
    return o


def hold(what, o, scores, weights=None):
    """weights: of exp(score) / sum; those of softmax unless given."""
    exact = (scores.softmax(-1) if weights is None else weights) @ v.double()
    torch.testing.assert_close(o.double(), exact, rtol=2e-2, atol=2e-2)
    print(f"{what}: agrees with float64")


# %% [markdown]
# ## A bias
#
# It has the extents of the scores, or 1: this one is the same for all sequences.

# %%
bias = torch.randn(1, H, S, S, device=device, dtype=torch.bfloat16)
hold("a bias", attend(tensors={"bias": bias}), plain + bias.double())

# %% [markdown]
# ## ALiBi
#
# What is far from the diagonal counts less, by a slope that each head has: powers of two. It needs a causal mask.

# %%
slopes = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)], device=device, dtype=torch.float64)
causal = (plain + slopes[:, None, None] * (columns - rows)).masked_fill(columns > rows, -math.inf)
hold("ALiBi", attend({"use_alibi_mask": True, "diagonal_band_right_bound": 0}), causal)

# %% [markdown]
# ## Dropout
#
# With a mask and a scale of one's own, or drawn from a seed and an offset. What is drawn is graphfuse's, not cuDNN's;
# `rng_dump` has it.

# %%
kept = torch.rand(B, H, S, S, device=device) > 0.2
mask, factor = kept.to(torch.bfloat16), torch.full((1, 1, 1, 1), 1.25, device=device)
graph = new()
Q, K, V, MASK = (graph.tensor_like(t) for t in (q, k, v, mask))
FACTOR = graph.tensor([1, 1, 1, 1], [1, 1, 1, 1], cudnn.data_type.FLOAT)
OUT, _ = graph.sdpa(q=Q, k=K, v=V, attn_scale=scale, generate_stats=False, dropout=(MASK, FACTOR))
OUT.set_output(True)
o = torch.empty_like(q)
run(graph, {Q: q, K: k, V: v, MASK: mask, FACTOR: factor, OUT: o})
hold("dropout by a mask", o, plain, plain.softmax(-1) * kept * 1.25)

seed, offset = (torch.full((1, 1, 1, 1), n, dtype=torch.int64, device=device) for n in (1234, 1))
graph = new()
Q, K, V = (graph.tensor_like(t) for t in (q, k, v))
SEED, OFFSET = (graph.tensor([1, 1, 1, 1], [1, 1, 1, 1], cudnn.data_type.INT64) for _ in range(2))
DUMP = graph.tensor([B, H, S, S], [H * S * S, S * S, S, 1], cudnn.data_type.FLOAT).set_output(True)
OUT, _ = graph.sdpa(q=Q, k=K, v=V, attn_scale=scale, generate_stats=False, dropout=(0.25, SEED, OFFSET), rng_dump=DUMP)
OUT.set_output(True)
drawn = torch.empty(B, H, S, S, device=device)
run(graph, {Q: q, K: k, V: v, SEED: seed, OFFSET: offset, DUMP: drawn, OUT: o})
assert abs(drawn.mean().item() - 0.75) < 0.01
hold("dropout by a seed", o, plain, plain.softmax(-1) * drawn.double() / 0.75)

# %% [markdown]
# ## A sink
#
# A score beside those of each row, of which nothing is added to O: weights of a row are less than 1 together. The
# largest score of a row and the sum of exponentials less it are outputs of their own.

# %%
sink = torch.randn(1, H, 1, 1, device=device)
largest, total = (torch.empty(B, H, S, 1, device=device) for _ in range(2))
o = attend(tensors={"sink_token": sink}, outputs={"score_max": largest, "score_sum_exp": total})
with_sink = torch.cat([plain, sink.double().expand(B, H, S, 1)], dim=-1)
hold("a sink", o, plain, with_sink.softmax(-1)[..., :-1])
log_sum = largest.double() + total.double().log()
torch.testing.assert_close(log_sum, with_sink.logsumexp(-1, keepdim=True), rtol=1e-5, atol=1e-5)

# %% [markdown]
# ## Tiles
#
# A bit for each 128 x 128 scores, the lowest of a byte first. Here the first 128 rows see the first 128 columns
# alone.

# %%
bits = torch.tensor([0b01, 0b11], dtype=torch.uint8, device=device).reshape(1, 1, 2, 1).repeat(B, H, 1, 1)
hidden = (rows < 128) & (columns >= 128)
hold("tiles", attend(tensors={"block_mask": bits}), plain.masked_fill(hidden, -math.inf))

# %% [markdown]
# ## Functions of scores
#
# `score_mod` is a function that draws nodes between the first product and softmax: attention becomes products and one
# kernel for what is between them. This is soft-capping.

# %%
CAP = 2.0
kept = {}


def cap(graph, scores):
    kept["tanh"] = graph.tanh(graph.mul(scores, 1 / CAP))
    return graph.mul(kept["tanh"], CAP)


graph = new()
Q, K, V = (graph.tensor_like(t) for t in (q, k, v))
OUT, STATS = graph.sdpa(q=Q, k=K, v=V, attn_scale=scale, generate_stats=True, score_mod=cap)
OUT.set_output(True)
STATS.set_output(True).set_data_type(cudnn.data_type.FLOAT)
o, stats = torch.empty_like(q), torch.empty(B, H, S, 1, device=device)
run(graph, {Q: q, K: k, V: v, OUT: o, STATS: stats})
print(f"run by {', then '.join(region.engine for region in graph.explanation().regions)}")
hold("soft-capping", o, CAP * (plain / CAP).tanh())

# %% [markdown]
# Its backward takes the function that makes the gradient of the scores of that of the capped ones.


# %%
def cap_backward(graph, grad):
    return graph.mul(grad, graph.sub(1.0, graph.mul(kept["tanh"], kept["tanh"])))


loss = torch.randn_like(o)
read = {"q": q, "k": k, "v": v, "o": o, "dO": loss, "stats": stats}
graph = new()
given = {name: graph.tensor_like(t) for name, t in read.items()}
made = graph.sdpa_backward(**given, attn_scale=scale, score_mod=cap, score_mod_bprop=cap_backward)
grads = [torch.empty_like(t) for t in (q, k, v)]
for t in made:
    t.set_output(True)
run(graph, {given[name]: t for name, t in read.items()} | dict(zip(made, grads, strict=True)))
exact = [t.double().requires_grad_() for t in (q, k, v)]
weights = (CAP * (exact[0] @ exact[1].mT * (scale / CAP)).tanh()).softmax(-1)
(weights @ exact[2]).backward(loss.double())
for grad, t in zip(grads, exact, strict=True):
    torch.testing.assert_close(grad.double(), t.grad, rtol=2e-2, atol=2e-2)
print("gradients of soft-capping: agree with float64")

# %%
cudnn.destroy_handle(handle)
