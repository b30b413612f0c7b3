"""Layouts: the properties of a tensor that plans depend on, and the check that the tensors of a call fit each other."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.functional.tensor_parameter import Shape, TensorParameter, elements, no_rows, stored
from graphfuse.runtime.fastcall import ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """The properties of a tensor without its address, except the alignment of that. dtype, shape, stride: torch's,
    which count pairs for FP4. stored: the type in the graph."""

    dtype: torch.dtype
    stored: data_type
    shape: Shape
    stride: Shape
    device: torch.device
    alignment: int


def check_given(a: TensorParameter, value: object) -> None:
    """Raises VariantPackTypeError unless `value` is valid for the argument, regardless of other arguments."""
    if value is None and (a.optional or a.new is not None):
        return
    if not isinstance(value, torch.Tensor):
        raise VariantPackTypeError(f"{a.name} must be a torch tensor, got {type(value).__name__}{_note(a)}")
    if a.only is None:  # otherwise it is not known yet whether the argument is ignored
        _check_type(a, value)


def layout(a: TensorParameter, value: torch.Tensor) -> Layout:
    """The layout of a tensor. Raises VariantPackTypeError if it has no memory, or an unsupported type or layout."""
    _check_type(a, value)
    try:
        address = value.data_ptr()
    except RuntimeError as error:
        raise VariantPackTypeError(f"{a.name} has no memory: {str(error).splitlines()[0]}") from None
    return _layout(a, value, min(ALIGNMENT, address & -address) if address else ALIGNMENT)


def fake_layout(a: TensorParameter, value: torch.Tensor) -> Layout:
    """The layout of a tensor without memory; otherwise like `layout`."""
    _check_type(a, value)
    return _layout(a, value, ALIGNMENT)


def _layout(a: TensorParameter, value: torch.Tensor, alignment: int) -> Layout:
    return Layout(value.dtype, a.types[value.dtype], tuple(value.shape), value.stride(), value.device, alignment)


def check(
    arguments: Sequence[TensorParameter],
    layouts: Mapping[str, Layout],
    same: Callable[[Shape, Shape], bool] = operator.eq,
) -> None:
    """Raises VariantPackError for shapes and devices that do not fit each other. layouts: of the tensors in use, in
    order. same: whether two shapes are equal."""
    first = next(iter(layouts))
    device, given = layouts[first].device, f"as {first} has shape {layouts[first].shape}"
    shapes: dict[str, Shape] = {}
    for a in arguments:
        if a.name not in layouts:
            continue
        t = layouts[a.name]
        shapes[a.name] = elements(t.shape, t.stored)
        if a.shape is None:
            if not t.shape or t.shape[-1] == 0:
                raise no_rows(a.name, t.shape)
        else:
            accepted = [stored(shape, t.stored) for shape in a.shape(shapes)]
            if not any(same(t.shape, shape) for shape in accepted):
                raise VariantPackError(
                    f"{a.name} has shape {t.shape}; accepted: {' or '.join(map(str, accepted))}, {given}"
                )
        if t.device != device:
            raise VariantPackError(f"{a.name} is on {t.device}, {first} is on {device}; one device is accepted")
        if t.stored is data_type.FP4_E2M1 and t.stride[-1] != 1:
            raise VariantPackError(f"{a.name} has stride {t.stride}; accepted for FP4: 1 along the last dimension")


def _check_type(a: TensorParameter, value: torch.Tensor) -> None:
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else value.layout
        raise VariantPackTypeError(f"{a.name} is a tensor of layout {kind}; accepted: torch.strided")
    if value.dtype not in a.types:
        accepted = ", ".join(str(t).removeprefix("torch.") for t in a.types)
        raise VariantPackTypeError(f"{a.name} is of {value.dtype}; accepted: {accepted}{_note(a)}")


def _note(a: TensorParameter) -> str:
    return f" ({a.note})" if a.note else ""
