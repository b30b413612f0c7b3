"""Overrides that are refused, and what the error names."""

import re

import pytest
import torch

from graphfuse import GraphfuseError, GraphStateError, VariantPackError, VariantPackTypeError, norm_forward_phase
from support import graphs
from support.overridden import COLUMNS, FALLBACK, new, norm, to, values


def test_it_is_for_graphs_that_ask_for_it():
    g = graphs.new()
    g.relu(g.tensor([4, 8], name="x")).set_output()
    g.build(FALLBACK)
    for call in (lambda: g.execute({}, None, None, [1], [[2, 8]]), lambda: g.get_workspace_size(None, [1], [[2, 8]])):
        with pytest.raises(GraphStateError, match="made with is_override_shape_enabled=True"):
            call()
    dynamic = graphs.new(is_dynamic_shape_enabled=True)
    x = dynamic.tensor([4, 8], name="x", uid=1)
    dynamic.relu(x).set_output().set_name("out").set_uid(2)
    dynamic.build(FALLBACK)
    x, out = torch.randn(9, 8), torch.empty(9, 8)
    dynamic.execute({1: x, 2: out}, None, None, [1, 2], [x.shape] * 2)
    assert torch.equal(out, x.relu())


REFUSED = {
    "no uids": ((None, [[5, COLUMNS]] * 2), VariantPackError, "override_shapes is given without override_uids"),
    "no shapes": (([1, 3], None), VariantPackError, "override_uids is given without override_shapes"),
    "strides alone": ((None, None, [[1, 1]]), VariantPackError, "given without override_uids and override_shapes"),
    "no list": ((1, [[5, COLUMNS]]), VariantPackTypeError, "override_uids is an int; accepted: a list or tuple"),
    "lengths": (([1, 3], [[5, COLUMNS]]), VariantPackError, "2 entries, override_shapes 1, override_strides 2"),
    "a name": ((["x", 3], [[5, COLUMNS]] * 2), VariantPackTypeError, "override_uids has 'x'; accepted: uids"),
    "a bool": (([True, 3], [[5, COLUMNS]] * 2), VariantPackTypeError, "override_uids has True; accepted: uids"),
    "twice": (([1, 1], [[5, COLUMNS]] * 2), VariantPackError, "override_uids has 1 twice; accepted: each uid once"),
    "unknown": (([1, 77], [[5, COLUMNS]] * 2), VariantPackError, "77 is of no tensor .*'x' \\(1\\), 'w' \\(2\\)"),
    "virtual": (([1, 4], [[5, COLUMNS]] * 2), VariantPackError, "4 is tensor .*its shape follows|as it is virtual"),
    "no numbers": (([1, 3], ["ab", [5, COLUMNS]]), VariantPackTypeError, "uid 1: 'ab' is given; accepted: a sequence"),
    "a bool extent": (([1, 3], [[True, COLUMNS]] * 2), VariantPackError, "uid 1: .* accepted: a sequence of int, 0"),
    "half a row": (([1, 3], [[2.5, COLUMNS]] * 2), VariantPackTypeError, "uid 1: .* accepted: a sequence of int, 0"),
    "below zero": (([1, 3], [[-5, COLUMNS]] * 2), VariantPackError, "uid 1: .* accepted: a sequence of int, 0"),
    "rank": (([1, 3], [[5, 1, COLUMNS]] * 2), VariantPackError, "'x'.*has \\[5, 1, 40\\]; accepted: 2 extents"),
    "columns": (([1, 3], [[5, 8]] * 2), VariantPackError, "'x'.*has \\[5, 8\\]; .*that of the last stays 40"),
    "another output": (([1, 3], [[5, COLUMNS], [6, COLUMNS]]), VariantPackError, "'out'.*\\[6, 40\\]; accepted: \\[5,"),
    "input alone": (([1], [[5, COLUMNS]]), VariantPackError, "'out', uid 3, is not overridden .*accepted: override it"),
    "output alone": (([3], [[5, COLUMNS]]), VariantPackError, "'out'.*has \\[5, 40\\]; accepted: \\[64, 40\\]"),
    "weight, too": (
        ([1, 2, 3], [[5, COLUMNS]] * 3),
        VariantPackError,
        "'x'.* along axis 0 \\(extent 5\\) and .*: along axis 1",
    ),
    "rank of strides": ((*to(5), [[1], None]), VariantPackError, "'x'.*override_strides has \\[1\\]; accepted: 2"),
    "strides below zero": ((*to(5), [[-1, 1], None]), VariantPackError, "override_strides, tensor with uid 1"),
    "strides that overlap": ((*to(5), [None, [1, 1]]), VariantPackError, "'out'.*several elements to one address"),
}


