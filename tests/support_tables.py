"""docs/support.md: what the engines take, asked of them. Run it to write the page anew.

Each cell is the answer of planning to a small graph, for a chip that need not be there: nothing is compiled.
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from graphfuse import data_type, heur_mode, norm_forward_phase, reduction_mode, tensor_reordering
from graphfuse.api import pygraph
from graphfuse.base.device import ARCHES, for_arch
from graphfuse.base.errors import GraphfuseError
from graphfuse.contract.launch_limits import largest_cluster
from graphfuse.engines.cudnn.op_rules import OP_RULES
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import BLOCKS, OPS, Port
from graphfuse.runtime.handle import Handle

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "support.md"
COMMAND = "python tests/support_tables.py"
CHIP = "sm_90a"

FLOAT, BF16, FP4 = data_type.FLOAT, data_type.BFLOAT16, data_type.FP4_E2M1
INT64 = data_type.INT64
TYPES = [dtype for dtype in data_type if dtype is not data_type.NOT_SET]
ROWS, COLUMNS = 64, 256
IMAGE, CHANNELS, ONE = (2, 8, 16, 16), (1, 8, 1, 1), (1, 1, 1, 1)
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
"""Phases of norms."""

YES, NO = "yes", "-"

Draw = Callable[[pygraph], object]
"""Adds nodes, and returns what the last one returned."""


def graph(draw: Draw, arch: str = CHIP) -> pygraph:
    """Whatever is drawn, validated, every result of the last node an output."""
    g = pygraph(io_data_type=BF16, intermediate_data_type=FLOAT, handle=Handle(for_arch(arch)))
    made = draw(g)
    for tensor in made if isinstance(made, list | tuple) else (made,):
        if tensor is not None:
            tensor.set_output()
    g.validate()
    return g


def refusal(draw: Draw, arch: str = CHIP) -> str | None:
    """Why no generated kernel takes all of it; None if one does."""
    try:
        g = graph(draw, arch)
        g.build_operation_graph()
        g.create_execution_plans([heur_mode.OPENSOURCE])
        g.check_support()
    except GraphfuseError as error:
        return str(error)
    return None


def tensor(g: pygraph, shape=(ROWS, COLUMNS), dtype: data_type = BF16, **how) -> Tensor:
    return g.tensor(list(shape), data_type=dtype, **how)


def narrow(g: pygraph, name: str) -> object:
    """Attention of FP8, each required input of a type that it may have."""

    def drawn(port: Port) -> Tensor:
        dim = (2, 8, 32, 1) if port.name == "stats" else (2, 8, 32, 32)
        if "scale" in port.name:
            dim = (2, 8, 32, 1) if port.types else ONE
            dim = (2, 8, 1, 32) if port.name.endswith("_T") or (name, port.name) == ("sdpa_mxfp8", "descale_v") else dim
        return tensor(g, dim, port.types[0] if port.types else FLOAT)

    made = getattr(g, name)(**{port.name: drawn(port) for port in OPS[name].inputs if not port.optional})
    return made[0]


def normed(g: pygraph) -> Tensor:
    return g.rmsnorm(tensor(g), tensor(g, (1, COLUMNS)), 1e-6, norm_forward_phase=INFERENCE)[0]


def statistic(g: pygraph) -> Tensor:
    return tensor(g, (ROWS, 1), FLOAT)


def channel(g: pygraph) -> Tensor:
    return tensor(g, CHANNELS, FLOAT)


def _adaptive(g: pygraph, call: Callable) -> object:
    rows = functools.partial(tensor, g, (1, ROWS, COLUMNS))
    return call(rows, functools.partial(tensor, g, (1, 1, COLUMNS)), lambda: tensor(g, (1, ROWS, 1), FLOAT))


SAMPLES: dict[str, Draw] = {
    "rmsnorm": lambda g: g.rmsnorm(tensor(g), tensor(g, (1, COLUMNS)), 1e-6, norm_forward_phase=TRAINING),
    "layernorm": lambda g: g.layernorm(
        tensor(g), tensor(g, (1, COLUMNS)), tensor(g, (1, COLUMNS)), 1e-6, norm_forward_phase=TRAINING
    ),
    "rmsnorm_backward": lambda g: g.rmsnorm_backward(
        tensor(g), tensor(g), tensor(g, (1, COLUMNS)), statistic(g), has_dbias=True
    ),
    "layernorm_backward": lambda g: g.layernorm_backward(
        tensor(g), tensor(g), tensor(g, (1, COLUMNS)), statistic(g), statistic(g)
    ),
    "adalayernorm": lambda g: _adaptive(
        g, lambda x, row, one: g.adalayernorm(x(), row(), row(), 1e-6, norm_forward_phase=TRAINING)
    ),
    "adalayernorm_backward": lambda g: _adaptive(
        g, lambda x, row, one: g.adalayernorm_backward(x(), x(), row(), one(), one())
    ),
    "reduction": lambda g: g.reduction(tensor(g), mode=reduction_mode.ADD).set_dim([ROWS, 1]),
    "block_scale_quantize": lambda g: _quantized(g, 16, FP4, data_type.FP8_E4M3),
    "block_scale_dequantize": lambda g: g.block_scale_dequantize(
        tensor(g, dtype=data_type.FP8_E4M3), tensor(g, (ROWS, COLUMNS // 32), data_type.FP8_E8M0), [1, 32]
    ),
    "cross_entropy": lambda g: g.cross_entropy(tensor(g), tensor(g, (ROWS, 1), INT64)),
    "cross_entropy_backward": lambda g: g.cross_entropy_backward(
        statistic(g), tensor(g), tensor(g, (ROWS, 1), INT64), statistic(g)
    ),
    "dropout": lambda g: g.dropout(normed(g), *(tensor(g, (1, 1), FLOAT) for _ in range(2)), probability=0.1),
    "gen_index": lambda g: g.mul(g.gen_index(tensor(g), axis=1), normed(g)),
    "gather_rows": lambda g: g.rotate_pairs(
        normed(g), *(g.gather_rows(tensor(g, (64, COLUMNS // 2)), tensor(g, (ROWS, 1), INT64)) for _ in range(2))
    ),
    "scatter_rows": lambda g: g.scatter_rows(normed(g), tensor(g, (ROWS, 1), INT64)).set_dim([64, COLUMNS]),
    "all_reduce": lambda g: g.mul(g.all_reduce(tensor(g), tensor(g, (1, 68), INT64), rank=0), normed(g)),
    "all_gather": lambda g: g.all_gather(normed(g), tensor(g, (1, 68), INT64), rank=0),
    "add_rows": lambda g: g.add_rows(tensor(g), tensor(g, (ROWS, 1), INT64)).set_dim([64, COLUMNS]),
    "rotate_pairs": lambda g: g.rotate_pairs(normed(g), *(tensor(g, (ROWS, COLUMNS // 2)) for _ in range(2))),
    "rope": lambda g: g.rope(tensor(g, IMAGE), tensor(g, (16, 1, 1, 16), FLOAT)),
    "rope_backward": lambda g: g.rope_backward(tensor(g, IMAGE), tensor(g, (16, 1, 1, 16), FLOAT)),
    "turn_pairs": lambda g: g.turn_pairs(normed(g)),
    "join": lambda g: g.rmsnorm(
        g.join(tensor(g), tensor(g), axis=0), tensor(g, (1, COLUMNS)), 1e-6, norm_forward_phase=INFERENCE
    )[0],
    "matmul": lambda g: g.matmul(tensor(g, (1, ROWS, COLUMNS)), tensor(g, (1, COLUMNS, ROWS))),
    "moe_grouped_matmul": lambda g: g.moe_grouped_matmul(
        tensor(g, (1, ROWS, COLUMNS)), tensor(g, (2, COLUMNS, ROWS)), tensor(g, (3, 1, 1), data_type.INT32)
    ),
    "moe_grouped_matmul_bwd": lambda g: g.moe_grouped_matmul_bwd(
        tensor(g, (1, ROWS, COLUMNS)), tensor(g, (1, ROWS, COLUMNS)), tensor(g, (2, 1, 1), data_type.INT32)
    ),
    "conv_fprop": lambda g: g.conv_fprop(tensor(g, IMAGE), tensor(g, (8, 8, 3, 3)), padding=[1, 1]),
    "conv_dgrad": lambda g: g.conv_dgrad(tensor(g, IMAGE), tensor(g, (8, 8, 3, 3)), padding=[1, 1]).set_dim(IMAGE),
    "conv_wgrad": lambda g: g.conv_wgrad(tensor(g, IMAGE), tensor(g, IMAGE), padding=[1, 1]).set_dim([8, 8, 3, 3]),
    "genstats": lambda g: g.genstats(tensor(g, IMAGE)),
    "sdpa": lambda g: g.sdpa(*(tensor(g, IMAGE) for _ in range(3)), is_inference=True)[0],
    "sdpa_backward": lambda g: g.sdpa_backward(
        *(tensor(g, IMAGE) for _ in range(5)), tensor(g, (*IMAGE[:3], 1), FLOAT)
    ),
    "sdpa_fp8": lambda g: narrow(g, "sdpa_fp8"),
    "sdpa_fp8_backward": lambda g: narrow(g, "sdpa_fp8_backward"),
    "sdpa_mxfp8": lambda g: narrow(g, "sdpa_mxfp8"),
    "sdpa_mxfp8_backward": lambda g: narrow(g, "sdpa_mxfp8_backward"),
    "instancenorm": lambda g: g.instancenorm(
        tensor(g, IMAGE), channel(g), channel(g), 1e-6, norm_forward_phase=INFERENCE
    )[0],
    "instancenorm_backward": lambda g: g.instancenorm_backward(
        tensor(g, IMAGE), tensor(g, IMAGE), channel(g), *(tensor(g, (2, 8, 1, 1), FLOAT) for _ in range(2))
    ),
    "batchnorm": lambda g: g.batchnorm(tensor(g, IMAGE), channel(g), channel(g), epsilon=1e-6),
    "batchnorm_inference": lambda g: g.batchnorm_inference(tensor(g, IMAGE), *(channel(g) for _ in range(4))),
    "batchnorm_backward": lambda g: g.batchnorm_backward(
        tensor(g, IMAGE), tensor(g, IMAGE), *(channel(g) for _ in range(3))
    ),
    "transpose": lambda g: g.transpose(tensor(g, IMAGE), permutation=[0, 1, 3, 2]),
    "expand": lambda g: g.expand(tensor(g, (ROWS, 1))).set_dim([ROWS, COLUMNS]),
    "reshape": lambda g: g.reshape(tensor(g)).set_dim([ROWS * 2, COLUMNS // 2]),
    "slice": lambda g: g.slice(tensor(g), slices=[slice(0, 8), slice(0, COLUMNS)]),
}
"""By op, one use of it. An op that is missing here is used as `plain` does."""


def plain(name: str) -> Draw:
    """An op of a norm's result and whole tensors, without attributes."""

    def draw(g: pygraph) -> object:
        op = OPS[name]
        needed = [port for port in op.inputs if not port.optional]
        first = normed(g) if op.pointwise else tensor(g)
        return getattr(g, name)(first, *(tensor(g) for _ in needed[1:]))

    return draw


