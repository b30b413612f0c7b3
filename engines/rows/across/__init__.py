"""Schedule for tensors in which neighbouring elements belong to neighbouring rows, such as a contiguous [N, C, T, H, W]
normalized over C. Threads process neighbouring rows, one column after another. Its kernel is ``across.cu``."""

from graphfuse.engines.rows.across.knobs import AcrossKnobs as AcrossKnobs
from graphfuse.engines.rows.across.schedule import Across as Across
