"""`Tensor`, the tensor of a user's graph. `freeze` converts it to an `ir.FrozenTensor`."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from graphfuse.base import cudnn_names, dtypes
from graphfuse.base.cudnn_keywords import also
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import GraphNotSupportedError, GraphTypeError, GraphValidationError


class Tensor:
    """A tensor of a graph. Every setter returns the tensor, so that calls can be chained.

    ``pygraph.tensor`` and the op methods make tensors. Dimensions and strides are in elements, outermost first.
    ``validate`` infers properties that are not set.
    """

    def __init__(self, uid: int, name: str, changed: Callable[[], None], claim: Callable[[Tensor, int], None]):
        self._changed = changed
        self._claim = claim
        self._uid = uid
        self._name = name
        self._dim: tuple[int, ...] | None = None
        self._stride: tuple[int, ...] | None = None
        self._data_type = data_type.NOT_SET
        self._virtual = True
        self._by_value = False
        self._alignment = 16
        self._reordering = tensor_reordering.NONE
        self._ragged_offset: Tensor | None = None
        self._ragged_offset_multiplier = 1
        # Results of validate, separate from what the user set: a later change upstream must not conflict with an old
        # inference.
        self.inferred_dim: tuple[int, ...] = ()
        self.inferred_stride: tuple[int, ...] = ()
        self.inferred_data_type = data_type.NOT_SET
        self.value: float | None = None
        """The number of a constant made by ``tensor_scalar`` or from a Python float; None otherwise."""

    def set_dim(self, dim: Sequence[int]) -> Tensor:
        """Extents per axis, each >= 0 (0 makes the tensor empty)."""
        self._dim = _integers(self, "dim", dim)
        return self._mark_changed()

    def set_stride(self, stride: Sequence[int]) -> Tensor:
        """Elements between neighbours along each axis, each >= 0."""
        self._stride = _integers(self, "stride", stride)
        return self._mark_changed()

    @also(dtype="data_type")
    def set_data_type(self, data_type: object) -> Tensor:  # noqa: A002 - cuDNN's spelling
        """A ``data_type``, or a torch or numpy dtype."""
        self._data_type = checked_type(f"tensor {self._name!r}", data_type)
        return self._mark_changed()

    @also(value="is_output")
    def set_output(self, is_output: bool = True) -> Tensor:
        """Makes the tensor an output, for which callers give a buffer, or virtual."""
        self._virtual = not is_output
        return self._mark_changed()

    @also(value="is_virtual")
    def set_is_virtual(self, is_virtual: bool) -> Tensor:
        """Makes the tensor virtual, so that it exists only between nodes, or not."""
        self._virtual = bool(is_virtual)
        return self._mark_changed()

    @also(value="is_pass_by_value")
    def set_is_pass_by_value(self, is_pass_by_value: bool) -> Tensor:
        """Makes execute take a host number for the tensor instead of a device buffer, or not."""
        self._by_value = bool(is_pass_by_value)
        return self._mark_changed()

    def set_name(self, name: str) -> Tensor:
        if not name:
            raise GraphTypeError(f"tensor {self._name!r}: a name must be a non-empty str, got {name!r}")
        self._name = checked_name(f"tensor {self._name!r}", name)
        return self._mark_changed()

    def set_uid(self, uid: int) -> Tensor:
        """The number that identifies the tensor in ``execute``; unique in the graph.

        Numbers that users set, or that ``get_uid`` has returned, stay: setting one of them for another tensor raises
        GraphValidationError. Any other number may be set; a tensor that has it gets a new one.
        """
        self._claim(self, uid)
        self._uid = uid
        return self._mark_changed()

    def set_byte_alignment(self, alignment: int) -> Tensor:
        """Alignment of every address bound to this tensor, in bytes: a power of two, default 16.

        Lower it for slices that start anywhere; kernels then use narrower accesses.
        """
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise GraphValidationError(
                f"tensor {self._name!r}: byte alignment must be a power of two, got {alignment!r}"
            )
        self._alignment = alignment
        return self._mark_changed()

    def set_alignment_value(self, value: int) -> Tensor:
        """A promise that every number in this tensor, such as a number of rows, is a multiple of `value`. It has no
        effect, because no kernel here needs it."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GraphValidationError(
                f"tensor {self._name!r}: an alignment value must be an integer >= 1, got {value!r}"
            )
        return self

    def set_reordering_type(self, reordering_type: tensor_reordering) -> Tensor:
        """The order of the elements in memory. F8_128x4 is for scales: those that ``block_scale_quantize``
        makes, whose blocks must run along the last axis, and those that ``block_scale_dequantize`` reads.

        dim stays that of rows and blocks; strides have no meaning. The memory has ceil(rows / 128) * 128 rows of
        ceil(blocks / 4) * 4 elements. Its padding is neither written nor used. Rows are those of all leading axes
        together. With the extents of whole tiles, such as [batch, 256, 8] for [batch, 137, 5], each matrix has separate
        tiles, as cuDNN's batched products read them. Writers and readers need the same extents.
        """
        if not isinstance(reordering_type, tensor_reordering):
            raise GraphTypeError(
                f"tensor {self._name!r}: reordering type must be a tensor_reordering, got {reordering_type!r}"
            )
        self._reordering = reordering_type
        return self._mark_changed()

    def set_ragged_offset(self, ragged_offset: Tensor | None) -> Tensor:
        """The offsets at which batches begin, for packed sequences that ``sdpa`` reads and writes.

        This tensor is [batch, heads, rows, columns], with the rows of the longest sequence. ragged_offset is INT32 or
        INT64, [batch + 1, 1, 1, 1], given to execute. It has the distance from the beginning of the memory to each
        batch, and to the end of the last, in units that ``set_ragged_offset_multiplier`` sets. The stride of the batch
        axis has no meaning then. None: batches begin at multiples of that stride.
        """
        if not isinstance(ragged_offset, Tensor | None):
            raise GraphTypeError(
                f"tensor {self._name!r}: ragged offset must be a tensor of its graph, got {ragged_offset!r}"
            )
        self._ragged_offset = ragged_offset
        return self._mark_changed()

    def set_ragged_offset_multiplier(self, multiplier: int) -> Tensor:
        """The unit of ragged offsets, in elements; 1 unless set."""
        if not isinstance(multiplier, int) or isinstance(multiplier, bool) or multiplier < 1:
            raise GraphValidationError(
                f"tensor {self._name!r}: a ragged offset multiplier must be an integer >= 1, got {multiplier!r}"
            )
        self._ragged_offset_multiplier = multiplier
        return self._mark_changed()

    def get_ragged_offset(self) -> Tensor | None:
        return self._ragged_offset

    def get_ragged_offset_multiplier(self) -> int:
        return self._ragged_offset_multiplier

    def get_dim(self) -> list[int]:
        """Extents; empty if neither set nor inferred."""
        return list(self._dim or self.inferred_dim)

    def get_stride(self) -> list[int]:
        return list(self._stride or self.inferred_stride)

    def get_data_type(self) -> data_type:
        return self.inferred_data_type if self._data_type is data_type.NOT_SET else self._data_type

    def clear_inferred(self) -> None:
        """Removes the properties that validate inferred."""
        self.inferred_dim = self.inferred_stride = ()
        self.inferred_data_type = data_type.NOT_SET

    def get_name(self) -> str:
        return self._name

    def get_uid(self) -> int:
        """The number that identifies the tensor in ``execute``. It stays after this call (see ``set_uid``)."""
        self._claim(self, self._uid)
        return self._uid

    @property
    def current_uid(self) -> int:
        """The uid, which may still change. For internal use, unlike ``get_uid``."""
        return self._uid

    def get_is_virtual(self) -> bool:
        return self._virtual

    def get_is_pass_by_value(self) -> bool:
        return self._by_value

    def get_byte_alignment(self) -> int:
        return self._alignment

    set_alignment, get_alignment = set_byte_alignment, get_byte_alignment  # cuDNN's names

    def get_has_compile_time_constant(self) -> bool:
        """True if the tensor is a constant of the graph (``tensor_scalar``)."""
        return self.value is not None

    def get_reordering_type(self) -> tensor_reordering:
        return self._reordering

    def get_vector_count(self) -> int:
        """1: elements are not in vectors."""
        return 1

    def get_vector_dimension(self) -> int:
        """-1: no axis has vectors."""
        return -1

    def set_vector_count_and_dimension(self, count: int = 1, dimension: int = -1) -> Tensor:
        """Accepts only 1 and -1, for no vectors. Raises GraphNotSupportedError otherwise."""
        if (count, dimension) != (1, -1):
            raise GraphNotSupportedError(
                f"tensor {self._name!r}: vectors of {count!r} along axis {dimension!r}; accepted: 1 and -1, for none. "
                "Strides say where elements are"
            )
        return self

    def validate(self) -> None:
        """Checks that dim and stride are known and agree, and that a tensor passed by value is not virtual.

        Raises GraphValidationError. ``pygraph.validate`` infers properties that are not set, and checks more."""
        where, dim, stride = f"tensor {self._name!r}", self.get_dim(), self.get_stride()
        for what, found in (("dim", dim), ("stride", stride)):
            if not found:
                raise GraphValidationError(f"{where} has no {what}: call set_{what}, or validate the graph")
        if len(dim) != len(stride):
            raise GraphValidationError(f"{where} has dim {dim} and stride {stride}, which differ in rank")
        if self._virtual and self._by_value:
            raise GraphValidationError(f"{where} is virtual and passed by value; accepted: one of these")

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            cudnn_names.refuse("a tensor", name, cudnn_names.TENSOR, self)

    def detached(self, dim: Sequence[int] = (), stride: Sequence[int] = ()) -> Tensor:
        """A copy that belongs to no graph. dim, stride: other extents and strides; no strides: inferred."""
        made = copy.copy(self)
        made._changed, made._claim = _ignore_change, _ignore_change
        if dim:
            made._dim, made._stride = tuple(dim), tuple(stride) or None
        return made

    def _mark_changed(self) -> Tensor:
        self._changed()
        return self

    def __repr__(self) -> str:
        return f"<tensor {self._name!r} uid={self._uid} dim={self.get_dim()} {self.get_data_type().name}>"