def sample(name: str) -> Draw:
    return SAMPLES.get(name) or plain(name)


def _quantized(g: pygraph, size: int, element: data_type, scale: data_type, **how) -> list[Tensor]:
    y, scales = g.block_scale_quantize(normed(g), block_size=size)
    return [y.set_data_type(element), scales.set_data_type(scale, **how)]


def _swizzled(g: pygraph) -> list[Tensor]:
    y, scales = _quantized(g, 16, FP4, data_type.FP8_E4M3)
    return [y, scales.set_reordering_type(tensor_reordering.F8_128x4)]


ROLES: dict[str, Callable[[pygraph, data_type], object]] = {
    "input of rows × columns": lambda g, dtype: g.rmsnorm(
        tensor(g, dtype=dtype), None, 1e-6, norm_forward_phase=INFERENCE
    )[0],
    "weight, bias: one value per column": lambda g, dtype: g.rmsnorm(
        tensor(g), tensor(g, (1, COLUMNS), dtype), 1e-6, norm_forward_phase=INFERENCE
    )[0],
    "input of one value per row": lambda g, dtype: g.mul(normed(g), tensor(g, (ROWS, 1), dtype)),
    "scalar in memory": lambda g, dtype: g.mul(normed(g), tensor(g, (1, 1), dtype)),
    "output of rows × columns": lambda g, dtype: normed(g).set_data_type(dtype),
    "output of one value per row": lambda g, dtype: (
        g.reduction(tensor(g), mode=reduction_mode.ADD).set_dim([ROWS, 1]).set_data_type(dtype)
    ),
    "sum over all rows": lambda g, dtype: [
        t if t is None or i != 1 else t.set_data_type(dtype)
        for i, t in enumerate(
            g.rmsnorm_backward(tensor(g), tensor(g), tensor(g, (1, COLUMNS)), statistic(g), has_dbias=False)
        )
    ],
}
"""What a tensor may be to a generated kernel, and a graph that has one of that type."""


