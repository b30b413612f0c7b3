"""A sum over a row of which all but one column counts as 0, as that of a target's logit: the element is read by its
number instead.

No other element is looked at for it, so that a row costs one read, whatever its length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphfuse.rows.steps import AnyStep, Chain, Column, Join, Load, Operand, Pick, Reduce


@dataclass(frozen=True)
class KnownOperands:
    """Answers about operands.

    wide: whether a value varies over columns. zero: whether it is always 0. plain: whether an input's row lies in one
    place, without being chosen by number.
    """

    wide: Callable[[Operand], bool]
    zero: Callable[[Operand], bool]
    plain: Callable[[Load], bool]


def picked(steps: Sequence[AnyStep], known: KnownOperands) -> tuple[AnyStep, ...]:
    """The steps, each such sum in its place an element. What it was made from may have no readers left."""
    return tuple(_element(steps, step, known) or step for step in steps)


def _element(steps: Sequence[AnyStep], total: AnyStep, known: KnownOperands) -> Pick | None:
    if not isinstance(total, Reduce) or total.join is not Join.SUM:
        return None
    chosen = _made(steps, total.input, "binary_select")
    value = chosen.get("input0")
    if not isinstance(value, Load) or not (known.wide(value) and known.plain(value) and known.zero(chosen["input1"])):
        return None
    compared = _made(steps, chosen["mask"], "cmp_eq")
    for number, other in (("input", "comparison"), ("comparison", "input")):
        if compared and _numbers(steps, compared[number]) and not known.wide(compared[other]):
            return Pick(value, compared[other], total.rounded)
    return None


def _numbers(steps: Sequence[AnyStep], o: Operand) -> bool:
    """True if a value is the number of its element's column."""
    return o == Column() or _made(steps, o, "identity").get("input") == Column()


def _made(steps: Sequence[AnyStep], o: Operand, op_name: str) -> dict[str, Operand]:
    """The operands of the step that makes a value, if it is of this op and does not round; else none."""
    step = steps[o.index] if isinstance(o, Chain) else None
    return dict(step.operands) if step is not None and step.op_name == op_name and step.rounded is None else {}
