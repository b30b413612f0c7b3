"""RMS normalization that feeds a swish, with all that stands around the two on the same rows."""

from graphfuse.match import Pattern, PatternGraph
from graphfuse.patterns import rmsnorm


def template(g: PatternGraph):
    y, inverse_rms = rmsnorm.norm(g)
    return {"output": g.swish(y), "inverse_rms": inverse_rms}


PATTERN = Pattern("rmsnorm_silu", template, rmsnorm.facts, rmsnorm.grow)
