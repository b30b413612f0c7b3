"""Address, data type and layout of values of a variant pack, which may come from any array library.

Only attributes are read. Nothing is copied, synchronized or dereferenced, and only the value's own library is imported.
As with cuDNN's raw pointers, the caller ensures that the data is ready on the stream of execution.
"""

import functools
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass

from graphfuse.base.dtypes import data_type, fit, from_foreign
from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.op_graph.ir import packed_stride
from graphfuse.runtime import device as devices

ACCEPTED = "a torch tensor, a numpy array, an object with __cuda_array_interface__ or __dlpack__, an address"

# DLDeviceType of the DLPack header -> place of the memory (pinned is host memory, managed is device memory).
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}


@dataclass(frozen=True)
class Buffer:
    """Memory that was given to execute. If only its address was given, all other fields are None.

    dim, stride: in storage elements, which for packed FP4 are bytes of two values.
    device: "cpu" or "cuda:N".
    itemsize: bytes of a storage element.
    """

    address: int
    dtype: data_type | None = None
    dim: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    device: str | None = None
    itemsize: int | None = None
    read_only: bool = False

    @property
    def nbytes(self) -> int | None:
        """Bytes from the first element to the end of the last one."""
        if self.dim is None:
            return None
        if 0 in self.dim:
            return 0
        return self.itemsize * (1 + sum((e - 1) * abs(s) for e, s in zip(self.dim, self.stride, strict=True)))

    @property
    def dense(self) -> bool:
        """True if the elements are contiguous without gaps; True for an address alone."""
        if self.dim is None or 0 in self.dim:
            return True
        axes = [(e, s) for e, s in zip(self.dim, self.stride, strict=True) if e != 1]
        return tuple(s for _, s in axes) == packed_stride([e for e, _ in axes])


def describe(value: object) -> Buffer:
    """The buffer of a value; None is the null address. Raises VariantPackTypeError for a value that is no buffer."""
    for library, kind, reader in _BY_TYPE:
        module = sys.modules.get(library)
        if module is not None and isinstance(value, getattr(module, kind)):
            return reader(value)
    if value is None:
        return Buffer(0)
    if isinstance(value, int) and not isinstance(value, bool):
        check_address(value)
        return Buffer(value)
    for attribute, reader in _BY_PROTOCOL:
        if hasattr(value, attribute):
            return reader(value)
    raise VariantPackTypeError(f"{type(value).__name__} is not a buffer; accepted: {ACCEPTED}")


def check_address(value: int) -> None:
    """Raises VariantPackError for a number outside of the range of addresses."""
    if not 0 <= value < 2**64:
        raise VariantPackError(f"{value:#x} is not an address; accepted: 0 to 2^64 - 1")


def number(value: object, dtype: data_type) -> float:
    """The number of a value that was given for a tensor of `dtype` passed by value.

    value: a Python or numpy number, or an array of one element in host memory. Raises VariantPackTypeError for anything
    else, including device memory, for which the host would have to wait. Raises VariantPackError for more than one
    element, or a number that `dtype` cannot represent (see ``dtypes.fit``).
    """
    if not isinstance(value, numbers.Real):
        value = _one_element(value)
    try:
        if isinstance(value, (str, bytes)):  # float() would parse these
            raise TypeError
        return fit(value, dtype)
    except (TypeError, RuntimeError):
        raise VariantPackTypeError(f"{value!r} is not a real number") from None
    except ValueError as error:
        raise VariantPackError(str(error)) from None


def _one_element(value: object) -> object:
    accepted = "accepted: a Python or numpy number, or a one-element array in host memory"
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise VariantPackTypeError(
                f"a tensor on {value.device} would have to be waited for; pass value.item() or a CPU tensor; {accepted}"
            )
        count = value.numel()
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        _check_unmasked(value)
        count = value.size
    elif hasattr(value, "__cuda_array_interface__"):
        kind = type(value).__name__
        raise VariantPackTypeError(f"{kind} is device memory, which would have to be waited for; {accepted}")
    else:
        raise VariantPackTypeError(f"{type(value).__name__} is not a number; {accepted}")
    if count != 1:
        raise VariantPackError(f"an array of {count} elements is not one number; {accepted}")
    return value.item()


