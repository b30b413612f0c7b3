"""Steps written without a graph, as expansions write them."""

from dataclasses import dataclass, field

from graphfuse.rows.expansions import EXPANSIONS
from graphfuse.rows.steps import Chain, Join, Operand, Reduce, Step


@dataclass
class Emitter:
    columns: int
    steps: list[Step | Reduce] = field(default_factory=list)

    def step(self, step: Step | Reduce) -> Chain:
        self.steps.append(step)
        return Chain(len(self.steps) - 1)

    def op(self, name: str, **operands: Operand) -> Chain:
        return self.step(Step(name, tuple(operands.items())))

    def reduce(self, join: Join, value: Operand) -> Chain:
        return self.step(Reduce(join, value))

    def expand(self, op_name: str, **operands: Operand):
        return EXPANSIONS[op_name].of(self, operands)
