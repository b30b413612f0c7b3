"""Translation of aten calls to several steps, if no single op of the table computes them by their arguments alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import torch

from graphfuse.ops import OPS
from graphfuse.runtime import torch_private
from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.aten_calls import Call, is_view
from graphfuse.torch.analysis.meaning import called_name, has_gradient, recorded_result, same
from graphfuse.torch.regions.call_translation import (
    FP8,
    SMALL_INTEGERS,
    TO_BOOL,
    CallTranslation,
    Untranslated,
    Value,
    rounded_number,
)
from graphfuse.torch.regions.pair_turns import turn_of

WIDEST, MULTIPLE = 512, 16
"""Columns that kernels rotate: at most this many, and a multiple of this."""
_BEYOND_COLUMNS = 2.0**24
"""A number larger than that of any column."""


def _same_elements(d: CallTranslation) -> Value:
    """Views that add or drop dimensions of extent 1, or repeat. Also rotations of neighbouring columns, which end in a
    view."""
    if (turn := turn_of(d.node)) is not None and turn.interleaved:
        return _turn_pairs(d)
    value, new = d["self"], d.out
    old = value.tensor
    if value.step is None:  # the tensor is read as the view has it
        is_alike = old.dim() == new.dim() and all(map(same, (*old.shape, *old.stride()), (*new.shape, *new.stride())))
        return value if is_alike else d.read(new)
    if new.dtype is not old.dtype:
        raise Untranslated("a view of another type")
    axes, left = [], [(n, a) for n, a in zip(value.shape, value.aligned(), strict=True) if not same(n, 1)]
    once, spare = [], len(left) < len(value.shape)
    for n in new.shape:
        if left and same(n, left[0][0]):
            axes.append(left.pop(0)[1])
            once.append(n)
        elif same(n, 1) or spare:
            axes.append(None)
            once.append(1)
        else:
            raise Untranslated("a view that moves elements")
    if left:
        raise Untranslated("a view that moves elements")
    for place in range(len(axes) - 1, -1, -1):
        if axes[place] is None:
            behind = axes[place + 1] if place + 1 < len(axes) else d.end
            axes[place] = behind - 1
    if any(a >= b for a, b in zip(axes, axes[1:], strict=False)):
        raise Untranslated("a view that adds a dimension where the rows have none")
    repeats = not all(map(same, once, new.shape))
    return Value(new, value.step, tuple(axes), torch.Size(once) if repeats else None)


def _permuted(d: CallTranslation) -> Value:
    value, new = d["self"], d.out
    if value.step is None:
        return d.read(new)
    if value.once is not None:
        raise Untranslated("a view that moves what is repeated")
    if all(new.dim() > v.tensor.dim() for v in value.step.read):
        raise Untranslated("a view that adds a dimension where the rows have none")
    order = [*range(new.dim())]
    if d.call.name == "permute.default":
        order = [dim % new.dim() for dim in d["dims"]]
    elif order:  # not a tensor without dimensions
        one, other = d["dim0"], d["dim1"]
        order[one], order[other] = order[other], order[one]
    return Value(new, value.step, tuple(value.aligned()[dim] for dim in order))


def _turn_pairs(d: CallTranslation) -> Value:
    turn, columns = turn_of(d.node), d.out.shape[-1]
    if turn is None:
        raise Untranslated("it joins tensors")
    if turn.interleaved:
        x = d["self"]
        d.columns(x, -1)
        return d.step("turn_pairs", {"input": x}, {"interleaved": True})
    if columns % MULTIPLE or columns > WIDEST:
        raise Untranslated(f"it turns {columns} columns; accepted: a multiple of {MULTIPLE}, at most {WIDEST}")
    x = d.known[d.call.arguments["tensors"][0]]
    d.columns(x, -1)
    return d.step("turn_pairs", {"input": x})


def _cast(d: CallTranslation) -> Value:
    x = d["a" if d.call.name == "convert_element_type.default" else "self"]
    if d.out.dtype is torch.bool:
        return d.step("cmp_neq", {"input": x, "comparison": 0})
    if d.out.dtype in FP8:
        recorded = recorded_result(d.node)
        if isinstance(recorded, torch.Tensor) and recorded.requires_grad:
            raise Untranslated(f"a cast to {d.out.dtype}, of which the gradient is of that type")
        if not _saturates(d.out.dtype):
            beyond = d.between("cmp_gt", input=d.between("abs", input=x), comparison=FP8[d.out.dtype])
            x = d.between("binary_select", input0=math.nan, input1=x, mask=beyond)
    if d.out.dtype in SMALL_INTEGERS:
        if x.tensor.dtype in SMALL_INTEGERS:
            raise Untranslated(f"a cast of {x.tensor.dtype} to {d.out.dtype}")
        # torch does not define the cast of numbers beyond the type. Kernels saturate.
        x = x if _is_whole(x) else d.between("trunc", input=x)
    return d.step("identity", {"input": x})


def _detached(d: CallTranslation) -> Value:
    """The value itself if the same node made it, as those that fill tensors do. Otherwise gradients end here."""
    of = d["self"].step
    return d["self"] if of is not None and of.owner is d.node else d.by_table()


def _is_whole(value: Value) -> bool:
    """True if all elements of a value are known to be whole numbers."""
    of: list[object] = [value]
    for one in of:  # grows in the loop by the operands
        step = one.step if isinstance(one, Value) else None
        if step is None:
            known = not one.tensor.is_floating_point() if isinstance(one, Value) else float(one).is_integer()
        elif known := step.op in _WHOLE:
            continue
        else:
            read = [step.inputs[port] for port in _STAY_WHOLE.get(step.op, OPS[step.op].chooses)]
            of += [v for v in read if v not in of]
            known = bool(read)
        if not known:
            return False
    return True


_WHOLE = frozenset({"round", "trunc", "ceil", "floor", "gen_index", *TO_BOOL})
"""Ops that make whole numbers."""
_STAY_WHOLE = dict.fromkeys(("add", "sub", "mul"), ("a", "b"))
"""Ports of ops that make whole numbers if these are whole, in addition to ops that choose."""


@cache
def _saturates(dtype: torch.dtype) -> bool:
    """True if torch casts numbers beyond a type to its largest number, as kernels do; before 2.13 they became NaN."""
    with torch_private.without_modes():  # under a compiler's mode, tensors have no values
        return not torch.full((1,), 1e4, device="cpu").to(dtype).isnan().item()


def _constant(number: float | None, d: CallTranslation) -> object:
    """Number that all elements of a new tensor have: the given one, or that of the call."""
    return rounded_number(d["fill_value"] if number is None else number, d.out.dtype)


def _constant_like(number: float | None, d: CallTranslation) -> object:
    """Number of `_constant`, for a call that a node makes among others. If the call is the whole node, a step with that
    number for each element of `self`: it selects the number in either case."""
    made, x = _constant(number, d), d["self"]
    if not d.call.name.startswith(f"{called_name(d.node)}.") or not isinstance(x, Value):
        return made
    itself = d.between("cmp_eq", input=x, comparison=x)
    return d.step("binary_select", {"input0": made, "input1": made, "mask": itself})


def _filled(d: CallTranslation) -> object:
    if isinstance(d["self"], Value):
        raise Untranslated("it fills what was computed")
    return rounded_number(d["value"], d.out.dtype)


_CASTS = ("_to_copy.default", "convert_element_type.default")


def is_number(call: Call, known: Mapping[torch.Tensor, object]) -> bool:
    """True for a view or a cast of a number that torch made a tensor. A number has no gradient that a view could
    end."""
    first = next(iter(call.arguments.values()), None)
    return (is_view(call) or call.name in _CASTS) and isinstance(known.get(first), int | float)


def as_number(d: CallTranslation) -> object:
    """The number that a view or a cast reads."""
    return rounded_number(d[next(iter(d.call.arguments))], d.out.dtype)


def _sign(d: CallTranslation) -> Value:
    x = d["self"]
    above, below = (d.between(op, input=x, comparison=0.0) for op in ("cmp_gt", "cmp_lt"))
    return d.step("sub", {"a": above, "b": below})


def _power(d: CallTranslation) -> Value:
    x, exponent = d["self"], d["exponent"]
    if exponent == 2:
        return d.step("mul", {"a": x, "b": x})
    if exponent == 3:
        return d.step("mul", {"a": d.step("mul", {"a": x, "b": x}), "b": x})  # torch rounds the square, too
    if exponent in (0.5, -0.5):
        return d.step("sqrt" if exponent > 0 else "rsqrt", {"input": x})
    if exponent == -1:
        return d.step("reciprocal", {"input": x})
    return d.step("pow", {"input0": x, "input1": exponent})


def _elu(d: CallTranslation, scale: float, input_scale: float) -> Value:
    x, alpha = d["self"], d["alpha"]
    if scale == input_scale == 1:
        return d.step("elu", {"input": x}, {"elu_alpha": alpha})
    below = d.between("mul", a=x, b=input_scale)
    below = d.step("elu", {"input": below}, {"elu_alpha": alpha * scale}, dtype=torch.float32)
    above, mask = d.between("mul", a=x, b=scale) if scale != 1 else x, d.between("cmp_gt", input=x, comparison=0.0)
    return d.step("binary_select", {"input0": above, "input1": below, "mask": mask})


def _six_hard_sigmoids(d: CallTranslation) -> Value:
    """Six times the hard sigmoid. Elements at its limits have no gradient."""
    return _limited(d, d.between("add", a=d["self"], b=3.0), 0.0, 6.0)


def _remainder(d: CallTranslation) -> Value:
    """Remainder of a tensor by another, with the sign of the divisor. `take_along_dim` uses it to count from the
    end."""
    a, b = (v if isinstance(v, Value) else rounded_number(v, d.out.dtype) for v in (d["self"], d["other"]))
    is_index = inductor.takes_by_number(d.node)
    a, dtype = (d.number_of_column(a), torch.float32) if is_index else (a, d.out.dtype)
    left = d.step("mod", {"input0": a, "input1": b}, dtype=dtype)
    below = d.between("cmp_lt", input=b, comparison=0) if isinstance(b, Value) else float(b < 0)
    differs = d.between("cmp_neq", input=d.between("cmp_lt", input=left, comparison=0), comparison=below)
    mask = d.between("logical_and", a=d.between("cmp_neq", input=left, comparison=0), b=differs)
    more = d.step("add", {"a": left, "b": b}, dtype=dtype)
    return d.step("binary_select", {"input0": more, "input1": left, "mask": mask}, dtype=dtype)


def _clamp(d: CallTranslation, low: object, high: object) -> Value:
    return _limited(d, d["self"], low, high, at_limits=_clamp_has_gradients_at_limits())


@cache
def _clamp_has_gradients_at_limits() -> bool:
    """True if the gradient of a clamped value that equals its limit is 1; from torch 2.15 it is 0."""
    with torch_private.without_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(x.clamp(min=0), x)[0])


def _limited(d: CallTranslation, x: Value, low: object, high: object, at_limits: bool = False) -> Value:
    """Values limited to a range. Those beyond the limits have no gradient; those at a limit have one if `at_limits`.
    This uses comparisons, as `max` and `min` divide the gradient between equal operands, as torch does for maximum
    alone."""
    below, above = ("cmp_lt", "cmp_gt") if at_limits else ("cmp_le", "cmp_ge")
    limits = [limit for limit in (low, high) if limit is not None]
    if any(limit != limit for limit in limits):
        raise Untranslated(f"{d.call.name} between {low} and {high}; accepted: numbers")
    for limit, beyond in ((low, below), (high, above)):
        if limit is not None:
            mask = d.between(beyond, input=x, comparison=limit)
            x = d.step("binary_select", {"input0": limit, "input1": x, "mask": mask}, dtype=x.tensor.dtype)
    return x


def _reduced(mode: str, d: CallTranslation) -> Value:
    x, arguments = d["self"], d.call.arguments
    if d.out.dtype not in (x.tensor.dtype, torch.float32):  # torch rounds the elements first
        raise Untranslated(f"{d.call.name} of {x.tensor.dtype} to {d.out.dtype}")
    return d.reduced(mode, x, arguments.get("dim"), bool(arguments.get("keepdim")), d.out.dtype)


def _extreme(mode: str, d: CallTranslation) -> Value:
    """The first of two results; the second is the index. The first of several equal elements has the whole gradient, as
    in torch. NaN is beyond all other values."""
    x, dim = d["self"], d["dim"]
    if not has_gradient(d.node):
        return d.reduced(mode, x, dim, d["keepdim"], d.out.dtype)
    most = d.reduced(mode, x, dim, True, torch.float32)
    is_nan = d.between("cmp_neq", input=x, comparison=x)
    is_most = d.between("logical_or", a=d.between("cmp_eq", input=x, comparison=most), b=is_nan)
    number = d.step("gen_index", {"input": x}, {"axis": -1}, shape=x.shape, dtype=torch.float32)
    candidate = d.between("binary_select", input0=number, input1=_BEYOND_COLUMNS, mask=is_most)
    is_first = d.between("cmp_eq", input=number, comparison=d.reduced("MIN", candidate, dim, True, torch.float32))
    alone = d.between("binary_select", input0=x, input1=0.0, mask=is_first)
    return d.reduced("ADD", alone, dim, d["keepdim"], d.out.dtype)


def _gathered(d: CallTranslation) -> Value:
    """Element of each row that an index selects. For an index beyond the columns it is NaN, as for a target of cross
    entropy; torch stops the program."""
    x, index, rows = d["self"], d["index"], [*d["self"].tensor.shape]
    (dim,) = d.columns(x, d["dim"])
    columns, rows[dim] = rows[dim], 1
    if len(rows) != index.tensor.dim() or not all(map(same, rows, index.tensor.shape)):
        raise Untranslated(f"{d.call.name} by an index of shape {tuple(index.tensor.shape)}; accepted: one a row")
    index = d.number_of_column(index, x.aligned())
    number = d.step("gen_index", {"input": x}, {"axis": -1}, shape=x.shape, dtype=torch.float32)
    is_named = d.between("cmp_eq", input=number, comparison=index)
    alone = d.between("binary_select", input0=x, input1=0.0, mask=is_named)
    one = d.reduced("ADD", alone, d["dim"], True, torch.float32)
    if isinstance(columns, int):
        limits = ("cmp_lt", 0), ("cmp_ge", columns)
        below, above = (d.between(op, input=index, comparison=limit) for op, limit in limits)
        mask = d.between("logical_or", a=below, b=above)
    else:
        mask = d.between("cmp_eq", input=d.reduced("ADD", is_named, d["dim"], True, torch.float32), comparison=0)
    return d.step("binary_select", {"input0": math.nan, "input1": one, "mask": mask})


def _vector_norm(d: CallTranslation) -> Value:
    modes = {2: "NORM2", 1: "NORM1", math.inf: "AMAX"}
    if d["ord"] not in modes or d.out.dtype not in (d["self"].tensor.dtype, torch.float32):
        raise Untranslated(f"a norm of order {d['ord']}; accepted: 1, 2, inf")
    return d.reduced(modes[d["ord"]], d["self"], d["dim"], d["keepdim"], d.out.dtype)


def _centred(d: CallTranslation) -> tuple[Value, float]:
    """Rows less their mean, and the divisor of their sum of squares for a variance."""
    x, correction = d["self"], 1 if d["correction"] is None else d["correction"]
    columns = math.prod(x.tensor.shape[n] for n in d.columns(x, d["dim"]))
    if not isinstance(columns, int) or not isinstance(correction, int | float) or columns <= correction:
        raise Untranslated("the variance of rows of an extent that varies")
    return d.between("sub", a=x, b=d.reduced("AVG", x, d["dim"], True, torch.float32)), columns - correction


def _variance(d: CallTranslation) -> Value:
    centred, count = _centred(d)
    squares = d.reduced("ADD", d.between("mul", a=centred, b=centred), d["dim"], d["keepdim"], torch.float32)
    return d.step("mul", {"a": squares, "b": 1 / count}, shape=d.out.shape)


def _deviation(d: CallTranslation) -> Value:
    """Standard deviation as the length of the centred row, whose gradient is 0 if all elements are equal."""
    centred, count = _centred(d)
    length = d.reduced("NORM2", centred, d["dim"], d["keepdim"], torch.float32)
    return d.step("mul", {"a": length, "b": count**-0.5}, shape=d.out.shape)


def _with_mean(draw: Callable[[CallTranslation], Value], d: CallTranslation) -> tuple[Value, Value]:
    return draw(d), d.reduced("AVG", d["self"], d["dim"], d["keepdim"], d.out.dtype)


def _with_scaled_sum(op: str, d: CallTranslation) -> Value:
    """Sum of a tensor and a number times an op of two other tensors."""
    made = d.between(op, a=d.converted("tensor1"), b=d.converted("tensor2"))
    made = made if d["value"] == 1 else d.between("mul", a=made, b=d["value"])
    return d.step("add", {"a": d["self"], "b": made})


def _interpolated(d: CallTranslation) -> Value:
    """Interpolation between two values, computed from the nearer one, as in torch."""
    start, end, weight = map(d.converted, ("self", "end", "weight"))
    way = d.between("sub", a=end, b=start)
    if not isinstance(weight, Value):
        if abs(weight) < 0.5:
            return d.step("add", {"a": start, "b": d.between("mul", a=way, b=weight)})
        return d.step("sub", {"a": end, "b": d.between("mul", a=way, b=1 - weight)})
    near = d.between("add", a=start, b=d.between("mul", a=way, b=weight))
    far = d.between("sub", a=end, b=d.between("mul", a=way, b=d.between("sub", a=1, b=weight)))
    is_near = d.between("cmp_lt", input=d.between("abs", input=weight), comparison=0.5)
    return d.step("binary_select", {"input0": near, "input1": far, "mask": is_near})


def _along_rows(op: str, d: CallTranslation) -> Value:
    d.columns(d["self"], d["dim"])
    return d.step(op, {"input": d["self"]}, {"axis": -1})


def _logsumexp(d: CallTranslation) -> Value:
    x = d["self"]
    axes, reduced = x.aligned(), d.columns(x, d["dim"])
    left = axes if d["keepdim"] else tuple(axis for n, axis in enumerate(axes) if n not in reduced)
    return d.step("logsumexp", {"input": x}, {"axis": -1}, axes=left)


def _cross_entropy(d: CallTranslation) -> Value:
    x = d["input"]
    rows = x.aligned()[: d.columns(x, -1)[0]]
    read = (v for one in (x.step.upstream() if x.step else ()) for v in one.read)
    if any(axis < min(x.aligned()) for v in read for axis in v.aligned()):
        raise Untranslated("it reads targets without a dimension that its logits had before")
    target = replace(d["target"], axes=rows)
    options = {name: d[name] for name in ("ignore_index", "label_smoothing", "z_loss")}
    return d.step("cross_entropy", {"input": x, "target": target}, options, axes=rows)


def _norm(op: str, vectors: Mapping[str, str], d: CallTranslation) -> Value:
    """A norm of torch. vectors: by port, the arguments that are given there unless they are None."""
    x, eps = d["input"], torch.finfo(torch.float32).eps if d["eps"] is None else d["eps"]
    if x.once is not None:
        raise Untranslated(f"{d.call.name} of what is repeated")
    d.columns(x, range(-len(d["normalized_shape"]), 0))
    given = {port: d[name] for port, name in vectors.items() if d[name] is not None}
    eps = float(eps) if isinstance(eps, torch.SymFloat) and eps.node.has_hint() else eps
    return d.step(op, {"input": x, **given, "epsilon": eps}, {"norm_forward_phase": "INFERENCE"})


COMPOSITES: dict[str, Callable[[CallTranslation], object]] = {
    **dict.fromkeys(
        "view.default reshape.default _unsafe_view.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims "
        "expand.default alias.default".split(),
        _same_elements,
    ),
    **dict.fromkeys(("permute.default", "transpose.int"), _permuted),
    "cat.default": _turn_pairs,
    **dict.fromkeys(_CASTS, _cast),
    "bitwise_xor.Tensor": lambda d: d.step("cmp_neq", {"input": d["self"], "comparison": d["other"]}),
    "scalar_tensor.default": lambda d: d["s"],
    "detach.default": _detached,
    **dict.fromkeys(("full.default", "new_full.default"), partial(_constant, None)),
    **dict.fromkeys(("zeros.default", "new_zeros.default"), partial(_constant, 0.0)),
    **dict.fromkeys(("ones.default", "new_ones.default"), partial(_constant, 1.0)),
    "full_like.default": partial(_constant_like, None),
    "zeros_like.default": partial(_constant_like, 0.0),
    "ones_like.default": partial(_constant_like, 1.0),
    "empty_like.default": partial(_constant, 0.0),  # undefined until something fills it
    "fill.Scalar": _filled,
    "sign.default": _sign,
    "pow.Tensor_Scalar": _power,
    **dict.fromkeys("remainder.Tensor remainder.Scalar remainder.Scalar_Tensor".split(), _remainder),
    "clamp.default": lambda d: _clamp(d, d["min"], d["max"]),
    "clamp_min.default": lambda d: _clamp(d, d["min"], None),
    "clamp_max.default": lambda d: _clamp(d, None, d["max"]),
    "elu.default": lambda d: _elu(d, d["scale"], d["input_scale"]),
    "celu.default": lambda d: _elu(d, 1, 1 / d["alpha"]),
    "hardsigmoid.default": lambda d: d.step("div", {"a": _six_hard_sigmoids(d), "b": 6.0}),
    "hardswish.default": lambda d: d.step(
        "div", {"a": d.between("mul", a=d["self"], b=_six_hard_sigmoids(d)), "b": 6.0}
    ),
    "hardtanh.default": lambda d: _limited(d, d["self"], d["min_val"], d["max_val"]),
    **dict.fromkeys(("mean.dim", "mean.default"), partial(_reduced, "AVG")),
    **dict.fromkeys(("sum.dim_IntList", "sum.default"), partial(_reduced, "ADD")),
    **dict.fromkeys(("amax.default", "max.default"), partial(_reduced, "MAX")),
    **dict.fromkeys(("amin.default", "min.default"), partial(_reduced, "MIN")),
    "max.dim": partial(_extreme, "MAX"),
    "min.dim": partial(_extreme, "MIN"),
    "gather.default": _gathered,
    "linalg_vector_norm.default": _vector_norm,
    "var.correction": _variance,
    "var_mean.correction": partial(_with_mean, _variance),
    "std.correction": _deviation,
    "std_mean.correction": partial(_with_mean, _deviation),
    "addcmul.default": partial(_with_scaled_sum, "mul"),
    "addcdiv.default": partial(_with_scaled_sum, "div"),
    **dict.fromkeys(("lerp.Scalar", "lerp.Tensor"), _interpolated),
    "_softmax.default": partial(_along_rows, "softmax"),
    "_log_softmax.default": partial(_along_rows, "log_softmax"),
    "logsumexp.default": _logsumexp,
    "graphfuse::cross_entropy_loss.default": _cross_entropy,
    "native_layer_norm.default": partial(_norm, "layernorm", {"scale": "weight", "bias": "bias"}),
    **dict.fromkeys(("_fused_rms_norm.default", "rms_norm.default"), partial(_norm, "rmsnorm", {"scale": "weight"})),
}