def _torch(value) -> Buffer:
    torch = sys.modules["torch"]
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
        raise VariantPackTypeError(f"{kind} is not a buffer; accepted: torch.strided")
    if value.is_neg():
        raise VariantPackTypeError("a lazily negated tensor does not hold its values; pass tensor.resolve_neg()")
    dtype = _dtype(value.dtype)
    try:
        address = value.data_ptr()
    except RuntimeError as error:  # fake and other tensors without memory
        raise VariantPackTypeError(f"a tensor without memory: {str(error).splitlines()[0]}") from None
    return Buffer(address, dtype, tuple(value.shape), value.stride(), _name(value.device), value.element_size())


def _numpy(value) -> Buffer:
    _check_unmasked(value)
    if not value.dtype.isnative:
        raise VariantPackTypeError(f"numpy dtype {value.dtype} has the other byte order; pass array.astype(native)")
    stride = _elements(value.strides, value.itemsize)
    address, read_only = value.__array_interface__["data"]
    return Buffer(address, _numpy_dtype(value.dtype), value.shape, stride, "cpu", value.itemsize, read_only)


def _check_unmasked(value) -> None:
    masked = sys.modules.get("numpy.ma")  # unless it is imported, there are no masked arrays
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise VariantPackTypeError("a masked array is not a buffer; pass array.data, or array.filled(number)")


def _cuda_array_interface(value) -> Buffer:
    import numpy

    face = value.__cuda_array_interface__
    dtype = numpy.dtype(face["typestr"])
    if not dtype.isnative:
        raise VariantPackTypeError(f"typestr {face['typestr']!r} has the other byte order")
    if face.get("mask") is not None:
        raise VariantPackTypeError("a masked array is not a buffer")
    dim = tuple(face["shape"])
    strides = face.get("strides")
    stride = packed_stride(dim) if strides is None else _elements(strides, dtype.itemsize)
    address, read_only = face["data"]
    address = address or 0
    place = devices.pointer_device(address)
    return Buffer(address, _numpy_dtype(dtype), dim, stride, place, dtype.itemsize, read_only)


def _dlpack(value) -> Buffer:
    from graphfuse.runtime.cuda_core import StridedMemoryView

    kind, ordinal = value.__dlpack_device__()
    where = _DLPACK_DEVICES.get(int(kind))
    if where is None:
        raise VariantPackTypeError(f"DLPack device type {int(kind)} is neither host memory nor that of a CUDA device")
    try:
        view = StridedMemoryView.from_dlpack(value, stream_ptr=-1)
        dtype, itemsize = _numpy_dtype(view.dtype), view.dtype.itemsize
    except VariantPackTypeError:
        raise
    except Exception as error:  # exporters may raise anything; cuda.core refuses the 4 and 8 bit float types
        kind = type(value).__name__
        raise VariantPackTypeError(f"DLPack export of {kind} failed ({error}); a uint8 view may do") from None
    dim = tuple(view.shape)
    stride = packed_stride(dim) if view.strides is None else tuple(view.strides)
    device = "cpu" if where == "cpu" else f"cuda:{ordinal}"
    return Buffer(view.ptr, dtype, dim, stride, device, itemsize, bool(view.readonly))


_BY_TYPE: tuple[tuple[str, str, Callable[[object], Buffer]], ...] = (
    ("torch", "Tensor", _torch),
    ("numpy", "ndarray", _numpy),
)
_BY_PROTOCOL: tuple[tuple[str, Callable[[object], Buffer]], ...] = (
    ("__cuda_array_interface__", _cuda_array_interface),
    ("__dlpack__", _dlpack),
)


_name = functools.cache(str)  # name of a torch.device


@functools.cache
def _dtype(foreign: object) -> data_type:
    try:
        return from_foreign(foreign)
    except TypeError as error:
        raise VariantPackTypeError(str(error)) from None


def _numpy_dtype(dtype) -> data_type:
    found = _dtype(dtype)
    if found.bits < 8:
        raise VariantPackTypeError(f"numpy dtype {dtype} keeps one value a byte; pass two values a byte as uint8")
    return found


def _elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if any(s % itemsize for s in strides):
        raise VariantPackTypeError(f"byte strides {list(strides)} are no multiple of the element's {itemsize} bytes")
    return tuple(s // itemsize for s in strides)
