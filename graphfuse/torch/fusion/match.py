"""Finds norms, and what stands around them, in an FX graph, by what its nodes compute and where they round.

A norm is found in any spelling: what is compared is the value that a node has and the type that it is rounded to. A
node in the type that is computed in (float32) rounds nothing; any other does. What operators would round elsewhere is
not taken, or not all of it. Adaptive layer norm is, where the caller asks for it: models write it in the type of x, and
compilers, as our operators, round it once.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from graphfuse.torch.fusion.core import core, inverse, unit
from graphfuse.torch.fusion.form import ADAPTED, OPERATORS, Form
from graphfuse.torch.fusion.meaning import (
    Meaning,
    dtype,
    exact,
    is_changed,
    is_op,
    operands,
    same,
    unviewed,
    value,
    wide,
)
from graphfuse.torch.fusion.site import NormSite


def find(graph: GraphModule, once: bool = False) -> list[NormSite]:
    """The norms of a graph that an operator computes, in order, each with as much around it as that operator takes.

    once: whether adaptive layer norm, and a gated sum before it, are taken as rounded once where the graph rounds
    between their steps.
    """
    found: list[NormSite] = []
    for node in graph.graph.nodes:
        site = _grown(node, once)
        if site is not None:
            summed = (_with_unrounded_sum(site) if once else None) or _with_sum(site)
            is_taken = any(summed.total is other.total for other in found)  # of two norms of a sum one makes it
            found.append(site if is_taken else summed)
    return _with_inner(found)


def rounds_otherwise(graph: GraphModule) -> str:
    """Why nothing was found where a graph looks as if it had a norm; "" where it does not look so."""
    nodes = list(graph.graph.nodes)
    for node in nodes:
        cast = is_op(node, "cast")
        if inverse(cast.args[0] if cast else node) is not None and dtype(node) in (torch.bfloat16, torch.float16):
            return "it rounds the inverse root; no operator rounds there"
    if any(is_op(node, "rsqrt", "sqrt", "var", "layer_norm", "rms_norm", "length") for node in nodes):
        return "it normalizes in a way that no operator computes"
    return ""


def _grown(node: Node, once: bool) -> NormSite | None:
    """The largest site that an operator computes of those that begin with a norm."""
    for begun in _begun(node):
        fitting = [site for site in _following(begun, once) if _is_served(site)]
        if fitting:
            return replace(fitting[-1], begun=begun.out)
    return None


def _begun(node: Node) -> Iterator[NormSite]:
    """Sites that may begin one, the largest first."""
    plain = unit(node)
    if plain is not None:
        for x in _read(plain):
            yield replace(plain, tensors=plain.tensors | {"x": x})
    plain = core(node)
    if plain is None:
        return
    yield from _of_groups(plain)
    product = _product(plain)
    if product is not None:
        yield product
    for x in _read(plain):
        yield replace(plain, tensors=plain.tensors | {"x": x})


def _read(site: NormSite) -> Iterator[Node]:
    """Nodes that are normalized, read before a cast to a wider type if the result is rounded to what it was."""
    return iter(dict.fromkeys((exact(site.tensors["x"]), site.tensors["x"])))


def _product(site: NormSite) -> NormSite | None:
    """The norm of x times the SiLU of a gate, if what is normalized is that, unrounded."""
    found = is_op(site.tensors["x"], "mul")
    for x, gate in operands(found) if found else ():
        activated = _activated(gate)
        if activated is None or activated[0] != "SiLU" or site.form != Form("rms"):
            continue
        x, gate = exact(x), exact(activated[1])
        if isinstance(x, Node) and dtype(site.out) is wide(dtype(x)) and _is_like(x, gate):
            return replace(site, form=replace(site.form, before="* SiLU(gate)"), tensors={"x": x, "gate": gate})
    return None


def _of_groups(site: NormSite) -> Iterator[NormSite]:
    """The norm of groups of a row, if what is normalized is a view of a row as groups: of a product, or of x."""
    found = is_op(site.tensors["x"], "view")
    source = found.args[0] if found else None
    if value(source) is None or site.form != Form("rms"):
        return
    old, new = value(source).shape, value(site.tensors["x"]).shape
    if len(new) != len(old) + 1 or not all(map(same, old[:-1], new)):
        return
    if not all(isinstance(n, int) for n in (old[-1], *new[-2:])) or new[-2] * new[-1] != old[-1]:
        return
    whole = replace(site, tensors={"x": source}, groups=new[-2])
    product = _product(whole)
    if product is not None:
        yield product
    for x in _read(whole):
        yield replace(whole, tensors={"x": x})


def _is_served(site: NormSite) -> bool:
    if site.form not in OPERATORS or dtype(site.out) is not dtype(site.tensors["x"]):
        return False
    if site.form.kind == "unit" and site.factor is None or not _is_like(site.out, site.tensors["x"]):
        return False
    if site.groups > 1 and sum(not isinstance(n, int) for n in value(site.out).shape) > 1:
        return False  # a view has one extent that is not known
    return not any(is_changed(t) for t in site.tensors.values())


# What follows it, and what comes before.


def _following(site: NormSite | None, once: bool) -> Iterator[NormSite]:
    """A norm, and that norm with more and more of what follows. Some of these may be nobody's form."""
    while site is not None:
        yield site
        site = _next(site, once)


