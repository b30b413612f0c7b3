"""Masks of a window of keys in graphs that torch compiles: where the operator takes the window, and where not."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphfuse.torch.analysis.surroundings import graph_parts
from graphfuse.torch.attention import mask_pass as attention
from graphfuse.torch.attention.mask_pass import OPERATOR, rewrite
from graphfuse.torch.attention.operator import WINDOWED
from support.attention_graphs import N, checked, expanded, qkv, with_mask
from support.dispatched import Called

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
ANY = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def band(width):
    return lambda: torch.ones(N, N, dtype=torch.bool).tril().triu(1 - width)


@pytest.fixture
def windows(monkeypatch):
    """Kernels are chosen as if they all took windows: what the operator makes a mask of is computed."""
    monkeypatch.setattr(attention, "kernel_of", lambda *given: WINDOWED)


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("width", [1, 2, N - 1])
def test_windows_go(width, attention_calls):
    def function(q, k, v):
        return with_mask(band(width))(q, expanded(k), expanded(v))

    note = f"a window of {width} keys: no mask, k and v not repeated"
    assert checked(function, *qkv(kv_heads=2)) == [(OPERATOR, note)]
    assert checked(with_mask(band(width), scale=0.3), *qkv()) == [(OPERATOR, note.partition(",")[0])]
    assert not attention_calls


@pytest.mark.usefixtures("windows")
def test_windows_stay_where_the_operator_has_other_rules():
    def in_three(q, k, v):
        return with_mask(band(2))(q[:, 0], k[:, 0], v[:, 0])

    def by_one_head(q, k, v):
        return with_mask(band(2))(q, k[:1], v[:1])

    def dropped(q, k, v):
        return with_mask(band(2), dropout_p=0.5)(q, k, v) * 0

    def other_scale(q, k, v):
        return with_mask(band(2), scale=-1.0)(q, k, v)

    def chosen(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return with_mask(band(2))(q, k, v)

    for function, why in (
        (in_three, "no faster kernel for a window of 2 keys"),
        (by_one_head, "no faster kernel for a window of 2 keys"),
        (dropped, "no faster kernel for a window of 2 keys"),
        (other_scale, "positive scale"),
        (chosen, "which kernels attention may take is set"),
    ):
        ((became, reason),) = checked(function, *qkv())
        assert not became and why in reason


@pytest.mark.usefixtures("windows")
def test_windows_stay_where_the_result_is_changed():
    """Torch's kernels but the mathematical one, and the operator, read the result in backward."""

    def changed(q, k, v):
        out = with_mask(band(2))(q, k, v)
        out.transpose(1, 2).mul_(2)
        return out

    with sdpa_kernel(SDPBackend.MATH):
        assert checked(changed, *qkv()) == [("", "its mask stays: its result is changed in place")]


@pytest.mark.parametrize(
    ("dtype", "columns", "allowed", "became", "why"),
    [
        (torch.bfloat16, 256, ANY, OPERATOR, "a window of 16 keys: no mask"),
        (torch.bfloat16, 264, ANY, "", "no faster kernel for a window of 16 keys"),
        (torch.float32, 64, ANY, "", "no faster kernel for a window of 16 keys"),
        (torch.float16, 36, ANY, OPERATOR, "a window of 16 keys: no mask"),
        (torch.float16, 36, [SDPBackend.EFFICIENT_ATTENTION], "", "which kernels attention may take is set"),
    ],
)
def test_windows_on_a_gpu(dtype, columns, allowed, became, why):
    """What is put into a graph of tensors on one: torch's flash attention and nothing of the mask."""
    graph = torch.fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    places = graph.call_function(torch.arange, (64,), {"device": "cuda"})
    own = graph.call_method("unsqueeze", (places, 1))
    first = graph.call_function(torch.sub, (own, 16))
    seen = [graph.call_function(torch.le, (places, own)), graph.call_function(torch.gt, (places, first))]
    mask = graph.call_function(torch.logical_and, tuple(seen))
    many = [graph.call_method("repeat_interleave", (t, 4, 1)) for t in (k, v)]
    out = graph.call_function(F.scaled_dot_product_attention, (q, *many), {"attn_mask": mask})
    graph.output(out)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode() as fake:
        given = [torch.empty(2, heads, 64, columns, device="cuda", dtype=dtype) for heads in (8, 2, 2)]
        GraphRecord(module).run(*given)
    with sdpa_kernel(allowed):
        (entry,) = rewrite(module, graph_parts(graph), lambda node: (node.name, ""))
    assert entry.became == became and why in entry.why
    if became:
        assert out.args[0] is q and out.args[3:] == (None, None, True, None, 16)
        assert not any(step in graph.nodes for step in (places, own, first, mask, *seen))
        with fake, Called() as called:
            made = module(*given)
        assert (made.shape, made.dtype) == (given[0].shape, dtype)
        assert list(called.found) == ["aten::_flash_attention_forward"]


class GraphRecord(torch.fx.Interpreter):
    def run_node(self, node):
        node.meta["example_value"] = super().run_node(node)
        return node.meta["example_value"]