def _ignore_change(*_: object) -> None:
    """Callback for changes of a tensor of no graph; it does nothing."""


def checked_type(where: str, value: object) -> data_type:
    """The data type for `value`. Raises GraphTypeError, naming `where`."""
    try:
        return dtypes.from_foreign(value)
    except TypeError as error:
        raise GraphTypeError(f"{where}: {error}") from None


def checked_name(where: str, value: object) -> str:
    """`value`, a str. Raises GraphTypeError, naming `where`, for other types."""
    if not isinstance(value, str):
        raise GraphTypeError(f"{where}: a name must be a str, got {value!r}")
    return value


def plain_number(value: object) -> object:
    """A NumPy number as a Python number; other values unchanged."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def checked_number(where: str, value: float, dtype: data_type) -> float:
    """`value` as a float that fits `dtype`. Raises GraphValidationError, naming `where`."""
    try:
        return dtypes.fit(value, dtype)
    except ValueError as error:
        raise GraphValidationError(f"{where}: {error}") from None


def _integers(tensor: Tensor, what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        numbers = tuple(v.__index__() for v in values)
    except (TypeError, AttributeError):
        raise GraphTypeError(
            f"tensor {tensor.get_name()!r}: {what} must be a sequence of integers, got {values!r}"
        ) from None
    if not numbers or any(n < 0 for n in numbers):
        raise GraphValidationError(
            f"tensor {tensor.get_name()!r}: {what} must be one or more integers >= 0, got {values!r}"
        )
    return numbers
