"""Engine ``rmsnorm_backward``: row programs with one sum of a row and with sums over all rows, as the gradients of
scale and bias are, in one kernel, for any row length.

Serves ``RowFacts`` on NVIDIA GPUs. The kernel is ``persistent.cu``.
"""

from graphfuse.engines.rows.persistent.engine import RmsNormBackwardEngine as RmsNormBackwardEngine
from graphfuse.engines.rows.persistent.knobs import PersistentKnobs as PersistentKnobs
