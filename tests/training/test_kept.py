"""What operators keep for backward is what the rules of their ops read, and nothing else."""

import pytest
import torch

from graphfuse.functional import option
from graphfuse.functional.operator import FUNCTIONS
from graphfuse.torch.operators import by_rule

pytestmark = pytest.mark.torch

NAMES = [name for name in FUNCTIONS if f"{name}_training" in FUNCTIONS]
X = (3, 2, 24)  # a problem that no other test has


def drawn(f):
    """All arguments of an operator, those that may be left out among them."""
    made, shapes = {}, {}
    for a in f.arguments:
        if a.written:
            continue
        shapes[a.name] = (7, 16) if a.table else a.shape(shapes)[0] if a.shape and not a.free else X
        floats = torch.float32 in a.types
        made[a.name] = (
            torch.randn(shapes[a.name]).requires_grad_() if floats else torch.ones(shapes[a.name], dtype=torch.int64)
        )
    numbers = {name: option.NUMBERS[name][0](0) for name in f.options if name in option.NUMBERS}
    return [made.get(n, numbers.get(n, 0.5 if n in f.numbers else True)) for n in f.parameters]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_what_rules_read(name, plan_on, monkeypatch):
    plan_on("cpu")  # anew
    found = {}

    class Wrong(by_rule.BackwardByRule):
        def read(self, t):
            value = super().read(t)
            if value is not None and self._names[t] in self.of.kept:
                found.setdefault(self.of, set()).add(self._names[t])
            return value

    monkeypatch.setattr(by_rule, "BackwardByRule", Wrong)
    packet = getattr(torch.ops.graphfuse, name.removeprefix("graphfuse::"))
    made = packet(*drawn(FUNCTIONS[name]))
    sum(y.sum() for y in (made if isinstance(made, tuple) else (made,))).backward()
    assert found
    for computation, read in found.items():
        assert read == {*computation.kept}
