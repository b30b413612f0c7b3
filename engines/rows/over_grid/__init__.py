"""Schedule in which many CTAs of the grid share a row. Its kernel is ``over_grid.cu``."""

from graphfuse.engines.rows.over_grid.knobs import OverGridKnobs as OverGridKnobs
from graphfuse.engines.rows.over_grid.schedule import OverGrid as OverGrid
