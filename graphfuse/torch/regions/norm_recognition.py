"""Recognition of norms that a program computes in steps: they become the ops that they are.

The kernel of the forward stays the same. Its gradient becomes that of the op, which has a closed formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.ops import OPS
from graphfuse.torch.analysis.traversal import reachable
from graphfuse.torch.regions.call_translation import TO_BOOL
from graphfuse.torch.regions.program import Program, ProgramStep, Source, number_of

_OUTSIDE = -1
_INFERENCE = {"norm_forward_phase": "INFERENCE"}


def recognize_norms(program: Program, columns: int | None, trains: bool = False) -> Program:
    """Equivalent program with norms as ops. columns: of its rows; None if their extent varies. trains: whether its
    results have gradients."""
    steps = _distinct(program)
    # No kernel makes an op's gradients of strided rows: sums over these rows are a separate kernel.
    for number in range(0 if program.follows and trains else len(steps.program.steps)):
        found = steps.norm(number, columns) or steps.scaled(number)
        if found is not None:
            before, behind = steps.program.steps[:number], steps.program.steps[number + 1 :]
            steps = _Steps(replace(steps.program, steps=(*before, found, *behind)))
    return _without_identities(steps)


def _distinct(program: Program) -> _Steps:
    """Program in which readers of equal steps read the first of them."""
    first: dict[str, Source] = {}
    new: dict[Source, Source] = {}
    steps = []
    for number, step in enumerate(program.steps):
        steps.append(step.reading(new))
        same = first.setdefault(repr(steps[-1]), f"@{number}")
        if same != f"@{number}":
            new[f"@{number}"] = same
    return _Steps(_without_unread(replace(program, steps=tuple(steps))))


class _Steps:
    def __init__(self, program: Program):
        self.program = program
        self._readers: dict[Source, set[int]] = {}
        for number, step in enumerate(program.steps):
            for source in step.inputs.values() if not _is_exact(step) else ():
                self._readers.setdefault(self._exact(source), set()).add(number)
        for one in program.outputs:
            self._readers.setdefault(self._exact(f"@{one.step}"), set()).add(_OUTSIDE)
        self._truths = {one.name for one in program.inputs if one.dtype == data_type.BOOLEAN.name}
        self._vectors = {one.name for one in program.inputs if one.extents.is_vector}

    def norm(self, number: int, columns: int | None) -> ProgramStep | None:
        """The norm, before any weight, whose last step is the given one; None if there is none."""
        step = self.program.steps[number]
        columns = step.part or columns
        for x, variance in self._normalized(step):
            for mean, epsilon in self._operands(variance, "add"):
                square = self._mean(mean, columns) if isinstance(epsilon, int | float) else None
                squared = None if square is None else self._square(square)
                if squared is None or squared != self._exact(x):
                    continue
                centred = self._centred(squared, columns)
                op, of = ("rmsnorm", squared) if centred is None else ("layernorm", centred)
                if self._is_own(number, of):
                    return ProgramStep(op, {"input": of, "epsilon": epsilon}, _INFERENCE, step.dtype, step.part)
        return None

    def scaled(self, number: int) -> ProgramStep | None:
        """The norm with a weight or a bias for its columns, if a step applies that before anything is rounded; None
        otherwise."""
        step = self.program.steps[number]
        port = {"mul": "scale", "add": "bias"}.get(step.op)
        for norm, vector in self._pairs(step) if port else ():
            of = self._step(norm, "rmsnorm", "layernorm")
            if of is None or not self._is_vector(vector) or self._readers[self._exact(norm)] != {number}:
                continue
            if of.part != step.part:
                continue
            if port not in of.inputs and (port == "bias" or "bias" not in of.inputs):
                return replace(of, inputs={**of.inputs, port: self._exact(vector)}, dtype=step.dtype)
        return None

    def _normalized(self, step: ProgramStep) -> Iterator[tuple[Source, Source]]:
        """x and v of a step that computes x / sqrt(v)."""
        if step.op == "div":
            root = self._step(step.inputs["b"], "sqrt")
            if root is not None:
                yield step.inputs["a"], root.inputs["input"]
        for x, other in self._pairs(step) if step.op == "mul" else ():
            inverse = self._step(other, "rsqrt", "reciprocal", "div")
            if inverse is None or inverse.op == "div" and inverse.inputs["a"] != 1:
                continue
            if inverse.op == "rsqrt":
                yield x, inverse.inputs["input"]
                continue
            root = self._step(inverse.inputs["b" if inverse.op == "div" else "input"], "sqrt")
            if root is not None:
                yield x, root.inputs["input"]

    def _mean(self, source: Source, columns: int | None) -> Source | None:
        """Source of a mean over columns; None if the given source is no such mean."""
        mean = self._step(source, "reduction", "mul", "div")
        if mean is None:
            return None
        if mean.op == "reduction":
            return mean.inputs["input"] if mean.attributes["mode"] == "AVG" else None
        for total, number in self._pairs(mean):
            summed = self._step(total, "reduction")
            count = None if columns is None else columns if mean.op == "div" else 1 / columns
            if summed is not None and summed.attributes["mode"] == "ADD" and number == count:
                return summed.inputs["input"]
            if mean.op == "div":
                break
        return None

    def _square(self, source: Source) -> Source | None:
        """Source of a square; None if the given source is no square."""
        for a, b in self._operands(source, "mul"):
            return self._exact(a) if self._exact(a) == self._exact(b) and isinstance(a, str) else None
        return None

    def _centred(self, source: Source, columns: int | None) -> Source | None:
        """x of a source that is x less its mean; None for any other source."""
        difference = self._step(source, "sub")
        of = None if difference is None else self._mean(difference.inputs["b"], columns)
        return self._exact(of) if of is not None and self._exact(of) == self._exact(difference.inputs["a"]) else None

    def _is_own(self, number: int, x: Source) -> bool:
        """True if nothing else reads the steps between x and a step."""

        def read(source: Source) -> Iterable[Source]:
            step = self._made_by(source)
            return (s for s in map(self._exact, step.inputs.values()) if s != x) if step else ()

        between = {*map(number_of, reachable([f"@{number}"], read))} - {None}
        return all(self._readers[f"@{n}"] <= between for n in between - {number})

    def rounds(self, number: int) -> bool:
        """True if a step may round the result of the one before it, of which it is the only reader: that is not rounded
        yet, and its gradient does not read its result."""
        source = self._exact(self.program.steps[number].inputs["input"])
        made = self._step(source, "rmsnorm", "layernorm", "add", "sub", "mul")
        return made is not None and self.is_number(source) and self._readers[source] == {number}

    def is_number(self, source: Source) -> bool:
        """True if a source is not boolean."""
        step = self._made_by(source)
        return step.op not in TO_BOOL if step else source not in self._truths

    def _is_vector(self, source: Source) -> bool:
        """True if a source has a value for each column, the same in all rows."""
        step = self._made_by(source)
        if step is None:
            return source in self._vectors
        read = [s for s in step.inputs.values() if isinstance(s, str)]
        return OPS[step.op].pointwise and bool(read) and all(map(self._is_vector, read))

    def _exact(self, source: Source) -> Source:
        """The source whose value a source has, before steps that round nothing."""
        while (step := self._made_by(source)) and _is_exact(step):
            source = step.inputs["input"]
        return source

    def _made_by(self, source: Source) -> ProgramStep | None:
        """Step that makes a source; None for an input or a number."""
        number = number_of(source)
        return None if number is None else self.program.steps[number]

    def _step(self, source: Source, *ops: str) -> ProgramStep | None:
        """Step that makes a source, if it is one of these ops and rounds nothing; None otherwise."""
        step = self._made_by(self._exact(source))
        return step if step and step.op in ops and not step.dtype else None

    def _operands(self, source: Source, op: str) -> Iterator[tuple[Source, Source]]:
        step = self._step(source, op)
        return iter(()) if step is None else self._pairs(step)

    @staticmethod
    def _pairs(step: ProgramStep) -> Iterator[tuple[Source, Source]]:
        """Operands of a binary step, in both orders."""
        a, b = step.inputs.values()
        return iter(((a, b), (b, a)))


def _without_identities(steps: _Steps) -> Program:
    """Program without steps that pass on a value, or round what only they read: the step before them makes it
    rounded."""
    made, new = [*steps.program.steps], dict[Source, Source]()
    for number, step in enumerate(made):
        made[number] = step = step.reading(new)
        source = step.inputs.get("input")
        if step.op == "identity" and step.dtype and steps.rounds(number):
            made[number] = replace(made[number_of(source)], dtype=step.dtype)
        elif _is_exact(step) and steps.is_number(source):
            new[f"@{number}"] = source
    return _without_unread(replace(steps.program, steps=tuple(made)))


def _is_exact(step: ProgramStep) -> bool:
    """True if a step returns its input unchanged."""
    return step.op == "identity" and not step.dtype


def _without_unread(program: Program) -> Program:
    read: set[int | None] = {one.step for one in program.outputs}
    for number in reversed(range(len(program.steps))):
        if number in read:
            read.update(map(number_of, program.steps[number].inputs.values()))
    order = sorted(read - {None})
    numbers: dict[Source, str] = {f"@{old}": f"@{new}" for new, old in enumerate(order)}
    steps = tuple(program.steps[number].reading(numbers) for number in order)
    outputs = tuple(replace(one, step=order.index(one.step)) for one in program.outputs)
    return replace(program, steps=steps, outputs=outputs)
