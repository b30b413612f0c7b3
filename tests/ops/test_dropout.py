"""Dropout: which elements become 0, and what is refused. Tests of all row ops hold its values, too."""

import pytest
import torch

from graphfuse import (
    GraphNotSupportedError,
    GraphValidationError,
    differentiate,
    heur_mode,
    norm_forward_phase,
    reduction_mode,
)
from graphfuse.ops import references
from support import graphs
from support.graphs import BF16, FLOAT
from support.row_ops import _philox


def test_known_answers():
    """Those that the authors of Philox publish, of 4x32 with seven rounds."""
    known = {
        (0, 0, (0, 0, 0, 0)): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        (2**32 - 1, 2**32 - 1, (2**32 - 1,) * 4): (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    }
    for given, words in known.items():
        assert _philox(*given) == words
    zero, columns = torch.zeros(8, dtype=torch.float64), torch.arange(8)
    made = references.random_uniform(torch, zero, zero, torch.zeros(8, dtype=torch.int64), columns)
    words = known[0, 0, (0, 0, 0, 0)]
    assert (made * 2**16).tolist() == [half for word in words for half in (word & 0xFFFF, word >> 16)]


@pytest.mark.parametrize("row", [0, 3, 2**32 - 1, 2**32, 2**40 + 5])
def test_rows_and_columns_of_all_sizes(row):
    columns = torch.tensor([0, 1, 2, 3, 4, 1001, 2**24 - 1])
    seed, offset = (torch.tensor([float(n)]) for n in (2**24 - 1, 77))
    made = references.random_uniform(torch, seed, offset, torch.full_like(columns, row), columns)
    counters = [(c // 8, row % 2**32, row >> 32, 0) for c in columns.tolist()]
    words = [_philox(2**24 - 1, 77, counter)[c // 2 % 4] for counter, c in zip(counters, columns.tolist(), strict=True)]
    halves = [word >> 16 if c % 2 else word % 2**16 for word, c in zip(words, columns.tolist(), strict=True)]
    assert (made.double() * 2**16).tolist() == halves


def drawn(dim=(6, 40), probability=0.25, seed=(1, 1), offset=(1, 1), **options):
    g = graphs.new(**options)
    x = g.tensor(list(dim), data_type=BF16, name="x")
    key = (g.tensor(list(d), data_type=FLOAT, name=n) for n, d in (("seed", seed), ("offset", offset)))
    g.dropout(x, *key, probability=probability).set_output().set_name("y").set_data_type(BF16)
    return g


@pytest.mark.parametrize(
    "change, message",
    [
        ({"probability": 1}, "probability is 1.0; accepted: 0 up to 1, without 1"),
        ({"probability": -0.1}, "probability is -0.1; accepted: 0 up to 1, without 1"),
        ({"probability": float("nan")}, "probability is nan; accepted: 0 up to 1, without 1"),
        ({"seed": (6, 1)}, r"seed must have one element, got \[6, 1\]"),
        ({"offset": (1, 40)}, r"offset must have one element, got \[1, 40\]"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(GraphValidationError, match=f"'dropout.0' .*{message}"):
        drawn(**change).validate()


def test_the_key_has_no_gradient():
    g = drawn()
    x, seed, y = (next(t for t in g.tensors if t.get_name() == name) for name in ("x", "seed", "y"))
    with pytest.raises(GraphNotSupportedError, match="the key of random numbers has no gradient"):
        differentiate(g, [y], [x, seed])


@pytest.mark.emulate
@pytest.mark.parametrize("dim", [(6, 40), (3, 4099), (2, 3, 1000), (1, 20000)])
def test_kernels_drop_what_the_reference_drops(dim):
    made = []
    for device in ("emulator", "cpu"):
        one = (1,) * len(dim)
        g = drawn(dim, 0.3, one, one, device=device)
        g.build([heur_mode.A])
        pack = {"x": torch.ones(dim, dtype=torch.bfloat16), "y": torch.empty(dim, dtype=torch.bfloat16)}
        pack |= {name: torch.full(one, value) for name, value in (("seed", 4711.0), ("offset", 2.0**24 - 1))}
        g.execute(pack)
        made.append(pack["y"])
    assert torch.equal(*made)
    assert abs((made[0] == 0).double().mean() - 0.3) < 4 * (0.21 / made[0].numel()) ** 0.5
    assert made[0].max() == torch.tensor(1 / 0.7).bfloat16()


@pytest.mark.emulate
@pytest.mark.parametrize("is_first", [False, True])
def test_a_norm_and_dropout_are_one_kernel_both_ways(is_first):
    g = graphs.new(device="emulator")
    x, w = g.tensor([4, 64], data_type=BF16, name="x"), g.tensor([1, 64], data_type=BF16, name="w")
    key = [g.tensor([1, 1], data_type=FLOAT, name=name) for name in ("seed", "offset")]
    more = []
    if is_first:
        r = g.tensor([4, 64], data_type=BF16, name="r")
        total = g.add(g.dropout(x, *key, probability=0.5), r).set_output().set_name("total").set_data_type(BF16)
        more = [total]
        out, _ = g.rmsnorm(total, w, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    else:
        y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
        out = g.dropout(y, *key, probability=0.5)
    out.set_output().set_name("out").set_data_type(BF16)
    made = differentiate(g, [out, *more], [x, w])
    for graph in (made.forward, made.backward):
        graph.build([heur_mode.A])
        assert [part.engine.name for part in graph._planner.plans[0].parts] == ["rows"]


def test_a_gradient_that_rows_share_drops_what_forward_has_dropped():
    """That of a sum is one a row: as it is, it would be dropped by other places."""
    g = graphs.new(io_data_type=FLOAT)
    x = g.tensor([3, 40], data_type=FLOAT, name="x")
    key = [g.tensor([1, 1], data_type=FLOAT, name=name) for name in ("seed", "offset")]
    y = g.dropout(x, *key, probability=0.5)
    total = g.reduction(y, mode=reduction_mode.ADD).set_dim([3, 1]).set_output().set_name("total")
    made = differentiate(g, [total], [x])
    pack = {"seed": torch.full((1, 1), 3.0), "offset": torch.full((1, 1), 4.0)}
    pack |= {"dtotal": torch.ones(3, 1), "dx": torch.empty(3, 40)}
    graphs.run(made.backward, pack, [heur_mode.A])
    again = graphs.new(io_data_type=FLOAT)
    read = [
        again.tensor(list(d), data_type=FLOAT, name=n)
        for n, d in (("x", (3, 40)), ("seed", (1, 1)), ("offset", (1, 1)))
    ]
    again.dropout(*read, probability=0.5).set_output().set_name("y")
    forward = {"x": torch.ones(3, 40), "seed": pack["seed"], "offset": pack["offset"], "y": torch.empty(3, 40)}
    graphs.run(again, forward, [heur_mode.A])
    assert torch.equal(pack["dx"], forward["y"]) and 0 < (forward["y"] == 0).sum() < 120
