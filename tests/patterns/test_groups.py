"""A norm over each group of a row, as Mamba-2 has it behind or before a gate: one kernel, weights for each group."""

import pytest
import torch

from graphfuse import norm_forward_phase, reduction_mode
from support import graphs, oracle
from support.emulation import Planned
from support.graphs import BF16, E4M3, FLOAT, TORCH

EPS = 1e-5
SIZES = [(1, 2, 64), (5, 4, 72), (3, 8, 128)]


class Groups:
    """Rows of so many groups of columns: x and its gate z side by side in memory, w for each group and column."""

    def __init__(self, rows: int, groups: int, columns: int):
        self.g = graphs.new(device="emulator")
        self.shape = [rows, groups, columns]
        stride = [2 * groups * columns, columns, 1]
        self.x, self.z = (self.g.tensor(self.shape, stride, BF16, name=name) for name in "xz")
        self.w = self.g.tensor([1, groups, columns], data_type=BF16, name="w")

    def norm(self, x):
        """A scale of w's shape would have all groups normalized together."""
        y = self.g.rmsnorm(x, epsilon=EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        return self.g.mul(y, self.w)

    def plain(self):
        return self.norm(self.x)

    def gated_before(self):
        return self.norm(self.g.mul(self.x, self.g.swish(self.z)))

    def gated_after(self):
        return self.g.mul(self.norm(self.x), self.g.swish(self.z))

    def by_groups_scaled(self):
        """What is gated, over the largest of its group, which is written too."""
        g, y = self.g, self.gated_after()
        amax = g.reduction(y, mode=reduction_mode.AMAX).set_dim([*self.shape[:2], 1])
        scale = g.max(g.mul(amax, 1 / 448), 1 / (448 * 512))
        scale.set_output().set_name("scale").set_data_type(FLOAT)
        return g.mul(y, g.reciprocal(scale))


def _norm(x, w):
    """By groups one by one, so that no broadcasting rule is taken for granted."""
    groups = [oracle.rmsnorm(x[:, k], w[0, k], EPS)[0] for k in range(x.shape[1])]
    return torch.stack(groups, dim=1)


EXACT = {
    "plain": lambda x, z, w: _norm(x, w),
    "gated_before": lambda x, z, w: _norm(x * oracle.swish(z), w),
    "gated_after": lambda x, z, w: _norm(x, w) * oracle.swish(z),
}
STEP = {FLOAT: 2**-19, BF16: 2**-8, E4M3: 2**-4}


def drawn(kind: str, size: tuple[int, int, int], output) -> tuple[Planned, dict[str, torch.Tensor]]:
    made, (rows, groups, columns) = Groups(*size), size
    getattr(made, kind)().set_output().set_name("y").set_data_type(output)
    source = graphs.generator("cpu", columns)
    both = torch.randn(rows, 2 * groups * columns, generator=source).bfloat16()
    x, z = (half.unflatten(1, (groups, columns)) for half in both.chunk(2, 1))
    w = torch.randn(1, groups, columns, generator=source).bfloat16()
    pack = {"x": x, "w": w, "y": torch.zeros(size).to(TORCH[output])}
    if kind != "plain":
        pack["z"] = z
    if kind == "by_groups_scaled":
        pack["scale"] = torch.zeros(rows, groups, 1)
    return Planned(made.g, pack), pack


def exact(kind: str, pack: dict[str, torch.Tensor]) -> torch.Tensor:
    return EXACT[kind](*(pack[name].double() if name in pack else None for name in "xzw"))


@pytest.mark.emulate
@pytest.mark.parametrize("output", [FLOAT, BF16, E4M3], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values(kind, size, output):
    planned, pack = drawn(kind, size, output)
    assert planned.part.facts.columns == size[2]
    planned.run()
    wanted = exact(kind, pack)
    error = (pack["y"].double() - wanted).abs()
    assert (error <= STEP[output] * (1 + 2**-6) * wanted.abs() + (2**-9 if output is E4M3 else 2**-18)).all()


@pytest.mark.emulate
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_scale_for_each_group(size):
    planned, pack = drawn("by_groups_scaled", size, E4M3)
    planned.run()
    wanted = exact("gated_after", pack)
    scale = wanted.abs().amax(2, keepdim=True) / 448
    torch.testing.assert_close(pack["scale"].double(), scale, rtol=1e-5, atol=0)
    found = pack["y"].double() * pack["scale"].double()
    assert ((found - wanted).abs() <= 2**-4 * (1 + 2**-6) * wanted.abs() + 2**-9 * scale).all()
    assert (pack["y"].double().abs().amax(2) == 448).all()


@pytest.mark.emulate
def test_a_group_is_normalized_alike_wherever_it_stands():
    planned, pack = drawn("gated_before", (3, 8, 128), FLOAT)
    planned.run()
    alone, few = drawn("gated_before", (3, 2, 128), FLOAT)
    for k in range(0, 8, 2):
        few["x"].copy_(pack["x"][:, k : k + 2]), few["z"].copy_(pack["z"][:, k : k + 2])
        few["w"].copy_(pack["w"][:, k : k + 2])
        alone.run()
        assert torch.equal(few["y"], pack["y"][:, k : k + 2])
