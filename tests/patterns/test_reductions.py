"""Programs with any reductions of a row, written as nodes: one kernel each, values, the same bits for every knob."""

from dataclasses import replace

import pytest
import torch

from graphfuse import GraphNotSupportedError, heur_mode, norm_forward_phase, pygraph, reduction_mode
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.persistent import PersistentKnobs
from graphfuse.rows.steps import Join
from support import graphs
from support.emulation import Planned
from support.graphs import BF16

EPS = 1e-5


class Written:
    """The nodes of one problem. w, b: of one row."""

    def __init__(self, rows: int, columns: int, device: str = "emulator"):
        self.g = graphs.new(device=device)
        self.rows = rows
        self.x = self.g.tensor([rows, columns], data_type=BF16, name="x")
        self.w, self.b = (self.g.tensor([1, columns], data_type=BF16, name=name) for name in "wb")

    def over(self, value, mode: reduction_mode):
        return self.g.reduction(value, mode=mode).set_dim([self.rows, 1])

    def layer_norm(self):
        g, mean = self.g, self.over(self.x, reduction_mode.AVG)
        apart = g.sub(self.x, mean)
        variance = self.over(g.mul(apart, apart), reduction_mode.AVG)
        return g.add(g.mul(g.mul(apart, g.rsqrt(g.add(variance, EPS))), self.w), self.b)

    def layer_norm_op(self):
        phase = norm_forward_phase.INFERENCE
        return self.g.layernorm(self.x, self.w, self.b, EPS, norm_forward_phase=phase)[0]

    def exponents(self):
        g, largest = self.g, self.over(self.x, reduction_mode.MAX)
        powers = g.exp(g.sub(self.x, largest))
        return largest, powers, self.over(powers, reduction_mode.ADD)

    def softmax(self):
        _, powers, total = self.exponents()
        return self.g.div(powers, total)

    def log_sum_exp(self):
        largest, _, total = self.exponents()
        return self.g.add(self.g.log(total), largest)

    def log_softmax(self):
        largest, _, total = self.exponents()
        return self.g.sub(self.g.sub(self.x, largest), self.g.log(total))

    def normalized(self):
        return self.g.div(self.x, self.g.max(self.over(self.x, reduction_mode.NORM2), 1e-12))

    def over_magnitudes(self):
        return self.g.div(self.x, self.over(self.x, reduction_mode.NORM1))

    def two_in_a_phase(self):
        g, mean = self.g, self.over(self.x, reduction_mode.AVG)
        squares = self.over(g.mul(self.x, self.x), reduction_mode.AVG)
        return g.add(g.mul(self.x, squares), mean)

    def range(self):
        return self.g.sub(self.over(self.x, reduction_mode.MAX), self.over(self.x, reduction_mode.MIN))

    def four_phases(self):
        """Softmax of a layer norm without weights."""
        g, mean = self.g, self.over(self.x, reduction_mode.AVG)
        apart = g.sub(self.x, mean)
        variance = self.over(g.mul(apart, apart), reduction_mode.AVG)
        normal = g.mul(apart, g.rsqrt(g.add(variance, EPS)))
        powers = g.exp(g.sub(normal, self.over(normal, reduction_mode.MAX)))
        return g.div(powers, self.over(powers, reduction_mode.ADD))

    def rms_norm(self):
        g, mean = self.g, self.over(self.g.mul(self.x, self.x), reduction_mode.AVG)
        return g.mul(g.mul(self.x, g.rsqrt(g.add(mean, EPS))), self.w)

    def rms_norm_op(self):
        return self.g.rmsnorm(self.x, self.w, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]


def _layer_norm(x, w, b):
    return torch.nn.functional.layer_norm(x, x.shape[1:], None, None, EPS) * w + b


FAMILIES = {
    "layer_norm": (_layer_norm, "wb"),
    "softmax": (lambda x, w, b: x.softmax(1), ""),
    "log_sum_exp": (lambda x, w, b: x.logsumexp(1, keepdim=True), ""),
    "log_softmax": (lambda x, w, b: x.log_softmax(1), ""),
    "normalized": (lambda x, w, b: torch.nn.functional.normalize(x, dim=1), ""),
    "over_magnitudes": (lambda x, w, b: x / x.abs().sum(1, keepdim=True), ""),
    "two_in_a_phase": (lambda x, w, b: x * (x * x).mean(1, keepdim=True) + x.mean(1, keepdim=True), ""),
    "range": (lambda x, w, b: x.amax(1, keepdim=True) - x.amin(1, keepdim=True), ""),
    "four_phases": (lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[1:], None, None, EPS).softmax(1), ""),
    "rms_norm": (lambda x, w, b: torch.nn.functional.rms_norm(x, x.shape[1:], None, EPS) * w, "w"),
}


