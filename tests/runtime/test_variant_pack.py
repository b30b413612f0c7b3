import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from graphfuse.base.device import CPU, for_arch
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import VariantPackError, VariantPackTypeError, WorkspaceError
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, Node, packed_stride
from graphfuse.runtime.variant_pack import Binder

pytestmark = pytest.mark.torch

GPU = for_arch("sm_90a")
BF16, FP32 = data_type.BFLOAT16, data_type.FLOAT


def tensor(id: int, dim=(1, 4, 8), dtype=FP32, stride=None, **properties) -> FrozenTensor:
    """Tensor 0, 1, 2, ... is called a, b, c, ... and has uid 100, 101, 102, ..."""
    properties = {"name": "abcdefgh"[id], "alignment": 4, **properties}
    return FrozenTensor(id, 100 + id, dtype=dtype, dim=dim, stride=stride or packed_stride(dim), **properties)


def graph(*tensors: FrozenTensor) -> FrozenGraph:
    """One node that reads all tensors but the last and writes the last."""
    *inputs, output = (t.id for t in tensors)
    ports = tuple((f"in{i}", i) for i in inputs)
    return FrozenGraph("g", tensors, (Node("n", "add", ports, (("output", output),)),))


ADD = graph(tensor(0), tensor(1), tensor(2))
COPY = graph(tensor(0), tensor(1))


def bind(graph, pack, workspace, workspace_bytes, device, in_place=frozenset(), placed=None):
    return Binder(graph, device, workspace_bytes, in_place, placed).bind(pack, workspace)


def arrays(count: int, shape=(4, 8)) -> list[torch.Tensor]:
    return [torch.zeros(shape) for _ in range(count)]


def copy(t: FrozenTensor, value: object, device=CPU):
    """Bind `value` as the one input of a graph whose input is t."""
    return bind(graph(t, tensor(1, name="out")), {100: value, 101: 1 << 40}, None, 0, device)


class Key:
    def __init__(self, uid):
        self.uid = uid

    def get_uid(self):
        return self.uid


def test_keys_are_uids_names_or_tensors():
    a, b, c = arrays(3)
    found = bind(ADD, {100: a, "b": b, Key(102): c}, None, 0, CPU)
    assert [found.address(i) for i in range(3)] == [t.data_ptr() for t in (a, b, c)]
    assert found.workspace == 0


def test_missing_and_unknown_entries_are_listed_with_what_is_accepted():
    g = FrozenGraph(
        "g",
        (tensor(0), tensor(1, virtual=True), tensor(2), tensor(3, by_value=True, value=2.0, dim=(1, 1, 1)), tensor(4)),
        (
            Node("n", "add", (("a", 0), ("b", 3)), (("output", 1),)),
            Node("m", "add", (("a", 1), ("b", 0)), (("output", 2),)),
        ),
    )
    with pytest.raises(VariantPackError) as error:
        bind(g, {"a": 64, "b": 64, 103: 1.0, 104: 64, "zzz": 64, 999: 64}, None, 0, CPU)
    message = str(error.value)
    assert "missing: 'c' (uid 102)" in message
    assert "'b' (a virtual tensor has no memory of the caller's)" in message
    assert "103 (its value is part of the graph)" in message
    assert "'zzz', 999" in message and "104" not in message
    assert "accepted, by uid or name: 'a' (uid 100), 'c' (uid 102)" in message


@pytest.mark.parametrize("twice", ["a", Key(100)])
def test_two_entries_for_one_tensor(twice):
    a, b, c = arrays(3)
    with pytest.raises(VariantPackError, match="tensor 'a' .*two entries"):
        bind(ADD, {100: a, 101: b, 102: c, twice: a}, None, 0, CPU)


def test_a_name_that_two_tensors_have():
    twins = graph(tensor(0, name="x"), tensor(1, name="x"), tensor(2))
    a, b, c = arrays(3)
    with pytest.raises(VariantPackError, match="'x' names 2 tensors; accepted: their uids 100, 101"):
        bind(twins, {"x": a, 101: b, 102: c}, None, 0, CPU)
    assert bind(twins, {100: a, 101: b, "c": c}, None, 0, CPU).address(1) == b.data_ptr()


