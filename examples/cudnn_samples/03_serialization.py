# %% [markdown]
# # Serialization
#
# `serialize` makes bytes of a graph, its built plans and the machine code of their kernels. `deserialize` runs them in
# another process, which plans and compiles nothing.

# %%
import tempfile
from pathlib import Path

import torch

import graphfuse as cudnn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
handle = cudnn.create_handle() if device == "cuda" else cudnn.create_handle("emulator")
print(f"runs on {handle.device} ({handle.device.name})")

x = torch.randn(200, 320, device=device, dtype=torch.bfloat16)
weight = torch.rand(1, 320, device=device, dtype=torch.bfloat16) + 0.5

# %% [markdown]
# Whoever reads the data has not the tensor objects of this script. So tensors are known by uid.

# %%
UID_X, UID_WEIGHT, UID_Y = 1, 2, 3

graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    handle=handle,
)
X = graph.tensor_like(x).set_uid(UID_X)
W = graph.tensor_like(weight).set_uid(UID_WEIGHT)
normalized, _ = graph.rmsnorm(
    input=X,
    scale=W,
    epsilon=1e-6,
    norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
)
graph.swish(input=normalized).set_output(True).set_uid(UID_Y)

graph.validate()
graph.build_operation_graph()
graph.create_execution_plans([cudnn.heur_mode.A])
graph.check_support()
graph.build_plans()
data = graph.serialize()

path = Path(tempfile.mkdtemp()) / "norm.plan"
path.write_bytes(data)
print(f"{path.name}: {len(data)} bytes; without kernels: {len(graph.serialize(include_kernels=False))}")

# %% [markdown]
# ## Reading it
#
# The graph that reads has to be empty. Its handle says where it runs: a device of the same architecture. cuDNN's
# order, `deserialize(handle, data)`, is accepted, too.

# %%
again = cudnn.pygraph(handle=handle).deserialize(path.read_bytes())
out = torch.empty_like(x)
workspace = torch.empty(again.get_workspace_size(), device=device, dtype=torch.uint8)
again.execute({UID_X: x, UID_WEIGHT: weight, UID_Y: out}, workspace, handle=handle)

norm64 = torch.nn.functional.rms_norm(x.double(), (320,), weight[0].double(), 1e-6)
torch.testing.assert_close(out.double(), torch.nn.functional.silu(norm64), rtol=2**-8, atol=1e-30)
assert again.get_plan_name_at_index(0) == graph.get_plan_name_at_index(0)
print(f"read again, it runs {again.get_plan_name_at_index(0)} and agrees with float64")

# %% [markdown]
# Data for a device that is not here is written by `graphfuse compile --arch sm_100a --output FILE`.

# %% [markdown]
# ## Whom to trust
#
# A digest tells damage. It does not tell who made the data, and the machine code in it is run. With a secret `key`,
# only data that was made with it is accepted.

# %%
secret = b"of this service alone"
signed = graph.serialize(key=secret)
cudnn.pygraph(handle=handle).deserialize(signed, key=secret)

damaged = data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]
for what, given, key in (("damaged", damaged, None), ("unsigned", data, secret), ("another key", signed, b"another")):
    try:
        cudnn.pygraph(handle=handle).deserialize(given, key=key)
    except cudnn.SerializedError as error:
        print(f"{what}: {error}")
    else:
        raise AssertionError(f"{what} was accepted")

# %% [markdown]
# ## The graph alone
#
# `to_json` has no plans and no device: a graph to keep beside a model, or to send with a question.

# %%
same = cudnn.pygraph.from_json(graph.to_json(), handle=handle)
assert same.key() == graph.key()
print(f"the JSON has {len(graph.to_json())} characters")

# %%
path.unlink()
path.parent.rmdir()
cudnn.destroy_handle(handle)
