"""The norm itself in an FX graph, before any weight: rows over their root mean square, deviation or length, in any
spelling."""

import operator
from dataclasses import replace

import torch
from torch.fx import Node

from graphfuse.torch.fusion.form import Form
from graphfuse.torch.fusion.meaning import (
    Meaning,
    dtype,
    exact,
    is_op,
    number,
    operands,
    same,
    told,
    unviewed,
    value,
    wide,
)
from graphfuse.torch.fusion.site import NormSite, Number


def core(node: Node) -> NormSite | None:
    """The norm over the last dimension that a node ends, before any weight."""
    called = is_op(node, "layer_norm", "rms_norm", "normalize")
    if called:
        return _called(node, called)
    found = is_op(node, "mul", "div")
    if found is None:
        return None
    for a, b in operands(found):
        site = _rms_or_layer(node, a, b, found.meaning) or (_l2(node, a, b) if found.meaning == "div" else None)
        if site is not None:
            return site
        if found.meaning == "div":
            return None
    return None


def _rms_or_layer(node: Node, a: object, b: object, how: str) -> NormSite | None:
    """a times an inverse root, or a over a root."""
    kind = dtype(node)
    b = unviewed(b)
    inner = inverse(b) if how == "mul" else _root(b)
    if inner is None or value(a) is None or kind is not wide(dtype(a)) or dtype(b) is not kind:
        return None
    found = is_op(inner, "add")
    if found is None or dtype(inner) is not kind:
        return None
    for mean, epsilon in operands(found):
        eps = number(epsilon)
        if eps is None:
            continue
        x = _variance_of(mean, kind)  # first: layer norm is RMSNorm of what was centred
        if x is not None and _same_value(x, _centred_of(a, kind)):
            return _site(Form("layer"), node, x, eps)
        x = _mean_square_of(mean, kind)
        if x is not None and _same_value(x, a):
            return _site(Form("rms"), node, a, eps)
    return None


def _site(form: Form, out: Node, x: object, eps: Number) -> NormSite | None:
    if not isinstance(x, Node) or value(x) is None or value(out) is None or value(x).dim() != value(out).dim():
        return None
    if not same(value(x).shape[-1], value(out).shape[-1]):
        return None
    return NormSite(form, out, {"x": x}, eps)


def inverse(node: object) -> object | None:
    """Operand that a node is one over the root of."""
    if found := is_op(node, "rsqrt"):
        return found.get(0, "input")
    if (found := is_op(node, "pow")) and found.get(1, "exponent") == -0.5:
        return found.get(0, "input")
    if found := is_op(node, "reciprocal"):
        return _root(unviewed(found.get(0, "input")))
    if (found := is_op(node, "div")) and found.get(0, "input") in (1, 1.0):
        return _root(unviewed(found.get(1, "other")))
    return None


def _root(node: object) -> object | None:
    if found := is_op(node, "sqrt"):
        return found.get(0, "input")
    if (found := is_op(node, "pow")) and found.get(1, "exponent") == 0.5:
        return found.get(0, "input")
    return None


def _is_last(found: Meaning, source: object, place: int = 1) -> bool:
    """True if an operation goes over the last dimension alone."""
    dims = found.get(place, "dim", found.named.get("axis"))
    dims = [dims] if isinstance(dims, int) else dims
    return value(source) is not None and list(dims or ()) in ([-1], [value(source).dim() - 1])


def _mean_of(node: object, kind: torch.dtype) -> object | None:
    """Operand that a node is the mean of over the last dimension, computed in `kind`."""
    node = unviewed(node)
    if dtype(node) is not kind:
        return None
    if (found := _var_mean(node, 1)) is not None:
        return found.get(0, "input")
    if found := is_op(node, "mean"):
        source = found.get(0, "input")
        return source if _is_last(found, source) else None
    found = is_op(node, "div", "mul")
    for total, count in operands(found) if found else ():
        summed = is_op(unviewed(total), "sum")
        if summed is None or not isinstance(count, int | float) or dtype(unviewed(total)) is not kind:
            continue
        source = summed.get(0, "input")
        if _is_last(summed, source) and isinstance(value(source).shape[-1], int):
            length = value(source).shape[-1]
            if count == (length if found.meaning == "div" else 1 / length):
                return source
    return None


def _square_of(node: object, kind: torch.dtype) -> object | None:
    node = exact(node)  # where a mean takes its sum in a wider type, the square is rounded
    if dtype(node) is not kind:
        return None
    if found := is_op(node, "square"):
        return found.get(0, "input")
    if (found := is_op(node, "pow")) and found.get(1, "exponent") in (2, 2.0):
        return found.get(0, "input")
    if (found := is_op(node, "mul")) and _same_value(found.get(0, "input"), found.get(1, "other")):
        return found.get(0, "input")
    return None


def _mean_square_of(node: object, kind: torch.dtype) -> object | None:
    mean = _mean_of(node, kind)
    return None if mean is None else _square_of(mean, kind)


def _centred_of(node: object, kind: torch.dtype) -> object | None:
    """The x of a node that is x minus its mean."""
    found = is_op(exact(node), "sub")
    if found is None or dtype(node) is not kind:
        return None
    x, mean = found.get(0, "input"), found.get(1, "other")
    of = _mean_of(mean, kind)
    return x if of is not None and _same_value(of, x) else None


