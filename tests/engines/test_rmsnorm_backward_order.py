"""The order in which the backward kernel sums over a row: the documented one, whatever knobs and tensors."""

import math

import numpy as np
import pytest
import torch

from graphfuse import data_type, pygraph
from graphfuse.engines.rows.persistent import PersistentKnobs
from support import graphs
from support.emulation import Planned
from support.graphs import BF16, FLOAT, HALF, TORCH

pytestmark = pytest.mark.emulate

ROWS = 6


def mean(products: np.ndarray, given: data_type = BF16) -> np.ndarray:
    """Of each row: halves of chunks of 8 in order, or chunks of 4 of float32 tensors, then the tree over chunks that
    joins the highest bit of their numbers first. products: float32, exact."""
    columns = products.shape[1]
    chunk = math.gcd(columns, 4 if given is FLOAT else 8)
    half = 4 if chunk == 8 else chunk
    parts = np.zeros((len(products), columns // half), np.float32)
    for i in range(half):
        parts += products[:, i::half]
    if half < chunk:
        parts = parts[:, ::2] + parts[:, 1::2]
    return over_tree(parts) * np.float32(1 / columns)


def over_tree(parts: np.ndarray) -> np.ndarray:
    while (count := parts.shape[1]) > 1:
        joined = 1 << (count - 1).bit_length() - 1
        after = parts[:, joined:]
        parts = np.concatenate([parts[:, : after.shape[1]] + after, parts[:, after.shape[1] : joined]], 1)
    return parts[:, 0]


def operands(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x of 1 and -1; a gradient of many magnitudes that all types have, that cancel in pairs and is zero at every third
    place: what is left of the mean is a matter of order, and is DX where the gradient is zero."""
    source = graphs.generator("cpu", columns)
    x = torch.randint(0, 2, (ROWS, columns), generator=source) * 2.0 - 1
    places = torch.tensor([i for i in range(columns) if i % 3])
    first, second = places[torch.randperm(len(places), generator=source)][: len(places) // 2 * 2].view(2, -1)
    exponents = torch.randint(-9, 13, (ROWS, len(first)), generator=source)
    values = torch.ldexp(torch.randn(ROWS, len(first), generator=source), exponents).clamp(-60000, 60000)
    grad = torch.zeros(ROWS, columns)
    grad[:, first], grad[:, second] = values * x[:, first], -values * x[:, second]
    return x, grad.bfloat16().half().float()


def graph(columns: int, given: data_type, made: data_type, more: bool) -> pygraph:
    """more: whether a float32 tensor is added to DX, which is rounded before, as it is where it is stored."""
    g = graphs.new(device="emulator", intermediate_rounding="declared") if more else graphs.new(device="emulator")
    grad, x = (g.tensor([ROWS, columns], data_type=given, name=name) for name in ("grad", "x"))
    weight, inverse = (
        g.tensor([1, columns], data_type=given, name="w"),
        g.tensor([ROWS, 1], data_type=FLOAT, name="inverse"),
    )
    dx, dscale, _ = g.rmsnorm_backward(grad, x, weight, inverse, has_dbias=False)
    dscale.set_output().set_name("dscale").set_data_type(FLOAT)
    if more:
        dx.set_data_type(made)
        dx = g.add(dx, g.tensor([ROWS, columns], data_type=FLOAT, name="more"))
    dx.set_output().set_name("dx").set_data_type(FLOAT if more else made)
    return g


def run(columns: int, given: data_type, made: data_type, knobs: PersistentKnobs, more: bool = False) -> None:
    x, grad = operands(columns)
    pack = {"x": x.to(TORCH[given]), "grad": grad.to(TORCH[given]), "inverse": torch.ones(ROWS, 1)}
    pack |= {"w": torch.ones(1, columns, dtype=TORCH[given]), "dscale": torch.empty(1, columns)}
    pack["dx"] = torch.empty(ROWS, columns, dtype=torch.float32 if more else TORCH[made])
    if more:
        pack["more"] = torch.zeros(ROWS, columns)
    Planned(graph(columns, given, made, more), pack, knobs).run()
    wanted = torch.from_numpy(mean((x * grad).numpy(), given))
    wanted = torch.where(grad == 0, -x * wanted[:, None], 0).to(TORCH[made])
    found = torch.where(grad == 0, pack["dx"], 0).to(TORCH[made])
    assert torch.equal(found, wanted), f"{int((found != wanted).any(1).sum())} of {ROWS} rows"


TYPES = [(BF16, BF16), (BF16, FLOAT), (HALF, HALF), (HALF, BF16), (FLOAT, FLOAT), (FLOAT, BF16)]


@pytest.mark.parametrize(("given", "made"), TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("columns", [6, 64, 1000, 1004, 2056])
def test_what_is_written_does_not_decide_the_order(columns, given, made):
    run(
        columns, given, made, PersistentKnobs(32, 64, 1, 1, 2) if columns < 2000 else PersistentKnobs(128, 128, 2, 1, 2)
    )


SPREAD = {
    "a thread": (64, PersistentKnobs(1, 32, 2, 1, 1)),
    "two threads": (88, PersistentKnobs(2, 32, 2, 1, 1)),
    "part of a warp": (200, PersistentKnobs(8, 32, 1, 1, 1)),
    "warps": (1000, PersistentKnobs(64, 64, 2, 1, 1)),
    "many warps": (2056, PersistentKnobs(512, 512, 2, 1, 1)),
    "a cluster": (1000, PersistentKnobs(128, 64, 2, 1, 2)),
    "delayed": (1000, PersistentKnobs(64, 64, 3, 1, 1, 1)),
    "a cluster, delayed": (1000, PersistentKnobs(128, 32, 3, 1, 4, 1)),
    "read again": (41000, PersistentKnobs(512, 512, 1, 1, 2)),
}


@pytest.mark.some(4)
@pytest.mark.parametrize(("given", "made"), [(BF16, BF16), (BF16, FLOAT), (FLOAT, FLOAT)], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("columns", "knobs"), SPREAD.values(), ids=SPREAD)
def test_knobs_do_not_decide_the_order(columns, knobs, given, made):
    run(columns, given, made, knobs)


def test_a_tensor_beside_does_not_decide_the_order():
    """A wider one, for which threads take fewer elements together."""
    run(1000, BF16, BF16, PersistentKnobs(64, 64, 2, 1, 1), more=True)


def test_another_order_would_be_seen():
    """The same tree over chunks that are summed in order, without halves."""
    for columns in (200, 1000, 41000):
        x, grad = operands(columns)
        products, parts = (x * grad).numpy(), np.zeros((ROWS, columns // 8), np.float32)
        for i in range(8):
            parts += products[:, i::8]
        other, wanted = over_tree(parts) * np.float32(1 / columns), mean(products)
        assert (torch.from_numpy(other).bfloat16() != torch.from_numpy(wanted).bfloat16()).any(), columns
