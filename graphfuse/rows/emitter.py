"""Writes the steps of a row program, one after another."""

from collections.abc import Mapping
from types import MappingProxyType

from graphfuse.rows.steps import AnyStep, Chain, Join, Operand, Reduce, Step


class Emitter:
    """columns: elements of a row. steps: what is written so far."""

    def __init__(self, columns: int):
        self.columns = columns
        self.steps: list[AnyStep] = []

    def step(self, step: AnyStep) -> Chain:
        self.steps.append(step)
        return Chain(len(self.steps) - 1)

    def op(self, name: str, attributes: Mapping[str, object] = MappingProxyType({}), /, **operands: Operand) -> Chain:
        """A pointwise step, its operands by port."""
        return self.step(Step(name, tuple(operands.items()), tuple(attributes.items())))

    def reduce(self, join: Join, value: Operand) -> Chain:
        return self.step(Reduce(join, value))
