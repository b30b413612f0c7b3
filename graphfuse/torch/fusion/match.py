"""Finds norms, and what stands around them, in an FX graph, by what its nodes compute and where they round.

A norm is found in any spelling: what is compared is the value that a node has and the type that it is rounded to. A
node in the type that is computed in (float32) rounds nothing; any other does. What operators would round elsewhere is
not taken, or not all of it.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from graphfuse.torch.fusion.form import OPERATORS, Form, Serving
from graphfuse.torch.fusion.meaning import (
    Op,
    dtype,
    exact,
    is_changed,
    is_op,
    number,
    operands,
    same,
    unviewed,
    value,
    wide,
)


@dataclass(frozen=True)
class Site:
    """A norm in a graph.

    out: the node that has its result. tensors: what it is computed from, by the names of the operator's arguments.
    eps: the epsilon, which may be symbolic. total: the node of a residual sum, which the operator makes as well. left:
    what stands around it that the operator does not compute, in words.
    """

    form: Form
    out: Node
    tensors: dict[str, Node]
    eps: float | torch.SymFloat | None
    total: Node | None = None
    left: str = ""

    @property
    def serving(self) -> Serving:
        return OPERATORS[self.form]

    @property
    def alone(self) -> "Site":
        """Without the residual sum."""
        if self.total is None:
            return self
        tensors = {n: t for n, t in self.tensors.items() if n != "residual"} | {"x": self.total}
        return replace(self, form=replace(self.form, residual=False), tensors=tensors, total=None)


def find(graph: GraphModule) -> list[Site]:
    """The norms of a graph that an operator computes, in order, each with as much around it as that operator takes."""
    found: list[Site] = []
    for node in graph.graph.nodes:
        site = _grown(node)
        if site is not None:
            summed = _with_sum(site)
            is_taken = any(summed.total is other.total for other in found)  # of two norms of a sum one makes it
            found.append(site if is_taken else summed)
    totals = {site.total or site.tensors["x"]: site for site in found}
    return [replace(site, left=_left(site, totals)) for site in found]


def rounds_otherwise(graph: GraphModule) -> str:
    """Why nothing was found where a graph looks as if it had a norm; "" where it does not look so."""
    nodes = list(graph.graph.nodes)
    for node in nodes:
        cast = is_op(node, "cast")
        if _inverse(cast.args[0] if cast else node) is not None and dtype(node) in (torch.bfloat16, torch.float16):
            return "it rounds the inverse root; no operator rounds there"
    if any(is_op(node, "rsqrt", "sqrt", "var", "layer_norm", "rms_norm", "length") for node in nodes):
        return "it normalizes in a way that no operator computes"
    return ""


def _grown(node: Node) -> Site | None:
    core = _core(node)
    if core is None:
        return None
    # What is normalized is read before a cast to a wider type, if the result is rounded to what it was.
    for x in dict.fromkeys((exact(core.tensors["x"]), core.tensors["x"])):
        fitting = [site for site in _following(replace(core, tensors=core.tensors | {"x": x})) if _is_served(site)]
        if fitting:
            return fitting[-1]
    return None


def _is_served(site: Site) -> bool:
    if site.form not in OPERATORS or dtype(site.out) is not dtype(site.tensors["x"]):
        return False
    return not any(is_changed(t) for t in site.tensors.values())


# The norm itself.


def _core(node: Node) -> Site | None:
    """The norm that a node ends, before any weight."""
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


def _rms_or_layer(node: Node, a: object, b: object, how: str) -> Site | None:
    """a times an inverse root, or a over a root."""
    kind = dtype(node)
    b = unviewed(b)
    inner = _inverse(b) if how == "mul" else _root(b)
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


def _site(form: Form, out: Node, x: object, eps: float | torch.SymFloat | None) -> Site | None:
    if not isinstance(x, Node) or value(x) is None or value(out) is None or value(x).dim() != value(out).dim():
        return None
    if not same(value(x).shape[-1], value(out).shape[-1]):
        return None
    return Site(form, out, {"x": x}, eps)


def _inverse(node: object) -> object | None:
    """What a node is one over the root of."""
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


def _is_last(found: Op, source: object, place: int = 1) -> bool:
    """Whether an operation goes over the last dimension alone."""
    dims = found.get(place, "dim", found.named.get("axis"))
    dims = [dims] if isinstance(dims, int) else dims
    return value(source) is not None and list(dims or ()) in ([-1], [value(source).dim() - 1])


def _mean_of(node: object, kind: torch.dtype) -> object | None:
    """What a node is the mean of over the last dimension, computed in `kind`."""
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


def _is_of_all(found: Op) -> bool:
    """Whether a variance is that of all elements of a row."""
    biased = found.get(2, "correction", found.named.get("unbiased"))
    return _is_last(found, found.get(0, "input")) and biased is not None and not biased


def _var_mean(node: object, place: int) -> Op | None:
    """The operation over rows that a node is one result of: the variance (0) or the mean (1)."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != place:
        return None
    found = is_op(node.args[0], "var_mean")
    return found if found is not None and _is_last(found, found.get(0, "input")) else None


