"""How a row is cut into what threads take together, and what they hold of it."""

import math
from dataclasses import dataclass

from graphfuse.codegen.rowwise import Rows
from graphfuse.engines.rmsnorm.knobs import RmsNormKnobs
from graphfuse.patterns.rmsnorm import RmsNormFacts

CHUNK = 8  # elements whose squares are summed one after another; of shorter rows, what divides them
# Registers of a thread that may hold what is kept of a row, by threads a CTA. The register file has
# 64 or 128 for each thread, of which the rest of the kernel needs 40 to 50 without spilling;
# smaller CTAs gain nothing by more than 64.
_HELD_REGISTERS = {1024: 16, 512: 40}
_MOST_HELD = 64
ROW_REGISTERS = 512 * _HELD_REGISTERS[512]  # the most that a CTA holds


@dataclass(frozen=True)
class Row:
    """How a row is cut, from facts alone.

    chunk: elements that are summed one after another. chunks: a row's. registers: 32-bit registers that
    a thread needs for one chunk, to read it or to keep of it what later phases need. later: for what the
    phase after the sum reads of one chunk. fits: one CTA can
    keep a row; otherwise a cluster may, or the row is read and worked out again in each phase.
    """

    chunk: int
    chunks: int
    registers: int
    later: int
    fits: bool

    @classmethod
    def of(cls, facts: RmsNormFacts) -> "Row":
        chunk = math.gcd(facts.columns, CHUNK)
        chunks = facts.columns // chunk
        rows = Rows(facts.program, facts.row_extents, facts.columns, chunk, resident=True)
        # What is read is worked on at once, when little else takes registers.
        registers = max(1, -(-chunk * max(rows.held_bytes, rows.read_bytes(0, True) // 2) // 4))
        later = -(-chunk * (rows.read_bytes(1, True) + rows.read_bytes(1, False)) // 4)
        return cls(chunk, chunks, registers, later, -(-chunks // 512) * 512 * registers <= ROW_REGISTERS)

    def resident(self, knobs: RmsNormKnobs) -> bool:
        return self.fits or knobs.cluster > 1

    def passes(self, knobs: RmsNormKnobs) -> int:
        """How often a thread reads what it has registers for, a power of two."""
        if self.resident(knobs):
            return 1
        at_once = max(1, 8 // self.registers)
        return 1 << (-(-self._pieces(knobs) // at_once) - 1).bit_length()

    def steps(self, knobs: RmsNormKnobs) -> int:
        """Pieces of one pass over the row that each thread takes."""
        return -(-self._pieces(knobs) // self.passes(knobs))

    def _pieces(self, knobs: RmsNormKnobs) -> int:
        """Of the row, that each thread takes."""
        return -(-self.chunks // (knobs.threads_per_row * knobs.chunks))


def rows_of(facts: RmsNormFacts, knobs: RmsNormKnobs) -> Rows:
    row = Row.of(facts)
    piece = row.chunk * knobs.chunks
    # 16-bit values, unpacked for the sum and kept, take three times their room, which long rows do not have.
    again = row.resident(knobs) and row.steps(knobs) * piece > 40
    return Rows(facts.program, facts.row_extents, facts.columns, piece, row.resident(knobs), again)


def held_registers(threads: int) -> int:
    return _HELD_REGISTERS.get(threads, _MOST_HELD)
