"""A bench as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graphfuse.benchmarks.peer import Peer
from graphfuse.benchmarks.target import Target


class Case(Protocol):
    """One problem: a frozen dataclass whose fields name it in the record. `output` is one of them."""

    output: str

    def __str__(self) -> str: ...

    @property
    def moved(self) -> int:
        """Bytes: each input read once, each output written once."""

    def sets(self, count: int, device: str) -> Sequence[object]:
        """`count` buffer sets with random inputs, each with its input `x`."""

    def spoil(self, operands: object) -> None:
        """Overwrite the outputs of a set with what no result is."""

    def wrong(self, operands: object, tight: bool) -> str | None:
        """Why the outputs of a set are wrong, None if they are not."""


@dataclass(frozen=True)
class Bench:
    """name: of the record. ours, stream: the peers that the others and the limit are compared with."""

    name: str
    title: str
    cases: tuple[Case, ...]
    quick: tuple[Case, ...]
    peers: tuple[Peer, ...]
    targets: tuple[Target, ...]
    ours: str = "graphfuse"
    stream: str = "stream"
