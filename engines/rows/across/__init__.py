"""Schedule of row programs in which threads take neighbouring rows of one column after another: of tensors in which
neighbouring elements are of neighbouring rows, as of a contiguous [N, C, T, H, W] that is normalized over C. Its kernel
is ``across.cu``."""

from graphfuse.engines.rows.across.knobs import AcrossKnobs as AcrossKnobs
from graphfuse.engines.rows.across.schedule import Across as Across
