"""Rotary position embedding, and what stands around it: rows by number, pairs of columns, tensors joined to one."""

from collections.abc import Mapping

from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape


def _gathered(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, index = shapes["input"], shapes["index"]
    if len(x) != len(index) or len(x) < 2:
        raise GraphValidationError(f"input and index must have one rank, of 2 or more, got {list(x)} and {list(index)}")
    if any(e != 1 and i != 1 for e, i in zip(x[1:], index[1:], strict=True)) or index[-1] != 1:
        raise GraphValidationError(
            f"index must have extent 1 along the last axis, and either it or input along each other one but the first, "
            f"got {list(index)} and input {list(x)}"
        )
    return {"output": (index[0], *(max(e, i) if 0 not in (e, i) else 0 for e, i in zip(x[1:], index[1:], strict=True)))}


def _gather_rows(t, x, a) -> dict[str, object]:
    values, index = x["input"], x["index"].long()
    count = values.shape[0]
    inside = (index >= 0) & (index < count)
    absent = float("nan") if values.is_floating_point() else 0  # as NaN becomes in integers
    if not count:
        return {"output": t.full(t.broadcast_shapes(index.shape, (1, *values.shape[1:])), absent).to(values)}
    # All axes but the first of what is gathered, or of the numbers, have extent 1 wherever the other has more.
    rows = [
        t.arange(e, device=values.device).reshape([-1 if k == axis else 1 for k in range(index.dim())])
        for axis, e in enumerate(values.shape)
    ][1:]
    found = values[(t.where(inside, index, 0), *rows)]
    return {"output": t.where(inside, found, absent)}


def _scattered(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    x, index, made = shapes["input"], shapes["index"], wanted.get("output")
    if made is None:
        raise GraphValidationError("output has no dim, which nothing else says: call set_dim on it")
    if len({len(x), len(index), len(made)}) > 1 or len(x) < 2:
        raise GraphValidationError(
            f"input, index and output must have one rank, of 2 or more, got {list(x)}, {list(index)} and {list(made)}"
        )
    if index[0] != x[0] or index[-1] != 1 or any(i not in (1, e) for i, e in zip(index, x, strict=True)):
        raise GraphValidationError(
            f"index must have input's extents or 1, and 1 along the last axis, got {list(index)}"
        )
    if any(e != i * m for e, i, m in zip(x[1:], index[1:], made[1:], strict=True)):
        raise GraphValidationError(
            f"output must have input's extents but along the first axis and where index varies, got {list(made)} of "
            f"input {list(x)} and index {list(index)}"
        )
    return {"output": made}


def _scatter_rows(t, x, a) -> dict[str, object]:
    values, index = x["input"], x["index"].long()
    found = x["output"].clone()  # what is in memory
    numbers = index.expand(*values.shape[:-1], 1)[..., 0]
    rows = [
        t.arange(found.shape[axis], device=values.device).reshape(
            [-1 if k == axis else 1 for k in range(numbers.dim())]
        )
        for axis in range(1, numbers.dim())
    ]
    inside = (numbers >= 0) & (numbers < found.shape[0])
    places = t.broadcast_tensors(numbers, *rows)
    found[tuple(place[inside] for place in places)] = values[inside]
    return {"output": found}


def _rotated(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x, cos, sin = (shapes[port] for port in ("input", "cos", "sin"))
    if cos != sin:
        raise GraphValidationError(f"cos and sin must have one shape, got {list(cos)} and {list(sin)}")
    if len(cos) != len(x) or any(c not in (1, e) for c, e in zip(cos[:-1], x[:-1], strict=True)):
        raise GraphValidationError(
            f"cos must have extents 1 or input's but along the last axis, got {list(cos)} of {list(x)}"
        )
    if not 1 <= cos[-1] <= x[-1] // 2:
        raise GraphValidationError(
            f"cos has {cos[-1]} columns; accepted: one for each pair of columns, 1 to {x[-1] // 2} of input {list(x)}"
        )
    return {"output": x}


def _rotate_pairs(t, x, a) -> dict[str, object]:
    values, cos, sin = x["input"], x["cos"], -x["sin"] if a["inverse"] else x["sin"]
    pairs = cos.shape[-1]
    turned, rest = values[..., : 2 * pairs], values[..., 2 * pairs :]
    if a["interleaved"]:
        one, two = turned[..., ::2], turned[..., 1::2]
    else:
        one, two = turned[..., :pairs], turned[..., pairs:]
    made = one * cos - two * sin, two * cos + one * sin
    turned = t.stack(made, dim=-1).flatten(-2) if a["interleaved"] else t.cat(made, dim=-1)
    return {"output": t.cat((turned, rest), dim=-1)}


def _joined(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    a, b, axis = shapes["a"], shapes["b"], attributes["axis"]
    if not -len(a) <= axis < len(a):
        raise GraphValidationError(f"axis {axis} is outside the inputs' rank {len(a)}")
    axis %= len(a)
    if len(a) != len(b) or any(m != n for k, (m, n) in enumerate(zip(a, b, strict=True)) if k != axis):
        raise GraphValidationError(
            f"a and b must have equal extents but along axis {axis}, got {list(a)} and {list(b)}"
        )
    return {"output": (*a[:axis], a[axis] + b[axis], *a[axis + 1 :])}


TABLE = (
    Op(
        "gather_rows",
        "Slices of input along its first axis, by number: output[i, ...] = input[index[i, ...], ...]. index, of any\n"
        "type, INT32 and INT64 among them, has extent 1 along the last axis, and along others where input has more;\n"
        "it may vary along axes where input has extent 1. The slice of a number that input does not have is NaN;\n"
        "nothing is read there.",
        inputs=(Port("input", moved=True), Port("index", numbers=True)),
        outputs=(Port("output", label="OUT_0"),),
        infer=_gathered,
        reference=_gather_rows,
    ),
    Op(
        "scatter_rows",
        "Slices of input along its first axis, written by number: output[index[i, ...], ...] = input[i, ...]. What\n"
        "no number names stays as it is in memory. A number below 0, or one that output has not, is of no slice:\n"
        "that one is not written. Of two slices with one number either is written. index is as that of gather_rows;\n"
        "output must be given its dim, and be an output of the graph: a cache that is filled bit by bit.",
        inputs=(Port("input", moved=True), Port("index", numbers=True)),
        outputs=(Port("output", label="OUT_0", kept=True),),
        infer=_scattered,
        reference=_scatter_rows,
    ),
    Op(
        "rotate_pairs",
        "Rotary position embedding (Su et al. 2021): pairs of columns of input, rotated by angles of which cos and\n"
        "sin are given, one for each pair: (x, y) becomes (x cos - y sin, y cos + x sin). With n pairs, columns i and\n"
        "n + i are a pair (half-split, as in GPT-NeoX), or, interleaved, columns 2 i and 2 i + 1 (GPT-J). Columns\n"
        "from 2 n on are as they were. inverse rotates back, which is the gradient. cos and sin broadcast along all\n"
        "axes but the last. cuDNN's rope is another op: it takes angles.",
        inputs=(Port("input"), Port("cos"), Port("sin")),
        outputs=(Port("output", label="OUT_0"),),
        infer=_rotated,
        reference=_rotate_pairs,
        attributes=(Attribute("interleaved", (bool,), False), Attribute("inverse", (bool,), False)),
    ),
    Op(
        "join",
        "The elements of a, then those of b along axis. A negative axis counts from the last.",
        inputs=(Port("a", moved=True), Port("b", moved=True)),
        outputs=(Port("output", label="OUT_0"),),
        infer=_joined,
        frozen=lambda attributes, inputs, outputs: {**attributes, "axis": attributes["axis"] % len(inputs["a"])},
        reference=lambda t, x, a: {"output": t.cat((x["a"], x["b"]), dim=a["axis"])},
        attributes=(Attribute("axis", (int,), required=True),),
    ),
)
