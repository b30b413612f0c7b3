"""Engine ``rmsnorm_across``: row programs of tensors in which neighbouring elements are of neighbouring rows, in one
kernel, for any row length. Such is a contiguous [N, C, T, H, W] that is normalized over C.

Serves ``RowFacts`` on NVIDIA GPUs. The kernel is ``across.cu``.
"""

from graphfuse.engines.rows.across.engine import AcrossEngine as AcrossEngine
from graphfuse.engines.rows.across.knobs import AcrossKnobs as AcrossKnobs
