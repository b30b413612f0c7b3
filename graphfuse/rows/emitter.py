"""`Emitter`, which appends the steps of a row program."""

from collections.abc import Mapping
from types import MappingProxyType

from graphfuse.base.dtypes import data_type
from graphfuse.ops import Join, RowArithmetic
from graphfuse.rows.program import RANDOM
from graphfuse.rows.steps import AnyStep, Chain, Column, Number, Operand, Reduce, RowNumber, Step

_LOG2_E = 1.4426950408889634


class Emitter(RowArithmetic):
    """Arithmetic on rows that emits steps. columns: elements of a row. steps: those emitted so far."""

    most = data_type.FLOAT.facts.max

    def __init__(self, columns: int):
        self.columns = columns
        self.steps: list[AnyStep] = []

    def step(self, step: AnyStep) -> Chain:
        self.steps.append(step)
        return Chain(len(self.steps) - 1)

    def op(
        self, name: str, attributes: Mapping[str, object] = MappingProxyType({}), /, **operands: Operand | float
    ) -> Chain:
        """The value of a new pointwise step. operands: by port."""
        given = ((port, Number(o) if isinstance(o, int | float) else o) for port, o in operands.items())
        return self.step(Step(name, tuple(given), tuple(attributes.items())))

    def reduce(self, join: Join, value: Operand) -> Chain:
        return self.step(Reduce(join, value))

    def mean(self, value: Operand) -> Chain:
        return self.op("mul", a=self.reduce(Join.SUM, value), b=1.0 / self.columns)

    def power(self, value: Operand) -> Chain:
        # The error of the exponent is proportional to its size.
        return self.op("exp2_approx", input=self.op("mul", a=value, b=_LOG2_E))

    def numbers(self) -> Chain:
        return self.op("identity", input=Column())

    def random_at_least(self, seed: Operand, offset: Operand, least: int) -> Chain:
        place = {"row": RowNumber(), "column": Column(integer=True)}
        return self.op(RANDOM, seed=seed, offset=offset, **place, least=least)
