# %% [markdown]
# # Building a graph step by step
#
# `build` is six steps. Each can be called by itself, to look at what it decides, or to decide otherwise. The graph is
# a residual sum, RMSNorm and GELU.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

x = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
residual = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
weight = torch.rand(1, 256, device=device, dtype=torch.bfloat16) + 0.5
out = torch.empty_like(x)

# %% [markdown]
# ## 1. Tensors and nodes
#
# `tensor_like` takes shape, strides, type and alignment from an array. A number, as the epsilon, is a constant of the
# graph; a tensor with `is_pass_by_value=True` would be a number that each `execute` is given.

# %%
graph = cudnn.pygraph(
    name="steps",
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    handle=handle,
)
X = graph.tensor_like(x, name="x")
R = graph.tensor_like(residual, name="residual")
W = graph.tensor_like(weight, name="weight")
total = graph.add(a=X, b=R, name="sum")
normalized, _ = graph.rmsnorm(
    input=total,
    scale=W,
    epsilon=1e-6,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
    name="norm",
)
Y = graph.gelu_approx_tanh(input=normalized, name="gelu").set_output(True).set_name("y")

# %% [markdown]
# ## 2. `validate`
#
# It infers what was not set. What is wrong in a graph is an error here, which names the node.

# %%
graph.validate()
print(Y.get_name(), Y.get_dim(), Y.get_stride(), Y.get_data_type())
print(graph)

# %% [markdown]
# ## 3. `build_operation_graph` and `create_execution_plans`
#
# Patterns are matched, then engines are asked in each heuristic mode in turn. There is a plan for each choice of knobs
# that an engine proposes.

# %%
graph.build_operation_graph()
graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
for index in range(graph.get_execution_plan_count()):
    print(index, graph.get_plan_name_at_index(index))

# %% [markdown]
# ## 4. Choosing: notes, engines, workspace
#
# Plans can be barred by what they are. Here those that compile nothing at run time are: the reference engine's.

# %%
graph.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])
graph.deselect_workspace_greater_than(0)

# %% [markdown]
# ## 5. `check_support` and `build_plans`
#
# `HEURISTICS_CHOICE` compiles the first plan that can be, `ALL` all of them. The first is selected.

# %%
graph.check_support()
graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
assert graph.get_workspace_size() == 0
print(graph.explain())

# %% [markdown]
# ## 6. `execute`

# %%
graph.execute({X: x, R: residual, W: weight, Y: out}, None, handle=handle)
total64 = x.double() + residual.double()
norm64 = total64 * torch.rsqrt(total64.square().mean(1, keepdim=True) + 1e-6) * weight.double()
exact = torch.nn.functional.gelu(norm64, approximate="tanh")
torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)
print("agrees with float64")

# %% [markdown]
# ## When there is no plan
#
# `check_support` lists what every engine said. The error is `cudnnGraphNotSupportedError`, as in cuDNN.

# %%
graph.deselect_engines(["rows", "reference"])
try:
    graph.check_support()
except cudnn.cudnnGraphNotSupportedError as error:
    print(error)
else:
    raise AssertionError("all engines were barred")

# %% [markdown]
# A step that is called too early says which one is missing.

# %%
try:
    cudnn.pygraph().create_execution_plans([cudnn.heur_mode.A])
except cudnn.GraphStateError as error:
    print(error)
