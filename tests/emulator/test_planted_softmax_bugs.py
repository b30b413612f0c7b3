"""Bugs planted into what is printed for softmax and its like: what keeps e^x finite, and what no row may take in."""

import pytest
import torch

from graphfuse.base.dtypes import data_type
from graphfuse.codegen.expressions import literal
from graphfuse.engines.rows.by_row import ByRowKnobs
from support import graphs
from support.bugs import ADDRESS, WRONG, Bug, assert_caught, plant
from support.emulation import Planned
from support.graphs import BF16, FLOAT

pytestmark = pytest.mark.emulate

# Rows of two warps, two of them a CTA; the last threads of a row have a piece less than the others.
KNOBS = ByRowKnobs(64, 128)
ROWS, COLUMNS = 5, 500
NOWHERE = ("", "")
HIGH, LOW = 95.0, -95.0  # e^x is infinite, or no float32 number with all its digits
_LARGEST = "maxima[0] = inside ? gf::max(maxima[0], gf::largest(l0)) : maxima[0];"

_MOST = data_type.FLOAT.facts.max
_FINITE = ", ".join(map(literal, (0.0, -_MOST, _MOST)))


def _bug(old: str, new: str) -> Bug:
    return Bug(old, new, {ADDRESS: WRONG}, NOWHERE)


BUGS = {
    "the largest is not subtracted": ("softmax", HIGH, _bug("v0 = maxima[0];", "v0 = 0.0f;")),
    "the largest is not subtracted from a logarithm": ("log_softmax", HIGH, _bug("v0 = maxima[0];", "v0 = 0.0f;")),
    "the search begins with zero": (
        "softmax",
        LOW,
        _bug("maxima[0] = gf::as_float(0xff800000u);", "maxima[0] = 0.0f;"),
    ),
    "the search begins with the least normal number": (
        "softmax",
        LOW,
        _bug("maxima[0] = gf::as_float(0xff800000u);", "maxima[0] = 0x1.0p-126f;"),
    ),
    "what is past the row's end is searched": (
        "softmax",
        LOW,
        _bug(_LARGEST, "maxima[0] = gf::max(maxima[0], gf::largest(l0));"),
    ),
    "the largest of magnitudes": ("softmax", LOW, _bug("gf::largest(l0)", "gf::max_magnitude(l0)")),
    "the largest of a thread's last piece": (
        "softmax",
        HIGH,
        _bug("inside ? gf::max(maxima[0], gf::largest(l0))", "inside ? gf::largest(l0)"),
    ),
    "e to the power of what is past the row's end is added": (
        "softmax",
        LOW,
        _bug("ZEROS_STAY_ZERO = false;", "ZEROS_STAY_ZERO = true;"),
    ),
    "the total's reciprocal": ("softmax", HIGH, _bug("(1.0f / v4)", "v4")),
    "the largest is not added again": ("logsumexp", LOW, _bug("(v6 + v1);", "v6;")),
    "infinity less infinity": ("logsumexp", -float("inf"), _bug(f"v1 = gf::relu(v0, {_FINITE});", "v1 = v0;")),
}


def planned(op: str, middle: float) -> Planned:
    g = graphs.new(device="emulator")
    x = g.tensor([ROWS, COLUMNS], data_type=BF16, name="x")
    y = getattr(g, op)(x).set_output().set_name("y").set_data_type(FLOAT)
    values = torch.randn(ROWS, COLUMNS, generator=graphs.generator("cpu", 1)) * 2 + middle
    g.validate()
    return Planned(g, {"x": values.bfloat16(), "y": torch.full(y.get_dim(), 7.0)}, KNOBS)


@pytest.mark.some(6)
@pytest.mark.parametrize("name", BUGS)
def test_in_softmax(name):
    op, middle, bug = BUGS[name]
    right, kernel = planned(op, middle), planned(op, middle)
    right.run()
    found = kernel.check(ADDRESS, plant(kernel.source, bug))
    assert_caught(bug, "" if found == right.contents() else WRONG, ADDRESS, {})


@pytest.mark.each_value
@pytest.mark.parametrize("op, middle", sorted({(op, middle) for op, middle, _ in BUGS.values()}))
def test_without_a_bug_nothing_is_found(op, middle):
    right, kernel = planned(op, middle), planned(op, middle)
    right.run()
    assert kernel.check(ADDRESS) == right.contents()
