"""Where the pattern fits: gelu(x + bias), in any order of the operands."""

from graphfuse.match import Match, Pattern, PatternGraph
from plugin_bias_gelu.facts import BiasGeluFacts


def template(g: PatternGraph):
    return {"output": g.gelu(g.add(g.capture("x"), g.capture("bias")))}


def facts(match: Match) -> BiasGeluFacts:
    tensors = {name: match.graph.tensors[t] for name, t in match.tensors.items()}
    if tensors["x"].elements < tensors["bias"].elements:  # the operands of an add may be swapped
        tensors |= {"x": tensors["bias"], "bias": tensors["x"]}
    total = match.graph.tensors[match.node("add").output("output")].dtype
    return BiasGeluFacts(**tensors, total=total)


PATTERN = Pattern("bias_gelu", template, facts)