def drawn(family: str, rows: int, columns: int, device: str = "emulator") -> tuple[pygraph, dict[str, torch.Tensor]]:
    """The graph of a family and a pack for it, its output "y" float32."""
    written = Written(rows, columns, device)
    y = getattr(written, family)().set_output().set_name("y")
    written.g.validate()
    source = graphs.generator("cpu", columns)
    # All of one sign, and far from it: nothing may take a padding zero for an element.
    x = (torch.randn(rows, columns, generator=source) * 2 - 9).bfloat16()
    pack = {"x": x, "y": torch.full(y.get_dim(), float("nan"))}
    for name in FAMILIES[family.removesuffix("_op")][1]:
        pack[name] = torch.randn(1, columns, generator=source).bfloat16()
    return written.g, pack


def exact(family: str, pack: dict[str, torch.Tensor]) -> torch.Tensor:
    of, _ = FAMILIES[family]
    return of(*(pack[name].double() if name in pack else None for name in "xwb"))


SIZES = [(1, 64), (7, 1000), (4, 33), (2, 40000)]


@pytest.mark.emulate
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows, columns", SIZES)
def test_values(family, rows, columns):
    graph, pack = drawn(family, rows, columns)
    planned = Planned(graph, pack)
    planned.run()
    wanted = exact(family, pack)
    size = wanted.abs().amax(1, keepdim=True)
    if family == "log_sum_exp":  # of a logarithm and what it nearly cancels
        size = pack["x"].double().abs().amax(1, keepdim=True)
    assert ((pack["y"].double() - wanted).abs() <= 3e-6 * size).all()


KNOBS = {
    "four threads": ByRowKnobs(4, 64),
    "part of a warp": ByRowKnobs(8, 64),
    "a warp, two chunks": ByRowKnobs(32, 64, 2),
    "warps": ByRowKnobs(128, 128),
    "many warps": ByRowKnobs(512, 512),
    "four CTAs": ByRowKnobs(256, 64),
    "two CTAs": ByRowKnobs(128, 64),
    "two CTAs, two chunks": ByRowKnobs(128, 64, 2),
    "part of a warp stays": PersistentKnobs(8, 64, 3, 1, 1),
    "a warp stays": PersistentKnobs(32, 64, 2, 1, 2),
    "warps stay": PersistentKnobs(64, 64, 3, 1, 1),
    "a cluster stays": PersistentKnobs(128, 64, 4, 1, 2),
}
SPREAD = ["layer_norm", "softmax", "log_sum_exp", "two_in_a_phase", "range", "four_phases"]


@pytest.mark.some(2)
@pytest.mark.emulate
@pytest.mark.parametrize("family", SPREAD)
def test_knobs_do_not_decide_a_bit(family):
    found = {}
    for name, knobs in KNOBS.items():
        graph, pack = drawn(family, 3, 208)
        planned = Planned(graph, pack, knobs)
        planned.run()
        found[name] = pack["y"].numpy().tobytes()
    assert len(set(found.values())) == 1, {name: hash(y) for name, y in found.items()}


@pytest.mark.some(1)
@pytest.mark.emulate
@pytest.mark.parametrize("knobs", [PersistentKnobs(64, 64, 3, 1, 1), PersistentKnobs(128, 64, 3, 1, 2)])
def test_two_sums_that_come_together_while_the_next_row_begins(knobs):
    found = []
    for delay in (0, 1):
        graph, pack = drawn("two_in_a_phase", 7, 208)
        planned = Planned(graph, pack, replace(knobs, delay=delay))
        planned.run()
        checked = [planned.check(build)["y"] for build in (Build.ADDRESS, Build.RACE) if delay]
        found += [pack["y"].numpy().tobytes(), *checked]
    assert len(set(found)) == 1


@pytest.mark.emulate
@pytest.mark.parametrize("family", ["layer_norm", "softmax", "two_in_a_phase"])
def test_schedules_that_read_rows_again_agree(family):
    found = []
    for knobs in (ByRowKnobs(1024, 1024), PersistentKnobs(512, 512, 1, 1, 1)):
        graph, pack = drawn(family, 2, 70000)
        Planned(graph, pack, knobs).run()
        found.append(pack["y"])
    assert torch.equal(*found)


@pytest.mark.emulate
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE], ids=lambda build: build.name)
@pytest.mark.parametrize("knobs", ["part of a warp", "warps", "two CTAs", "warps stay", "a cluster stays"])
@pytest.mark.parametrize("family", ["softmax", "two_in_a_phase", "four_phases"])
def test_under_sanitizers_in_all_schedules(family, knobs, build):
    # ThreadSanitizer makes a thread for each message between CTAs. Each row has CTAs of its own, if they do not stay.
    graph, pack = drawn(family, 2 if knobs == "two CTAs" else 5, 208)
    planned = Planned(graph, pack, KNOBS[knobs])
    found = planned.check(build)
    planned.run()
    assert found["y"] == planned.contents()["y"]


