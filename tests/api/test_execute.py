"""execute: what it accepts as keys and values, and that whatever is wrong is refused before anything is written."""

import re

import numpy as np
import pytest
import torch

import graphfuse
from graphfuse import VariantPackError, VariantPackTypeError, WorkspaceError, heur_mode, norm_forward_phase
from support import graphs
from support.graphs import BF16, E4M3, FP4, Norm

pytestmark = pytest.mark.torch

CASE = Norm(rows=6, columns=32, bias=BF16, eps=None, training=True)
UNTOUCHED = 0xA5


@pytest.fixture
def built():
    g = CASE.graph()
    g.build([heur_mode.FALLBACK])
    return g


def pack() -> dict:
    outputs = CASE.outputs()
    outputs["inverse_rms"].view(torch.uint8).fill_(UNTOUCHED)
    return CASE.inputs() | outputs


def renamed(values: dict, g, how) -> dict:
    return {how(next(t for t in g.tensors if t.get_name() == name)): v for name, v in values.items()}


@pytest.mark.parametrize(
    "how", [lambda t: t, lambda t: t.get_uid(), lambda t: t.get_name()], ids=["tensor", "uid", "name"]
)
def test_keys(built, how):
    values = pack()
    built.execute(renamed(values, built, how))
    assert (values["out"].double() - CASE.exact(values)["out"]).abs().max() < 0.05


