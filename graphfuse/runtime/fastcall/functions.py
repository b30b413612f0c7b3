"""Generates the fast path for repeated calls of a function, which also allocates the results."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphfuse.contract.row_counts import ROW_CLASS
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall.writing import clashing, misaligned, text, trying, when, written

ALIGNMENT = 16
"""Largest alignment of an address, in bytes, that a plan requires, as no access is wider."""

DECLINED = object()
"""Result of a fast path for a call unlike the earlier one. Nothing has been done."""


@dataclass(frozen=True)
class Given:
    """A tensor argument of a call. A fast path serves calls with different counts of slices (``functional.split``).

    counted: whether its leading extents are those of the first tensor.
    tail: its other extents.
    packed: whether it must be contiguous; otherwise the guard compares its strides.
    row: bytes from one slice to the next; 0 if it is not counted.
    last: bytes of the last slice.
    alignment: bytes that its address is a multiple of, up to ALIGNMENT.
    sized: whether its extents follow from the count by another rule.
    """

    name: str
    counted: bool
    tail: tuple[int, ...]
    packed: bool
    row: int
    last: int
    alignment: int = ALIGNMENT
    sized: bool = False

    @property
    def nbytes(self) -> str:
        """Bytes from its first element to the end of its last one, as a Python expression of `count`."""
        if self.sized:
            return f"{self.name}_nbytes(count)"
        if not self.row:
            return str(self.last)
        return f"count * {self.row}" if self.row == self.last else f"((count - 1) * {self.row} + {self.last})"

    def beside(self, other: "Given", apart: str) -> str:
        """Python condition that this tensor is not within gaps between the rows of another, for any count of rows.

        apart: Python expression of this one's address minus the other's. Empty if there are no gaps of its size."""
        if self.row != other.row or self.last + other.last > self.row:
            return ""
        return f" and not {other.last} <= ({apart}) % {self.row} <= {self.row - self.last}"


@dataclass(frozen=True)
class New:
    """A tensor that the call allocates. counted, tail, sized: as in ``Given``. strides: the tensor whose strides it
    gets; None if it is contiguous."""

    name: str
    counted: bool
    tail: tuple[int, ...]
    sized: bool = False
    strides: str | None = None


@dataclass(frozen=True)
class CallForm:
    """Everything that the generated text of a fast path depends on. Equal forms share one compiled text.

    parameters: names, in order.
    numbers: parameters that are numbers.
    options: parameters that are neither tensors nor numbers.
    absent: parameters for tensors that are None in the call.
    same: for each tensor argument, the first parameter with the same object.
    leading: number of leading extents of the first tensor that are counted; `trailing` others follow.
    clashes: pairs of a written and another tensor whose addresses are compared.
    values: parameters and new tensors that the plan is launched with, in order.
    written: parameters whose versions the call increments.
    results: names; None for a result that was not requested.
    """

    name: str
    parameters: tuple[str, ...]
    numbers: tuple[str, ...]
    options: tuple[str, ...]
    absent: tuple[str, ...]
    same: tuple[tuple[str, str], ...]
    given: tuple[Given, ...]
    new: tuple[New, ...]
    leading: int
    trailing: int
    clashes: tuple[tuple[str, str], ...]
    values: tuple[str, ...]
    written: tuple[str, ...]
    results: tuple[str | None, ...]

    @property
    def text(self) -> str:
        first, by_name = self.given[0], {g.name: g for g in self.given}
        distinct = [name for name, other in self.same if name == other]
        unlike = ["modes()", "store.generation != generation"]  # modes see calls in torch's dispatcher alone
        unlike += [f"type({n}) is not float or not -{_LARGEST} < {n} < {_LARGEST}" for n in self.numbers]
        # Equal values may differ in type, such as True and 1.
        unlike += [f"type({n}) is not {n}_kind or {n} != {n}_value" for n in self.options]
        unlike += [f"{n} is not None" for n in self.absent]
        unlike += [f"{n} is not {other}" for n, other in self.same if n != other]
        extents = [f"d{axis}" for axis in range(self.leading)]
        at = {name: f"{other}_at" for name, other in self.same} | {n.name: f"{n.name}_at" for n in self.new}
        shapes = [g for g in (by_name[name] for name in distinct) if g is not first]
        differ = [f"not {g.name}.is_contiguous()" for g in (first, *shapes) if g.packed]
        like = lambda g: "shape" if g.tail == first.tail else _tuple(*extents, *g.tail)  # noqa: E731
        differ += [f"{g.name}.shape != {like(g)}" for g in shapes if g.counted]
        differ += [f"{g.name}.shape != {g.name}_extents({self._count})[0]" for g in shapes if g.sized]
        misplaced = [*self._misaligned(at, [by_name[name] for name in distinct])]
        for n, (made, other) in enumerate(self.clashes):
            one, two, apart = by_name[made], by_name[other], f"{at[made]} - {at[other]}"
            misplaced.append(clashing(n, apart, (f"-{one.nbytes}", two.nbytes), one.beside(two, apart), "count"))
        results = ", ".join(str(name) for name in self.results)
        declined = "return declined"
        return text(
            "call",
            self.parameters,
            trying(
                [
                    *when(unlike, declined),
                    # Comparing a nested tensor would end the process. Reading its shape raises instead.
                    f"shape = {first.name}.shape",
                    *when([f"{n}.is_nested" for n in distinct if n != first.name], declined),
                    *when([f"not alike({', '.join(distinct)})"], declined),
                    f"{''.join(f'{e}, ' for e in extents + ['_'] * self.trailing)}= shape",
                    *when(differ, declined),
                    *(f"{n}_at = {n}.data_ptr()" for n in distinct),
                ],
                "AttributeError, RuntimeError, TypeError",  # of no tensor, none with memory
                declined,
            ),
            f"count = {self._count}",
            when(misplaced, declined),
            f"found = starts.get({ROW_CLASS}) or prepare(count)",
            when(["found is None"], declined),
            "start, nbytes = found",
            [self._new(extents, n) for n in self.new],
            "space = 0",
            when(["nbytes"], "workspace = empty((nbytes,), (1,), uint8)", "space = workspace.data_ptr()"),
            f"start({', '.join(('stream()', 'space', 'count', *(at.get(v, v) for v in self.values)))})",
            [f"bump({_tuple(*self.written)})"] if self.written else [],
            f"return {f'({results})' if len(self.results) > 1 else results or 'None'}",
        )

    def _misaligned(self, at: Mapping[str, str], given: Sequence[Given]) -> Iterator[str]:
        """Python conditions under which addresses have another alignment than the plan was made for.

        With less, kernels could not access as many bytes at once. With more, another plan is faster."""
        if most := [at[g.name] for g in given if g.alignment == ALIGNMENT]:
            yield misaligned(most, ALIGNMENT)
        for g in given:
            if g.alignment < ALIGNMENT:
                yield f"{at[g.name]} & -{at[g.name]} != {g.alignment}"

    @property
    def _count(self) -> str:
        return " * ".join(f"d{axis}" for axis in range(self.leading)) or "1"

    def _new(self, extents: Sequence[str], new: New) -> str:
        if new.strides:
            made = f"empty_like({new.strides}, dtype={new.name}_type)"
        elif new.sized:
            made = f"empty(*{new.name}_extents(count), {new.name}_type)"
        else:
            tail_strides = [math.prod(new.tail[i + 1 :]) for i in range(len(new.tail))]
            row, strides = math.prod(new.tail), []
            for axis in range(len(extents)) if new.counted else ():
                strides.append(" * ".join([*extents[axis + 1 :], str(row)]))
            shape = (*extents, *new.tail) if new.counted else new.tail
            made = f"empty({_tuple(*shape)}, {_tuple(*strides, *tail_strides)}, {new.name}_type)"
        return f"{new.name} = {made}; {new.name}_at = {new.name}.data_ptr()"


def _tuple(*items: object) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"


_LARGEST = "3.4028234e38"
"""Bound of the magnitude of numbers that the fast path accepts, as float32 can represent these."""


def function(form: CallForm, names: Mapping[str, object]) -> Callable[..., object]:
    """Generated function that runs calls like an earlier one, and returns DECLINED for others.

    names: the objects that the text refers to:
    store, generation: the store of tuned knobs, and its generation when the call was planned.
    alike: a guard of the tensor arguments. stream: returns the address of the current stream.
    starts: (start, bytes of workspace) by class of count. prepare: adds and returns that for a count, or returns None.
    empty: allocates, given shape, strides and data type.
    NAME_type: data type of a new tensor. NAME_extents, NAME_nbytes: return shape and strides, and bytes, of a sized
    tensor, given the count.
    NAME_kind, NAME_value: type and value of an option. clash0, clash1, ...: for each of `clashes`, a function that
    returns whether the two illegally overlap, given count and distance.
    """
    torch = sys.modules["torch"]
    own = {
        "declined": DECLINED,
        "uint8": torch.uint8,
        "empty_like": torch.empty_like,
        "bump": torch_private.increment_version(),
        "modes": torch_private.dispatch_modes(),
    }
    return written(f"fast path of {form.name}", "call", form.text, own | dict(names))
