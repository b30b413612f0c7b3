"""Row programs: reductions of rows with all that works on the same rows around them, in one kernel.

`engine` serves ``RowFacts`` on NVIDIA GPUs by one of its schedules: `by_row`, a CTA for some rows; `persistent`, CTAs
that take row after row; and `across`, a CTA for neighbouring rows of tensors in which these lie side by side. Tuned
knobs are the tables ``rows.ARCH.json``.
"""

from graphfuse.engines.rows.engine import RowEngine as RowEngine