def test_what_stands_under_none_is_skipped():
    a, b, c = arrays(3)
    assert bind(ADD, {None: "anything", 100: a, 101: b, 102: c}, None, 0, CPU).address(2) == c.data_ptr()
    with pytest.raises(VariantPackError, match="missing: 'c'"):
        bind(ADD, {None: c, 100: a, 101: b}, None, 0, CPU)


@pytest.mark.parametrize("pack", [[1, 2], None, {1.5: 0}, {True: 0}, {(1,): 0}])
def test_packs_and_keys_of_the_wrong_type(pack):
    with pytest.raises(VariantPackTypeError, match="variant pack"):
        bind(ADD, pack, None, 0, CPU)


def test_the_tensor_is_named_when_its_value_is_no_buffer():
    with pytest.raises(VariantPackTypeError, match=r"tensor 'a' \(FLOAT \[1, 4, 8\].*str is not a buffer; accepted"):
        copy(tensor(0), "text")


# Data types


def test_a_wrong_data_type():
    with pytest.raises(VariantPackTypeError, match="tensor 'a'.*given is HALF; accepted: FLOAT$"):
        copy(tensor(0), torch.zeros(4, 8, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP8_E8M0])
def test_bytes_serve_for_eight_bit_floats(dtype):
    t = tensor(0, dtype=dtype)
    for given_type in (torch.uint8, getattr(torch, dtype.facts.torch)):
        array = torch.zeros(4, 8, dtype=torch.uint8).view(given_type)
        assert copy(t, array).address(0) == array.data_ptr()
    with pytest.raises(VariantPackTypeError, match=f"given is INT8; accepted: {dtype.name} or UINT8"):
        copy(t, torch.zeros(4, 8, dtype=torch.int8))


def test_bytes_do_not_serve_for_other_types():
    with pytest.raises(VariantPackTypeError, match="given is UINT8; accepted: INT8$"):
        copy(tensor(0, dtype=data_type.INT8), np.zeros((4, 8), np.uint8))


@pytest.mark.parametrize("given_type", [torch.uint8, torch.float4_e2m1fn_x2])
def test_fp4_is_given_as_pairs(given_type):
    t = tensor(0, dim=(4, 32), dtype=data_type.FP4_E2M1, stride=(48, 1))
    rows = torch.zeros(4, 24, dtype=torch.uint8)[:, :16].view(given_type)
    assert copy(t, rows).address(0) == rows.data_ptr()
    with pytest.raises(VariantPackError, match=r"shape given is \[4, 32\]; accepted: \[4, 16\] bytes of two values"):
        copy(t, torch.zeros(4, 32, dtype=torch.uint8).view(given_type))
    with pytest.raises(VariantPackError, match=r"stride given is \[16, 1\].*accepted: \[24, 1\] for \[4, 16\] bytes"):
        copy(t, torch.zeros(4, 16, dtype=torch.uint8).view(given_type))


