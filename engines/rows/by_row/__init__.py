"""Schedule in which a CTA processes some rows, or a part of one, and ends. Its kernel is ``by_row.cu``."""

from graphfuse.engines.rows.by_row.knobs import ByRowKnobs as ByRowKnobs
from graphfuse.engines.rows.by_row.schedule import ByRow as ByRow
