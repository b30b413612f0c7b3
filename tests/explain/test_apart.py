"""Plans of several parts say why they are not one."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from graphfuse import differentiate, heur_mode, norm_forward_phase
from graphfuse.contract.match import Pattern
from graphfuse.op_graph.ir import Subgraph
from support import graphs, toys
from support.graphs import BF16

INFERENCE, EPS = norm_forward_phase.INFERENCE, 1e-5


@dataclass(frozen=True)
class Split:
    """A graph whose gradients are several parts. tensors: shapes of what it reads and is differentiated by. why: what
    is said of two of the parts."""

    tensors: dict[str, list[int]]
    draw: Callable
    why: str


def _norm(g, x, w=None):
    return g.rmsnorm(x, w, EPS, norm_forward_phase=INFERENCE)[0]


def _adaptive(g, x, w, b):
    return [g.adalayernorm(x, w, b, EPS, norm_forward_phase=INFERENCE)[0]]


def _adaptive_by_nodes(g, x, w, b):
    y = g.layernorm(x, None, None, EPS, norm_forward_phase=INFERENCE)[0]
    return [g.add(g.mul(y, g.add(w, 1.0)), b)]


def _rotated(g, q, k, cos, sin):
    return [g.rotate_pairs(_norm(g, x), cos, sin, interleaved=False) for x in (q, k)]


def _norms(g, x, *weights):
    y = x
    for w in weights:
        y = _norm(g, g.add(y, x), w)
    return [y]


ROWS, WEIGHT = [64, 128], [1, 128]

SPLITS = {
    "sums of samples": Split(
        {"x": [4, 16, 128], "w": [4, 1, 128], "b": [4, 1, 128]},
        _adaptive,
        "reduces [4, 16, 128] to [4, 1, 128]; of rows along axis 2 of [4, 16, 128] a kernel makes one value each",
    ),
    "two kernels for three kinds of gradients": Split(
        {"x": [4, 16, 128], "w": [4, 1, 128], "b": [4, 1, 128]},
        _adaptive_by_nodes,
        "reduction.0, sub.0, mul.1, mul.2, reduction.1 without add.0, mul.0, layernorm_backward.0: node 'layernorm_b",
    ),
    "bytes": Split(
        {"x": ROWS} | {f"w{n}": WEIGHT for n in range(6)},
        _norms,
        "bytes; no choice with it saves more than what is chosen",
    ),
    "sums over other axes": Split(
        {"scores": [2, 4, 16, 128], "mask": [2, 1, 16, 128]},
        lambda g, scores, mask: [g.softmax(g.add(scores, mask))],
        "reduces [2, 4, 16, 128] to [2, 1, 16, 128]",
    ),
    "other rows": Split(
        {"x": [64, 8, 64], "w": [1, 8, 64]},
        lambda g, x, w: [g.mul(_norm(g, x), w)],
        "works on rows along axis 2 of [64, 8, 64], and they on rows along axis 0 of [64, 8, 64]",
    ),
    "a sum that is read": Split(
        {"x": ROWS, "w": WEIGHT},
        lambda g, x, w: [g.softmax(g.add(g.mul(x, w), w))],
        "which is not known before all rows are done",
    ),
    "a norm's gradient and a softmax": Split(
        {"x": ROWS, "w": WEIGHT},
        lambda g, x, w: [g.softmax(_norm(g, x, w))],
        "(rmsnorm_backward) makes gradients of a norm and sums over all rows, which no kernel computes with",
    ),
    "a product": Split(
        {"x": [1, 64, 128], "a": [1, 128, 64]},
        lambda g, x, a: [g.matmul(_norm(g, x), a)],
        "node 'matmul.0' (matmul) is no operation on rows",
    ),
    "behind a product": Split(
        {"x": [1, 64, 128], "a": [1, 128, 64], "b": [1, 64, 64]},
        lambda g, x, a, b: [g.matmul(g.gelu(g.matmul(x, a)), b)],
        "gelu_backward.0 without transpose.0, matmul.0: node 'matmul.0'",
    ),
    "queries and keys": Split(
        {"q": [16, 8, 64], "k": [16, 2, 64], "cos": [16, 1, 32], "sin": [16, 1, 32]},
        _rotated,
        "they pass nothing on, and what both read has not all rows along axis 2 of [16, 2, 64]",
    ),
    "many norms": Split(
        {"x": ROWS} | {f"w{n}": WEIGHT for n in range(6)},
        _norms,
        "(rmsnorm_backward) is a norm or softmax more than the 4 that a kernel has",
    ),
    "moved rows": Split(
        {"x": [4, 16, 128]},
        lambda g, x: [g.transpose(_norm(g, x), permutation=[1, 0, 2])],
        "node 'transpose.0' (transpose) is no operation on rows",
    ),
    "groups": Split(
        {"x": [2, 8, 4, 16], "w": [1, 8, 1, 1]},
        lambda g, x, w: [g.mul(g.reshape(_norm(g, g.reshape(x).set_dim([2, 4, 128]))).set_dim([2, 8, 4, 16]), w)],
        "(reshape) does not divide rows along the last axis into parts",
    ),
}


def _explained(split: Split):
    g = graphs.new(device="emulator", io_data_type=BF16)
    t = {name: g.tensor(dim, name=name) for name, dim in split.tensors.items()}
    outputs = [o.set_output().set_name(f"out{n}") for n, o in enumerate(split.draw(g, *t.values()))]
    backward = differentiate(g, outputs, [name for name in t if name not in ("cos", "sin")]).backward
    backward.build([heur_mode.A])
    return backward.explanation()


@pytest.mark.parametrize("name", SPLITS)
def test_gradients(name):
    found = _explained(SPLITS[name])
    assert len(found.regions) > 1
    assert f"why plan 0 has {len(found.regions)} parts" in str(found)
    assert SPLITS[name].why in str(found)
    assert {n for a in found.apart for n in (a.part, a.other)} == set(range(len(found.regions)))
    assert not [a for a in found.apart if "no pattern" in a.why]


def _of(draw: Callable, **planned) -> str:
    g = graphs.new(device=planned.pop("device", "emulator"))
    for t in draw(g):
        t.set_output()
    g.build([heur_mode.A], **planned)
    return g.explain()


def test_parts_without_a_common_tensor():
    text = _of(lambda g: [_norm(g, g.tensor(ROWS)), g.softmax(g.tensor([8, 32]))])
    assert "rmsnorm.0 without softmax.0: they have no tensor in common" in text


@dataclass(frozen=True)
class Pair:
    """Facts: two matched nodes."""

    subgraph: Subgraph


class Declining(toys.HostSolo):
    facts = Pair

    def __init__(self, reason: str):
        super().__init__("declining", reason=reason)


def test_what_runs_between():
    def draw(g):
        x = g.tensor([1, 64, 64])
        y = _norm(g, x)
        return [_norm(g, g.add(g.matmul(y, g.tensor([1, 64, 64])), y))]

    text = _of(draw)
    assert "rmsnorm.0 without add.0, rmsnorm.1: what runs between them: 'matmul.0'" in text


def test_facts_and_engines_that_decline_both():
    def draw(g):
        x, w = g.tensor([3, 4, 8], [64, 16, 1], name="x"), g.tensor([1, 4, 8])
        return [g.relu(_norm(g, x, w))]

    text = _of(draw, patterns=toys.solo("relu"), engines=[toys.HostSolo("toy")])
    assert "rmsnorm.0 without relu.0: pattern rows fits 'rmsnorm.0', 'relu.0', but tensor 'x'" in text

    def template(g):
        return {"out": g.tanh(g.relu(g.capture("x")))}

    pair = Pattern("pair", template, lambda match: Pair(match.subgraph))
    found = {
        "patterns": [pair, *toys.solo("relu", "tanh"), "rows"],
        "engines": [Declining(reason="too small"), toys.HostSolo()],
    }
    text = _of(lambda g: [g.tanh(g.relu(g.tensor([8])))], **found)
    assert "relu.0 without tanh.0: declining declines 'relu.0', 'tanh.0': too small" in text


def test_a_plan_of_one_part_says_nothing():
    assert "why plan" not in _of(lambda g: [_norm(g, g.tensor(ROWS))])
