"""What the engine sees of a match: a frozen dataclass, without names and positions."""

from dataclasses import dataclass

from graphfuse import data_type
from graphfuse.plugin import FrozenTensor


@dataclass(frozen=True)
class Facts:
    """total: the type that x + bias is rounded to before the GELU; FLOAT where it is not."""

    x: FrozenTensor
    bias: FrozenTensor
    output: FrozenTensor
    total: data_type

    @property
    def columns(self) -> int:
        return self.output.dim[-1]