def operations() -> Iterable[tuple[str, ...]]:
    for name, op in OPS.items():
        graph(sample(name))  # a sample that is not valid raises here, and is no answer
        said = YES if name in OP_RULES else NO
        yield f"`{name}`", "pointwise" if op.pointwise else "", YES if refusal(sample(name)) is None else NO, said


def types() -> Iterable[tuple[str, ...]]:
    for role, draw in ROLES.items():
        # FP4 outputs are quantized in blocks: they have a table of their own.
        accepted = [t for t in TYPES if t is not FP4 and refusal(lambda g, d=draw, t=t: d(g, t)) is None]
        yield role, ", ".join(f"`{t.name}`" for t in accepted)


def blocks() -> Iterable[tuple[str, ...]]:
    for size, made in BLOCKS.items():
        for element in made.elements:
            taken = [s for s in TYPES if refusal(lambda g, e=element, s=s, n=size: _quantized(g, n, e, s)) is None]
            yield str(size), f"`{element.name}`", ", ".join(f"`{s.name}`" for s in taken)


def chips() -> Iterable[tuple[str, ...]]:
    for arch in ARCHES:
        device = for_arch(arch)
        taken = refusal(normed, arch) is None
        fp8, fp4 = _conversion("FP8", arch), _conversion("FP4", arch)
        most = largest_cluster(device)
        yield arch, device.name, YES if taken else NO, fp8, fp4, str(most) if most > 1 else NO


