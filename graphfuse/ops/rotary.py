"""Rotary position embedding, and ops around it: rows by number, pairs of columns, joined tensors."""

from collections.abc import Mapping

from graphfuse.base.errors import GraphValidationError
from graphfuse.base.wording import counted
from graphfuse.ops.moves import required_shape, with_dim
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NUMBERS, NoRule, Pullback


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


def _places(t, shape, device) -> list[object]:
    """Indices along each axis but the first, which broadcast with a tensor of the shape."""
    return [
        t.arange(extent, device=device).reshape(-1, *[1] * (len(shape) - 1 - axis))
        for axis, extent in enumerate(shape)
        if axis
    ]


def _gather_rows(t, x, a) -> dict[str, object]:
    values, index = x["input"], x["index"].long()
    count = values.shape[0]
    inside = (index >= 0) & (index < count)
    absent = float("nan") if values.is_floating_point() else 0  # NaN becomes 0 in integers
    if not count:
        return {"output": t.full(t.broadcast_shapes(index.shape, (1, *values.shape[1:])), absent).to(values)}
    # Along each axis but the first, input or index has extent 1.
    found = values[(t.where(inside, index, 0), *_places(t, values.shape, values.device))]
    return {"output": t.where(inside, found, absent)}


def _scattered(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    x, index, made = shapes["input"], shapes["index"], required_shape(wanted)
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
    found = x["output"].clone()  # the old values in memory
    numbers = index.expand(*values.shape[:-1], 1)[..., 0]
    inside = (numbers >= 0) & (numbers < found.shape[0])
    places = t.broadcast_tensors(numbers, *_places(t, found.shape[:-1], values.device))
    found[tuple(place[inside] for place in places)] = values[inside]
    return {"output": found}


def _added(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    made = required_shape(wanted)
    gathered = _gathered({"input": made, "index": shapes["index"]}, attributes, {})["output"]
    if shapes["input"] != gathered:
        raise GraphValidationError(
            f"input must have the shape that gather_rows makes of output {list(made)} and index "
            f"{list(shapes['index'])}, {list(gathered)}, got {list(shapes['input'])}"
        )
    return {"output": made}


def _add_rows(t, x, a) -> dict[str, object]:
    values, index = x["input"], x["index"].long()
    found = values.new_zeros(a["dim"])
    inside = ((index >= 0) & (index < found.shape[0])).expand(values.shape)
    places = t.broadcast_tensors(values, index, *_places(t, found.shape, values.device))[1:]
    return {"output": found.index_put_(tuple(place[inside] for place in places), values[inside], accumulate=True)}


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
            f"cos has {counted(cos[-1], 'column')}; accepted: one for each pair of columns, 1 to "
            f"{x[-1] // 2} of input {list(x)}"
        )
    return {"output": x}


def _rotate_pairs(t, x, a) -> dict[str, object]:
    values, cos, sin = x["input"], x["cos"], -x["sin"] if a["inverse"] else x["sin"]
    pairs = cos.shape[-1]
    rotated, rest = values[..., : 2 * pairs], values[..., 2 * pairs :]
    if a["interleaved"]:
        one, two = rotated[..., ::2], rotated[..., 1::2]
    else:
        one, two = rotated[..., :pairs], rotated[..., pairs:]
    made = one * cos - two * sin, two * cos + one * sin
    rotated = t.stack(made, dim=-1).flatten(-2) if a["interleaved"] else t.cat(made, dim=-1)
    return {"output": t.cat((rotated, rest), dim=-1)}


def _check_heads(port: str, x: Shape, freqs: Shape, columns: int) -> None:
    """Raises GraphValidationError for invalid shapes of rope. port: name of x. columns: number of rotated columns."""
    if len(x) != 4:
        raise GraphValidationError(f"{port} must have rank 4, of samples, heads, rows and columns, got {list(x)}")
    if columns < 0 or columns > x[-1] or (columns or x[-1]) % 2:
        raise GraphValidationError(
            f"rope_dim is {columns}; accepted: an even number up to {x[-1]}, the columns of {port}, or 0 for all "
            f"of them, if they are even"
        )
    columns = columns or x[-1]
    if len(freqs) != 4 or freqs[0] < x[2] or freqs[1:3] != (1, 1) or freqs[3] not in (columns, columns // 2):
        raise GraphValidationError(
            f"freqs must have dim [{x[2]} or more, 1, 1, {columns}], or half as many columns, of {port} {list(x)}, "
            f"got {list(freqs)}"
        )


def _turned(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    x = shapes["input"]
    if x[-1] % 2 or not x[-1]:
        raise GraphValidationError(f"input has {counted(x[-1], 'column')}; accepted: an even number of them, 2 or more")
    return {"output": x}


def _turn_pairs(t, x, a) -> dict[str, object]:
    values = x["input"]
    if a["interleaved"]:
        return {"output": t.stack((-values[..., 1::2], values[..., ::2]), dim=-1).flatten(-2)}
    one, two = values.chunk(2, dim=-1)
    return {"output": t.cat((-two, one), dim=-1)}


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


def _gathered_back(p: Pullback) -> object:
    return p.graph.add_rows(p.whole("output"), p["index"]).set_dim(p.dim_of("input"))


def _scattered_back(p: Pullback) -> object:
    """The gradients of slices that are written; zeros for those that are not."""
    index = p["index"]
    found = p.graph.gather_rows(p.whole("output"), index)
    last = float(p.dim_of("output")[0] - 1)  # rounded as index is, so that no number up to it compares as above
    written = p.graph.mul(p.graph.cmp_ge(index, 0.0), p.graph.cmp_le(index, last))
    return p.graph.binary_select(found, 0.0, written)


def _rotated_back(p: Pullback) -> object:
    how = {**p.attributes, "inverse": not p.attributes["inverse"]}
    return p.graph.rotate_pairs(p.whole("output"), p["cos"], p["sin"], **how)


def _part(p: Pullback, first: bool) -> object:
    """The gradient of one of two joined tensors."""
    a, made = p.dim_of("a"), p.dim_of("output")
    axis = p.attributes["axis"] % len(made)
    part = slice(0, a[axis]) if first else slice(a[axis], made[axis])
    slices = tuple(part if k == axis else slice(0, extent) for k, extent in enumerate(made))
    return p.graph.slice(p.whole("output"), slices=slices)


_ANGLES = NoRule("cosines and sines of a rotation have no gradient here")


def _rope(name: str, doc: str, given: str, made: Port, other: str, inverse: bool = False) -> Op:
    """Entry of cuDNN's rotation of the port `given`. other: the inverse op, for the gradient."""

    def infer(shapes: Mapping[str, Shape], attributes: Attributes, _: object) -> dict[str, Shape]:
        _check_heads(given, shapes[given], shapes["freqs"], attributes["rope_dim"])
        return {made.name: shapes[given]}

    def frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs: object) -> Attributes:
        return {**attributes, "rope_dim": attributes["rope_dim"] or inputs[given][-1]}

    def reference(t, x, a) -> dict[str, object]:
        values, columns = x[given], a["rope_dim"]
        angles = x["freqs"][: values.shape[2], 0, 0, : columns // 2]
        how = {"interleaved": False, "inverse": inverse}
        rest, rotated = values[..., : values.shape[-1] - columns], values[..., values.shape[-1] - columns :]
        rotated = _rotate_pairs(t, {"input": rotated, "cos": angles.cos(), "sin": angles.sin()}, how)["output"]
        return {made.name: t.cat((rest, rotated), dim=-1) * a["output_scale"]}

    def back(p: Pullback) -> object:
        return getattr(p.graph, other)(p.whole(made.name), p["freqs"], **p.attributes)

    return Op(
        name,
        doc,
        inputs=(Port(given), Port("freqs")),
        outputs=(made,),
        infer=infer,
        frozen=frozen,
        reference=reference,
        attributes=(Attribute("output_scale", (float, int), 1.0), Attribute("rope_dim", (int,), 0)),
        vjp={given: back, "freqs": _ANGLES},
    )


TABLE = (
    Op(
        "gather_rows",
        "Slices of input along its first axis, by number: output[i, ...] = input[index[i, ...], ...]. index, of any\n"
        "type, including INT32 and INT64, has extent 1 along the last axis, and along each other axis but the first\n"
        "either index or input has extent 1. A slice whose number is out of range is NaN, without a read out of\n"
        "bounds.",
        inputs=(Port("input", moved=True), Port("index", numbers=True)),
        infer=_gathered,
        reference=_gather_rows,
        vjp={"input": _gathered_back, "index": NUMBERS},
    ),
    Op(
        "scatter_rows",
        "Slices of input along its first axis, written by number: output[index[i, ...], ...] = input[i, ...]. Other\n"
        "slices of output keep their values in memory, such as those of a cache that is filled step by step. A slice\n"
        "whose number is out of range is not written. Of two slices with the same number, either is written. index is\n"
        "as in gather_rows. The dim of output must be set, and it must be an output of the graph.",
        inputs=(Port("input", moved=True), Port("index", numbers=True)),
        outputs=(Port("output", label="OUT_0", kept=True),),
        infer=_scattered,
        reference=_scatter_rows,
        vjp={"input": _scattered_back, "index": NUMBERS},
        may_recompute=False,  # the old values in memory are unknown
    ),
    Op(
        "add_rows",
        "Slices of input along its first axis, summed by number: output[j, ...] is the sum of input[i, ...] over all\n"
        "i with index[i, ...] = j, in the order of i; 0 if there are none. It is the gradient of gather_rows. Slices\n"
        "whose number is out of range are ignored. index is as in gather_rows. The dim of output must be set.",
        inputs=(Port("input"), Port("index", numbers=True)),
        infer=_added,
        frozen=with_dim,
        reference=_add_rows,
        vjp={"input": _scattered_back, "index": NUMBERS},
    ),
    Op(
        "rotate_pairs",
        "Rotary position embedding (Su et al. 2021): pairs of columns of input are rotated by angles, given as cos\n"
        "and sin, one for each pair: (x, y) becomes (x cos - y sin, y cos + x sin). With n pairs, columns i and\n"
        "n + i are a pair (half-split, as in GPT-NeoX), or, interleaved, columns 2 i and 2 i + 1 (GPT-J). Columns\n"
        "from 2 n on are unchanged. inverse rotates back, which is the gradient. cos and sin broadcast along all axes\n"
        "but the last. rope takes angles.",
        inputs=(Port("input"), Port("cos"), Port("sin")),
        infer=_rotated,
        reference=_rotate_pairs,
        attributes=(Attribute("interleaved", (bool,), False), Attribute("inverse", (bool,), False)),
        vjp={"input": _rotated_back, "cos": _ANGLES, "sin": _ANGLES},
    ),
    _rope(
        "rope",
        "Rotary position embedding by angles: the last rope_dim columns of input, [samples, heads, rows, columns],\n"
        "are rotated, in rotate_pairs' half-split pairs; all columns are multiplied by output_scale. freqs has a row\n"
        "of angles in radians for each of input's rows, or more rows: [rows, 1, 1, rope_dim]. Only the first half of\n"
        "its columns is used, and the other half may be missing. rope_dim 0: all columns.",
        "input",
        Port("output", label="OUTPUT"),
        other="rope_backward",
    ),
    _rope(
        "rope_backward",
        "Gradient of rope's input, from dY, that of its output: dY rotated back by the same angles, and\n"
        "multiplied by output_scale. Angles have no gradient. Returns DX.",
        "dY",
        Port("DX"),
        other="rope",
        inverse=True,
    ),
    Op(
        "turn_pairs",
        "Pairs of columns of input, rotated by a right angle: (x, y) becomes (-y, x). All columns are in pairs, as in\n"
        "rotate_pairs. So input * cos + turn_pairs(input) * sin is a rotation with cosines and sines for each column\n"
        "of input.",
        inputs=(Port("input"),),
        infer=_turned,
        reference=_turn_pairs,
        attributes=(Attribute("interleaved", (bool,), False),),
        vjp={"input": lambda p: p.graph.neg(p.graph.turn_pairs(p.whole("output"), **p.attributes))},
    ),
    Op(
        "join",
        "The elements of a, then those of b along axis. A negative axis counts from the last.",
        inputs=(Port("a", moved=True), Port("b", moved=True)),
        infer=_joined,
        frozen=lambda attributes, inputs, outputs: {**attributes, "axis": attributes["axis"] % len(inputs["a"])},
        reference=lambda t, x, a: {"output": t.cat((x["a"], x["b"]), dim=a["axis"])},
        attributes=(Attribute("axis", (int,), required=True),),
        vjp={"a": lambda p: _part(p, first=True), "b": lambda p: _part(p, first=False)},
    ),
)