def _next(site: NormSite, once: bool) -> NormSite | None:
    out, x, form = site.out, site.tensors["x"], site.form
    kind, users = wide(dtype(x)), list(out.users)
    rounds = form.kind == "unit" and dtype(out) is dtype(x)
    if len(users) == 2 and dtype(out) is kind and not form.after:
        user = _spelled_silu(out, *users)
        return None if user is None else replace(site, out=user, form=replace(form, after="SiLU"))
    if len(users) != 1 or value(users[0]) is None:
        return None
    user = users[0]
    if not _is_like(user, out):
        is_back = is_op(user, "view") and not _is_like(out, x) and _is_like(user, x)
        return replace(site, out=user) if is_back and dtype(user) is dtype(out) else None
    if is_op(user, "cast", "same"):
        return replace(site, out=user) if dtype(user) in (dtype(out), dtype(x)) else None
    if form.rounded and form.kind == "rms" and dtype(user) is kind and not form.after:
        return _times_activated(site, user)  # which is not rounded again before the product is
    if dtype(user) is not dtype(out):
        return None
    if rounds:
        return _scaled_unit(site, user)
    if dtype(out) is not kind:  # rounded
        is_bare = form == Form(form.kind, before=form.before)
        scaled = _scaled(site, user, rounded=True) if is_bare else None
        return scaled or (_adapted(site, user, once) if once else None)
    if is_op(user, "silu") and not form.after:
        return replace(site, out=user, form=replace(form, after="SiLU"))
    return _scaled(site, user) or _adapted(site, user, once) or _gated(site, user) or _times_activated(site, user)


def _is_like(a: object, b: object) -> bool:
    """True if two nodes are tensors of one shape on one device."""
    one, two = value(a), value(b)
    if one is None or two is None or one.dim() != two.dim() or one.device != two.device:
        return False
    return all(map(same, one.shape, two.shape))


def _other(found: Meaning, node: Node) -> Node | None:
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


def _activated(node: object) -> tuple[str, object] | None:
    """The activation that a node is, unrounded, and of what."""
    node = exact(node)
    if dtype(node) is not wide(dtype(node)):
        return None
    for meaning, name in (("silu", "SiLU"), ("sigmoid", "sigmoid")):
        if found := is_op(node, meaning):
            return name, found.get(0, "input")
    found = is_op(node, "mul")
    for gate, factor in operands(found) if found else ():
        inner = is_op(exact(factor), "sigmoid")
        if inner and dtype(exact(factor)) is dtype(node) and exact(inner.get(0, "input")) is exact(gate):
            return "SiLU", gate
    return None


def _times_activated(site: NormSite, user: Node) -> NormSite | None:
    """Times an activation of a gate."""
    found, form = is_op(user, "mul"), site.form
    activated = _activated(_other(found, site.out)) if found else None
    if activated is None or form.after or form.before or form.bias:
        return None
    gate = exact(activated[1])
    if not isinstance(gate, Node) or not _is_like(gate, site.tensors["x"]) or not _is_like(user, gate):
        return None
    form = replace(form, after=f"* {activated[0]}(gate)")
    return replace(site, out=user, form=form, tensors=site.tensors | {"gate": gate})