def _same_value(a: object, b: object) -> bool:
    return a is not None and b is not None and exact(a) is exact(b)


def _l2(node: Node, a: object, b: object) -> Site | None:
    kind = dtype(node)
    while found := is_op(b, "expand"):
        b = found.get(0, "input")
    clamped = is_op(unviewed(b), "clamp_min")
    if clamped is None or kind is not wide(dtype(a)) or clamped.get(2, "max") is not None:
        return None
    length, eps = unviewed(clamped.get(0, "input")), number(clamped.get(1, "min"))
    found = is_op(length, "length")
    if found is None or dtype(length) is not kind or eps is None:
        return None
    source = found.get(0, "input")
    if found.get(1, "ord", found.named.get("p", 2)) not in (2, 2.0) or not _is_last(found, source, 2):
        return None
    return _site(Form("l2"), node, a, eps) if _same_value(source, a) else None


def _called(node: Node, found: Op) -> Site | None:
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
    if len(found.get(1, "normalized_shape")) != 1:
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


# What follows it, and what comes before.


def _following(site: Site | None) -> Iterator[Site]:
    """A norm, and that norm with more and more of what follows. Some of these may be nobody's form."""
    while site is not None:
        yield site
        site = _next(site)


def _next(site: Site) -> Site | None:
    out, x, form = site.out, site.tensors["x"], site.form
    kind, users = wide(dtype(x)), list(out.users)
    if len(users) == 2 and dtype(out) is kind and not form.after:
        user = _spelled_silu(out, *users)
        return None if user is None else replace(site, out=user, form=replace(form, after="SiLU"))
    if len(users) != 1 or value(users[0]) is None:
        return None
    user = users[0]
    if not _is_like(user, out):
        return None
    if is_op(user, "cast", "same"):
        return replace(site, out=user) if dtype(user) in (dtype(out), dtype(x)) else None
    if dtype(user) is not dtype(out):
        return None
    if dtype(out) is not kind:  # rounded
        return _scaled(site, user, rounded=True) if form == Form(form.kind) else None
    if is_op(user, "silu") and not form.after:
        return replace(site, out=user, form=replace(form, after="SiLU"))
    return _scaled(site, user) or _adapted(site, user) or _gated(site, user)


def _is_like(a: object, b: object) -> bool:
    """Whether two nodes are tensors of one shape on one device."""
    one, two = value(a), value(b)
    if one is None or two is None or one.dim() != two.dim() or one.device != two.device:
        return False
    return all(map(same, one.shape, two.shape))


def _other(found: Op, node: Node) -> Node | None:
    """The operand that `node` is not."""
    a, b = found.get(0, "input"), found.get(1, "other")
    other = b if a is node else a
    return other if isinstance(other, Node) and other is not node else None


def _spelled_silu(y: Node, *users: Node) -> Node | None:
    """y * sigmoid(y)."""
    for sigmoid, product in (users, users[::-1]):
        found = is_op(product, "mul")
        if found and is_op(sigmoid, "sigmoid") and _other(found, y) is sigmoid and list(sigmoid.users) == [product]:
            return product if dtype(product) is dtype(sigmoid) is dtype(y) else None
    return None


def _row(node: object, x: Node) -> Node | None:
    """The vector of one number for each column that a factor or term is, in exact values."""
    leaf = exact(unviewed(exact(node)))
    found = value(leaf)
    if found is None or found.dim() != 1 or not same(found.shape[0], value(x).shape[-1]) or same(found.shape[0], 1):
        return None
    return leaf if found.device == value(x).device and wide(found.dtype) is wide(dtype(x)) else None


