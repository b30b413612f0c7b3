"""Matrix products."""

from collections.abc import Mapping

from graphfuse.base.errors import GraphValidationError
from graphfuse.ops import layouts
from graphfuse.ops.op import Attributes, Op, Port, Shape
from graphfuse.ops.pullback import Pullback


def _matmul_shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    a, b = shapes["A"], shapes["B"]
    if len(a) != len(b) or len(a) < 2:
        raise GraphValidationError(
            f"A and B must have one rank, 2 or more, [batch axes..., M, K] and [batch axes..., K, N], "
            f"got {list(a)} and {list(b)}"
        )
    if a[-1] != b[-2]:
        raise GraphValidationError(
            f"B must have as many rows as A has columns, {a[-1]}, got {b[-2]} (A {list(a)}, B {list(b)})"
        )
    for axis, (one, other) in enumerate(zip(a[:-2], b[:-2], strict=True)):
        if one != other and 1 not in (one, other):
            raise GraphValidationError(
                f"batch axis {axis} does not broadcast (equal extents or 1 are accepted): A {list(a)}, B {list(b)}"
            )
    batch = (other if one == 1 else one for one, other in zip(a[:-2], b[:-2], strict=True))
    return {"C": (*batch, a[-2], b[-1])}


_LONGEST = 2**20
"""Terms of a sum that float64 represents exactly, for products of a 16-bit and a 17-bit number."""


def multiplied(t, a, b):
    """The matrix product; of integers modulo 2^32, in float64, because torch has no integer product on GPUs."""
    if a.is_floating_point():
        return t.matmul(a, b)
    total = 0
    for rows, columns in zip(a.split(_LONGEST, -1), b.split(_LONGEST, -2), strict=True):
        (low, high), (other_low, other_high) = _halves(rows), _halves(columns)
        crossed = t.matmul(high, other_low) + t.matmul(low, other_high)
        # The product of both high halves is a multiple of 2^32.
        total = total + t.matmul(low, other_low).long() + (crossed.long() << 16)
    return total.to(a.dtype)


def _halves(values):
    """The low and the high 16 bits of INT32, in float64: low + 2^16 high."""
    return (values & 0xFFFF).double(), (values >> 16).double()


def _transposed(p: Pullback, port: str) -> object:
    *batch, rows, columns = range(len(p.dim_of(port)))
    return p.graph.transpose(p[port], permutation=(*batch, columns, rows))


TABLE = (
    Op(
        "matmul",
        "The matrix product C = A B of [batch axes..., M, K] and [batch axes..., K, N]. Extents of 1 along batch axes\n"
        "broadcast. Strides give the layouts of A and B: either may be transposed.\n"
        "A virtual input is read in the type that it declares. Products and sums are in the compute data type, FLOAT\n"
        "unless set, in an order that is not specified, and C is rounded once, to its own type. The reference\n"
        "engine uses torch.matmul, on a GPU with FLOAT inputs with the precision of\n"
        "torch.set_float32_matmul_precision.\n"
        "In INT32 they are exact, modulo 2^32. C is row-major unless set.",
        inputs=(Port("A", declared=True), Port("B", declared=True)),
        outputs=(Port("C"),),
        infer=_matmul_shapes,
        strides=layouts.row_major,
        reference=lambda t, x, a: {"C": multiplied(t, x["A"], x["B"])},
        not_offered={"padding": (0.0, "0.0: A and B are multiplied whole, and have nothing to be filled")},
        vjp={
            "A": lambda p: p.graph.matmul(p.whole("C"), _transposed(p, "B")),
            "B": lambda p: p.graph.matmul(_transposed(p, "A"), p.whole("C")),
        },
        integers=True,
        may_recompute=False,
    ),
)
