# %% [markdown]
# # Ahead of time
#
# A graph can be planned and compiled for a chip that is not in this machine. Its figures are enough: device properties,
# which the other machine writes down as text, or which are published. Compiled kernels can also be kept in a cache of
# one's own, apart from any graph.

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


def norm(rows=300, **settings) -> cudnn.pygraph:
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        **settings,
    )
    y, _ = graph.rmsnorm(
        input=graph.tensor([rows, 384], name="x"),
        scale=graph.tensor_like(weight, name="weight"),
        epsilon=1e-5,
        norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
    )
    y.set_output(True).set_name("y")
    graph.build([cudnn.heur_mode.OPENSOURCE])
    return graph


def check(graph: cudnn.pygraph) -> None:
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    graph.execute({"x": x, "weight": weight, "y": out.zero_()}, workspace, handle=handle)
    torch.testing.assert_close(out.double(), exact, rtol=2**-10, atol=2**-24)


# %% [markdown]
# ## Device properties
#
# `create_device_properties` takes the number of a device, the name of an architecture, or the text that `serialize`
# wrote. `sm_version` is shorter, where published figures will do.

# %%
text = cudnn.create_device_properties("sm_100a").serialize()
print(text)
there = norm(device_property=cudnn.create_device_properties(text))
data = there.serialize()
print(f"planned for {there.device.arch}, not loaded: {len(data)} bytes with {there.get_plan_name_at_index(0)}")
assert norm(sm_version=100).device.arch == there.device.arch

# %% [markdown]
# What was made for another chip is refused here. What was made for a chip like this one runs, and compiles nothing.

# %%
if handle.device.sm != 100:
    try:
        cudnn.pygraph().deserialize(handle, data)
    except cudnn.SerializedError as error:
        print(error)
if device == "cuda":
    mine = norm(device_property=cudnn.create_device_properties(handle.device.ordinal))
    check(cudnn.pygraph().deserialize(handle, mine.serialize(), enforce_precompiled=True))
    print("compiled ahead for the device that is here, and run")

# %% [markdown]
# ## A kernel cache
#
# Graphs that are built with a kernel cache take their kernels from it, and put those there that they compile. No kernel
# has a number of rows in it, so graphs of several sizes share one.

# %%
cache = cudnn.create_kernel_cache()
for rows in (300, 301):
    norm(rows, handle=handle, kernel_cache=cache)
print(f"{cache.size()} kernel, of two graphs")
text = cache.serialize()

cache = cudnn.create_kernel_cache()  # in another process
cache.deserialize(text)
before = cache.revision()
check(norm(handle=handle, kernel_cache=cache))
assert cache.revision() == before
print("run with the kernels of the text")

# %%
cudnn.destroy_handle(handle)
