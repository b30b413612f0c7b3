"""Replacement of sums over a row in which only one column is not zero, such as the logit of a target.

The element of this column is read by its number, or computed from elements that are read so. A row then costs one read,
whatever its length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graphfuse.ops import OPS
from graphfuse.rows.steps import (
    AnyStep,
    Chain,
    Column,
    Join,
    Load,
    Number,
    Operand,
    Pick,
    Reduce,
    Rewrite,
    Step,
    operands_of,
    renamed,
)


@dataclass(frozen=True)
class KnownOperands:
    """Predicates of operands.

    wide: whether a value varies over columns. zero: whether it is always 0. plain: whether an input has all rows at
    its strides and an element for each column.
    """

    wide: Callable[[Operand], bool]
    zero: Callable[[Operand], bool]
    plain: Callable[[Load], bool]


def picked(steps: Sequence[AnyStep], known: KnownOperands, columns: int) -> Rewrite:
    """The steps with such sums replaced by elements; None if there are none. Operands may have no readers left.

    columns: elements of a row."""
    if all(_chosen(steps, step, known)[0] is None for step in steps):
        return None
    made: list[AnyStep] = []
    renames: dict[Operand, Operand] = {}
    alone: set[Operand] = set()  # values whose elements depend only on the same column of plain inputs

    def is_alone(o: Operand) -> bool:
        return o in alone or isinstance(o, Load) and known.wide(o) and known.plain(o)

    def step(name: str, **operands: Operand) -> Chain:
        made.append(Step(name, tuple(operands.items())))
        return Chain(len(made) - 1)

    def element(value: Operand, column: Operand) -> None:
        """Appends the steps that compute the element of `value` in a column. Not recursive: there may be many steps."""
        last, wanted = value.index if isinstance(value, Chain) else -1, {value}
        for k in reversed(range(last + 1)):
            if Chain(k) in wanted:
                wanted.update(o for _, o in steps[k].operands if known.wide(o))
        done: dict[Operand, Operand] = {}
        loads = sorted((o for o in wanted if isinstance(o, Load)), key=lambda o: o.index)
        for o in (*loads, *(Chain(k) for k in range(last + 1) if Chain(k) in wanted)):
            made.append(Pick(o, column) if isinstance(o, Load) else renamed(steps[o.index], renames | done))
            done[o] = Chain(len(made) - 1)

    for k, old in enumerate(steps):
        value, column = _chosen(steps, old, known)
        if value is None or not is_alone(value):
            made.append(renamed(old, renames))
            wide = [o for _, o in old.operands if known.wide(o)]
            if isinstance(old, Step) and old.op_name in OPS and wide and all(map(is_alone, wide)):
                alone.add(Chain(k))
        else:
            column = renames.get(column, column)
            element(value, column)
            found = Chain(len(made) - 1)
            if not isinstance(value, Load):  # it may be nonzero even if no column has the number
                nearest = step(
                    "min", input0=step("max", input0=column, input1=Number(0.0)), input1=Number(columns - 1.0)
                )
                mask = step("cmp_eq", input=step("floor", input=nearest), comparison=column)
                step("binary_select", input0=found, input1=Number(0.0), mask=mask)
            made[-1] = replace(made[-1], rounded=old.rounded)
        renames[Chain(k)] = Chain(len(made) - 1)
    return tuple(made), renames


def _chosen(
    steps: Sequence[AnyStep], total: AnyStep, known: KnownOperands
) -> tuple[Operand, Operand] | tuple[None, None]:
    """The value of which a step sums one element, and the number of this element's column; else (None, None)."""
    if isinstance(total, Reduce) and total.join is Join.SUM:
        chosen = operands_of(steps, total.input, "binary_select")
        compared = operands_of(steps, chosen["mask"], "cmp_eq") if chosen and known.zero(chosen["input1"]) else {}
        for number, other in (("input", "comparison"), ("comparison", "input")):
            if compared and _numbers(steps, compared[number]) and not known.wide(compared[other]):
                return chosen["input0"], compared[other]
    return None, None


def _numbers(steps: Sequence[AnyStep], o: Operand) -> bool:
    """True if a value is the column number of each element."""
    return o == Column() or operands_of(steps, o, "identity").get("input") == Column()