def _plus_one(node: object, kind: torch.dtype) -> object | None:
    """The w of a node that is 1 + w, unrounded."""
    node = unviewed(exact(node))
    found = is_op(node, "add")
    if found is None or dtype(node) is not kind:
        return None
    return next((w for w, one in operands(found) if not isinstance(one, Node) and one == 1), None)


def _scaled(site: Site, user: Node, rounded: bool = False) -> Site | None:
    """Times a weight, or plus a bias."""
    form, x = site.form, site.tensors["x"]
    if form.bias or form.after:
        return None
    if (found := is_op(user, "add")) and not rounded:
        bias = _row(_other(found, site.out), x)
        return bias and replace(site, out=user, form=replace(form, bias=True), tensors=site.tensors | {"bias": bias})
    found = is_op(user, "mul")
    if found is None or form.weight:
        return None
    factor = _other(found, site.out)
    plus_one = _plus_one(factor, dtype(user))
    weight = _row(factor if plus_one is None else plus_one, x)
    if weight is None or rounded and plus_one is not None:
        return None
    form = replace(form, weight="w" if plus_one is None else "1 + w", rounded=rounded)
    return replace(site, out=user, form=form, tensors=site.tensors | {"weight": weight})


def _adapted(site: Site, user: Node) -> Site | None:
    """Times 1 + a scale of each sample, and then plus a shift."""
    form, x = site.form, site.tensors["x"]
    if form == Form("layer") and (found := is_op(user, "mul")):
        scale, after = _plus_one(_other(found, site.out), dtype(user)), "1 + scale"
    elif form.after == "1 + scale" and (found := is_op(user, "add")):
        scale, after = _other(found, site.out), "(1 + scale) + shift"
        if value(scale) is None or not _is_like(exact(scale), site.tensors["scale"]):
            return None
    else:
        return None
    scale = exact(scale)
    if value(scale) is None or not _is_per_sample(value(scale), value(x)):
        return None
    name = "scale" if after == "1 + scale" else "shift"
    return replace(site, out=user, form=replace(form, after=after), tensors=site.tensors | {name: scale})


def _is_per_sample(scale: torch.Tensor, x: torch.Tensor) -> bool:
    if scale.dim() != x.dim() or scale.dim() < 2 or not same(scale.shape[-1], x.shape[-1]):
        return False
    return same(scale.shape[0], x.shape[0]) and all(same(n, 1) for n in scale.shape[1:-1])


def _gated(site: Site, user: Node) -> Site | None:
    found = is_op(user, "mul")
    if site.form.after != "SiLU" or found is None:
        return None
    gate = exact(_other(found, site.out))
    if not isinstance(gate, Node) or not _is_like(gate, user):
        return None
    form = replace(site.form, after="SiLU * gate")
    return replace(site, out=user, form=form, tensors=site.tensors | {"gate": gate})


def _with_sum(site: Site) -> Site:
    """With the residual sum that x is, if it is one of tensors of its type."""
    total, form = site.tensors["x"], replace(site.form, residual=True)
    found = is_op(total, "add")
    if found is None or form not in OPERATORS:
        return site
    residual, x = found.get(0, "input"), found.get(1, "other")
    fits = (_is_like(t, total) and dtype(t) is dtype(total) and not is_changed(t) for t in (residual, x))
    if not all(fits):
        return site
    return replace(site, form=form, total=total, tensors=site.tensors | {"x": x, "residual": residual})


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _left(site: Site, sites: Mapping[Node, Site]) -> str:
    """What stands behind a norm that no operator computes with it, with these rounding points."""
    said = []
    for user in site.out.users:
        found = is_op(user, "add", "mul", "silu", "cast")
        if found is None:
            continue
        if found.meaning == "cast" and dtype(user) in _FLOAT8:
            said.append("-> FP8")
        elif found.meaning == "silu":
            said.append("-> SiLU")
        elif found.meaning == "add" and user in sites:
            said.append(f"-> residual sum -> {sites[user].form.kind} norm")
        elif found.meaning == "add" and _is_like(_other(found, site.out), user):
            said.append("-> residual sum")
        elif found.meaning == "mul" and _is_like(_other(found, site.out), user):
            said.append("* gate")
    return ", ".join(dict.fromkeys(said))
