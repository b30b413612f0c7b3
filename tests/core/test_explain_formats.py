"""Every format of an explanation: what it counts, that it is well formed, and that no name becomes more than text."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse import (
    GraphNotSupportedError,
    GraphTypeError,
    data_type,
    explain,
    heur_mode,
    norm_forward_phase,
    reduction_mode,
)
from graphfuse.explain import layout
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
    g.tanh(g.tensor([4, 8])).set_output()
    found = planned(g).explanation()
    assert found.unmatched == (0,) and "no pattern matches tanh.0" in str(found)
    for name in ("tree", "html"):
        assert "no pattern matches tanh.0" in g.explain(name)
    assert explain.fallback(found) == "tanh.0 (no pattern matches tanh.0)"
    with pytest.raises(GraphNotSupportedError, match="\n  no pattern matches tanh.0"):
        g.build([heur_mode.OPENSOURCE])
    fused = planned(Norm().graph("emulator")).explanation()
    assert explain.fallback(fused) is None
    alone = planned(Norm().graph("cpu")).explanation()
    assert explain.fallback(alone) == ("rmsnorm.0, swish.0 (rows: needs a CUDA device or the emulator; got cpu)")
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
    assert all(g.explain(name) == write(g.explanation()) for name, write in explain.FORMATS.items())
    with pytest.raises(GraphTypeError, match="format is 'pdf'; accepted: 'text', 'tree', 'json', 'svg', 'mermaid', 'h"):
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
    assert bundle == {"text/plain": str(found), "image/svg+xml": explain.svg(found)}
    assert found._repr_svg_() == explain.svg(found)


def test_rich_prints_a_tree():
    found = hostile().explanation()
    text = explain.FORMATS["tree"](found)
    assert HOSTILE[0] in text and "\x1b" not in text and "\x00" not in text
    assert [line for line in text.splitlines() if "(relu)" in line and "]]> end" in line]
    assert str(found.__rich__().label).startswith("graph ")


@pictured
def test_a_picture_is_well_formed_and_has_every_node(make):
    g = make()
    found = g.explanation()
    root = ElementTree.fromstring(explain.svg(found))
    shapes = {"svg", "title", "defs", "marker", "path", "rect", "text", "g"}
    assert {e.tag for e in root.iter()} == {SVG + s for s in shapes}
    assert not any(name.startswith("on") or "href" in name for e in root.iter() for name in e.attrib)
    titles = [e.text for e in root.iter(SVG + "title")]
    for node in found.nodes:
        assert any(t.startswith(f"{explain.account.printable(node.name)} ({node.op}, computes in") for t in titles)
    given = [t for t in found.tensors if t.role != "virtual" and t.value is None]
    assert sum(t.startswith(("input ", "output ", "scalar ")) for t in titles) == len(given)


def test_long_names_are_wrapped():
    """Whole, in letters that lie in the picture; so is the title of a region with short names."""
    names = [
        "model.layers.31." + "attention_output_projection." * 4 + "x",
        "W" * 150,
        "a name of " + "words " * 20 + ".",
    ]
    g = graphs.new("g" * 200, "emulator")
    g.relu(g.tensor([4, 8], name=names[0]), name=names[1]).set_output().set_name(names[2])
    small = graphs.new("s", "emulator")
    small.relu(small.tensor([4, 8], name="x"), name="r").set_output().set_name("y")
    for graph, whole in ((g, [*names, g.name]), (small, ["reference, node by node: 128 B read, 128 B written"])):
        root = ElementTree.fromstring(explain.svg(planned(graph).explanation()))
        texts = list(root.iter(SVG + "text"))
        joined = "".join(t.text for t in texts).replace(" ", "")
        assert [name for name in whole if name.replace(" ", "") not in joined] == [] and "\u2026" not in joined
        shift = float(re.search(r"translate\(([\d.]+),", root.find(SVG + "g").get("transform"))[1])
        inside = {id(t) for t in root.find(SVG + "g").iter()}
        for t in texts:
            width = len(t.text) * 7.2 * int(t.get("font-size", 12)) / 12
            left = float(t.get("x")) - (width / 2 if t.get("text-anchor") else 0) + shift * (id(t) in inside)
            assert 0 <= left and left + width <= float(root.get("width")), t.text


@pictured
def test_boxes_overlap_neither_each_other_nor_lines(make):
    check_layout(make().explanation())


@settings(deadline=None, max_examples=40)
@given(graphs.drawn(max_ops=14), st.sampled_from(["cpu", "emulator"]))
def test_any_graph_can_be_pictured(graph, device):
    found = planned(graph.build(device=device)).explanation()
    check_layout(found)
    for write in (explain.svg, explain.html):
        ElementTree.fromstring(write(found).removeprefix("<!DOCTYPE html>"))


def check_layout(found):
    sizes = {("node", i): (150.0, 40.0) for i in range(len(found.nodes))}
    sizes |= {("tensor", t.id): (90.0, 40.0) for t in found.tensors if layout.drawn(t)}
    made = layout.arrange(found, sizes)
    boxes = made.boxes
    assert boxes.keys() == sizes.keys()
    for a, b in itertools.combinations(boxes.values(), 2):
        apart_x, apart_y = abs(a.middle - b.middle), abs(a.y - b.y)
        assert apart_y >= 40 + layout.GAP / 2 or apart_x >= (a.width + b.width) / 2 + layout.GAP - 1e-6
    for a in boxes.values():
        assert a.x >= 0 and a.x + a.width <= made.width and a.y >= 0 and a.y + a.height <= made.height
    for band in made.bands:
        inside = {i for i in range(len(found.nodes))} if band.region is None else set(found.regions[band.region].nodes)
        for (kind, number), box in boxes.items():
            within = band.box.y < box.y and box.y + box.height < band.box.y + band.box.height
            assert within == (kind == "node" and number in inside)
    for line in made.lines:
        for (x0, y0), (x1, y1) in itertools.pairwise(line.points):
            assert y1 >= y0, "a line runs upwards"
            for v, box in boxes.items():
                if v not in (line.start, line.end) and y0 <= box.y < y1 and x0 == x1:
                    assert not box.x < x0 < box.x + box.width


@pictured
def test_a_page_is_well_formed_and_refers_to_nothing_outside(make):
    g = make()
    page = explain.html(g.explanation())
    assert page.startswith("<!DOCTYPE html>")
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    tags = {e.tag.removeprefix(SVG) for e in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "image", "use", "foreignObject"}
    assert not any(name.startswith("on") or name in ("src", "href") for e in root.iter() for name in e.attrib)
    rest = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|@import|url\((?!#graphfuse-arrow\))|//[a-z]", rest)
    assert root.find("head/title").text.startswith(f"graph {explain.account.printable(g.name)} on ")


@pictured
def test_a_flowchart_holds_no_name_as_more_than_text(make):
    g = make()
    lines = explain.mermaid(g.explanation()).splitlines()
    label = r'"(?:[\w .,:()\[\]-]|#\d+;|<br/>)*"'
    accepted = (
        rf"  t\d+\(\[{label}\]\)",
        rf"  subgraph r\d+\[{label}\]",
        r"  end",
        rf" +n\d+\[{label}\]",
        rf"  [nt]\d+ -- {label} --> n\d+",
        r"  n\d+ --> t\d+",
        r"  style r\d+ fill:#[0-9a-f]{6},stroke:#[0-9a-f]{6}",
    )
    assert lines[0] == "flowchart TD"
    assert [line for line in lines[1:] if not any(re.fullmatch(a, line) for a in accepted)] == []
    known = set(re.findall(r"^ +([nt]\d+)[(\[]", "\n".join(lines), re.M))
    assert {n for line in lines if "-->" in line for n in re.findall(r"[nt]\d+(?=$| -)", line)} <= known


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_the_page(tmp_path):
    g = graphs.new("<img src=x onerror=\"document.title='taken'\">", "emulator")
    g.relu(g.tensor([4, 8], name="<script>document.title='taken'</script>"), name="&lt;b&gt;").set_output()
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(explain.html(planned(g).explanation()))
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    dom = subprocess.run([*browser, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120).stdout
    assert "<title>graph &lt;img src=x onerror=" in dom and "<script" not in dom and "&amp;lt;b&amp;gt;" in dom
    subprocess.run([*browser, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 10_000


# Kernels' text


def test_source_of_each_kernel():
    g = planned(Norm().graph("emulator"))
    (source,) = g.get_kernel_source_at_index(0)
    assert 'extern "C"' in source and "row_program" in source and g.name not in source.split()
    assert g.get_kernel_source_at_index(g.get_execution_plan_count() - 1) == ()
    assert len(hostile().get_kernel_source_at_index(0)) == 3
