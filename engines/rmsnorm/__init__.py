"""Engine ``rmsnorm``: row programs with any reductions of a row, in one kernel, for any row length.

Serves ``RowFacts`` on NVIDIA GPUs. The kernel is ``rmsnorm.cu``, tuned knobs are the tables ``rmsnorm.ARCH.json``.
"""

from graphfuse.engines.rmsnorm.engine import RmsNormEngine as RmsNormEngine
from graphfuse.engines.rmsnorm.knobs import RmsNormKnobs as RmsNormKnobs
