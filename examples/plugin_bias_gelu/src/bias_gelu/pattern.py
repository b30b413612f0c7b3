"""Which nodes fit, gelu(x + bias), and what the engine is told of them."""

from graphfuse.plugin import Match, Pattern, PatternGraph

from .facts import Facts


def template(g: PatternGraph):
    """Captures stand for tensors. Attributes that are left out may have any value."""
    return {"output": g.gelu(g.add(g.capture("x"), g.capture("bias")))}


def facts(match: Match) -> Facts:
    tensors = {name: match.graph.tensors[t] for name, t in match.tensors.items()}
    if tensors["x"].elements < tensors["bias"].elements:  # the operands of an add may be swapped
        tensors |= {"x": tensors["bias"], "bias": tensors["x"]}
    total = match.graph.tensors[match.node("add").output("output")].dtype
    return Facts(**tensors, total=total)


PATTERN = Pattern("bias_gelu", template, facts)
