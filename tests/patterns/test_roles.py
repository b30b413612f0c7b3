"""Roles and places: no other file of the patterns asks for the name of an op, and places say what kernels need."""

import ast
from pathlib import Path

import pytest

from graphfuse import GraphNotSupportedError, heur_mode
from graphfuse.ops import EXPANSIONS, OPS
from graphfuse.patterns.roles import ROLES
from graphfuse.rows.views import ROWS, Indexed, View, Within, joined
from support import graphs
from support.graphs import BF16, FLOAT

PATTERNS = Path(__file__).resolve().parents[2] / "patterns"
FILES = sorted(path for path in PATTERNS.glob("*.py") if path.name != "epilogues.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_compares_the_name_of_an_op(path):
    compared = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)]
    sides = [[ast.unparse(side) for side in (node.left, *node.comparators)] for node in compared]
    named = [found for found in sides if any(side.endswith(".op_name") for side in found)]
    assert all(found[-1] in ("ROLES", "self.roles") for found in named), named


def test_every_op_that_works_on_rows_has_a_role():
    assert {name for name, op in OPS.items() if op.pointwise} | set(EXPANSIONS) <= set(ROLES) <= set(OPS)


def view(place=ROWS, name="x"):
    return View(0, name, BF16, (64, 0), 1, 16, place=place)


def parameters(place):
    return [(name, value) for _, name, value in place.parameters("o0", BF16.nbytes)]


NUMBERS = ("axis0", "axis1")


def test_a_tensor_with_all_rows_needs_nothing():
    assert not parameters(ROWS) and ROWS.has("o0", NUMBERS) == "" and list(ROWS.counted("o0", NUMBERS)) == [*NUMBERS]
    assert not (ROWS.partial or ROWS.late or ROWS.kind) and ROWS.like(ROWS)


def test_some_rows_are_counted_from_the_first():
    place = Within(1, 4, 6)
    assert parameters(place) == [("o0_first", 4), ("o0_end", 6)] and place.partial and not place.late
    assert list(place.counted("o0", NUMBERS)) == ["axis0", "(gf::u32(axis1) - a.o0_first)"]
    assert place.has("o0", NUMBERS) == "gf::u32(axis1) < a.o0_end && gf::u32(axis1) >= a.o0_first"
    assert place.reach((9, 8), (64, 32)) == [(9, 64), (2, 32)]
    assert place.like(Within(1, 4, 6)) and not place.like(Within(0, 4, 6)) and not place.like(ROWS)


def test_of_several_tensors_each_has_the_rows_that_those_before_have_not():
    found = joined([view(Within(1, first, first + 2)) for first in (0, 2, 4)])
    assert [part.place.span for part in found.parts] == [(1, 0, 2), (1, 2, 4), (1, 4, 6)]
    assert not found.place.partial and found.place.late
    assert [part.place.has("o0", NUMBERS) for part in found.parts] == ["gf::u32(axis1) < a.o0_end"] * 2 + [""]
    names = [[name for name, _ in parameters(part.place)] for part in found.parts]
    assert names == [["o0_end"], ["o0_first", "o0_end"], ["o0_first"]]
    assert all(part.place.like(Within(*part.place.span)) for part in found.parts)


def test_chosen_rows_may_be_those_of_a_part():
    place = Indexed(2, 128, 9).only(Within(1, 4, 6))
    assert parameters(place) == [("o0_row", 256), ("o0_count", 9), ("o0_first", 4), ("o0_end", 6)]
    assert place.kind == "are chosen by number" and (place.numbers, place.axes, place.strides) == ((2,), (1,), (128,))
    assert place.reach((9, 8), (0, 32)) == [(2, 32), (9, 128)]
    assert place.in_program({1: 0}, [7, 8, 2]) == Indexed(2, 128, 9, Within(0, 4, 6))
    assert place.settled("o0", "row.o0") == (
        "row.o0_there && row.o0 != nullptr ? gf::offset(row.o0, row.o0_far) : nullptr"
    )
    assert not place.like(place)  # two rows may have one number


def test_pairs_of_an_odd_number_of_columns_are_declined_in_words():
    g = graphs.new(device="emulator")
    angles = [g.tensor([3, 2], data_type=FLOAT, name=name) for name in ("cos", "sin")]
    g.rotate_pairs(g.tensor([3, 5], data_type=BF16, name="x"), *angles, interleaved=True).set_output()
    with pytest.raises(GraphNotSupportedError, match="in rows of 5; accepted: an even number"):
        g.build([heur_mode.OPENSOURCE])


@pytest.mark.parametrize("parts", [(0, 1), (1, 0)], ids=str)
def test_a_joined_tensor_that_broadcasts_along_its_axis_is_none_of_the_rows(parts):
    g = graphs.new(device="emulator")
    x, a, b = (g.tensor([n, 64], data_type=BF16, name=f"t{n}") for n in (3, *parts))
    g.mul(g.softmax(x, 1), g.join(a, b, 0)).set_output()
    with pytest.raises(GraphNotSupportedError, match="join"):
        g.build([heur_mode.OPENSOURCE])
