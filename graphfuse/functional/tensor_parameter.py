"""Tensor parameters of a function as data: types, shapes, which are written and which are allocated."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import VariantPackError

Shape = tuple[int, ...]

Rule = Callable[[Mapping[str, Shape]], tuple[Shape, ...]]
"""Function from the shapes of preceding arguments to the shapes that an argument may have, first the one it is
allocated with. Shapes count elements, of which FP4 stores two in a byte. Raises VariantPackError if there is none."""

NewType = Callable[[Mapping[str, torch.Tensor]], torch.dtype]

Types = Mapping[torch.dtype, data_type]
"""The graph's types by torch's types."""


def types(*accepted: data_type, as_bytes: bool = False) -> Types:
    """Mapping of the accepted types; with as_bytes also of uint8, for the bytes of the only one."""
    found = {getattr(torch, a.facts.torch): a for a in accepted}
    return found | {torch.uint8: accepted[0]} if as_bytes else found


FLOATS = types(data_type.BFLOAT16, data_type.HALF, data_type.FLOAT)
FORMATS = FLOATS | types(data_type.FP8_E4M3, data_type.FP8_E5M2)
FLOAT = types(data_type.FLOAT)
INTEGERS = types(data_type.INT64, data_type.INT32)
FP8 = types(data_type.FP8_E4M3, data_type.FP8_E5M2)
PAIRS = torch.float4_e2m1fn_x2


@dataclass(frozen=True, eq=False)
class TensorParameter:
    """One tensor of a function.

    shape: rule of its shapes; None if it may have any, as the first tensor.
    free: whether its shape or strides do not follow from other arguments, so that they distinguish problems.
    table: whether its extents are unrelated to the first tensor's.
    written: whether the function writes it.
    new: the type it is allocated with if the caller gives none, or a function of the preceding arguments that returns
    that.
    strides: a preceding argument of its shape whose strides it is allocated with, as far as these leave no gaps. None
    for a tensor whose rows are contiguous.
    optional: whether it may be omitted.
    only: (name, type) of another argument without which this one is ignored.
    asked: the option without which it does not exist.
    row_axes: how many last dimensions of the first tensor belong to a row; these are neither counted nor split.
    over_rows: for a written tensor without a dimension for rows, how parts from some rows each are combined: "sum" or
    "max"; None if they cannot be.
    note: part of the error if it is refused.
    """

    name: str
    types: Types
    shape: Rule | None = None
    free: bool = False
    table: bool = False
    written: bool = False
    new: torch.dtype | NewType | None = None
    strides: str | None = None
    optional: bool = False
    only: tuple[str, torch.dtype] | None = None
    asked: str | None = None
    row_axes: int = 1
    over_rows: str | None = None
    note: str = ""


def type_of(name: str) -> NewType:
    """The type of another argument."""
    return lambda tensors: tensors[name].dtype


def like(name: str) -> Rule:
    """The shape of another argument."""
    return lambda shapes: (shapes[name],)


def like_or_columns(name: str, other: str) -> Rule:
    """The shape of another argument; if that is not given, one value per column of `other`."""
    return lambda shapes: (shapes.get(name, shapes[other][-1:]),)


def columns(name: str) -> Rule:
    """One value for each column of another argument."""
    return lambda shapes: (shapes[name][-1:],)


def columns_or_heads(name: str) -> Rule:
    """One value per column of another argument, the same in all rows, or different for each index of the preceding
    dimension, such as heads."""
    return lambda shapes: (shapes[name][-1:], *(shapes[name][-2:] for _ in shapes[name][1:2]))


def columns_of_heads(name: str) -> Rule:
    """One value per column of all heads of another argument, its last two dimensions, joined."""
    return lambda shapes: ((prod(shapes[name][-2:]),),)


def samples(name: str) -> Rule:
    """One row of values per index of the first dimension of another argument, one for all its rows, or one for each of
    them."""

    def rule(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
        *leading, columns = shapes[name]
        ones = (1,) * len(leading)
        return (*leading[:1], *ones[1:], columns), (columns,), (*ones, columns), shapes[name]

    return rule


def rows(name: str) -> Rule:
    """One value for each row of another argument."""
    return lambda shapes: ((*shapes[name][:-1], 1),)


def each_row(name: str) -> Rule:
    """One value for each row of another argument, without a dimension for columns."""
    return lambda shapes: (shapes[name][:-1],)


def one(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
    """A single value."""
    return (1,), ()


def blocks(name: str, size: int) -> Rule:
    """One value per `size` consecutive elements in a row of another argument."""

    def rule(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
        *leading, columns = shapes[name]
        if columns % size:
            raise VariantPackError(
                f"{name} has shape {tuple(shapes[name])}; accepted with blocks of {size}: a last dimension that is "
                f"a multiple of {size}"
            )
        return ((*leading, columns // size),)

    return rule


def swizzled(rule: Rule) -> Rule:
    """Memory for the shape of `rule` in tiles of 128 rows by 4 columns, with the last ones padded."""

    def tiles(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
        *leading, columns = rule(shapes)[0]
        height, width = -(-prod(leading) // 128) * 128, -(-columns // 4) * 4
        return (height * width,), (height, width)

    return tiles


def stored(shape: Shape, dtype: data_type) -> Shape:
    """The shape in torch's units for a shape in elements."""
    return (*shape[:-1], shape[-1] // 2) if dtype is data_type.FP4_E2M1 else shape


def elements(shape: Shape, dtype: data_type | None) -> Shape:
    """The inverse of `stored`."""
    return (*shape[:-1], shape[-1] * 2) if dtype is data_type.FP4_E2M1 and len(shape) else shape


def no_rows(name: str, shape: Shape) -> VariantPackError:
    """The error for a first tensor without rows or without elements in a row."""
    return VariantPackError(f"{name} has shape {tuple(shape)}; accepted: one dimension or more, the last not empty")


def used(arguments: Iterable[TensorParameter], given: Mapping[str, object]) -> list[TensorParameter]:
    """Parameters that a call uses, given or allocated. given: values by name."""
    found = []
    for a in arguments:
        if a.only is not None and getattr(given.get(a.only[0]), "dtype", None) != a.only[1]:
            continue
        if a.asked is not None and not given[a.asked]:
            continue
        if given.get(a.name) is not None or not a.optional:
            found.append(a)
    return found


def complete(arguments: Iterable[TensorParameter], given: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors that a call uses, in order. Those that the caller omits are allocated. torch.compile traces this.
    given: parameters by name. Raises VariantPackError if a tensor to allocate has no shape."""
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, Shape] = {}
    device = None
    for a in used(arguments, given):
        value = given.get(a.name)
        if value is None:
            dtype = a.new if isinstance(a.new, torch.dtype) else a.new(tensors)
            if a.strides:
                value = torch.empty_like(tensors[a.strides], dtype=dtype)
            else:
                value = torch.empty(stored(a.shape(shapes)[0], a.types[dtype]), dtype=dtype, device=device)
        if device is None:
            device = value.device
        if a.shape is None and not value.shape:  # rules of later arguments require a last dimension
            raise no_rows(a.name, value.shape)
        tensors[a.name] = value
        shapes[a.name] = elements(value.shape, a.types.get(value.dtype))  # other types are refused later
    return tensors