def _scaled_unit(site: NormSite, user: Node) -> NormSite | None:
    """Times the number, times a weight, plus a bias, and SiLU, each of which is rounded."""
    form, added, scaled = site.form, is_op(user, "add"), is_op(user, "mul")
    if form.after:
        return None
    if is_op(user, "silu"):
        return replace(site, out=user, form=replace(form, after="SiLU"))
    a, b = next(operands(added or scaled)) if added or scaled else (None, None)
    other = b if a is site.out else a
    if added and isinstance(other, int | float):
        return replace(site, out=user) if other == 0 else None
    if added and not form.bias:
        name, form = "bias", replace(form, bias=True)
    elif scaled and site.factor is None and not form.weight and isinstance(other, int | float):
        return replace(site, out=user, factor=float(other))
    elif scaled and not form.weight and not form.bias and site.factor is not None:
        name, form = "weight", replace(form, weight="w")
    else:
        return None
    vector = _along(other, site)
    return vector and replace(site, out=user, form=form, tensors=site.tensors | {name: vector})


def _along(node: object, site: NormSite) -> Node | None:
    """The node that has one number for each place along a row, in exact values, and extents of 1 beside."""
    leaf, x = exact(node), value(site.tensors["x"])
    found = value(leaf)
    if found is None or found.device != x.device or found.dtype is not x.dtype or found.dim() < -site.dim:
        return None
    if any(not same(n, 1) for i, n in enumerate(found.shape) if i - found.dim() != site.dim):
        return None
    return leaf if same(found.shape[site.dim], x.shape[site.dim]) and not same(found.shape[site.dim], 1) else None


def _row(node: object, site: NormSite) -> Node | None:
    """The vector of one number for each column that a factor or term is, in exact values."""
    x, leaf = value(site.tensors["x"]), exact(unviewed(exact(node)))
    if site.groups > 1 and not _is_like(site.out, site.tensors["x"]):  # a view of it as groups
        found = is_op(leaf, "view")
        leaf = exact(found.args[0]) if found and _ends(leaf, value(site.out)) else None
    found = value(leaf)
    if found is None or found.dim() != 1 or not same(found.shape[0], x.shape[-1]) or same(found.shape[0], 1):
        return None
    return leaf if found.device == x.device and wide(found.dtype) is wide(x.dtype) else None


def _ends(node: object, of: torch.Tensor) -> bool:
    """True if a node has the last two extents of a tensor, and else extents of 1."""
    *leading, groups, columns = value(node).shape if value(node).dim() > 1 else (0, 0)
    return all(same(n, 1) for n in leading) and same(groups, of.shape[-2]) and same(columns, of.shape[-1])


def _plus_one(node: object, kind: torch.dtype | None) -> object | None:
    """The w of a node that is 1 + w, in this type, which rounds nothing; None for any type."""
    node = unviewed(exact(node))
    found = is_op(node, "add")
    if found is None or kind not in (None, dtype(node)):
        return None
    return next((w for w, one in operands(found) if not isinstance(one, Node) and one == 1), None)


def _scaled(site: NormSite, user: Node, rounded: bool = False) -> NormSite | None:
    """Times a weight, or plus a bias."""
    form = site.form
    if form.bias or form.after:
        return None
    if (found := is_op(user, "add")) and not rounded:
        bias = _row(_other(found, site.out), site)
        return bias and replace(site, out=user, form=replace(form, bias=True), tensors=site.tensors | {"bias": bias})
    found = is_op(user, "mul")
    if found is None or form.weight:
        return None
    factor = _other(found, site.out)
    plus_one = None if rounded else _plus_one(factor, dtype(user))
    weight = _row(factor if plus_one is None else plus_one, site)
    if weight is None:
        return None
    form = replace(form, weight="w" if plus_one is None else "1 + w", rounded=rounded)
    return replace(site, out=user, form=form, tensors=site.tensors | {"weight": weight})


def _adapted(site: NormSite, user: Node, once: bool) -> NormSite | None:
    """Times 1 + a scale of each sample, and then plus a shift. once: whether 1 + the scale may be rounded."""
    form, x = site.form, value(site.tensors["x"])
    if form == Form("layer") and (found := is_op(user, "mul")):
        given, name, after = _other(found, site.out), "scale", "1 + scale"
        vector = exact(_plus_one(given, None if once else dtype(user)))
    elif form.after == "1 + scale" and (found := is_op(user, "add")):
        given, name, after = _other(found, site.out), "shift", ADAPTED
        vector = exact(given)
    else:
        return None
    if value(vector) is None or wide(dtype(vector)) is not wide(x.dtype) or not _is_per_sample(value(given), x):
        return None
    # 1 is added before the dimensions between are: the operator's argument becomes a view.
    is_viewed = value(vector).dim() < x.dim() and isinstance(x.shape[-1], int)
    if not is_viewed and not _is_per_sample(value(vector), x):
        return None
    return replace(site, out=user, form=replace(form, after=after), tensors=site.tensors | {name: vector})


