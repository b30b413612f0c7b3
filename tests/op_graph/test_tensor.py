"""The tensor a user sets up: chaining, getters, uids, templates and refusals."""

import numpy as np
import pytest
import torch

import graphfuse
from graphfuse import GraphTypeError, GraphValidationError, data_type, heur_mode, tensor_reordering
from support import graphs

pytestmark = pytest.mark.torch

SETTINGS = [
    ("dim", [2, 3], [2, 3]),
    ("dim", (2, 0), [2, 0]),
    ("dim", torch.Size([4, 5]), [4, 5]),
    ("dim", np.array([4, 5]), [4, 5]),
    ("stride", [3, 1], [3, 1]),
    ("stride", [0, 0], [0, 0]),
    ("data_type", data_type.HALF, data_type.HALF),
    ("data_type", torch.bfloat16, data_type.BFLOAT16),
    ("data_type", torch.float8_e4m3fn, data_type.FP8_E4M3),
    ("data_type", np.dtype("float32"), data_type.FLOAT),
    ("name", "some name", "some name"),
    ("uid", 77, 77),
    ("is_virtual", True, True),
    ("is_pass_by_value", True, True),
    ("byte_alignment", 2, 2),
    ("reordering_type", tensor_reordering.F8_128x4, tensor_reordering.F8_128x4),
]


@pytest.mark.parametrize(("what", "value", "want"), SETTINGS)
def test_setters_chain_and_getters_tell(what, value, want):
    t = graphs.new().tensor([2, 3])
    assert getattr(t, f"set_{what}")(value) is t
    assert getattr(t, f"get_{what}")() == want


def test_set_output_is_the_opposite_of_virtual():
    t = graphs.new().tensor([2, 3])
    assert t.set_output(False).get_is_virtual() and not t.set_output().get_is_virtual()


WRONG = [
    ("dim", [2, -1], GraphValidationError),
    ("dim", [], GraphValidationError),
    ("dim", [2.0], GraphTypeError),
    ("dim", 5, GraphTypeError),
    ("stride", ["a"], GraphTypeError),
    ("stride", [-1, 1], GraphValidationError),
    ("data_type", "float7", GraphTypeError),
    ("data_type", torch.complex64, GraphTypeError),
    ("name", "", GraphTypeError),
    ("name", 3, GraphTypeError),
    ("uid", -1, GraphTypeError),
    ("uid", "1", GraphTypeError),
    ("uid", True, GraphTypeError),
    ("reordering_type", None, GraphTypeError),
    ("reordering_type", "F8_128x4", GraphTypeError),
    ("byte_alignment", 3, GraphValidationError),
    ("byte_alignment", 0, GraphValidationError),
]


@pytest.mark.parametrize(("what", "value", "error"), WRONG)
def test_setters_refuse(what, value, error):
    t = graphs.new().tensor([2, 3], name="mine")
    with pytest.raises(error) as caught:
        getattr(t, f"set_{what}")(value)
    assert repr(value) in str(caught.value)
    assert "'mine'" in str(caught.value)


def test_uids_are_unique_and_chosen_ones_stay():
    g = graphs.new()
    a = g.tensor([1], name="a", uid=5)
    free = [g.tensor([1]) for _ in range(8)]
    assert a.current_uid == 5
    assert len({t.current_uid for t in (a, *free)}) == 9
    with pytest.raises(GraphValidationError, match=r"'b'.*uid 5 belongs to tensor 'a'"):
        g.tensor([1], name="b", uid=5)
    taken = free[0].current_uid
    chosen = g.tensor([1], name="c", uid=taken)  # was given out by the graph, so it moves
    assert chosen.get_uid() == taken and free[0].get_uid() != taken
    assert len({t.get_uid() for t in (a, chosen, *free)}) == 10


def test_a_uid_that_was_told_stays():
    g = graphs.new()
    x = g.tensor([4], name="x")
    told = x.get_uid()
    y = g.relu(x).set_output().set_name("y")
    with pytest.raises(GraphValidationError, match=rf"'y'.*uid {told} belongs to tensor 'x'"):
        y.set_uid(told)
    assert x.get_uid() == told != y.get_uid()
    g.build([heur_mode.FALLBACK])
    given, out = -torch.ones(4), torch.full((4,), 7.0)
    g.execute({told: given, y.get_uid(): out})
    assert given.eq(-1).all() and out.eq(0).all()