@pytest.mark.parametrize(
    ("t", "count"),
    [
        (tensor(0, dim=(4, 32, 1), dtype=data_type.FP4_E2M1), 64),
        (tensor(0, dim=(4, 32), stride=(1, 4), dtype=data_type.FP4_E2M1), 64),
        (tensor(0, dim=(4, 32), stride=(48, 1), dtype=data_type.FP4_E2M1), 88),  # gaps are bytes like others
        (tensor(0, dim=(4, 8), dtype=data_type.FP8_E4M3), 32),
        (tensor(0, dim=(4, 2), dtype=data_type.FP8_E8M0), 8),
        (tensor(0, dim=(0, 32), dtype=data_type.FP4_E2M1), 0),
    ],
    ids=str,
)
def test_bytes_in_one_row_serve_for_narrow_types(t, count):
    for row in (torch.zeros(count, dtype=torch.uint8), np.zeros(count, np.uint8)):
        address = row.data_ptr() if isinstance(row, torch.Tensor) else row.ctypes.data
        assert copy(t, row).address(0) == address
    accepted = rf"shape given is \[{count + 1}\]; accepted: .*, or {count} bytes \(UINT8\) in one row$"
    with pytest.raises(VariantPackError, match=accepted):
        copy(t, torch.zeros(count + 1, dtype=torch.uint8))


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(128, dtype=torch.uint8)[::2],  # not side by side
        torch.zeros(2, 32, dtype=torch.uint8),  # a shape, and another one
        torch.zeros(64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),  # says that it is no plain bytes
    ],
    ids=["apart", "shape", "pairs"],
)
def test_other_bytes_have_the_tensors_shape(given):
    with pytest.raises(VariantPackError, match=r"shape given is .*; accepted: \[4, 16\] bytes.* or 64 bytes"):
        copy(tensor(0, dim=(4, 32), dtype=data_type.FP4_E2M1), given)


def test_types_that_are_no_bytes_have_no_other_shape():
    for dtype, row in ((FP32, torch.zeros(32)), (data_type.UINT8, torch.zeros(32, dtype=torch.uint8))):
        with pytest.raises(VariantPackError, match=r"accepted: \[4, 8\], axes of extent 1 aside$"):
            copy(tensor(0, dim=(4, 8), dtype=dtype), row)


def test_unpacked_fp4_is_refused():
    with pytest.raises(VariantPackTypeError, match="two values a byte as uint8"):
        copy(tensor(0, dim=(4, 32), dtype=data_type.FP4_E2M1), np.zeros((4, 16), ml_dtypes.float4_e2m1fn))


# Shapes and strides


@pytest.mark.parametrize("shape", [(4, 8), (1, 4, 8), (4, 1, 8, 1), (1, 1, 4, 8)])
def test_axes_of_one_do_not_count(shape):
    array = torch.zeros(shape)
    assert copy(tensor(0), array).address(0) == array.data_ptr()


@pytest.mark.parametrize("shape", [(8, 4), (32,), (4, 9), (4, 8, 2), ()])
def test_a_wrong_shape(shape):
    with pytest.raises(VariantPackError, match=r"tensor 'a'.*shape given is .*; accepted: \[1, 4, 8\]") as error:
        copy(tensor(0), torch.zeros(shape))
    assert str(list(shape)) in str(error.value)


def test_a_wrong_stride():
    with pytest.raises(VariantPackError, match=r"stride given is \[1, 4\] for shape \[4, 8\]; accepted: \[32, 8, 1\]"):
        copy(tensor(0), torch.zeros(8, 4).t())


@st.composite
def strided(draw) -> np.ndarray:
    """An array that slicing, transposing and new axes made."""
    rank = draw(st.integers(1, 4))
    array = np.zeros(draw(st.tuples(*[st.integers(1, 5)] * rank)), draw(st.sampled_from(["float32", "float16"])))
    index = tuple(slice(draw(st.integers(0, n - 1)), None, draw(st.integers(1, 3))) for n in array.shape)
    array = array[index].transpose(draw(st.permutations(range(rank))))
    for _ in range(draw(st.integers(0, 2))):
        array = np.expand_dims(array, draw(st.integers(0, array.ndim)))
    return array


