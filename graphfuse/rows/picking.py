"""A sum over a row of which all but one column counts as 0, as that of a target's logit: the element is read by its
number instead.

No other element is looked at for it, so that a row costs one read, whatever its length.
"""

from collections.abc import Callable, Sequence

from graphfuse.rows.steps import AnyStep, Chain, Column, Join, Load, Operand, Pick, Reduce

Holds = Callable[[Operand], bool]


def picked(steps: Sequence[AnyStep], wide: Holds, zero: Holds) -> tuple[AnyStep, ...]:
    """The steps, each such sum in its place an element. What it was made from may have no readers left.

    wide: whether a value varies over columns. zero: whether it is always 0.
    """
    return tuple(_element(steps, step, wide, zero) or step for step in steps)


def _element(steps: Sequence[AnyStep], total: AnyStep, wide: Holds, zero: Holds) -> Pick | None:
    if not isinstance(total, Reduce) or total.join is not Join.SUM:
        return None
    chosen = _made(steps, total.input, "binary_select")
    if not chosen or not zero(chosen["input1"]) or not isinstance(chosen["input0"], Load) or not wide(chosen["input0"]):
        return None
    compared = _made(steps, chosen["mask"], "cmp_eq")
    for number, other in (("input", "comparison"), ("comparison", "input")):
        if compared and _numbers(steps, compared[number]) and not wide(compared[other]):
            return Pick(chosen["input0"], compared[other], total.rounded)
    return None


def _numbers(steps: Sequence[AnyStep], o: Operand) -> bool:
    """Whether a value is the number of its element's column."""
    return o == Column() or _made(steps, o, "identity").get("input") == Column()


def _made(steps: Sequence[AnyStep], o: Operand, op_name: str) -> dict[str, Operand]:
    """The operands of the step that makes a value, if it is of this op and does not round; else none."""
    step = steps[o.index] if isinstance(o, Chain) else None
    return dict(step.operands) if step is not None and step.op_name == op_name and step.rounded is None else {}
