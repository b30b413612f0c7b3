"""Scales in the order F8_128x4: places, padding, what execute accepts, who reads them again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphfuse
from graphfuse import GraphTypeError, GraphValidationError, VariantPackError, VariantPackTypeError, tensor_reordering
from graphfuse.base import reordering
from graphfuse.contract.engine import NoKnobs
from graphfuse.op_graph.ir import Subgraph
from support import graphs, oracle
from support.graphs import E5M2

SWIZZLED = tensor_reordering.F8_128x4


@given(rows=st.lists(st.integers(1, 40), min_size=1, max_size=3), blocks=st.integers(1, 19))
def test_offsets(rows, blocks):
    dim = (*rows, blocks)
    values = torch.randint(0, 255, dim, dtype=torch.uint8)
    want = torch.from_numpy(oracle.swizzled(values.numpy(), fill=255))
    assert reordering.padded(dim) == want.numel()
    memory = torch.full_like(want, 255)
    memory[reordering.offsets(torch, dim, "cpu")] = values
    assert torch.equal(memory, want)


def test_a_hand_made_place():
    # Row 130 of 200, block 6 of 7: tile (1, 1) of 2 x 2; row 2, block 2 in it.
    assert reordering.offsets(torch, (200, 7), "cpu")[130, 6] == 3 * 512 + 2 * 16 + 2
    assert reordering.offsets(torch, (200, 7), "cpu")[127, 3] == 31 * 16 + 3 * 4 + 3
    assert [reordering.padded(dim) for dim in ((1, 1), (128, 4), (129, 5), (0, 4), (2, 100, 4))] == [
        512,
        512,
        2048,
        0,
        1024,
    ]


def quantizer(dim, block: int, **properties) -> graphfuse.pygraph:
    g = graphs.new(**properties)
    y, scale = g.block_scale_quantize(g.tensor(dim, name="x"), block_size=block)
    y.set_output().set_name("y")
    scale.set_output().set_name("scale").set_reordering_type(SWIZZLED).set_byte_alignment(1)
    return g


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("dim", [[1, 32], [128, 128], [130, 160], [3, 50, 96], [2, 2, 2, 64]], ids=str)
def test_scales_are_written_there_and_nothing_beside_them(dim, block):
    values = torch.randn(dim)
    codes, scales = oracle.nvfp4(values.numpy()) if block == 16 else oracle.mxfp8(values.numpy(), "e4m3")
    want = torch.from_numpy(oracle.swizzled(scales, fill=0xA5))
    g = quantizer(dim, block)
    g.build([graphfuse.heur_mode.FALLBACK])
    kind = {16: torch.float8_e4m3fn, 32: torch.float8_e8m0fnu}[block]
    assert g._ir.tensors[-1].nbytes == want.numel()
    shapes = (want.shape, (-1, 4), (1, -1, 128, 4))
    for memory in [torch.empty(want.shape, dtype=torch.uint8).reshape(s) for s in shapes] + [
        torch.empty(want.numel() + 100, dtype=torch.uint8),
        torch.empty(want.shape, dtype=torch.uint8).view(kind),
    ]:
        found = torch.empty(codes.shape, dtype=torch.uint8)
        memory.view(torch.uint8).fill_(0xA5)
        g.execute({"x": values, "y": found, "scale": memory})
        flat = memory.view(torch.uint8).flatten()
        assert torch.equal(flat[: want.numel()], want) and (flat[want.numel() :] == 0xA5).all()
        assert torch.equal(found, torch.from_numpy(codes))
    memory = torch.full(want.shape, 0xA5, dtype=torch.uint8)
    g.execute({"x": values, "y": found, "scale": memory.data_ptr()})
    assert torch.equal(memory, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=pytest.mark.emulate)])
@pytest.mark.parametrize("whole", [True, False], ids=["whole tiles", "as many as blocks"])
def test_batches_come_back_by_the_same_extents(whole, device):
    """Tiles of each matrix, which cuDNN's batched products read, or tiles that matrices share."""
    batch, rows, columns = 2, 120, 160
    dim = [batch, 128, 8] if whole else [batch, rows, 5]
    x = torch.randn(batch, rows, columns)
    g = quantizer([*x.shape], 32, device=device)
    scale = next(t for t in g.tensors if t.get_name() == "scale")
    scale.set_dim(dim)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    memory = torch.full((batch * 128 * 8,), 0x7F, dtype=torch.uint8)
    graphs.run(g, {"x": x, "y": codes, "scale": memory})
    want, scales = oracle.mxfp8(x.numpy(), "e4m3")
    assert torch.equal(codes, torch.from_numpy(want))
    parts = scales if whole else [scales]
    places = torch.cat([torch.from_numpy(oracle.swizzled(part, 0 if whole else 0x7F)) for part in parts])
    assert torch.equal(memory, places)
    h = graphs.new(device=device)
    y = h.tensor([*x.shape], data_type=graphs.E4M3, name="y")
    s = h.tensor(dim, data_type=graphfuse.data_type.FP8_E8M0, reordering_type=SWIZZLED, name="scale")
    h.block_scale_dequantize(y, s, [1, 32]).set_output().set_name("out")
    out = torch.empty(x.shape)
    graphs.run(h, {"y": codes, "scale": memory, "out": out})
    exact = oracle.from_mxfp8(torch.from_numpy(want), torch.from_numpy(scales), "e4m3")
    assert torch.equal(out.double(), exact)


