"""The data types of tensors, with cuDNN's names, and the facts about each.

This module loads neither torch nor CUDA.
"""

import enum
import math
from dataclasses import dataclass
from typing import SupportsFloat

from graphfuse.base.cudnn_names import Members


@dataclass(frozen=True)
class TypeFacts:
    """Size, names and range of one data type.

    bits: size of one element. torch, numpy: the name in that library; numpy's includes those of ml_dtypes.
    ctype: the element type in generated CUDA C++. max: largest finite value of a float type; None for integers.
    integers: smallest and largest value of an integer type; None for floats.
    """

    bits: int
    torch: str
    numpy: str
    ctype: str
    max: float | None = None
    integers: tuple[int, int] | None = None


class data_type(enum.Enum, metaclass=Members):  # noqa: N801 - cuDNN's spelling
    """Element type of a tensor (names of ``cudnn.data_type``)."""

    NOT_SET = "not_set"
    FLOAT = "float"
    DOUBLE = "double"
    HALF = "half"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E8M0 = "fp8_e8m0"
    FP4_E2M1 = "fp4_e2m1"
    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"
    BOOLEAN = "boolean"

    @property
    def facts(self) -> TypeFacts:
        """Size, names and range. Raises ValueError for NOT_SET."""
        try:
            return FACTS[self]
        except KeyError:
            raise ValueError(f"data_type.{self.name} has no element size: set a data type first") from None

    @property
    def bits(self) -> int:
        return self.facts.bits

    @property
    def is_float(self) -> bool:
        return self in FACTS and self.facts.max is not None

    @property
    def is_wide(self) -> bool:
        """True if float32 cannot represent all values."""
        return self in (data_type.DOUBLE, data_type.INT32, data_type.INT64)

    def nbytes(self, elements: int) -> int:
        """Bytes that `elements` consecutive elements take (two FP4 elements share a byte)."""
        return -(-elements * self.bits // 8)

    def __repr__(self) -> str:
        return f"data_type.{self.name}"


def common_type(dtypes: set[data_type]) -> data_type:
    """The type that represents all values of `dtypes`. INT64 with floats gives DOUBLE, which is exact up to 2^53."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    wide = {dtype for dtype in dtypes if dtype.is_wide}
    if wide and all(dtype.facts.integers for dtype in dtypes):
        return max(wide, key=lambda dtype: dtype.bits)
    return data_type.DOUBLE if wide else data_type.FLOAT


FACTS: dict[data_type, TypeFacts] = {
    data_type.FLOAT: TypeFacts(32, "float32", "float32", "float", 3.4028234663852886e38),
    data_type.DOUBLE: TypeFacts(64, "float64", "float64", "double", 1.7976931348623157e308),
    data_type.HALF: TypeFacts(16, "float16", "float16", "gf::half", 65504.0),
    data_type.BFLOAT16: TypeFacts(16, "bfloat16", "bfloat16", "gf::bf16", 3.3895313892515355e38),
    data_type.FP8_E4M3: TypeFacts(8, "float8_e4m3fn", "float8_e4m3fn", "gf::e4m3", 448.0),
    data_type.FP8_E5M2: TypeFacts(8, "float8_e5m2", "float8_e5m2", "gf::e5m2", 57344.0),
    data_type.FP8_E8M0: TypeFacts(8, "float8_e8m0fnu", "float8_e8m0fnu", "gf::e8m0", 2.0**127),
    data_type.FP4_E2M1: TypeFacts(4, "float4_e2m1fn_x2", "float4_e2m1fn", "gf::e2m1", 6.0),
    data_type.INT8: TypeFacts(8, "int8", "int8", "signed char", integers=(-(2**7), 2**7 - 1)),
    data_type.UINT8: TypeFacts(8, "uint8", "uint8", "unsigned char", integers=(0, 2**8 - 1)),
    data_type.INT32: TypeFacts(32, "int32", "int32", "int", integers=(-(2**31), 2**31 - 1)),
    data_type.INT64: TypeFacts(64, "int64", "int64", "long long", integers=(-(2**63), 2**63 - 1)),
    data_type.BOOLEAN: TypeFacts(8, "bool", "bool", "bool", integers=(0, 1)),
}

FP8 = (data_type.FP8_E4M3, data_type.FP8_E5M2)
"""FP8 types of elements. Scales have another one, FP8_E8M0."""
SMALL_INTEGERS = (data_type.INT8, data_type.UINT8)
"""8-bit integers, to which quantization converts floats."""
SIXTEEN_BITS = (data_type.BFLOAT16, data_type.HALF)
"""16-bit floating-point types."""

BY_TORCH_NAME = {facts.torch: dtype for dtype, facts in FACTS.items()}
BY_NUMPY_NAME = {facts.numpy: dtype for dtype, facts in FACTS.items()}


def from_foreign(value: object) -> data_type:
    """The data type for a ``data_type``, a torch or numpy dtype, or the name of one."""
    if isinstance(value, data_type):
        return value
    name = str(getattr(value, "name", value)).removeprefix("torch.")
    found = BY_TORCH_NAME.get(name) or BY_NUMPY_NAME.get(name)
    if found is None:
        raise TypeError(f"{value!r} is not a data type graphfuse knows; accepted: {', '.join(BY_TORCH_NAME)}")
    return found


def fit(value: SupportsFloat, dtype: data_type) -> float:
    """`value` as a float, checked as the value of a by-value tensor of `dtype`.

    Kernels get such numbers as float32, so DOUBLE and NOT_SET have FLOAT's range. A float type accepts infinities, NaN
    and all that rounds to one of its finite values. Raises ValueError, with what is accepted, for another number.
    """
    facts = FACTS[data_type.FLOAT if dtype in (data_type.NOT_SET, data_type.DOUBLE) else dtype]
    try:
        number = float(value)
    except OverflowError:
        number = math.nan if facts.integers else _overflow(facts.max)  # an int beyond float64 fits nothing
    if facts.integers:
        low, high = facts.integers
        fits = low <= number <= high and number == int(number)
    else:
        low, high = -facts.max, facts.max
        fits = not math.isfinite(number) or abs(number) < _overflow(high)
    if not fits:
        kind = "integers from " if facts.integers else ""
        raise ValueError(f"{_brief(value)} does not fit {facts.torch}; accepted: {kind}{low} to {high}")
    return number


def _overflow(largest: float) -> int:
    """Least magnitude that rounds out of the type's finite range: half a ulp above the largest value."""
    whole = int(largest)
    return whole + (whole & -whole) // 2


def _brief(value: object) -> str:
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"an integer of {bits} bits" if bits > 128 else repr(value)
