"""Every format of an explanation: what it counts, that it is well formed, and that no name becomes more than text."""

import dataclasses
import json
import re
import shutil
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse import (
    GraphNotSupportedError,
    GraphTypeError,
    GraphvizError,
    data_type,
    explain,
    heur_mode,
    norm_forward_phase,
    reduction_mode,
)
from support import graphs
from support.graphs import Norm

HOSTILE = ("<script>alert(1)</script>", "a\"b'c", "</text></svg>", "&amp; #quot; `x`", "x\x00\n\x1b[31m", "]]> end")
SVG = "{http://www.w3.org/2000/svg}"


def planned(g, mode=heur_mode.A):
    g.build_operation_graph()
    g.create_execution_plans([mode])
    return g


def hostile(device="emulator"):
    """Two norms, a residual sum that is read again, a reduction of columns, strides of 0; names that mean harm."""
    g = graphs.new(HOSTILE[0], device, io_data_type=data_type.BFLOAT16)
    x, r = (g.tensor([64, 256], name=name) for name in HOSTILE[:2])
    w, b = g.tensor([1, 256], name=HOSTILE[2]), g.tensor([64, 256], [256, 0], name="broadcast")
    phase = {"norm_forward_phase": norm_forward_phase.INFERENCE}
    total = g.add(x, r, name=HOSTILE[3]).set_output().set_name("total")
    y = g.rmsnorm(total, w, 1e-5, **phase, name=HOSTILE[4])[0]
    z = g.rmsnorm(g.tanh(g.relu(r, name=HOSTILE[5])), w, 1e-5, **phase)[0]
    g.add(g.add(y, z), b).set_output().set_name('out"<>')
    g.reduction(x, mode=reduction_mode.ADD).set_output().set_dim([1, 256]).set_data_type(data_type.FLOAT)
    return planned(g)


def barred():
    g = hostile()
    g.deselect_engines(["rows", "reference"])  # nothing is shown
    return g


pictured = pytest.mark.parametrize(
    "make",
    [
        hostile,
        lambda: hostile("cpu"),
        lambda: planned(Norm(training=True, factor="value").graph("emulator")),
        barred,
    ],
    ids=["fused", "node by node", "scalars", "no plan"],
)


# What is counted


def test_bytes_of_a_fused_norm():
    rows, columns = 12, 64
    found = planned(Norm(rows, columns).graph("emulator")).explanation()
    x = out = rows * columns * 2
    between = rows * columns * 4  # as float32, which the swish gets
    weight = columns * 2
    assert (found.before.read, found.before.written) == (x + weight + between, between + out)
    assert (found.after.read, found.after.written) == (x + weight, out)


def test_the_reference_engine_moves_what_its_nodes_move():
    found = planned(Norm().graph("cpu")).explanation()
    (region,) = found.regions
    assert region.engine == "reference" and not region.fused and found.after == found.before


def test_a_stride_of_0_is_read_once():
    found = hostile().explanation()
    broadcast = next(t for t in found.tensors if t.name == "broadcast")
    assert broadcast.dim == (64, 256) and broadcast.nbytes == 64 * 2


def test_shown_is_the_selected_plan_else_the_first_that_may_be_used():
    g = planned(Norm().graph("emulator"))
    assert (g.explanation().shown, g.explanation().selected) == (0, None)
    last = g.get_execution_plan_count() - 1
    g.build_plan_at_index(last)
    found = g.explanation()
    assert found.shown == found.selected == last and found.regions[0].engine == "reference"
    g.deselect_engines(["reference", "rows"])
    found = g.explanation()
    assert found.shown is None and found.regions == () and {p.state for p in found.plans} == {"barred"}


