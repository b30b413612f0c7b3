import fractions

import ml_dtypes
import numpy as np
import pytest
import torch

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.runtime.buffers import Buffer, describe, number

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [d for d in data_type if d not in (data_type.NOT_SET, data_type.FP4_E2M1)])
def test_torch_tensors_of_every_type(dtype):
    tensor = torch.zeros(4, 8, dtype=torch.uint8).to(getattr(torch, dtype.facts.torch))[:, 1:4]
    size = tensor.element_size()
    assert describe(tensor) == Buffer(tensor.data_ptr(), dtype, (4, 3), (8, 1), "cpu", size)
    assert describe(tensor).nbytes == (3 * 8 + 3) * size


def test_packed_fp4():
    tensor = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert describe(tensor) == Buffer(tensor.data_ptr(), data_type.FP4_E2M1, (4, 8), (8, 1), "cpu", 1)


@pytest.mark.parametrize("dtype", ["f4", "f2", "u1", "i8", "bool", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_numpy_arrays(dtype):
    array = np.zeros((4, 8), dtype)[::2, ::-1]
    found = describe(array)
    assert found.address == array.ctypes.data
    assert found.dtype.facts.numpy == array.dtype.name
    assert (found.dim, found.stride, found.device, found.itemsize) == ((2, 8), (16, -1), "cpu", array.itemsize)
    assert not found.read_only
    array.flags.writeable = False
    assert describe(array).read_only


class Exported:
    """A host array that shows itself through DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("array", [np.zeros((4, 8), "float16")[:, ::2], torch.zeros(4, 8, dtype=torch.bfloat16).t()])
def test_dlpack(array):
    through = describe(Exported(array))
    assert through == describe(array)


def test_dlpack_without_strides_is_dense():
    assert describe(Exported(np.zeros((2, 3, 4), "float32"))).stride == (12, 4, 1)


def test_a_dlpack_type_that_cuda_core_does_not_read():
    with pytest.raises(VariantPackTypeError, match="a uint8 view may do"):
        describe(Exported(torch.zeros(4).to(torch.float8_e4m3fn)))


class Interface:
    def __init__(self, **entries):
        self.__cuda_array_interface__ = {"version": 3, "data": (0, False), "strides": None, **entries}


def test_cuda_array_interface():
    assert describe(Interface(shape=(2, 3), typestr="<f2")) == Buffer(0, data_type.HALF, (2, 3), (3, 1), None, 2)
    strided = describe(Interface(shape=(2, 3), typestr="|u1", strides=(8, 2), data=(0, True)))
    assert (strided.stride, strided.read_only) == ((8, 2), True)
    assert describe(Interface(shape=(0,), typestr="<f4", data=(None, False))).address == 0


@pytest.mark.parametrize("entries", [{"typestr": ">f4"}, {"typestr": "<c8"}, {"typestr": "<f4", "mask": object()}])
def test_cuda_array_interface_that_is_no_buffer(entries):
    with pytest.raises(VariantPackTypeError):
        describe(Interface(shape=(4,), **entries))


def test_addresses_and_null():
    assert describe(0x1000) == Buffer(0x1000)
    assert describe(None) == Buffer(0)
    assert describe(0x1000).nbytes is None


@pytest.mark.parametrize("value", [-16, 2**64])
def test_what_is_no_address(value):
    with pytest.raises(VariantPackError, match="not an address"):
        describe(value)


@pytest.mark.parametrize(
    "value",
    [
        "x",
        1.5,
        True,
        [1, 2],
        object(),
        np.zeros(4, "complex64"),
        np.zeros(4, ">f4"),
        np.zeros(4, ml_dtypes.float4_e2m1fn),
        np.zeros(4, [("a", "u1"), ("b", "f4")])["b"],
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(4, 4).to_sparse(),
        torch._neg_view(torch.zeros(4)),
    ],
    ids=lambda v: f"{type(v).__name__} {getattr(v, 'dtype', '')}",
)
def test_what_is_no_buffer(value):
    with pytest.raises(VariantPackTypeError):
        describe(value)


def test_describing_a_number_imports_no_library(python):
    code = """
import sys
from graphfuse.runtime import buffers
buffers.describe(4096), buffers.number(1.5, buffers.data_type.FLOAT)
print(*(name for name in ("torch", "numpy", "cuda.core", "cuda.bindings") if name in sys.modules))
"""
    assert python(code) == ""


@pytest.mark.parametrize(
    "value, found",
    [
        (2, 2.0),
        (0.1, 0.1),
        (fractions.Fraction(1, 2), 0.5),
        (np.float32(1.5), 1.5),
        (np.int64(3), 3.0),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (np.array([[2.5]], "float16"), 2.5),
        (np.array(7), 7.0),
        (torch.tensor(1e-6, dtype=torch.float64), 1e-6),
        (torch.full((1, 1), 0.5, dtype=torch.bfloat16), 0.5),
        (float("inf"), float("inf")),
        (3.4028235e38, 3.4028235e38),
    ],
    ids=str,
)
def test_numbers(value, found):
    assert number(value, data_type.FLOAT) == found


@pytest.mark.parametrize("value", ["1", b"1", None, 1j, [1], np.array(["1"]), np.array(1j), torch.tensor(1j)], ids=repr)
def test_what_is_no_number(value):
    with pytest.raises(VariantPackTypeError):
        number(value, data_type.FLOAT)


@pytest.mark.parametrize(
    "value", [torch.zeros(2), np.zeros(0), np.zeros((3, 1)), 1e39, -3.5e38, 10**60, -(10**400)], ids=str
)
def test_numbers_that_do_not_fit(value):
    with pytest.raises(VariantPackError) as error:
        number(value, data_type.FLOAT)
    assert not isinstance(error.value, VariantPackTypeError)


def test_the_range_is_where_float32_rounds_to_infinity():
    edge = 2.0**128 - 2.0**103
    assert number(np.nextafter(edge, 0), data_type.FLOAT) < edge
    assert np.isfinite(np.float32(np.nextafter(edge, 0)))
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(edge))
    with pytest.raises(VariantPackError, match="float32"):
        number(edge, data_type.FLOAT)


@pytest.mark.gpu
def test_device_memory():
    tensor = torch.zeros(4, 8, device="cuda:0", dtype=torch.bfloat16)
    assert describe(tensor) == Buffer(tensor.data_ptr(), data_type.BFLOAT16, (4, 8), (8, 1), "cuda:0", 2)
    assert describe(Exported(tensor)) == describe(tensor)
    half = torch.zeros(4, 8, device="cuda:0", dtype=torch.float16)
    assert describe(Interface(**half.__cuda_array_interface__)) == describe(half)


@pytest.mark.gpu
def test_a_number_in_device_memory_is_refused():
    with pytest.raises(VariantPackTypeError, match="on cuda:0 would have to be waited for; pass value.item"):
        number(torch.ones(1, device="cuda"), data_type.FLOAT)


@pytest.mark.parametrize("mask", [[[1, 0], [0, 0]], np.ma.nomask])
def test_a_masked_array_is_no_buffer(mask):
    array = np.ma.array(np.ones((2, 2), "f4"), mask=mask)
    with pytest.raises(VariantPackTypeError, match=r"a masked array is not a buffer; pass array\.data"):
        describe(array)
    assert describe(array.data).dim == (2, 2)


@pytest.mark.parametrize("value", [np.ma.masked, np.ma.array([1.0], mask=[True])])
def test_a_masked_value_is_no_number(value):
    with pytest.raises(VariantPackTypeError, match="a masked array is not"):
        number(value, data_type.FLOAT)