def _conversion(kind: str, arch: str) -> str:
    """How a chip converts to a type, as the notes of its plan say."""
    g = graph(lambda g: _quantized(g, 16, FP4, data_type.FP8_E4M3), arch)
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.OPENSOURCE])
    (note,) = (note for note in g.get_numerical_notes_at_index(0) if note.startswith(f"{kind} conversion: "))
    return note.split(": ")[1].split(",")[0]


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render() -> str:
    """The page."""
    return f"""\
# What is supported

Each cell of this page is the answer of planning to one small graph, for {for_arch(CHIP).name} unless it says otherwise.
`{COMMAND}` writes the page, and a test compares it with the engines. [Graphs](graphs.md) explains
what fuses.

The reference engine runs every valid graph with torch's operations. A dash therefore means "no kernel of this kind".
Only heuristic mode `OPENSOURCE` refuses such a graph.

## Operations

**Generated kernel**: a graph of this operation becomes one kernel. A pointwise operation is asked for behind a norm.
**cuDNN**: [its engine](graphs.md#cudnns-engine) can translate the node; cuDNN then decides.

{table(("operation", "", "generated kernel", "cuDNN"), operations())}

## Data types of generated kernels

Kernels compute in float32, whatever the types of their tensors are.

{table(("tensor", "types"), types())}

Outputs quantized in blocks (`block_scale_quantize`):

{table(("block", "elements", "scales"), blocks())}

Scales of one byte may also lie in tiles of 128 × 4 (`tensor_reordering.F8_128x4`): \
{YES if refusal(_swizzled) is None else NO}.

## Chips

**Software** conversions give the same bits as the instruction, except FP4 within 2^-21 of a midpoint of two codes.
**Cluster** is the largest number of CTAs that share a row.

{table(("architecture", "planned as", "kernels", "FP8 conversion", "FP4 conversion", "cluster"), chips())}
"""


if __name__ == "__main__":
    PATH.write_text(render())