def test_an_optional_tensor_that_is_none_is_no_key(built):
    """As cuDNN's scripts write packs for graphs with and without a bias; again and again, and bound."""
    values = pack()
    for _ in range(3):
        values["out"].fill_(0)
        built.execute({None: bf16(1), **values})
        assert (values["out"].double() - CASE.exact(values)["out"]).abs().max() < 0.05
    values["out"].fill_(0)
    built.bind({**values, None: None})()
    assert (values["out"].double() - CASE.exact(values)["out"]).abs().max() < 0.05


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=pytest.mark.emulate)])
def test_fp4_into_a_row_of_bytes(device):
    """As the cuDNN frontend's sample for RMSNorm and SiLU allocates it: N * C / 2 bytes for [N, C, 1, 1]."""
    case = Norm(rows=24, columns=64, output=FP4)
    n, c = case.rows, case.columns
    given, outs = case.inputs(), []
    for shape in ((n * c // 2,), (n, c // 2, 1, 1)):
        g = graphs.new(device=device)
        x, w = g.tensor([n, c, 1, 1], data_type=BF16), g.tensor([1, c, 1, 1], data_type=BF16)
        y = g.rmsnorm(x, w, 1e-5, norm_forward_phase=graphfuse.norm_forward_phase.INFERENCE)[0]
        z = g.swish(y).set_output().set_data_type(FP4)
        g.build([heur_mode.OPENSOURCE if device == "emulator" else heur_mode.A])
        outs.append(torch.full(shape, UNTOUCHED, dtype=torch.uint8))
        values = {x: given["x"].view(n, c, 1, 1), w: given["weight"].view(1, c, 1, 1), z: outs[-1]}
        workspace = graphs.workspace(g.get_workspace_size())
        for _ in range(2):  # the second is compared with the first
            g.execute(values, workspace)
    assert torch.equal(outs[0], outs[1].view(-1))
    scales = workspace[256 : 256 + n * c // 16].view(n, c // 16)
    graphs.hold(Norm(n, c, output=FP4, blocks=True), given, {"out": outs[0].view(n, c // 2), "block_scale": scales})


class Exported:
    """Nothing but DLPack."""

    def __init__(self, t):
        self.t = t

    def __dlpack__(self, **arguments):
        return self.t.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.t.__dlpack_device__()


VALUES = {
    "torch": lambda t: t,
    "address": lambda t: t.data_ptr(),
    "dlpack": Exported,
    "shape aside from ones": lambda t: t.view(1, *t.shape, 1),
    "numpy": lambda t: t.numpy() if t.dtype is torch.float32 else t,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values(built, value):
    plain, other = pack(), pack()
    built.execute(plain)
    built.execute({k: v if k == "epsilon" else value(v) for k, v in other.items()})
    assert torch.equal(plain["out"], other["out"]) and torch.equal(plain["inverse_rms"], other["inverse_rms"])


@pytest.mark.parametrize(
    "epsilon",
    [1e-5, np.float32(1e-5), torch.tensor(1e-5), torch.full((1, 1, 1, 1), 1e-5), np.full((1,), 1e-5)],
    ids=repr,
)
def test_numbers_by_value(built, epsilon):
    values = pack() | {"epsilon": epsilon}
    built.execute(values)
    assert (values["out"].double() - CASE.exact(values)["out"]).abs().max() < 0.05


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


# What replaces an entry -> (error, tensor named, what was given, what is accepted).
WRONG = {
    "shape": ({"x": bf16(6, 31)}, VariantPackError, "'x'", r"\[6, 31\]", r"\[6, 32\]"),
    "rank": ({"weight": bf16(32, 2)}, VariantPackError, "'weight'", r"\[32, 2\]", r"\[1, 32\]"),
    "transposed": ({"x": bf16(32, 6).t()}, VariantPackError, "'x'", r"\[1, 6\]", r"\[32, 1\]"),
    "row stride": ({"out": bf16(6, 40)[:, :32]}, VariantPackError, "'out'", r"\[40, 1\]", r"\[32, 1\]"),
    "data type": ({"x": torch.zeros(6, 32)}, VariantPackTypeError, "'x'", "FLOAT", "BFLOAT16"),
    "output data type": ({"out": torch.zeros(6, 32).half()}, VariantPackTypeError, "'out'", "HALF", "BFLOAT16"),
    "device": ({"x": torch.zeros(6, 32, dtype=torch.bfloat16, device="meta")}, VariantPackError, "'x'", "meta", "cpu"),
    "list": ({"x": [[0.0] * 32] * 6}, VariantPackTypeError, "'x'", "list", "torch tensor"),
    "text": ({"x": "x"}, VariantPackTypeError, "'x'", "str", "torch tensor"),
    "float for a tensor": ({"x": 1.0}, VariantPackTypeError, "'x'", "float", "address"),
    "null": ({"x": None}, VariantPackError, "'x'", "null", "memory"),
    "tensor for a number": ({"epsilon": torch.zeros(2)}, VariantPackError, "'epsilon'", "2 elements", "one"),
    "text for a number": ({"epsilon": "1e-5"}, VariantPackTypeError, "'epsilon'", "str", "number"),
    "huge number": ({"epsilon": 1e300}, VariantPackError, "'epsilon'", r"1e\+300", "float32"),
    "tensor of another graph": (
        {CASE.graph().tensors[0]: bf16(6, 32)},
        VariantPackError,
        "tensor 'x' uid=1.*not of graph 'graph'",
        "",
        "its tensors",
    ),
    "unaligned": (
        {"x": graphs.workspace(6 * 32 * 2 + 2).view(torch.bfloat16)[1:].view(6, 32)},
        VariantPackError,
        "'x'",
        "multiple of 2 bytes",
        "multiple of 16",
    ),
    "unaligned address": (
        {"weight": graphs.workspace(256).data_ptr() + 4},
        VariantPackError,
        "'weight'",
        "multiple of 4 bytes",
        "multiple of 16",
    ),
    "extra uid": ({12345: bf16(1)}, VariantPackError, "12345", "not accepted", "'x'"),
    "extra name": ({"y": bf16(1)}, VariantPackError, "'y'", "not accepted", "'x'"),
    "constant": ({"swish.0::swish_beta": 1.0}, VariantPackError, "swish.0::swish_beta", "not accepted", "'x'"),
    "virtual": ({"rmsnorm.0::Y": bf16(6, 32)}, VariantPackError, "rmsnorm.0::Y", "virtual", "'x'"),
    "key type": ({1.5: bf16(1)}, VariantPackTypeError, "1.5", "not a key", "uid, a name"),
}


@pytest.mark.parametrize(("change", "error", "tensor", "given", "accepted"), WRONG.values(), ids=WRONG)
def test_wrong_entries(built, change, error, tensor, given, accepted):
    refused(built, pack() | change, None, error, tensor, given, accepted)


@pytest.mark.parametrize("key", ["unused", 99, lambda t: t], ids=["name", "uid", "tensor"])
@pytest.mark.parametrize("value", [None, 7, "anything", torch.zeros(3)], ids=str)
def test_a_tensor_that_no_node_uses_is_let_pass(key, value):
    """As cuDNN does: an instance norm that is drawn without the scale that its script passes. Nothing reads the value,
    so nothing is asked of it, at the first call and at calls like it."""
    g = graphs.new(device="cpu")
    x, unused = g.tensor([2, 3, 4, 4], name="x"), g.tensor([1, 3, 1, 1], name="unused", uid=99)
    scale, bias = (g.tensor([1, 3, 1, 1], name=name) for name in ("scale", "bias"))
    y, *_ = g.instancenorm(x, scale, bias, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    y.set_output().set_name("y")
    g.build([heur_mode.FALLBACK])
    pack = {"x": torch.randn(2, 3, 4, 4), "scale": torch.rand(1, 3, 1, 1), "bias": torch.rand(1, 3, 1, 1)}
    exact = torch.nn.functional.instance_norm(pack["x"], weight=pack["scale"].flatten(), bias=pack["bias"].flatten())
    extra = {key(unused) if callable(key) else key: value}
    outs = [torch.empty(2, 3, 4, 4) for _ in range(3)]
    g.execute(pack | {"y": outs[0]} | extra)
    g.execute(pack | {"y": outs[1]} | extra)
    g.bind(pack | {"y": outs[2]} | extra)()
    for out in outs:
        torch.testing.assert_close(out, exact)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "epsilon", "out", "inverse_rms"])
def test_missing_entries(built, name):
    values = pack()
    del values[name]
    refused(built, values, None, VariantPackError, f"missing: '{name}'", "", "accepted")


def test_an_entry_by_two_keys(built):
    uid = built.tensors[0].get_uid()
    refused(built, pack() | {uid: bf16(6, 32)}, None, VariantPackError, "'x'", "two entries", "one")


@pytest.mark.parametrize("value", [None, [], 5])
def test_the_pack_must_be_a_mapping(built, value):
    with pytest.raises(VariantPackTypeError, match="mapping"):
        built.execute(value)


def aliases():
    values = pack()
    memory = torch.zeros(2 * 6 * 32, dtype=torch.bfloat16)
    yield (
        "output on weight",
        values | {"out": memory[:192].view(6, 32), "weight": memory[64:96].view(1, 32)},
        "'out'.*'weight'",
    )
    yield "partly", values | {"x": memory[:192].view(6, 32), "out": memory[96:288].view(6, 32)}, "'out'.*'x'"
    yield (
        "two outputs",
        values | {"inverse_rms": values["out"].view(-1)[:12].view(torch.float32).view(6, 1)},
        "'inverse_rms'.*'out'|'out'.*'inverse_rms'",
    )


@pytest.mark.parametrize(("values", "message"), [pytest.param(v, m, id=i) for i, v, m in aliases()])
def test_overlapping_outputs(built, values, message):
    with pytest.raises(VariantPackError, match=message) as caught:
        built.execute(values)
    assert "accepted: memory of its own" in str(caught.value)


def test_the_output_may_be_where_the_input_is(built):
    values = pack()
    apart = pack()
    built.execute(apart)
    built.execute(values | {"out": values["x"]})
    assert torch.equal(values["x"], apart["out"])


def test_inputs_may_share_memory_and_outputs_may_interleave(built):
    values = pack()
    values["bias"] = values["weight"]
    both = torch.zeros(6, 64, dtype=torch.bfloat16)
    case = Norm(rows=6, columns=32, input_stride=64, output_stride=64)
    g = case.graph()
    g.build([heur_mode.FALLBACK])
    both[:, :32] = values["x"]
    g.execute({"x": both[:, :32], "weight": values["weight"], "out": both[:, 32:]})
    built.execute(values)
    assert torch.equal(both[:, :32], values["x"])


def refused(g, values, workspace, error, *parts) -> None:
    outputs = [values[name] for name in ("out", "inverse_rms") if isinstance(values.get(name), torch.Tensor)]
    before = [t.clone() if t.device.type == "cpu" else None for t in outputs]
    with pytest.raises(error) as caught:
        g.execute(values, workspace)
    for part in parts:
        assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"
    for t, was in zip(outputs, before, strict=False):
        if was is not None:
            assert torch.equal(t.view(torch.uint8), was.view(torch.uint8)), "an output was written"


IMPLICIT = Norm(rows=6, columns=32, output=FP4)
NEED = 128 + 128 + 12


def unaligned():
    return graphs.workspace(NEED + 8)[8:]


WORKSPACES = {
    "missing": (lambda: None, WorkspaceError, str(NEED)),
    "too small": (lambda: graphs.workspace(NEED - 1), WorkspaceError, f"{NEED - 1} bytes.*{NEED}"),
    "empty": (lambda: torch.empty(0, dtype=torch.uint8), WorkspaceError, f"{NEED}"),
    "misaligned": (unaligned, WorkspaceError, "multiple of 8 bytes.*multiple of"),
    "null": (lambda: 0, WorkspaceError, "null"),
    "read-only": (lambda: readonly(graphs.workspace(NEED)), WorkspaceError, "read-only"),
    "gaps": (lambda: graphs.workspace(4 * NEED)[::2], WorkspaceError, "dense"),
    "text": (lambda: "workspace", VariantPackTypeError, "workspace: str"),
}


def readonly(t):
    array = t.numpy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(("make", "error", "message"), WORKSPACES.values(), ids=WORKSPACES)
def test_workspaces_that_are_refused(make, error, message):
    g = IMPLICIT.graph()
    g.build([heur_mode.FALLBACK])
    assert g.get_workspace_size() == NEED
    refused(g, IMPLICIT.inputs() | IMPLICIT.outputs(), make(), error, message)


def test_a_workspace_on_a_tensor_is_refused():
    g = IMPLICIT.graph()
    g.build([heur_mode.FALLBACK])
    memory = graphs.workspace(1024)
    out = memory[256:].view(torch.uint8)[: 6 * 16].view(6, 16)
    refused(g, IMPLICIT.inputs() | {"out": out}, memory, WorkspaceError, "overlaps tensor 'out'")


@pytest.mark.parametrize(
    "make",
    [lambda m: m, lambda m: m.data_ptr(), lambda m: m.numpy(), lambda m: m.view(torch.int32)],
    ids=["torch", "address", "numpy", "int32"],
)
def test_workspaces_that_are_accepted(make):
    g = IMPLICIT.graph()
    g.build([heur_mode.FALLBACK])
    memory, values = graphs.workspace(NEED), IMPLICIT.inputs() | IMPLICIT.outputs()
    g.execute(values, make(memory))
    assert (memory[256:] != 0xEE).any()


def test_bytes_stand_for_small_float_types():
    case = Norm(output=E4M3)
    values, bytes_ = case.inputs() | case.outputs(), torch.empty(12, 64, dtype=torch.uint8)
    graphs.run(case.graph(), values)
    graphs.run(case.graph(), values | {"out": bytes_})
    assert torch.equal(values["out"].view(torch.uint8), bytes_)


def test_an_empty_tensor_takes_any_address():
    case = Norm(rows=0)
    g = case.graph()
    g.build([heur_mode.FALLBACK])
    for empty in (0, 1, None, torch.empty(0, 64, dtype=torch.bfloat16)):
        g.execute(case.inputs() | {"x": empty, "out": empty})


def test_a_handle_of_another_device_is_refused(built):
    from graphfuse.base.device import Device
    from graphfuse.runtime.handle import Handle

    with pytest.raises(graphfuse.DeviceError, match="planned for cpu.*cuda:3"):
        built.execute(pack(), None, Handle(Device("cuda", 3)))


@pytest.mark.parametrize("value", [0, "cuda", object()])
def test_what_is_no_handle_is_refused(built, value):
    with pytest.raises(graphfuse.GraphTypeError, match="is not a handle; accepted: what create_handle returns"):
        built.execute(pack(), None, value)


@pytest.mark.parametrize(
    ("kind", "value"), [("INT32", 3.7), ("INT32", 2**31), ("HALF", 1e6), ("UINT8", torch.tensor(-1))]
)
def test_numbers_have_the_range_of_their_type(kind, value):
    g = graphs.new()
    factor = g.tensor([1], data_type=graphfuse.data_type[kind], is_pass_by_value=True, name="factor")
    g.mul(g.tensor([4], name="x"), factor).set_output().set_name("out")
    g.build([heur_mode.FALLBACK])
    with pytest.raises(VariantPackError, match="tensor 'factor'.*does not fit .*; accepted: "):
        g.execute({"x": torch.ones(4), "out": torch.ones(4), "factor": value})


def test_integer_outputs_round_and_saturate():
    g = graphs.new()
    x = g.tensor([4], name="x")
    for name in ("int8", "int32"):
        g.identity(x).set_output().set_data_type(name).set_name(name)
    made = {name: torch.zeros(4, dtype=getattr(torch, name)) for name in ("int8", "int32")}
    graphs.run(g, {"x": torch.tensor([300.0, 1.7, 2.5, float("nan")])} | made)
    assert made["int8"].tolist() == [127, 2, 2, 0] and made["int32"].tolist() == [300, 2, 2, 0]


def test_a_destroyed_handle_is_refused(built):
    handle = graphfuse.create_handle("cpu")
    graphfuse.destroy_handle(handle)
    with pytest.raises(graphfuse.GraphStateError, match="destroy"):
        built.execute(pack(), None, handle)
