"""Matrix products of tokens with the weights of their experts (mixture of experts), and the gradient of weights."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from graphfuse.base.enums import moe_grouped_matmul_mode
from graphfuse.base.errors import GraphValidationError, VariantPackError
from graphfuse.ops import layouts
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape, integers
from graphfuse.ops.pullback import NO_SECOND, NoRule

_MODE = moe_grouped_matmul_mode

_READS: Mapping[moe_grouped_matmul_mode, tuple[str, ...]] = {
    _MODE.NONE: (),
    _MODE.GATHER: ("token_index",),
    _MODE.SCATTER: ("token_index", "token_ks"),
    _MODE.COMBINE: ("token_index", "token_ks", "top_k_scores"),
}
"""Mode -> optional ports that it requires."""


def _shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    token, weight, mode, top_k = shapes["token"], shapes["weight"], attributes["mode"], attributes["top_k"]
    if len(token) != 3 or token[0] != 1 or len(weight) != 3 or token[2] != weight[1]:
        raise GraphValidationError(
            f"token and weight must be [1, tokens, K] and [experts, K, N], got {list(token)} and {list(weight)}"
        )
    _groups(shapes["first_token_offset"], weight[0])
    wanted = _READS[mode]
    for port in _READS[_MODE.COMBINE]:
        if (port in shapes) is not (port in wanted):
            how = "needs" if port in wanted else "would not read"
            raise GraphValidationError(
                f"mode {mode.name} {how} {port}; it reads {', '.join(wanted) or 'none of these'}"
            )
    rows = shapes["token_index"][1] if mode is _MODE.GATHER and len(shapes["token_index"]) > 1 else token[1]
    for port in ("token_index", "token_ks"):
        if shapes.get(port, (1, rows, 1)) != (1, rows, 1):
            raise GraphValidationError(
                f"{port} must be [1, rows of all groups, 1], {[1, rows, 1]}, got {list(shapes[port])}"
            )
    if mode in (_MODE.SCATTER, _MODE.COMBINE) and not 1 <= top_k <= weight[0]:
        raise GraphValidationError(f"top_k is {top_k}; accepted in mode {mode.name}: 1 to the {weight[0]} experts")
    if mode is _MODE.SCATTER and rows % top_k:
        raise GraphValidationError(f"token has {rows} rows; accepted in mode SCATTER: a multiple of top_k, {top_k}")
    scores = shapes.get("top_k_scores", ())
    if mode is _MODE.COMBINE and (len(scores) != 3 or scores[0] != 1 or scores[2] != top_k):
        raise GraphValidationError(f"top_k_scores must be [1, tokens, {top_k}], got {list(scores)}")
    return {"output": (1, scores[1] if mode is _MODE.COMBINE else rows, weight[2])}


def _groups(offsets: Shape, experts: int) -> int:
    """The number of groups. The offsets may include the end of the last group."""
    if len(offsets) == 3 and offsets[1:] == (1, 1) and experts:
        if offsets[0] > 1 and (offsets[0] - 1) % experts == 0:
            return offsets[0] - 1
        if offsets[0] and experts > 1 and offsets[0] % experts == 0:
            return offsets[0]
    raise GraphValidationError(
        f"first_token_offset must be [groups + 1, 1, 1], or without the end [groups, 1, 1] where there are several "
        f"experts; groups are a multiple of the {experts} experts; got {list(offsets)}"
    )


def _bounds(t, offsets, groups: int, rows: int):
    """Row numbers at which groups begin, and at which the last ends."""
    starts = offsets.flatten().long()
    return starts if len(starts) > groups else t.cat((starts, starts.new_tensor([rows])))


def _check_numbers(x: Mapping[str, Any], attributes: Attributes, room: Mapping[str, Sequence[int]]) -> None:
    """Raises VariantPackError unless offsets of groups are ascending and at most the number of rows."""
    found = x["first_token_offset"].flatten().tolist()
    rows = x["token_index" if attributes.get("mode") is _MODE.GATHER else "token"].shape[1]
    if any(after < before for before, after in itertools.pairwise((0, *found, rows))):
        raise VariantPackError(f"first_token_offset is {found}; accepted: ascending numbers from 0 to {rows}")


def _grouped(t, x, a) -> dict[str, object]:
    token, weight, mode = x["token"][0], x["weight"], a["mode"]
    if mode is _MODE.GATHER:
        token = _gathered_rows(t, token, x["token_index"].flatten().long())
    experts, rows = weight.shape[0], token.shape[0]
    groups = _groups(tuple(x["first_token_offset"].shape), experts)
    bounds = _bounds(t, x["first_token_offset"], groups, rows)
    numbers = t.arange(rows, device=token.device)
    made = token.new_zeros(rows, weight.shape[2])
    for expert in range(experts):  # all rows for each expert: its number of rows is not known on the host
        inside = t.zeros_like(numbers, dtype=t.bool)
        for group in range(expert, groups, experts):
            inside |= (bounds[group] <= numbers) & (numbers < bounds[group + 1])
        made = t.where(inside[:, None], t.matmul(token, weight[expert]), made)
    if mode in (_MODE.NONE, _MODE.GATHER):
        return {"output": made[None]}
    slots = (x["top_k_scores"].shape[1] if mode is _MODE.COMBINE else rows // a["top_k"]) * a["top_k"]
    placed = _scattered_rows(
        t, made, numbers, bounds, x["token_index"].flatten(), x["token_ks"].flatten(), a["top_k"], slots
    )
    if mode is _MODE.COMBINE:
        weighted = placed.unflatten(0, (-1, a["top_k"])) * x["top_k_scores"][0].unsqueeze(2)
        placed = weighted.sum(dim=1)
    return {"output": placed[None]}


def _gathered_rows(t, token, index):
    """Rows chosen by number; zeros for numbers of no row."""
    there = (index >= 0) & (index < token.shape[0])
    found = t.cat((token, token.new_zeros(1, token.shape[1])))
    return found[t.where(there, index, token.shape[0])]


def _scattered_rows(t, made, numbers, bounds, index, slot, top_k: int, slots: int):
    """Rows of groups at the positions of their tokens and slots; zeros at other positions."""
    index, slot = index.long(), slot.long()
    there = (index >= 0) & (index < slots // top_k) & (slot >= 0) & (slot < top_k)
    there &= (bounds[0] <= numbers) & (numbers < bounds[-1])
    found = made.new_zeros(slots + 1, made.shape[1])
    found[t.where(there, index * top_k + slot, slots)] = made
    return found[:slots]


def _shapes_backward(shapes: Mapping[str, Shape], attributes: Attributes, wanted) -> dict[str, Shape]:
    loss, token, offsets = shapes["doutput"], shapes["token"], shapes["first_token_offset"]
    if len(token) != 3 or len(loss) != 3 or token[0] != 1 or token[:2] != loss[:2]:
        raise GraphValidationError(
            f"token and doutput must be [1, tokens, K] and [1, tokens, N], got {list(token)} and {list(loss)}"
        )
    if len(offsets) != 3 or offsets[1:] != (1, 1) or not offsets[0]:
        raise GraphValidationError(
            f"first_token_offset must be [groups, 1, 1] or [groups + 1, 1, 1], got {list(offsets)}"
        )
    asked = wanted.get("dweight", ())
    groups = asked[0] if len(asked) == 3 and asked[0] == offsets[0] - 1 else offsets[0]
    return {"dweight": (groups, token[2], loss[2])}


def _backward(t, x, a) -> dict[str, object]:
    token, loss = x["token"][0], x["doutput"][0]
    bounds = _bounds(t, x["first_token_offset"], a["groups"], token.shape[0])
    numbers = t.arange(token.shape[0], device=token.device)
    made = []
    for group in range(a["groups"]):
        inside = ((bounds[group] <= numbers) & (numbers < bounds[group + 1]))[:, None]
        rows, of = (t.where(inside, values, 0.0) for values in (token, loss))
        made.append(t.matmul(rows.mT, of))
    return {"dweight": t.stack(made)}


TABLE = (
    Op(
        "moe_grouped_matmul",
        "Rows of tokens times the weight of their expert: token [1, tokens, K], weight [experts, K, N]. Group g has\n"
        "the rows from first_token_offset[g] up to the next offset, and its expert is g modulo experts. The offsets\n"
        "are [groups + 1, 1, 1], with the end of the last group, or [groups, 1, 1], if that is the last row. mode\n"
        "NONE: tokens and result are in the order of groups. GATHER: row r of the groups is token number\n"
        "token_index[r], [1, rows, 1]. SCATTER: row r of the result is written to row token_index[r] * top_k +\n"
        "token_ks[r]. COMBINE: it is added to row token_index[r], times top_k_scores[token_index[r], token_ks[r]],\n"
        "[1, tokens, top_k]. Each slot of a token occurs once. Rows of the result are zero if they are in no group or\n"
        "if no row is written to them; a gathered row is zero if its number is invalid. Products and sums are in the\n"
        "compute data type, FLOAT unless set, in an order that is not specified.",
        inputs=(
            *(Port(port) for port in ("token", "weight")),
            integers("first_token_offset"),
            integers("token_index", optional=True),
            integers("token_ks", optional=True),
            Port("top_k_scores", optional=True, by_name=True),
        ),
        infer=_shapes,
        strides=layouts.row_major,
        reference=_grouped,
        check=_check_numbers,
        attributes=(Attribute("mode", (_MODE,), _MODE.NONE), Attribute("top_k", (int,), 0)),
        vjp=NoRule(
            "its gradients are nodes of their own: build them with moe_grouped_matmul_bwd, and with this op and the "
            "weight transposed"
        ),
        may_recompute=False,
    ),
    Op(
        "moe_grouped_matmul_bwd",
        "The gradient of the weight of moe_grouped_matmul, in mode NONE, from that of its output: for each group the\n"
        "sum over its rows of token times doutput, [groups, K, N]. first_token_offset includes the end of the last\n"
        "group if the result, by set_dim, has one group less than there are offsets. The result's columns have no\n"
        "gaps unless its strides are set. Gradients of groups with the same expert are not summed.",
        inputs=(Port("doutput"), Port("token"), integers("first_token_offset")),
        outputs=(Port("dweight"),),
        infer=_shapes_backward,
        strides=lambda dim, attributes, inputs: layouts.packed_stride(dim, (0, 2, 1)),  # columns have no gaps
        frozen=lambda attributes, inputs, outputs: {"groups": outputs["dweight"][0][0]},
        reference=_backward,
        check=_check_numbers,
        vjp=NO_SECOND,
        may_recompute=False,
    ),
)