def test_a_uid_that_was_told_is_free_when_its_tensor_chose_another():
    g = graphs.new()
    x, y, z = (g.tensor([4], name=name) for name in "xyz")
    told = x.get_uid()
    x.set_uid(100)
    assert y.set_uid(told).get_uid() == told
    y.set_uid(101)
    fresh = g.tensor([4])  # may be given the number again, which is then nobody's choice
    assert z.set_uid(fresh.current_uid).get_uid() != fresh.get_uid()
    assert len({t.get_uid() for t in (x, y, z, fresh)}) == 4


def test_looking_at_a_graph_leaves_uids_free():
    g = graphs.new()
    x = g.tensor([4], name="x")
    y = g.relu(x).set_output()
    repr(x), str(g), g.validate(), g.key()
    taken = x.current_uid
    assert y.set_uid(taken).get_uid() == taken != x.get_uid()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(6, 8, dtype=torch.bfloat16)[:, :4],
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.zeros(3, 4, dtype=torch.float8_e5m2),
        lambda: np.zeros((4, 6), np.float16)[::2],
    ],
    ids=["torch slice", "channels last", "fp8", "numpy slice"],
)
def test_tensor_like_an_array(make):
    array = make()
    t = graphs.new().tensor_like(array, name="like")
    assert t.get_dim() == list(array.shape)
    stride = array.stride() if isinstance(array, torch.Tensor) else [s // array.itemsize for s in array.strides]
    assert t.get_stride() == list(stride)
    assert t.get_data_type() is graphfuse.base.dtypes.from_foreign(array.dtype)
    assert not t.get_is_virtual() and not t.get_is_pass_by_value() and t.get_name() == "like"


@pytest.mark.parametrize(
    ("view", "dim", "stride"),
    [
        (lambda t: t, [4, 32], [32, 1]),
        (lambda t: t.t(), [32, 4], [1, 32]),
        (lambda t: t[:, 2:6], [4, 8], [32, 1]),
        (lambda t: t[:, :1], [4, 2], [32, 1]),
        (lambda t: t[0, 0], [2], [1]),
    ],
)
def test_tensor_like_pairs_counts_elements(view, dim, stride):
    pairs = view(torch.zeros(4, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    t = graphs.new().tensor_like(pairs)
    assert (t.get_dim(), t.get_stride(), t.get_data_type()) == (dim, stride, data_type.FP4_E2M1)
    assert not t.get_is_pass_by_value()


def test_tensor_like_dlpack_only():
    class Exported:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    t = graphs.new().tensor_like(Exported(np.zeros((3, 4), np.float32)))
    assert (t.get_dim(), t.get_stride(), t.get_data_type()) == ([3, 4], [4, 1], data_type.FLOAT)


def test_tensor_like_declares_no_more_alignment_than_there_is():
    memory = graphs.workspace(256).view(torch.bfloat16)
    g = graphs.new()
    assert g.tensor_like(memory).get_byte_alignment() == 16
    assert g.tensor_like(memory[1:]).get_byte_alignment() == 2
    assert g.tensor_like(memory[4:]).get_byte_alignment() == 8


@pytest.mark.parametrize("scalar", [torch.tensor(2.0), torch.ones(1, 1), np.float32([2])], ids=repr)
def test_tensor_like_one_host_element_is_by_value(scalar):
    assert graphs.new().tensor_like(scalar).get_is_pass_by_value()


def test_tensor_like_a_graph_tensor():
    g = graphs.new()
    a = g.tensor([4, 6], [12, 2], data_type.HALF, byte_alignment=4)
    b = g.tensor_like(a, name="b", is_virtual=True)
    assert (b.get_dim(), b.get_stride(), b.get_data_type()) == ([4, 6], [12, 2], data_type.HALF)
    assert b.get_byte_alignment() == 4 and b.get_is_virtual() and b.get_uid() != a.get_uid()


@pytest.mark.parametrize("value", ["text", None, 5, [1, 2], object()])
def test_tensor_like_refuses(value):
    with pytest.raises(TypeError):
        graphs.new().tensor_like(value)


@pytest.mark.parametrize("value", [True, "1", None, 1j])
def test_tensor_scalar_refuses(value):
    with pytest.raises(GraphTypeError, match="tensor_scalar"):
        graphs.new().tensor_scalar(value)