def test_readers_of_whole_tiles():
    """Of the graph that writes them: zeros fill them."""
    g = quantizer([2, 120, 160], 32)
    scale = next(t for t in g.tensors if t.get_name() == "scale").set_dim([2, 128, 8])
    y = next(t for t in g.tensors if t.get_name() == "y")
    g.identity(scale).set_output().set_name("scales")
    g.block_scale_dequantize(y, scale, [1, 32]).set_output().set_name("out")
    x, codes, memory = torch.randn(2, 120, 160), torch.empty(2, 120, 160, dtype=torch.uint8), torch.empty(2048)
    out, scales = torch.empty(x.shape), torch.empty(2, 128, 8)
    graphs.run(g, {"x": x, "y": codes, "scale": memory.view(torch.uint8)[:2048], "out": out, "scales": scales})
    want, kinds = (torch.from_numpy(made) for made in oracle.mxfp8(x.numpy(), "e4m3"))
    assert torch.equal(out.double(), oracle.from_mxfp8(want, kinds, "e4m3"))
    assert torch.equal(scales[:, :120, :5], torch.exp2(kinds.float() - 127))
    assert scales[:, 120:].max() <= 2.0**-126 and scales[..., 5:].max() <= 2.0**-126


def test_extents_of_whole_tiles_are_of_tiles():
    g = quantizer([2, 120, 160], 32)
    next(t for t in g.tensors if t.get_name() == "scale").set_dim([2, 128, 8]).set_reordering_type(
        tensor_reordering.NONE
    )
    with pytest.raises(
        GraphValidationError, match=r"scale \(.*\) has the extents of whole tiles; accepted: \[2, 120, 5\]"
    ):
        g.validate()


