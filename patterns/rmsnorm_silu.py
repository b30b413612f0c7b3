"""RMS normalization that feeds a swish, with whatever pointwise chain and quantization follow."""

from graphfuse.match import Pattern, PatternGraph
from graphfuse.patterns import rmsnorm


def template(g: PatternGraph):
    y, inverse_rms = rmsnorm.norm(g)
    return {"output": g.tail(g.swish(y), ends=("block_scale_quantize",)), "inverse_rms": inverse_rms}


PATTERN = Pattern("rmsnorm_silu", template, rmsnorm.facts)