def _is_per_sample(scale: torch.Tensor | None, x: torch.Tensor) -> bool:
    if scale is None or scale.dim() != x.dim() or scale.dim() < 2 or scale.device != x.device:
        return False
    if wide(scale.dtype) is not wide(x.dtype):
        return False
    ends = same(scale.shape[0], x.shape[0]) and same(scale.shape[-1], x.shape[-1])
    return ends and all(same(n, 1) for n in scale.shape[1:-1])


def _gated(site: NormSite, user: Node) -> NormSite | None:
    found = is_op(user, "mul")
    if site.form.after != "SiLU" or found is None:
        return None
    gate = exact(_other(found, site.out))
    if not isinstance(gate, Node) or not _is_like(gate, user):
        return None
    form = replace(site.form, after="SiLU * gate")
    return replace(site, out=user, form=form, tensors=site.tensors | {"gate": gate})


def _with_sum(site: NormSite) -> NormSite:
    """Site with the residual sum that x is, if it is one of tensors of its type."""
    total, form = site.tensors["x"], replace(site.form, residual=True)
    found = is_op(total, "add")
    if found is None or form not in OPERATORS or site.groups > 1:
        return site
    residual, x = found.get(0, "input"), found.get(1, "other")
    fits = (_is_like(t, total) and dtype(t) is dtype(total) and not is_changed(t) for t in (residual, x))
    if not all(fits):
        return site
    return replace(site, form=form, total=total, tensors=site.tensors | {"x": x, "residual": residual})


def _with_unrounded_sum(site: NormSite) -> NormSite | None:
    """Site with the residual sum that x is, and the gate of each sample that a term of it is multiplied by, where one
    operator computes all."""
    total, form = site.tensors["x"], replace(site.form, residual=True, unrounded=True)
    if form not in OPERATORS:
        return None
    found = is_op(_before_rounding(total), "add")
    terms = list(operands(found)) if found else []
    gated = [(other, *product) for other, term in terms if (product := _times_gate(term, total))]
    for residual, x, gate in (*gated, *((a, b, None) for a, b in terms[:1])):
        tensors = {"x": exact(x), "residual": exact(residual)}
        if not all(_is_like(t, total) and dtype(t) is dtype(total) for t in tensors.values()):
            continue
        tensors |= {"gate": gate} if gate is not None else {}
        if not any(map(is_changed, tensors.values())):
            return replace(site, form=form, total=total, tensors=site.tensors | tensors)
    return None


def _before_rounding(total: Node) -> Node:
    """The sum in a wider type that a node rounds, if nobody else reads that; or the node."""
    found = is_op(total, "cast")
    wider = found.args[0] if found else None
    is_alone = value(wider) is not None and set(wider.users) == {total} and dtype(wider) is wide(dtype(total))
    return wider if is_alone else total


def _times_gate(term: object, total: Node) -> tuple[Node, Node] | None:
    """x and the gate of each sample that a term of a sum is the product of, if nobody else reads it."""
    product = exact(term)
    found = is_op(product, "mul")
    if found is None or any(len(node.users) != 1 for node in (term, product)):
        return None
    for x, gate in operands(found):
        x, gate = exact(x), exact(gate)
        if _is_like(x, total) and _is_per_sample(value(gate), value(total)):
            return x, gate
    return None


def _with_inner(sites: list[NormSite]) -> list[NormSite]:
    """Norms of residual sums with the norm that is a term of the sum, where one operator computes all."""
    plain = {site.out: site for site in sites if site.total is None}
    found = {id(site): site for site in sites}
    for site in sites:
        x, residual = (site.tensors.get(name) for name in ("x", "residual"))
        form = replace(site.form, inner=True)
        for term, other in ((x, residual), (residual, x)):
            inner = plain.get(term)
            if inner is None or form not in OPERATORS or replace(form, inner=False, residual=False) != inner.form:
                continue
            if set(term.users) != {site.total} or id(inner) not in found:
                continue
            tensors = {"x": inner.tensors["x"], "residual": other}
            weights = {"weight": inner, "next_weight": site}
            tensors |= {n: s.tensors["weight"] for n, s in weights.items() if "weight" in s.tensors}
            found[id(site)] = replace(site, form=form, tensors=tensors, inner=inner)
            del found[id(inner)]
            break
    return list(found.values())
