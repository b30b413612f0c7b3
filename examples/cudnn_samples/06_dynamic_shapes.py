# %% [markdown]
# # Dynamic shapes
#
# The number of rows enters no kernel. A graph that is built once runs any number of them: tokens of a batch, or images.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

BATCH, TOKENS, COLUMNS = 2, 64, 256
weight = torch.rand(1, 1, COLUMNS, device=device, dtype=torch.bfloat16) + 0.5


def check(given: torch.Tensor, made: torch.Tensor) -> None:
    exact = torch.nn.functional.rms_norm(given.double(), (COLUMNS,), weight.double().flatten(), 1e-6)
    torch.testing.assert_close(made.double(), torch.nn.functional.silu(exact), rtol=2**-8, atol=1e-30)


# %% [markdown]
# `is_override_shape_enabled` (or `is_dynamic_shape_enabled`) says that `execute` may be given other shapes. The shapes
# of the graph are those that it is planned for.

# %%
graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    handle=handle,
    is_override_shape_enabled=True,
)
X = graph.tensor(dim=[BATCH, TOKENS, COLUMNS], data_type=cudnn.data_type.BFLOAT16, name="x", uid=1)
W = graph.tensor_like(weight, name="weight").set_uid(2)
normalized, _ = graph.rmsnorm(
    input=X,
    scale=W,
    epsilon=1e-6,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
)
Y = graph.swish(input=normalized).set_output(True).set_name("y").set_uid(3)
graph.build([cudnn.heur_mode.OPENSOURCE])

# %% [markdown]
# ## Other leading extents
#
# Overrides are three lists: uids, shapes and strides of the tensors that differ. Only leading extents may change, those
# of batch and tokens here. Numbers of rows that are at most an eighth apart are a class. The first call of a class
# plans it, and later ones have nothing to build. `get_workspace_size` with the same overrides does that ahead of time.

# %%
for batch, tokens in ((2, 64), (2, 63), (1, 17), (5, 200)):
    x = torch.randn(batch, tokens, COLUMNS, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    overrides = {
        "override_uids": [1, 3],
        "override_shapes": [list(x.shape), list(y.shape)],
        "override_strides": [list(x.stride()), list(y.stride())],
    }
    size = graph.get_workspace_size(handle, **overrides)
    workspace = torch.empty(size, device=device, dtype=torch.uint8)
    graph.execute({1: x, 2: weight, 3: y}, workspace, handle=handle, **overrides)
    check(x, y)
    print(f"{batch} x {tokens} rows: agree with float64")

# %% [markdown]
# ## Another leading dimension
#
# Rows need not lie one after another. Here they are the first columns of a wider buffer, as queries in a packed QKV
# are: the stride of a row, which BLAS calls leading dimension, is another than that of the graph.

# %%
packed = torch.randn(BATCH, 40, 3 * COLUMNS, device=device, dtype=torch.bfloat16)
x = packed[..., :COLUMNS]
y = torch.empty(BATCH, 40, COLUMNS, device=device, dtype=torch.bfloat16)
graph.execute(
    {1: x, 2: weight, 3: y},
    None,
    handle=handle,
    override_uids=[1, 3],
    override_shapes=[[BATCH, 40, COLUMNS], [BATCH, 40, COLUMNS]],
    override_strides=[list(x.stride()), None],  # None: as in the graph, without gaps
)
check(x, y)
print(f"rows that are {x.stride(-2)} elements apart: agree with float64")

# %% [markdown]
# ## Buffers of the largest size
#
# What is given may be larger than the overrides say. Serving code allocates once, for the largest batch, and uses the
# first rows.

# %%
most = torch.randn(8, TOKENS, COLUMNS, device=device, dtype=torch.bfloat16)
made = torch.zeros_like(most)
graph.execute(
    {1: most, 2: weight, 3: made},
    None,
    handle=handle,
    override_uids=[1, 3],
    override_shapes=[[3, TOKENS, COLUMNS]] * 2,
)
check(most[:3], made[:3])
assert not made[3:].any()
print("3 of 8 samples written, the others untouched")

# %% [markdown]
# What cannot change is refused by name.

# %%
try:
    graph.get_workspace_size(handle, [1, 3], [[BATCH, TOKENS, 2 * COLUMNS]] * 2)
except cudnn.VariantPackError as error:
    print(error)
else:
    raise AssertionError("the columns of a norm were changed")

# %% [markdown]
# ## Attention
#
# Sequences may be others in number and length.

# %%
graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    compute_data_type=cudnn.data_type.FLOAT,
    handle=handle,
    is_override_shape_enabled=True,
)
Q, K, V = (graph.tensor(dim=[4, 8, 128, 32]).set_uid(uid) for uid in (1, 2, 3))
OUT, _ = graph.sdpa(q=Q, k=K, v=V, attn_scale=32**-0.5, generate_stats=False, use_causal_mask=True)
OUT.set_output(True).set_uid(4)
graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

for batch, rows in ((4, 128), (1, 128), (3, 40)):
    q, k, v = (torch.randn(batch, 8, rows, 32, device=device, dtype=torch.bfloat16) for _ in range(3))
    o = torch.empty_like(q)
    overrides = {"override_uids": [1, 2, 3, 4], "override_shapes": [list(q.shape)] * 4}
    size = graph.get_workspace_size(handle, **overrides)
    workspace = torch.empty(size, device=device, dtype=torch.uint8)
    graph.execute({1: q, 2: k, 3: v, 4: o}, workspace, handle=handle, **overrides)
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
    scores = (q.double() @ k.double().mT * 32**-0.5).masked_fill(hidden, -float("inf"))
    torch.testing.assert_close(o.double(), scores.softmax(-1) @ v.double(), rtol=2e-2, atol=2e-2)
    print(f"attention of {batch} sequences of {rows} rows: agrees with float64")

# %%
cudnn.destroy_handle(handle)
