# %% [markdown]
# # Attention to pages
#
# A cache of keys and values in pages: blocks of rows, anywhere in one container, and for each sequence the numbers of
# its pages. Prefill has many queries a sequence, decoding has one.

# %%
import math

import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

B, H, D = 3, 4, 32
MOST_Q, MOST_KV, PAGE = 40, 96, 16  # rows of the longest sequence of q, of k and v; rows of a page
EACH = MOST_KV // PAGE  # pages of the longest
scale = 1 / math.sqrt(D)
MODES = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]


def new():
    return cudnn.pygraph(
        io_data_type=cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def column(numbers):
    """[n, 1, 1, 1], as lengths and offsets are given."""
    return torch.tensor(numbers, dtype=torch.int32, device=device).reshape(-1, 1, 1, 1)


# %% [markdown]
# ## Containers and tables
#
# Pages are given out in any order. k and v may have different pages; here they share the numbers.

# %%
lengths_kv = [96, 50, 17]
container_k, container_v = (torch.randn(B * EACH, H, PAGE, D, device=device, dtype=torch.half) for _ in range(2))
table = torch.randperm(B * EACH, device=device).int().reshape(B, 1, EACH, 1)


def sequence(container, b):
    """Rows of one sequence, [heads, rows, columns], page by page."""
    pages = [container[number] for number in table[b].flatten().tolist()]
    return torch.cat(pages, dim=1)[:, : lengths_kv[b]].double()


def exact(queries, b, causal):
    scores = queries.double() @ sequence(container_k, b).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ sequence(container_v, b)


# %% [markdown]
# ## Prefill
#
# Sequences of q lie one behind another, without padding. The tensor has the extents of the longest, and a ragged
# offset: where each sequence begins, in elements.

# %%
lengths_q = [40, 7, 17]
packed = torch.randn(sum(lengths_q), H, D, device=device, dtype=torch.half)
starts = torch.tensor([0, *lengths_q]).cumsum(0) * H * D

graph = new()
STARTS = graph.tensor_like(column(starts.tolist()))
Q = graph.tensor([B, H, MOST_Q, D], [MOST_Q * H * D, D, H * D, 1], ragged_offset=STARTS)
K, V, TABLE_K, TABLE_V = (graph.tensor_like(t) for t in (container_k, container_v, table, table))
LENGTHS_Q, LENGTHS_KV = (graph.tensor_like(column(n)) for n in (lengths_q, lengths_kv))
OUT, _ = graph.sdpa(
    q=Q,
    k=K,
    v=V,
    attn_scale=scale,
    is_inference=True,
    use_causal_mask=True,
    use_padding_mask=True,
    seq_len_q=LENGTHS_Q,
    seq_len_kv=LENGTHS_KV,
    paged_attention_k_table=TABLE_K,
    paged_attention_v_table=TABLE_V,
    paged_attention_max_seq_len_kv=MOST_KV,
)
OUT.set_output(True).set_dim([B, H, MOST_Q, D]).set_stride([MOST_Q * H * D, D, H * D, 1])
graph.build(MODES)
o = torch.empty(B, MOST_Q, H, D, device=device, dtype=torch.half).transpose(1, 2)
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)


def prefill(queries, lengths, starts):
    pack = {Q: queries, STARTS: column(starts), LENGTHS_Q: column(lengths), LENGTHS_KV: column(lengths_kv), OUT: o}
    caches = {K: container_k, V: container_v, TABLE_K: table, TABLE_V: table}
    graph.execute(pack | caches, workspace, handle=handle)
    for b, rows in enumerate(queries.split(lengths)):
        found = o[b, :, : lengths[b]].double()
        torch.testing.assert_close(found, exact(rows.transpose(0, 1), b, True), rtol=3e-3, atol=5e-3)


prefill(packed, lengths_q, starts.tolist())
print(f"prefill of {lengths_q} rows to {lengths_kv}: agrees with float64")

# %% [markdown]
# Other lengths need no other plan.

# %%
prefill(packed[:12], [3, 8, 1], [0, 3 * H * D, 11 * H * D, 12 * H * D])
print("and of [3, 8, 1] rows by the same plan")

# %% [markdown]
# ## Decoding, with packed tables
#
# One query a sequence. Tables may lie one behind another, too: as many numbers as each sequence has pages.

# %%
query = torch.randn(B, H, 1, D, device=device, dtype=torch.half)
counts = [-(-length // PAGE) for length in lengths_kv]
packed_table = torch.cat([table[b, 0, :count] for b, count in enumerate(counts)])
table_starts = torch.tensor([0, *counts]).cumsum(0).tolist()

graph = new()
STARTS = graph.tensor_like(column(table_starts))
Q, K, V = (graph.tensor_like(t) for t in (query, container_k, container_v))
TABLE_K, TABLE_V = (
    graph.tensor([B, 1, EACH, 1], [EACH, 1, 1, 1], cudnn.data_type.INT32, ragged_offset=STARTS) for _ in range(2)
)
LENGTHS_Q, LENGTHS_KV = (graph.tensor_like(column(n)) for n in ([1] * B, lengths_kv))
OUT, _ = graph.sdpa(
    q=Q,
    k=K,
    v=V,
    attn_scale=scale,
    is_inference=True,
    use_padding_mask=True,
    seq_len_q=LENGTHS_Q,
    seq_len_kv=LENGTHS_KV,
    paged_attention_k_table=TABLE_K,
    paged_attention_v_table=TABLE_V,
    paged_attention_max_seq_len_kv=MOST_KV,
)
OUT.set_output(True)
graph.build(MODES)
o = torch.empty_like(query)
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
pack = {Q: query, K: container_k, V: container_v, LENGTHS_Q: column([1] * B), LENGTHS_KV: column(lengths_kv), OUT: o}
tables = {TABLE_K: packed_table, TABLE_V: packed_table, STARTS: column(table_starts)}
graph.execute(pack | tables, workspace, handle=handle)
for b in range(B):
    torch.testing.assert_close(o[b].double(), exact(query[b], b, False), rtol=3e-3, atol=5e-3)
print(f"decoding by {len(packed_table)} numbers of pages, of {counts}: agrees with float64")

# %%
cudnn.destroy_handle(handle)
