"""Engine ``rmsnorm_backward``: row programs with one sum of a row and with sums over all rows, as the gradients of
scale and bias are, in one kernel, for any row length.

Serves ``RowFacts`` on NVIDIA GPUs. The kernel is ``rmsnorm_backward.cu``.
"""

from graphfuse.engines.rmsnorm_backward.engine import RmsNormBackwardEngine as RmsNormBackwardEngine
from graphfuse.engines.rmsnorm_backward.knobs import RmsNormBackwardKnobs as RmsNormBackwardKnobs
