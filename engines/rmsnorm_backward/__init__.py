"""Engine ``rmsnorm_backward``: a row program around the backward of one RMS normalization, and the sums over rows that
are the gradients of scale and bias, in one kernel, for any row length.

Serves ``RowFacts`` on NVIDIA GPUs. The kernel is ``rmsnorm_backward.cu``.
"""

from graphfuse.engines.rmsnorm_backward.engine import RmsNormBackwardEngine as RmsNormBackwardEngine
from graphfuse.engines.rmsnorm_backward.knobs import RmsNormBackwardKnobs as RmsNormBackwardKnobs
