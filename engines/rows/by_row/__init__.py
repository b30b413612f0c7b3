"""Engine ``rmsnorm``: row programs with any reductions of a row, or none, in one kernel, for any row length.

Serves ``RowFacts`` on NVIDIA GPUs. The kernel is ``by_row.cu``, tuned knobs are the tables ``rmsnorm.ARCH.json``.
"""

from graphfuse.engines.rows.by_row.engine import RmsNormEngine as RmsNormEngine
from graphfuse.engines.rows.by_row.knobs import ByRowKnobs as ByRowKnobs
