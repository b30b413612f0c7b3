"""Functions over ranks as operators of torch, for graphs. Groups are given by name, as graphs store them.

``graphfuse::NAME`` allocates out and returns it; ``graphfuse::NAME.out`` writes a given one. They have no gradients.
"""

from collections.abc import Callable, Mapping

import torch
from torch import distributed

from graphfuse.functional.declaration import Function
from graphfuse.functional.operator import LIBRARY, pass_by_autograd
from graphfuse.functional.rank_functions import group_of
from graphfuse.runtime import torch_private

Call = Callable[..., torch.Tensor]


def define(declared: Function, call: Call, made: Callable[..., torch.Tensor], takes_dim: bool, new: bool) -> None:
    """Defines the operators of a function. declared: its function of one rank, which lists its tensors and which of
    them it writes. made: returns the fake result for the arguments of a call. new: whether it allocates a result."""
    tensors = [a for a in declared.arguments if a.name not in ("scale", "out")]
    letters = iter("abc")
    given = [f"Tensor({next(letters)}!) {a.name}" if a.written else f"Tensor {a.name}" for a in tensors]
    rest = ["float eps", *["int dim"] * takes_dim, "Tensor? scale", "str group"]
    names = (*(a.name for a in tensors), "eps", *["dim"] * takes_dim, "scale", "group")

    def run(*values: object) -> torch.Tensor:
        return call(**_given(names, values))

    def run_out(*values: object, out: torch.Tensor) -> None:
        call(**_given(names, values), out=out)

    def fake(*values: object) -> torch.Tensor:
        return made(**_given(names, values), out=None)

    def fake_out(*values: object, out: torch.Tensor) -> None:
        made(**_given(names, values), out=out)

    forms = [(f"{declared.name}.out", [*given, *rest, "*", f"Tensor({next(letters)}!) out"], "()", run_out, fake_out)]
    if new:
        forms.append((declared.name, [*given, *rest], "Tensor", run, fake))
    for form, parameters, returned, does, says in forms:
        LIBRARY.define(f"{form}({', '.join(parameters)}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(form, does, "CompositeExplicitAutograd")
        torch.library.register_fake(f"graphfuse::{form}", says, lib=LIBRARY)
        overload = getattr(getattr(torch.ops.graphfuse, declared.name), "out" if form.endswith(".out") else "default")
        pass_by_autograd(declared, overload)


def _given(names: tuple[str, ...], values: tuple[object, ...]) -> Mapping[str, object]:
    found = dict(zip(names, values, strict=True))
    return found | {"group": torch_private.process_group(str(found["group"]))}


def traced(name: str, group: distributed.ProcessGroup | None, out: torch.Tensor | None, *given: object) -> torch.Tensor:
    """The call while torch.compile traces it. given: the other arguments, in order."""
    operator = getattr(torch.ops.graphfuse, name)
    values = (*given, group_of(group).group_name)
    if out is None:
        return operator.default(*values)
    operator.out(*values, out=out)
    return out