@given(strided(), st.data())
def test_a_tensor_declared_as_the_array_is_accepts_it_and_its_squeezed_and_expanded_forms(array, data):
    dtype = FP32 if array.itemsize == 4 else data_type.HALF
    stride = tuple(s // array.itemsize for s in array.strides)
    t = tensor(0, dim=array.shape, stride=stride, dtype=dtype, alignment=1)
    axis = data.draw(st.integers(0, array.ndim))
    for form in (array, array.squeeze(), np.expand_dims(array, axis)):
        assert copy(t, form).address(0) == array.__array_interface__["data"][0]


@given(strided(), st.data())
def test_one_changed_stride_or_extent_is_refused(array, data):
    dtype = FP32 if array.itemsize == 4 else data_type.HALF
    axes = [a for a, n in enumerate(array.shape) if n > 1]
    assume(axes)
    axis = data.draw(st.sampled_from(axes))
    dim, stride = list(array.shape), [s // array.itemsize for s in array.strides]
    changed = data.draw(st.sampled_from([dim, stride]))
    changed[axis] += 1
    t = tensor(0, dim=tuple(dim), stride=tuple(stride), dtype=dtype, alignment=1)
    with pytest.raises(VariantPackError, match="shape given" if changed is dim else "stride given"):
        copy(t, array)


# Addresses, devices


def test_an_address_less_aligned_than_declared():
    whole = torch.zeros(64)
    start = (-whole.data_ptr() // 4) % 4 + 1  # one element past a 16-byte boundary
    with pytest.raises(VariantPackError, match="is a multiple of 4 bytes; accepted: a multiple of 16"):
        copy(tensor(0, alignment=16), whole[start : start + 32].view(4, 8))
    with pytest.raises(VariantPackError, match="is a multiple of 8 bytes"):
        copy(tensor(0, alignment=16), 0x1008)
    assert copy(tensor(0, alignment=16), 0x1010).address(0) == 0x1010


@pytest.mark.parametrize("null", [None, 0])
def test_null_is_for_tensors_without_elements(null):
    with pytest.raises(VariantPackError, match="tensor 'a'.*null; accepted: memory for 32 elements"):
        copy(tensor(0), null)
    assert copy(tensor(0, dim=(0, 8)), null).address(0) == 0


def test_a_tensor_without_elements_takes_anything_of_its_shape():
    t = tensor(0, dim=(0, 8), alignment=16)
    copy(t, torch.zeros(0, 8))
    copy(t, torch.zeros(8, 0).t())
    copy(t, torch.zeros(0, 8), device=GPU)
    copy(t, 3)
    with pytest.raises(VariantPackError, match=r"shape given is \[0, 9\]"):
        copy(t, torch.zeros(0, 9))


def test_memory_on_another_device():
    with pytest.raises(VariantPackError, match="tensor 'a'.*is on cpu; accepted: cuda:0, where the graph runs"):
        copy(tensor(0), torch.zeros(4, 8), device=GPU)
    with pytest.raises(VariantPackError, match="is on meta; accepted: cpu"):
        copy(tensor(0), torch.zeros(4, 8, device="meta"))


def test_read_only_memory_is_for_inputs():
    array = np.zeros((4, 8), np.float32)
    frozen = np.zeros((4, 8), np.float32)
    frozen.flags.writeable = False
    bind(COPY, {100: frozen, 101: array}, None, 0, CPU)
    with pytest.raises(VariantPackError, match="tensor 'b'.*read-only"):
        bind(COPY, {100: array, 101: frozen}, None, 0, CPU)


# By value

SCALE = graph(tensor(0), tensor(1, dim=(1, 1, 1), by_value=True), tensor(2))


@pytest.mark.parametrize("value", [0.5, np.float16(0.5), np.array([0.5]), torch.tensor([[0.5]], dtype=torch.bfloat16)])
def test_values(value):
    a, c = arrays(2)
    found = bind(SCALE, {100: a, 101: value, 102: c}, None, 0, CPU)
    assert found.scalar(1) == 0.5


def test_a_value_of_the_graph_needs_no_entry():
    a, c = arrays(2)
    constant = graph(tensor(0), tensor(1, dim=(1, 1, 1), by_value=True, value=0.25), tensor(2))
    assert bind(constant, {100: a, 102: c}, None, 0, CPU).scalar(1) == 0.25


def test_what_is_no_value_names_the_tensor():
    a, c = arrays(2)
    with pytest.raises(VariantPackTypeError, match="tensor 'b'.*str is not a number"):
        bind(SCALE, {100: a, 101: "half", 102: c}, None, 0, CPU)
    with pytest.raises(VariantPackError, match="tensor 'b'.*2 elements"):
        bind(SCALE, {100: a, 101: torch.zeros(2), 102: c}, None, 0, CPU)


# Workspace


def aligned(nbytes: int, to: int = 256) -> torch.Tensor:
    whole = torch.zeros(nbytes + to, dtype=torch.uint8)
    start = -whole.data_ptr() % to
    return whole[start : start + nbytes]


def work(workspace, needed=1024, device=CPU, **more):
    return bind(COPY, {100: 1 << 40, 101: 1 << 41}, workspace, needed, device, **more)


def as_square(space: torch.Tensor) -> torch.Tensor:
    return space.view(torch.float32).view(16, 16)


@pytest.mark.parametrize("make", [torch.Tensor.detach, torch.Tensor.numpy, as_square, torch.Tensor.data_ptr])
def test_workspaces_of_every_form(make):
    space = aligned(1024)
    found = work(make(space), placed={5: 256})
    assert found.workspace == space.data_ptr() and found.address(5) == space.data_ptr() + 256


@pytest.mark.parametrize("workspace", [None, 0, 3, torch.zeros(0), torch.zeros(1, device="meta")])
def test_any_workspace_will_do_where_none_is_needed(workspace):
    work(workspace, 0, GPU)


def test_a_missing_workspace():
    with pytest.raises(WorkspaceError, match="no workspace was given; accepted: 1024 bytes on cpu"):
        work(None)
    with pytest.raises(WorkspaceError, match="null address"):
        work(0)


def test_a_small_workspace():
    with pytest.raises(WorkspaceError, match="has 1023 bytes; accepted: at least 1024"):
        work(aligned(1024)[:1023])


@pytest.mark.parametrize("device, offset, accepted", [(GPU, 128, 256), (GPU, 16, 256), (CPU, 8, 16)])
def test_a_misaligned_workspace(device, offset, accepted):
    with pytest.raises(WorkspaceError, match=f"is a multiple of {offset} bytes; accepted: a multiple of {accepted}"):
        work((1 << 42) + offset, device=device)


def test_a_workspace_on_another_device():
    with pytest.raises(WorkspaceError, match="is on cpu; accepted: cuda:0"):
        work(aligned(1024), device=GPU)


def test_a_workspace_with_holes():
    with pytest.raises(WorkspaceError, match="accepted: dense memory"):
        work(aligned(4096).view(64, 64)[:, :32])


def test_a_read_only_workspace():
    space = aligned(1024).numpy()
    space.flags.writeable = False
    with pytest.raises(WorkspaceError, match="read-only"):
        work(space)


def test_a_workspace_that_is_no_buffer():
    with pytest.raises(VariantPackTypeError, match="workspace: str is not a buffer"):
        work("room", 0)


def test_tensors_with_a_place_in_the_workspace():
    g = graph(tensor(0), tensor(1, workspace=512))
    space = aligned(1024)
    found = bind(g, {100: 1 << 40}, space, 1024, CPU)
    assert found.address(1) == space.data_ptr() + 512


# Overlaps


def test_an_output_over_an_input():
    (a, _) = arrays(2)
    with pytest.raises(VariantPackError, match="output tensor 'b'.*overlaps tensor 'a'.*accepted: memory of its own$"):
        bind(COPY, {100: a, 101: a}, None, 0, CPU)


def test_two_inputs_may_be_one():
    a, c = arrays(2)
    assert bind(ADD, {100: a, 101: a, 102: c}, None, 0, CPU).address(1) == a.data_ptr()


def test_in_place_where_it_is_safe_and_the_same_memory():
    whole = torch.zeros(5, 8)
    safe = frozenset({(0, 1)})
    bind(COPY, {100: whole[:4], 101: whole[:4]}, None, 0, CPU, safe)
    with pytest.raises(VariantPackError, match="or exactly that tensor's with the same data type, shape and stride"):
        bind(COPY, {100: whole[:4], 101: whole[1:]}, None, 0, CPU, safe)
    with pytest.raises(VariantPackError, match="output tensor 'b'"):
        bind(COPY, {100: whole[:4], 101: whole[:4]}, None, 0, CPU, frozenset({(1, 0)}))


def test_in_place_does_not_look_at_strides_of_single_positions():
    g = graph(tensor(0, dim=(1, 8), stride=(8, 1)), tensor(1, dim=(1, 8), stride=(1, 1)))
    bind(g, {100: 1 << 40, 101: 1 << 40}, None, 0, CPU, frozenset({(0, 1)}))


@pytest.mark.parametrize(
    "other", [{"dtype": data_type.INT32}, {"dim": (1, 8, 4)}, {"dim": (1, 4, 4), "stride": (32, 8, 1)}]
)
def test_in_place_needs_identical_tensors(other):
    g = graph(tensor(0), tensor(1, **other))
    with pytest.raises(VariantPackError, match="exactly that tensor's"):
        bind(g, {100: 1 << 40, 101: 1 << 40}, None, 0, CPU, frozenset({(0, 1)}))


def test_outputs_over_each_other():
    g = FrozenGraph(
        "g",
        (tensor(0), tensor(1), tensor(2)),
        (Node("n", "add", (("a", 0),), (("output", 1),)), Node("m", "add", (("a", 0),), (("output", 2),))),
    )
    a, b = arrays(2)
    with pytest.raises(VariantPackError, match="output tensor 'c'.*overlaps tensor 'b'"):
        bind(g, {100: a, 101: b, 102: b}, None, 0, CPU)


def test_column_slices_of_one_buffer_are_separate():
    t = (1, 4, 8), FP32, (64, 16, 1)
    g = graph(tensor(0, *t), tensor(1, *t))
    whole = torch.zeros(4, 16)
    bind(g, {100: whole[:, :8], 101: whole[:, 8:]}, None, 0, CPU)
    with pytest.raises(VariantPackError, match="overlaps"):
        bind(g, {100: whole[:, :8], 101: whole[:, 7:15]}, None, 0, CPU)


def test_addresses_alone_are_checked_by_what_is_declared():
    with pytest.raises(VariantPackError, match="overlaps"):
        bind(COPY, {100: 4096, 101: 4096 + 124}, None, 0, CPU)
    bind(COPY, {100: 4096, 101: 4096 + 128}, None, 0, CPU)


@pytest.mark.parametrize("name, shift", [("a", 0), ("a", 1020), ("b", 1020), ("b", -124)])
def test_nothing_overlaps_the_workspace(name, shift):
    addresses = {"a": 1 << 40, "b": 1 << 41, name: (1 << 42) + shift}
    with pytest.raises(WorkspaceError, match=f"the workspace overlaps tensor '{name}'"):
        bind(COPY, addresses, 1 << 42, 1024, CPU)
    beside = {**addresses, name: (1 << 42) + (1024 if shift >= 0 else -128)}
    assert bind(COPY, beside, 1 << 42, 1024, CPU).workspace == 1 << 42


def test_tensors_without_elements_overlap_nothing():
    empty = graph(tensor(0, dim=(0, 8)), tensor(1, dim=(0, 8)))
    bind(empty, {100: 4096, 101: 4096}, 4096, 1024, CPU)


@pytest.mark.gpu
def test_mixed_devices_on_a_gpu():
    from graphfuse.runtime import device

    a, b = (torch.zeros(4, 8, device="cuda:0") for _ in range(2))
    found = bind(COPY, {100: a, 101: b}, None, 0, device.get("cuda:0"))
    assert found.address(1) == b.data_ptr()
    with pytest.raises(VariantPackError, match="tensor 'b'.*is on cpu; accepted: cuda:0"):
        bind(COPY, {100: a, 101: b.cpu()}, None, 0, device.get("cuda:0"))
    if device.count() > 1:
        with pytest.raises(VariantPackError, match="is on cuda:1; accepted: cuda:0"):
            bind(COPY, {100: a, 101: b.to("cuda:1")}, None, 0, device.get("cuda:0"))