def test_reasons():
    g = graphs.new(device="cpu")
    g.transpose(g.tensor([4, 8]), [1, 0]).set_output()
    found = planned(g).explanation()
    assert found.unmatched == (0,) and "no pattern matches transpose.0" in str(found)
    for name in ("tree", "html"):
        assert "no pattern matches transpose.0" in g.explain(name)
    assert explain.fallback(found) == "transpose.0 (no pattern matches transpose.0)"
    with pytest.raises(GraphNotSupportedError, match="\n  no pattern matches transpose.0"):
        g.build([heur_mode.OPENSOURCE])
    fused = planned(Norm().graph("emulator")).explanation()
    assert explain.fallback(fused) is None
    alone = planned(Norm().graph("cpu")).explanation()
    assert explain.fallback(alone) == (
        "rmsnorm.0, swish.0 (rows: needs a CUDA device or the emulator; got cpu; "
        "cudnn: cuDNN runs on CUDA devices, not on cpu)"
    )
    barred = planned(Norm().graph("emulator")).deselect_engines(["rows"]).explanation()
    said = "rmsnorm.0, swish.0 (plans were passed over: engine 'rows' is deselected)"
    assert len(barred.plans) > 2 and explain.fallback(barred) == said


def test_it_is_frozen_and_its_own():
    g = planned(Norm().graph("emulator"))
    found = g.explanation()
    text = str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.shown = 3
    g.deselect_engines(["rows"])
    assert str(found) == text != str(g.explanation())


# How it is written down


def test_text_is_the_format_unless_said_otherwise():
    g = hostile()
    assert g.explain() == g.explain("text") == explain.text(g.explanation()) == str(g.explanation())
    assert repr(g.explanation()) == g.explain()
    for name in explain.FORMATS.keys() - {"svg"}:
        assert g.explain(name) == explain.FORMATS[name](g.explanation())
    with pytest.raises(GraphTypeError, match="format is 'pdf'; accepted: 'text', 'tree', 'json', 'svg', 'mermaid', 'd"):
        g.explain("pdf")


def test_json_has_it_all():
    found = hostile().explanation()
    read = json.loads(explain.json(found))
    assert read.pop("version") == 1
    assert read.pop("before") == dataclasses.asdict(found.before)
    assert read.pop("after") == dataclasses.asdict(found.after)
    assert read == json.loads(json.dumps(dataclasses.asdict(found)))
    assert read["graph"] == HOSTILE[0] and [n["op"] for n in read["nodes"]][:2] == ["add", "rmsnorm"]


def test_a_notebook_shows_it():
    found = hostile().explanation()
    bundle = found._repr_mimebundle_()
    assert bundle == {"text/plain": str(found), "text/markdown": f"```mermaid\n{explain.mermaid(found)}\n```"}


def test_rich_prints_a_tree():
    found = hostile().explanation()
    text = explain.FORMATS["tree"](found)
    assert HOSTILE[0] in text and "\x1b" not in text and "\x00" not in text
    assert [line for line in text.splitlines() if "(relu)" in line and "]]> end" in line]
    assert str(found.__rich__().label).startswith("graph ")


@pictured
def test_a_page_is_well_formed_and_its_only_script_is_mermaid(make):
    g = make()
    page = explain.html(g.explanation())
    assert page.startswith("<!DOCTYPE html>")
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    assert [e.tag for e in root.iter()] == "html head meta title style script body h1 pre p pre".split()
    assert root.find("head/title").text.startswith(f"graph {explain.account.printable(g.name)} on ")
    assert root.find("body/pre").text == explain.mermaid(g.explanation())
    (script,) = (e.text for e in root.iter("script"))
    assert re.fullmatch(r'import mermaid from "https://[\w./@-]+"; mermaid.initialize\(\{[\w:, ]+\}\);', script)


@pictured
def test_a_flowchart_holds_no_name_as_more_than_text(make):
    g = make()
    lines = explain.mermaid(g.explanation()).splitlines()
    label = r'"(?:[\w .,:()\[\]-]|#\d+;|<br/>)*"'
    accepted = (
        rf"  t\d+\(\[{label}\]\)",
        rf"  subgraph r\d+\[{label}\]",
        r"  end",
        rf"    n\d+\[{label}\]",
        rf"  [nt]\d+ -- {label} --> n\d+",
        r"  n\d+ --> t\d+",
        r"  style r\d+ fill:#[0-9a-f]{6},stroke:#[0-9a-f]{6}",
    )
    assert lines[0] == "flowchart TD"
    assert [line for line in lines[1:] if not any(re.fullmatch(a, line) for a in accepted)] == []
    known = set(re.findall(r"^ +([nt]\d+)[(\[]", "\n".join(lines), re.M))
    assert {n for line in lines if "-->" in line for n in re.findall(r"[nt]\d+(?=$| -)", line)} <= known


