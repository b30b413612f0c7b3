# %% [markdown]
# # The low-level API
#
# Serving code keeps numbers, not objects: uids in place of tensors, addresses in place of arrays, the index of a plan
# in place of what heuristics choose. This sample runs a graph with nothing else.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

x = torch.randn(300, 384, device=device, dtype=torch.float16)
weight = torch.rand(1, 384, device=device, dtype=torch.float16) + 0.5
out = torch.empty_like(x)
exact = torch.nn.functional.rms_norm(x.double(), (384,), weight[0].double(), 1e-5)


def check(result: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), exact, rtol=2**-10, atol=2**-24)


# %% [markdown]
# ## Uids and addresses
#
# A uid is a number that the caller chooses. A variant pack may have uids as keys and addresses as values: then nothing
# is known of the memory, and nothing is checked but its alignment. A workspace may be an address, too.

# %%
UID_X, UID_WEIGHT, UID_EPSILON, UID_Y = 0, 1, 2, 100

graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, intermediate_data_type=cudnn.data_type.FLOAT, handle=handle)
X = graph.tensor(dim=[300, 384], data_type=cudnn.data_type.HALF, uid=UID_X)
W = graph.tensor_like(weight).set_uid(UID_WEIGHT)
EPSILON = graph.tensor(dim=[1, 1], data_type=cudnn.data_type.FLOAT, is_pass_by_value=True, uid=UID_EPSILON)
Y = graph.rmsnorm(
    input=X,
    scale=W,
    epsilon=EPSILON,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
)[0]
Y.set_output(True).set_uid(UID_Y)
graph.build([cudnn.heur_mode.OPENSOURCE])

if device == "cuda":
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
pack = {UID_X: x.data_ptr(), UID_WEIGHT: weight.data_ptr(), UID_EPSILON: 1e-5, UID_Y: out.data_ptr()}
workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
graph.execute(pack, workspace.data_ptr() or None, handle=handle)
check(out)
print(f"by uid and address, on stream {cudnn.get_stream(handle):#x}")

# %% [markdown]
# What a uid stands for can be asked.

# %%
found = graph.query_tensor_attributes_of_uid(UID_Y)
print(found.get_name(), found.get_dim(), found.get_data_type())

# %% [markdown]
# ## Plans by index
#
# Mode B proposes more knobs than the others. `build_plan_at_index` compiles one plan, `execute_plan_at_index` runs it.
# Whatever the knobs, bits are the same.

# %%
graph.create_execution_plans([cudnn.heur_mode.B])
first = out.clone()
for index in range(3):
    engine, knobs = graph.get_engine_and_knobs_at_index(index)
    graph.build_plan_at_index(index)
    workspace = torch.empty(graph.get_workspace_size_plan_at_index(index), device=device, dtype=torch.uint8)
    graph.execute_plan_at_index(pack, workspace, index, handle=handle)
    assert torch.equal(out, first)
    print(index, engine, knobs)

# %% [markdown]
# Engines have numbers. Knobs that are not named are the engine's own choice.

# %%
for number in range(graph.get_engine_count()):
    ranges = {k.type: (k.min_value, k.max_value) for k in graph.get_knobs_for_engine(number)}
    index = graph.create_execution_plan(number, {})
    print(number, ranges, graph.get_plan_name_at_index(index))

# %% [markdown]
# A plan that was found elsewhere is named by its engine and knobs. It is appended to the list.

# %%
engine, knobs = graph.get_engine_and_knobs_at_index(0)
index = graph.create_execution_plan(engine, knobs)
graph.build_plan_at_index(index)
graph.execute(pack, None, handle=handle)
check(out)
print(f"plan {index} of {graph.get_execution_plan_count()} was asked for by name")

# %% [markdown]
# ## Decorators
#
# `jit` builds what a function returns and gives uids in place of tensors. `graph_cache` calls the function once for
# each key.

# %%
calls = []


def key(handle, x, weight):
    return (*x.shape, *x.stride(), x.dtype, weight.dtype)


@cudnn.jit(heur_modes=[cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
@cudnn.graph_cache(key_fn=key)
def norm_graph(handle, x, weight):
    calls.append(x.shape)
    with cudnn.graph(handle) as (g, tensors):
        tensors += [g.tensor_like(x), g.tensor_like(weight)]
        y, _ = g.rmsnorm(
            input=tensors[0],
            scale=tensors[1],
            epsilon=1e-5,
            norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
        )
        tensors.append(y.set_output(True))
    return g, tensors


for _ in range(2):
    g, (x_uid, weight_uid, y_uid) = norm_graph(handle, x, weight)
    g.execute({x_uid: x, weight_uid: weight, y_uid: out.zero_()}, None, handle=handle)
    check(out)
assert len(calls) == 1
print("the graph of two calls was built once")

# %%
cudnn.destroy_handle(handle)
