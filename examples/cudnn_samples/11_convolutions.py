# %% [markdown]
# # Convolutions and their gradients
#
# `conv_fprop`, `conv_dgrad` and `conv_wgrad` are what cuDNN calls them, with its arguments. cuDNN's own plans run them
# where the engine `cudnn` is asked for and there is a GPU; else the reference engine does, with torch.

# %%
import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

N, C, H, W, K = 2, 16, 12, 12, 24
ENGINES = ["rows", "cudnn", "reference"]
WINDOW = {"padding": [1, 1], "stride": [2, 2], "dilation": [1, 1]}


def channels_last(*shape, dtype=torch.float16):
    return torch.randn(*shape, device=device).to(dtype).to(memory_format=torch.channels_last)


def new(**types):
    types = {
        "io_data_type": cudnn.data_type.HALF,
        "intermediate_data_type": cudnn.data_type.FLOAT,
        "compute_data_type": cudnn.data_type.FLOAT,
    } | types
    return cudnn.pygraph(handle=handle, **types)


def run(graph, pack):
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK], engines=ENGINES)
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute(pack, workspace, handle=handle)
    print(f"run by {', then '.join(region.engine for region in graph.explanation().regions)}")


x, weight = channels_last(N, C, H, W), channels_last(K, C, 3, 3)
bias = channels_last(1, K, 1, 1)
reference = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1, stride=2)

# %% [markdown]
# ## Convolution, bias, ReLU
#
# Strides say how tensors lie. What is not said is channels-last: the result's strides.

# %%
graph = new()
X, WEIGHT, BIAS = (graph.tensor_like(t) for t in (x, weight, bias))
product = graph.conv_fprop(image=X, weight=WEIGHT, **WINDOW)
Y = graph.relu(graph.bias(product, BIAS)).set_output(True)
y = channels_last(*reference.shape)
run(graph, {X: x, WEIGHT: weight, BIAS: bias, Y: y})
torch.testing.assert_close(y.double(), (reference + bias.double()).relu(), rtol=2**-10, atol=1e-3)
print(f"{Y.get_dim()} with strides {Y.get_stride()}: agrees with float64")

# %% [markdown]
# ## Statistics of the result
#
# `genstats` sums each channel's elements and their squares: what batch normalization behind the convolution needs.
# The image is what a norm and ReLU made of another one, on the way.

# %%
scale, shift = channels_last(1, C, 1, 1), channels_last(1, C, 1, 1)
graph = new()
X, S, B, WEIGHT = (graph.tensor_like(t) for t in (x, scale, shift, weight))
image = graph.relu(graph.bias(graph.scale(X, S), B)).set_data_type(cudnn.data_type.HALF)
Y = graph.conv_fprop(image=image, weight=WEIGHT, **WINDOW).set_output(True)
SUM, SQ_SUM = graph.genstats(Y)
for t in (SUM, SQ_SUM):
    t.set_output(True).set_data_type(cudnn.data_type.FLOAT)
total, squares = (torch.empty(1, K, 1, 1, device=device) for _ in range(2))
run(graph, {X: x, S: scale, B: shift, WEIGHT: weight, Y: y, SUM: total, SQ_SUM: squares})

# %% [markdown]
# A product reads a virtual tensor as the type that it declares, half here. `genstats` reads what is stored.

# %%
seen = (x.double() * scale.double() + shift.double()).relu().half()
exact = torch.nn.functional.conv2d(seen.double(), weight.double(), padding=1, stride=2)
torch.testing.assert_close(y.double(), exact, rtol=2**-9, atol=2e-2)
torch.testing.assert_close(total.double(), y.double().sum((0, 2, 3), keepdim=True), rtol=1e-4, atol=1e-2)
torch.testing.assert_close(squares.double(), y.double().square().sum((0, 2, 3), keepdim=True), rtol=1e-4, atol=1e-2)
print("sums of channels agree with float64")

# %% [markdown]
# ## Gradients
#
# Images of several sizes have a result of one size, and so have weights: `set_dim` says which it was.

# %%
loss = channels_last(*reference.shape)
graph = new()
X, WEIGHT, LOSS = (graph.tensor_like(t) for t in (x, weight, loss))
DX = graph.conv_dgrad(loss=LOSS, filter=WEIGHT, **WINDOW).set_dim(x.shape).set_output(True)
DW = graph.conv_wgrad(image=X, loss=LOSS, **WINDOW).set_dim(weight.shape).set_output(True)
dx, dw = channels_last(*x.shape), channels_last(*weight.shape)
run(graph, {X: x, WEIGHT: weight, LOSS: loss, DX: dx, DW: dw})

leaves = [t.double().requires_grad_() for t in (x, weight)]
made = torch.nn.functional.conv2d(*leaves, padding=1, stride=2)
of_x, of_weight = torch.autograd.grad(made, leaves, loss.double())
torch.testing.assert_close(dx.double(), of_x, rtol=2**-9, atol=2e-2)
torch.testing.assert_close(dw.double(), of_weight, rtol=2**-9, atol=2e-2)
print("both gradients agree with float64")

# %% [markdown]
# `differentiate` draws the same nodes of a forward graph, with the gradients of all else that is in it.

# %%
graph = new()
X, WEIGHT = graph.tensor_like(x, name="x"), graph.tensor_like(weight, name="weight")
graph.swish(graph.conv_fprop(image=X, weight=WEIGHT, **WINDOW)).set_output(True).set_name("y")
both = cudnn.differentiate(graph, ["y"], ["x", "weight"])
print("backward:", ", ".join(node.op.name for node in both.backward.nodes))

# %% [markdown]
# ## Integers
#
# With INT32 as the compute type, products and sums of INT8 are exact.

# %%
image, taps = (torch.randint(-128, 128, t.shape, dtype=torch.int8, device=device) for t in (x, weight))
INT8, INT32 = cudnn.data_type.INT8, cudnn.data_type.INT32
graph = new(io_data_type=INT8, intermediate_data_type=INT32, compute_data_type=INT32)
X, WEIGHT = graph.tensor_like(image), graph.tensor_like(taps)
Y = graph.identity(graph.conv_fprop(image=X, weight=WEIGHT, **WINDOW)).set_output(True).set_data_type(INT32)
y = torch.empty(reference.shape, device=device, dtype=torch.int32).to(memory_format=torch.channels_last)
run(graph, {X: image, WEIGHT: taps, Y: y})
assert torch.equal(y.double(), torch.nn.functional.conv2d(image.double(), taps.double(), padding=1, stride=2))
print("integers are exact")

# %%
cudnn.destroy_handle(handle)