def test_no_rows_take_no_memory():
    g = quantizer([0, 64], 16)
    pack = {"x": torch.empty(0, 64), "y": torch.empty(0, 32, dtype=torch.uint8)}
    graphs.run(g, pack | {"scale": torch.empty(0, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("memory", "error", "message"),
    [
        (torch.empty(2047, dtype=torch.uint8), VariantPackError, r"'scale'.*shape \[2047\].*at least 2048 bytes"),
        (torch.empty(130, 5, dtype=torch.uint8), VariantPackError, r"shape \[130, 5\].*at least 2048 bytes"),
        (torch.empty(4096, dtype=torch.uint8)[::2], VariantPackError, r"stride \[2\]; accepted.*dense"),
        (torch.empty(2048, dtype=torch.float16), VariantPackTypeError, "HALF; accepted: FP8_E4M3 or UINT8"),
    ],
    ids=["short", "logical shape", "gaps", "type"],
)
def test_memory_that_is_refused(memory, error, message):
    g = quantizer([130, 80], 16)
    g.build([graphfuse.heur_mode.FALLBACK])
    with pytest.raises(error, match=message):
        g.execute({"x": torch.empty(130, 80), "y": torch.empty(130, 40, dtype=torch.uint8), "scale": memory})


def test_scales_of_more_than_a_byte_are_refused():
    g = graphs.new()
    y, scale = g.block_scale_quantize(g.tensor([4, 256]), block_size=128)
    y.set_output()
    scale.set_output().set_name("scale").set_reordering_type(SWIZZLED)
    with pytest.raises(
        GraphValidationError, match=r"'scale' \(FLOAT.*reordered as F8_128x4; accepted: scales of 8 bits"
    ):
        g.validate()


def test_its_padding_overlaps_nothing():
    g = quantizer([130, 80], 16)
    g.build([graphfuse.heur_mode.FALLBACK])
    memory = torch.empty(2048 + 130 * 40, dtype=torch.uint8)
    with pytest.raises(
        VariantPackError, match=r"overlaps.*'scale' \(FP8_E4M3 \[130, 5\], F8_128x4\)|'scale'.*overlaps"
    ):
        y = memory[2032 : 2032 + 130 * 40].view(130, 40)
        g.execute({"x": torch.empty(130, 80), "y": y, "scale": memory[:2048]})


def test_who_reads_them_reads_their_values():
    """In one region, and from memory where they come from another."""
    values = torch.randn(130, 96)
    _, scales = oracle.mxfp8(values.numpy(), "e5m2")
    want = torch.exp2(torch.from_numpy(scales).float() - 127)
    g = graphs.new()
    y, scale = g.block_scale_quantize(g.tensor([130, 96], name="x"), block_size=32)
    y.set_output().set_name("y").set_data_type(E5M2)
    g.identity(scale.set_output().set_name("scale").set_reordering_type(SWIZZLED)).set_output().set_name("out")
    memory, out = torch.empty(1024, dtype=torch.uint8), torch.empty(130, 3)
    graphs.run(g, {"x": values, "y": torch.empty(130, 96, dtype=torch.uint8), "scale": memory, "out": out})
    assert torch.equal(out, want)

    class Buffers:
        def address(self, tensor):
            return {scale.get_uid(): memory, uid: out}[g._ir.tensors[tensor].uid].data_ptr()

    uid = next(t.uid for t in g._ir.tensors if t.name == "out")
    planner = g._planner
    (engine,) = (e for e in planner.registry.engines if e.name == "reference")
    out.zero_()
    engine.run(Subgraph(planner.graph, (1,)), NoKnobs(), planner.device, Buffers(), 0)
    assert torch.equal(out, want)


def test_generated_kernels_write_that_order_or_leave_it():
    case = graphs.Norm(rows=4, output=graphs.FP4, blocks=True)
    g, plain = case.graph("emulator"), case.graph("emulator")
    next(t for t in g.tensors if t.get_name() == "block_scale").set_reordering_type(SWIZZLED)
    pack, found, want = case.inputs(), case.outputs(), case.outputs()
    found["block_scale"] = torch.full((512,), 0xA5, dtype=torch.uint8)
    graphs.run(g, pack | found, [graphfuse.heur_mode.A])
    graphs.run(plain, pack | want, [graphfuse.heur_mode.A])
    places = torch.from_numpy(oracle.swizzled(want["block_scale"].numpy(), fill=0xA5))
    assert (found["block_scale"] == places).float().mean() > 0.99  # a value near a midpoint may round either way
    assert ((found["block_scale"] == 0xA5) == (places == 0xA5)).all()


def test_the_order_is_part_of_the_key_and_the_stride_is_not():
    def key(change):
        g = quantizer([130, 96], 32)
        change(next(t for t in g.tensors if t.get_name() == "scale"))
        g.validate()
        return g.key()

    swizzled = key(lambda t: None)
    assert key(lambda t: t.set_stride([17, 5])) == swizzled
    assert key(lambda t: t.set_reordering_type(tensor_reordering.NONE)) != swizzled


def test_a_graph_tensor_with_an_order():
    g = graphs.new()
    one = g.tensor([4, 4], reordering_type=SWIZZLED)
    assert g.tensor_like(one).get_reordering_type() is SWIZZLED
    with pytest.raises(GraphTypeError, match="'bad': reordering type must be a tensor_reordering, got 'F8_128x4'"):
        g.tensor([4, 4], reordering_type="F8_128x4", name="bad")