def _variance_of(node: object, kind: torch.dtype) -> object | None:
    """The x of a node that is its variance, of all elements."""
    square = _mean_square_of(node, kind)
    if square is not None:
        return _centred_of(square, kind)
    node = unviewed(node)
    if dtype(node) is not kind:
        return None
    found = _var_mean(node, 0) or is_op(node, "var")
    return found.get(0, "input") if found is not None and _is_of_all(found) else None


def _is_of_all(found: Meaning) -> bool:
    """True if a variance is that of all elements of a row."""
    biased = found.get(2, "correction", found.named.get("unbiased"))
    return _is_last(found, found.get(0, "input")) and biased is not None and not biased


def _var_mean(node: object, place: int) -> Meaning | None:
    """The operation over rows that a node is one result of: the variance (0) or the mean (1)."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != place:
        return None
    found = is_op(node.args[0], "var_mean")
    return found if found is not None and _is_last(found, found.get(0, "input")) else None


def _same_value(a: object, b: object) -> bool:
    return a is not None and b is not None and exact(a) is exact(b)


def unit(node: Node) -> NormSite | None:
    """Rows of length 1 along any dimension, each step rounded, as torch's function is written."""
    if found := is_op(node, "normalize"):
        x, dim, eps = found.get(0, "input"), found.get(2, "dim", 1), number(found.get(3, "eps", 1e-12))
        if found.get(1, "p", 2.0) not in (2, 2.0):
            return None
        length = x
    else:
        found = is_op(node, "div")
        parts = None if found is None else _over_length(found.get(0, "input"), found.get(1, "other"))
        if parts is None:
            return None
        x, dim, eps, length, divisor = parts
        if not _is_one_a_row(divisor, x, dim):
            return None
    kind = dtype(x)
    if kind is None or dtype(node) is not kind or dtype(length) is not kind or not isinstance(dim, int):
        return None
    rank = value(x).dim()
    if eps is None or not -rank <= dim < rank or value(node).dim() != rank:
        return None
    return NormSite(Form("unit", rounded=kind is not wide(kind)), node, {"x": x}, eps, dim=dim % rank - rank)


def _is_one_a_row(node: object, x: object, dim: int) -> bool:
    """True if a node has one number for each row of x along a dimension, which stays with an extent of 1."""
    if value(node) is None or value(node).dim() != value(x).dim():
        return False
    wanted = list(value(x).shape)
    wanted[dim] = 1
    return all(map(same, value(node).shape, wanted))


def _over_length(a: object, b: object) -> tuple[object, int, Number, object, object] | None:
    """x, the dimension, epsilon, the length and what there is one of in each row: of a over b, which is x's length or
    the epsilon."""
    while found := is_op(b, "expand"):
        b = found.get(0, "input")
    clamped = is_op(unviewed(b), "clamp_min")
    if clamped is None or clamped.get(2, "max") is not None:
        return None
    length, eps = unviewed(clamped.get(0, "input")), number(clamped.get(1, "min"))
    found = is_op(length, "length")
    if found is None or found.get(1, "ord", found.named.get("p", 2)) not in (2, 2.0):
        return None
    source, dims = found.get(0, "input"), found.get(2, "dim", found.named.get("axis"))
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    if len(dims) != 1 or not _same_value(source, a) or value(a) is None:
        return None
    return a, dims[0], eps, length, b


def _l2(node: Node, a: object, b: object) -> NormSite | None:
    kind = dtype(node)
    found = _over_length(a, b)
    if found is None or kind is not wide(dtype(a)):
        return None
    x, dim, eps, length, _ = found
    if dtype(length) is not kind or eps is None or dim not in (-1, value(x).dim() - 1):
        return None
    return _site(Form("l2"), node, x, eps)


def _called(node: Node, found: Meaning) -> NormSite | None:
    """torch's own norm, by a function that rounds once."""
    x = found.get(0, "input")
    if value(x) is None or dtype(x) is torch.float64:
        return None
    if found.meaning == "normalize":
        if found.get(1, "p", 2.0) not in (2, 2.0) or found.get(2, "dim", 1) not in (-1, value(x).dim() - 1):
            return None
        if dtype(x) is not torch.float32:  # torch rounds the length
            return None
        eps = number(found.get(3, "eps", 1e-12))
        return None if eps is None else _site(Form("l2"), node, x, eps)
    shape = found.get(1, "normalized_shape")
    if len(told(shape) if isinstance(shape, Node) else shape) != 1:  # where extents vary, a node has it
        return None
    out = node
    if isinstance(node.meta.get("val", node.meta.get("example_value")), list | tuple):  # with statistics
        users = {u.args[1]: u for u in node.users}
        if 0 not in users or any(users[i].users for i in users if i != 0):
            return None
        out = users[0]
    layer = found.meaning == "layer_norm"
    weight, bias = found.get(2, "weight"), found.get(3, "bias") if layer else None
    given = found.get(4, "eps", 1e-5) if layer else found.get(3, "eps")
    eps = number(given)
    if eps is None and given is not None:
        return None
    site = _site(Form("layer" if layer else "rms", "w" if weight is not None else "", bias is not None), out, x, eps)
    if site is None or dtype(out) is not dtype(x):
        return None
    scales = {"weight": weight, "bias": bias}
    return replace(site, tensors=site.tensors | {n: t for n, t in scales.items() if t is not None})
