"""Printing of a kernel's prefetch of rows into shared memory.

Each thread copies what it will read itself, so it waits for no other thread. Its accesses have a stride of THREADS, so
that those of neighbouring threads are contiguous: piece after piece, then the values of one per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.codegen.addresses import address, axes
from graphfuse.codegen.parameters import Pointer, pointers
from graphfuse.codegen.phase_plan import PhasePlan, access

LEAST = 4
"""Bytes of the narrowest access of an asynchronous copy."""


@dataclass(frozen=True)
class Copied:
    """An input that is copied.

    name: of its address, in struct Row. ctype: of one element. address: of the thread's first piece in global memory.
    nbytes: of a piece, or of one value. width: bytes of an access. pieces: whether it has an element for each column.
    """

    name: str
    ctype: str
    address: str
    nbytes: int
    width: int
    pieces: bool

    @property
    def distances(self) -> str:
        """Template arguments: bytes of a piece, bytes of an access, and bytes between two accesses of a thread."""
        return f"{self.nbytes}, {self.width}, THREADS * {self.width}"

    @property
    def piece_read(self) -> str:
        """The piece of `row` that is `at` pieces after the thread's first, read from shared memory."""
        return f"gf::load_apart<{self.distances}>(gf::offset(row.{self.name}, {self.step}))"

    @property
    def step(self) -> str:
        """Bytes in shared memory from the thread's first piece to the one `at` pieces after it."""
        return f"at / THREADS_PER_ROW * (THREADS * {self.nbytes})"

    @property
    def value_read(self) -> str:
        return f"gf::decode<{self.ctype}>(gf::load_pack<{self.nbytes}, gf::Access::USUAL>(row.{self.name}).word[0])"


@dataclass(frozen=True)
class Copies:
    """Inputs, and numbers of chosen rows, that are copied. The shared memory of one row is `stage`. axes: lines that
    compute the numbers of a row along several axes."""

    inputs: tuple[Copied, ...]
    axes: tuple[str, ...] = ()

    def named(self, name: str) -> Copied | None:
        return next((copied for copied in self.inputs if copied.name == name), None)

    @property
    def places(self) -> dict[str, str]:
        """Name of an input -> address of the thread's first access in shared memory."""
        return {copied.name: self.place(copied) for copied in self.inputs}

    def place(self, copied: Copied) -> str:
        """Address of the thread's first access of an input in shared memory. `stage` is the address for the widest
        accesses."""
        less = self._widest - copied.width
        return f"gf::offset(stage, {self._offset(copied)}{f' - int(own) * {less}' * bool(less)})"

    @property
    def _widest(self) -> int:
        return max((copied.width for copied in self.inputs), default=0)

    def _offset(self, copied: Copied) -> str:
        before = self._ordered[: self._ordered.index(copied)]
        pieces = sum(c.nbytes for c in before if c.pieces)
        return f"THREADS * (STEPS * {pieces} + {sum(c.nbytes for c in before if not c.pieces)})"

    @property
    def _ordered(self) -> tuple[Copied, ...]:
        return tuple(sorted(self.inputs, key=lambda copied: not copied.pieces))

    def source(self) -> Iterator[str]:
        yield ""
        yield "/// Where a row lies from which is copied, as one of its threads sees it."
        yield "struct Ahead {"
        yield from (f"  const void* {copied.name};" for copied in self.inputs)
        yield "};"
        yield "GF_DEVICE Ahead ahead_of(const Arguments& a, RowIndex index, Index thread) {"
        yield from self.axes
        yield "  return {" + ", ".join(copied.address for copied in self.inputs) + "};"
        yield "}"
        pieces, values = (sum(c.nbytes for c in self.inputs if c.pieces is kind) for kind in (True, False))
        yield f"constexpr int WIDEST_COPY = {self._widest};  // bytes of an access"
        yield f"constexpr int STAGE_BYTES = THREADS * (STEPS * {pieces} + {values});"
        yield from self._copy("copy_piece", ", Index at", True)
        yield from self._copy("copy_values", "", False)

    def _copy(self, name: str, at: str, pieces: bool) -> Iterator[str]:
        yield f"GF_DEVICE void {name}(const Ahead& row{at}, unsigned char* stage, gf::u32 own) {{"
        for copied in self.inputs:
            if copied.pieces is pieces:
                to, source = self.place(copied), f"row.{copied.name}"
                if pieces:
                    to = f"gf::offset({to}, {copied.step})"
                    source = f"gf::offset({source}, at * {copied.nbytes})"
                yield f"  gf::copy_apart<{copied.distances}>({to}, {source});"
        yield "}"


def copies(plan: PhasePlan) -> Copies:
    """Copies of all inputs that vary along rows, if their accesses are wide enough and an element fits a word.

    Cosines and sines are not copied: the rows of a token share them, and only their row number, which is read first, is
    copied."""
    inputs = plan.program.inputs
    own = (view.rows and view.dtype.bits <= 32 and view.unit.pairs is None and not view.unit.period for view in inputs)
    names = [f"i{i}" for i, copied in enumerate(own) if copied] + [f"n{k}" for k, _ in enumerate(plan.program.indices)]
    named = {pointer.name: pointer for pointer in pointers(plan)}
    found = (_copied(plan, named[name]) for name in names if plan.stages > 1)
    return Copies(tuple(copied for copied in found if copied.width >= LEAST), tuple(axes(plan)))


def _copied(plan: PhasePlan, pointer: Pointer) -> Copied:
    view, elements = pointer.view, plan.piece if pointer.view.columns else 1
    ctype, nbytes = view.dtype.facts.ctype, view.dtype.nbytes(elements)
    return Copied(pointer.name, ctype, address(plan, pointer), nbytes, access(view, elements), view.columns)