@pytest.mark.parametrize("lists, kind, message", REFUSED.values(), ids=REFUSED)
def test_refused(lists, kind, message):
    """With the tensor, what is given and what is accepted, and before anything is written."""
    g, pack = norm(), values(5)
    g.build(FALLBACK)
    g.execute(values(7), None, None, *to(7))
    lists = (*lists, None)[:3]
    for call in (g.execute, g.execute_plan_at_index, g.bind):
        options = {name: v for name, v in zip(("uids", "shapes", "strides"), lists, strict=True)}
        with pytest.raises(kind, match=message) as error:
            call(pack, **{f"override_{name}": v for name, v in options.items()})
        assert isinstance(error.value, GraphfuseError) and type(error.value) is kind
    with pytest.raises(kind, match=message):
        g.get_workspace_size(None, *lists)
    assert pack["out"].isnan().all()


def test_rows_along_several_axes_keep_their_length():
    g = new()
    x, w = g.tensor([6, 4, 8], name="x", uid=1), g.tensor([1, 4, 8], name="w", uid=2)
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    y.set_output().set_uid(3)
    g.build(FALLBACK)
    message = (
        r"'x'.*node 'rmsnorm.0' .* along axis 1 \(extent 5\) .*of \[6, 5, 8\]; accepted: along axis 1 \(extent 4\)"
    )
    with pytest.raises(VariantPackError, match=message):
        g.get_workspace_size(None, [1, 2, 3], [[6, 5, 8], [1, 5, 8], [6, 5, 8]])


def test_a_virtual_reshape_that_is_not_said():
    """Its uid is told; those of other virtual tensors are no more accepted than without it."""
    g = new()
    x = g.tensor([4, 6, 8], name="x", uid=1)
    y = g.relu(g.reshape(x).set_dim([24, 8]).set_name("flat").set_uid(2)).set_name("y").set_uid(3)
    g.relu(y).set_output().set_uid(4)
    g.build(FALLBACK)
    for uids, shapes, message in (
        ([1, 4], [[5, 6, 8], [30, 8]], "'reshape.0'.*240, got .*; accepted: override 'flat', uid 2, too"),
        ([1, 2, 4], [[5, 6, 8], [29, 8], [30, 8]], r"'reshape.0'.*240, got \[29, 8\].*\]\)$"),
        ([1, 2, 4], [[5, 6, 8], [5, 6, 8], [30, 8]], "'flat'.*accepted: 2 extents"),
        (
            [1, 3],
            [[5, 6, 8], [30, 8]],
            "3 is tensor 'y'.*virtual; accepted: .* a reshape makes, 'x' .*, 'flat' \\(2\\)",
        ),
        ([2], [[12, 8]], "'reshape.0'.*192, got"),
    ):
        with pytest.raises(VariantPackError, match=message):
            g.get_workspace_size(None, uids, shapes)


def test_numbers_have_no_shape_to_override():
    g = new()
    x = g.tensor([6, 8], name="x", uid=1)
    factor = g.tensor([1, 1], name="factor", uid=2, is_pass_by_value=True)
    g.mul(x, factor).set_output().set_uid(3)
    g.build(FALLBACK)
    with pytest.raises(VariantPackError, match="2 is tensor 'factor' .*passed by value; accepted: .*'x' \\(1\\)"):
        g.get_workspace_size(None, [2], [[1, 1]])


SMALLER = {
    "fewer rows": lambda p: p | {"x": p["x"][:8]},
    "a row less in memory": lambda p: p | {"out": torch.empty(9 * COLUMNS - 1)},
    "other strides": lambda p: p | {"x": p["x"].t().contiguous().t()[:, :COLUMNS].expand(9, COLUMNS)[::2]},
    "overlap": lambda p: p | {"out": p["x"].view(-1)[: 9 * COLUMNS].view(9, COLUMNS)[:, :]} | {"w": p["x"][8:]},
    "type": lambda p: p | {"x": p["x"].half()},
    "missing": lambda p: {"x": p["x"]},
}


@pytest.mark.parametrize("change", SMALLER.values(), ids=SMALLER)
def test_memory_too_small_is_refused_after_a_call_as_before(change):
    first, again = norm(), norm()
    first.build(FALLBACK), again.build(FALLBACK)
    again.execute(values(9), None, None, *to(9))
    errors = []
    for g in (first, again):
        pack = change(values(9))
        with pytest.raises(VariantPackError) as error:
            g.execute(pack, None, None, *to(9))
        errors.append((type(error.value), re.sub("0x[0-9a-f]+", "", str(error.value))))
    assert errors[0] == errors[1]
