"""What a schedule is: a way in which a kernel spreads the rows of a program over threads."""

import abc
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from graphfuse.device import Device
from graphfuse.engine import Launch, ProblemClass
from graphfuse.enums import heur_mode
from graphfuse.patterns.rows import RowFacts

KnobsT = TypeVar("KnobsT")

READ_AGAIN = "rows of {columns} columns do not fit in registers: they are read again in each phase"
"""What a schedule notes where it is so."""


class Schedule(abc.ABC, Generic[KnobsT]):
    """Class attributes:

    knobs: its frozen dataclass of knobs, by which plans tell schedules apart.
    """

    knobs: ClassVar[type]

    @abc.abstractmethod
    def prefers(self, facts: RowFacts) -> bool:
        """Whether the program is one that the schedule is there for. Cheap."""

    @abc.abstractmethod
    def reasons(self, facts: RowFacts, device: Device) -> Iterator[str]:
        """The reasons against, each naming the tensor and the limit."""

    @abc.abstractmethod
    def propose(self, facts: RowFacts, device: Device, mode: heur_mode) -> Sequence[KnobsT]:
        """Knobs to try, best first."""

    @abc.abstractmethod
    def faults(self, facts: RowFacts, knobs: KnobsT, device: Device) -> Iterator[str]:
        """Why these knobs cannot be used."""

    @abc.abstractmethod
    def notes(self, facts: RowFacts, knobs: KnobsT) -> Iterator[str]:
        """What the schedule does to the numbers of a plan."""

    @abc.abstractmethod
    def source(self, facts: RowFacts, knobs: KnobsT) -> str:
        """The translation unit, whose kernel is named ``row_program``."""

    @abc.abstractmethod
    def launch(self, facts: RowFacts, knobs: KnobsT) -> Launch:
        """Grid, block and arguments."""

    @abc.abstractmethod
    def problem(self, facts: RowFacts) -> ProblemClass:
        """The class that tuned knobs are kept for, of programs that the schedule is preferred for."""
