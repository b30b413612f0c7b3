"""Functions of elements beside a sum of rows, as regions: the op of the table that each becomes, and torch's values."""

import pytest
import torch
from torch.nn import functional as F

from support.regions import BINARY16, FULL, HALF, found, rows, summed

pytestmark = pytest.mark.torch

FUNCTIONS = {
    "ceil": torch.ceil,
    "floor": torch.floor,
    "round": lambda y: torch.round(3 * y),
    "trunc": lambda y: torch.trunc(3 * y),
    "exp2": torch.exp2,
    "log2": lambda y: torch.log2(y.abs() + 1),
    "binary_select of a number": lambda y: torch.maximum(y, torch.full_like(y, 0.3)),
    "sin": lambda y: torch.sin(100 * y),
    "cos": torch.cos,
    "tan": torch.tan,
    "erf": torch.erf,
    "elu": lambda y: F.elu(y, 0.5),
    "softplus": lambda y: F.softplus(y, 2.0),
    "mod": lambda y: torch.fmod(y, 0.7),
    "mod of a negative number": lambda y: y % -0.7,
    "mod of tensors": lambda y: y % (0.5 - y),
    "mod by a tensor of a number": lambda y: torch.remainder(2, y),
    "pow": lambda y: torch.pow(y.abs(), 1.7),
    "pow of a number": lambda y: 1.7**y,
    "pow of tensors": lambda y: torch.pow(y.abs(), y),
    "logical_and": lambda y: torch.where(torch.logical_and(y > 0, y < 1), y, 0.0),
    "logical_or": lambda y: torch.where(torch.logical_or(y < 0, y > 1), y, 0.0),
    "logical_not": lambda y: torch.where(torch.logical_not(y > 0), y, 0.0),
    "logical_and of masks": lambda y: torch.where((y > 0) & (y < 1), y, 0.0),
    "logical_or of masks": lambda y: torch.where((y < 0) | (y > 1), y, 0.0),
    "logical_not of a mask": lambda y: torch.where(~(y > 0), y, 0.0),
    "cmp_neq of masks": lambda y: torch.where((y > 0) ^ (y > 1), y, 0.0),
}


@pytest.mark.parametrize("dtype", [FULL, HALF, BINARY16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_torchs(name, dtype):
    function = FUNCTIONS[name]
    x = rows(dtype)
    module, given, verdicts = found(lambda x: function(summed(x)), x)
    ((region, why),) = verdicts
    assert not why and name.split()[0] in [step.op for step in region.program.steps]
    (made,), want = module(*given), function(summed(x))
    assert made.dtype is want.dtype
    error = {FULL: 1e-5, HALF: 2.0**-7, BINARY16: 2.0**-9}[dtype]  # a rounding more or less
    torch.testing.assert_close(made, want, rtol=error, atol=1e-5)