@pictured
def test_dot_holds_no_name_as_more_than_text(make):
    lines = explain.dot(make().explanation()).splitlines()
    label = r'"(?:[^"\\]|\\[\\"n])*"'
    accepted = (
        rf"  graph \[label={label}, labelloc=t, fontname=monospace, fontsize=12\]",
        r"  (node|edge) \[[\w=, ]+\]",
        rf"  t\d+ \[shape=ellipse, label={label}\]",
        r"  subgraph cluster\d+ \{",
        rf'    label={label}; style=filled; fillcolor="#[0-9a-f]{{6}}"',
        r'    color="#[0-9a-f]{6}"',
        rf"    n\d+ \[label={label}\]",
        rf"  [nt]\d+ -> [nt]\d+ \[label={label}\]",
        r"  \}",
    )
    assert (lines[0], lines[-1]) == ("digraph {", "}")
    assert [line for line in lines[1:-1] if not any(re.fullmatch(a, line) for a in accepted)] == []


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz")
@pictured
def test_graphviz_draws_every_node_by_its_name(make):
    found = make().explanation()
    root = ElementTree.fromstring(explain.svg(found).replace("\xa0", " "))
    texts = [e.text for e in root.iter(SVG + "text")]
    assert [n.op for n in found.nodes if n.op not in texts] == []
    names = [explain.account.printable(n.name).replace("\xa0", " ") for n in found.nodes]
    assert [name for name in names if name not in texts] == []
    groups = [e.get("class") for e in root.iter(SVG + "g")]
    given = [t for t in found.tensors if t.role != "virtual" and t.value is None]
    assert groups.count("node") == len(found.nodes) + len(given)
    assert groups.count("cluster") == len(found.regions)


def test_without_graphviz_a_picture_is_an_error_that_names_it(monkeypatch, tmp_path):
    g = planned(Norm().graph("cpu"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GraphvizError, match="install graphviz .* or take the format"):
        g.explain("svg")
    dot = tmp_path / "dot"
    dot.write_text("#!/bin/sh\necho 'no plugins' >&2; exit 3\n")
    dot.chmod(0o755)
    with pytest.raises(GraphvizError, match="draws no picture: no plugins"):
        g.explain("svg")


@settings(deadline=None, max_examples=40)
@given(graphs.drawn(max_ops=14), st.sampled_from(["cpu", "emulator"]))
def test_any_graph_can_be_drawn(graph, device):
    """A box for each node, once, and arrows between boxes that are there."""
    found = planned(graph.build(device=device)).explanation()
    ElementTree.fromstring(explain.html(found).removeprefix("<!DOCTYPE html>"))
    for text, arrow in ((explain.mermaid(found), "-->"), (explain.dot(found), "->")):
        lines = text.splitlines()
        boxes = [m[1] for line in lines if arrow not in line and (m := re.match(r" +([nt]\d+)[ (\[]", line))]
        assert sorted(b for b in boxes if b[0] == "n") == sorted(f"n{i}" for i in range(len(found.nodes)))
        ends = [(line.split()[0], m[1]) for line in lines if (m := re.search(rf" {arrow} ([nt]\d+)", line))]
        assert len(set(boxes)) == len(boxes) and {end for both in ends for end in both} <= set(boxes)


# Kernels' text


def test_source_of_each_kernel():
    g = planned(Norm().graph("emulator"))
    (source,) = g.get_kernel_source_at_index(0)
    assert 'extern "C"' in source and "row_program" in source and g.name not in source.split()
    assert g.get_kernel_source_at_index(g.get_execution_plan_count() - 1) == ()
    assert len(hostile().get_kernel_source_at_index(0)) == 2  # the second norm's; the sum over rows goes with the first