NORMS = ["rms_norm", "layer_norm"]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rows, columns", [(5, 96), (4, 1000), (2, 40000)])
def test_a_norm_written_as_nodes_is_the_kernel_of_the_op(norm, rows, columns):
    """Also in its text: of many rows it is told that weights are the same for all of them."""
    by_hand, op = (Planned(*drawn(family, rows, columns)).source for family in (norm, f"{norm}_op"))
    assert by_hand == op


@pytest.mark.emulate
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rows, columns", [(1, 96), (5, 1000)])
def test_a_norm_written_as_nodes_has_the_bits_of_the_op(norm, rows, columns):
    found = []
    for family in (norm, f"{norm}_op"):
        graph, pack = drawn(family, rows, columns)
        Planned(graph, pack).run()
        found.append(pack["y"])
    assert torch.equal(*found)


def test_phases_and_reductions():
    def of(family: str):
        program = Planned(*drawn(family, 5, 96)).part.facts.program
        return [tuple(len(program.reduced_after(p, join)) for join in Join) for p in range(program.last)]

    assert of("four_phases") == [(1, 0), (1, 0), (0, 1), (1, 0)]
    assert of("two_in_a_phase") == [(2, 0)] and of("range") == [(0, 2)]
    assert of("softmax") == [(0, 1), (1, 0)]


@pytest.mark.parametrize("mode", [reduction_mode.MUL, reduction_mode.MUL_NO_ZEROS])
def test_products_are_the_reference_engines(mode):
    written = Written(4, 64)
    written.over(written.x, mode).set_output()
    with pytest.raises(GraphNotSupportedError):
        written.g.build([heur_mode.OPENSOURCE])


def test_one_number_of_all_rows_is_no_row():
    written = Written(4, 64)
    written.g.reduction(written.x, mode=reduction_mode.ADD).set_output()
    with pytest.raises(GraphNotSupportedError):
        written.g.build([heur_mode.OPENSOURCE])


def largest(written: Written, value):
    """The largest magnitude of all."""
    return written.g.reduction(value, mode=reduction_mode.AMAX).set_dim([1, 1])


READ_INSIDE = {
    "epsilon": lambda o, s: o.g.rmsnorm(o.x, epsilon=s, norm_forward_phase=norm_forward_phase.INFERENCE)[0],
    "before a norm": lambda o, s: o.g.rmsnorm(
        o.g.div(o.x, s), epsilon=EPS, norm_forward_phase=norm_forward_phase.INFERENCE
    )[0],
    "beside a mean": lambda o, s: o.g.sub(o.g.div(o.x, s), o.over(o.x, reduction_mode.AVG)),
}


@pytest.mark.emulate
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("reads", READ_INSIDE.values(), ids=READ_INSIDE)
def test_what_is_known_after_all_rows_is_read_by_another_kernel(reads, stored):
    found = []
    for device in ("emulator", "cpu"):
        written = Written(4, 64, device)
        s = largest(written, written.x)
        reads(written, s).set_output().set_name("y")
        pack = {"x": torch.randn(4, 64, generator=graphs.generator("cpu", 4)).bfloat16(), "y": torch.empty(4, 64)}
        if stored:
            s.set_output().set_name("s")
            pack["s"] = torch.empty(1, 1)
        written.g.build([heur_mode.A])
        written.g.execute(pack, graphs.workspace(written.g.get_workspace_size()))
        found.append(pack["y"])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.emulate
def test_the_largest_of_all_beside_a_sum_of_products():
    g = graphs.new(device="emulator")
    a, b = (g.tensor([5, 8], name=name) for name in "ab")
    y = g.mul(a, g.reduction(g.mul(a, b), mode=reduction_mode.ADD).set_dim([5, 1]))
    y.set_output().set_name("y")
    g.reduction(y, mode=reduction_mode.AMAX).set_dim([1, 1]).set_output().set_name("largest")
    g.build([heur_mode.OPENSOURCE])
    source = graphs.generator("cpu", 1)
    pack = {name: torch.randn(5, 8, generator=source) for name in "ab"}
    pack |= {"y": torch.empty(5, 8), "largest": torch.full((1, 1), float("nan"))}
    g.execute(pack, graphs.workspace(g.get_workspace_size()))
    wanted = pack["a"].double() * (pack["a"].double() * pack["b"].double()).sum(1, keepdim=True)
    torch.testing.assert_close(pack["y"].double(), wanted, rtol=1e-5, atol=1e-6)
    assert pack["largest"].item() == pack["y"].abs().max().item()
