"""Row programs: reductions of rows with all that works on the same rows around them, in one kernel.

`engine` serves ``RowFacts`` on NVIDIA GPUs by one of its schedules: `by_row`, a CTA for some rows, and
`persistent`, CTAs that take row after row. Tuned knobs are the tables ``rows.ARCH.json``.
"""

from graphfuse.engines.rows.engine import RowEngine as RowEngine
