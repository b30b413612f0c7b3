"""`Values`, which holds the values of a match as steps of a row program, and their stores."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from graphfuse.base.dtypes import FP8, SIXTEEN_BITS, SMALL_INTEGERS, data_type
from graphfuse.contract.engine import No
from graphfuse.op_graph.ir import Node, Subgraph, TensorId
from graphfuse.ops import Join
from graphfuse.rows.clamping import unbounded
from graphfuse.rows.emitter import Emitter
from graphfuse.rows.pairs import EachPair
from graphfuse.rows.program import OF_PARTS, exchanges
from graphfuse.rows.rounding import has_type
from graphfuse.rows.steps import AnyStep, Chain, Load, Number, Operand, Rewrite, Scalar, Step


@dataclass(frozen=True)
class Written:
    """A store of a value: a ``Store`` with tensors instead of views."""

    tensor: TensorId
    value: Chain
    block_size: int = 0
    block_scale: TensorId | None = None
    amax: bool = False
    scales_of: data_type | None = None


class Values(Emitter):
    """The value of each tensor of a match, the steps that compute them, and the stores."""

    def __init__(self, subgraph: Subgraph, dim: Sequence[int], columns: int):
        """dim: extents of all rows and columns."""
        super().__init__(columns)
        self.graph, self.subgraph = subgraph.graph, subgraph
        self.elements = math.prod(dim)
        self.values: dict[TensorId, Operand] = {}
        self.loaded: dict[TensorId, int] = {}
        self.paired: dict[TensorId, EachPair] = {}  # inputs with an element for each pair of columns
        self.moved: set[TensorId] = set()  # outputs that a move writes
        self.stores: list[Written] = []
        self.sums: list[tuple[TensorId, tuple[Operand, ...]]] = []
        self.faults: list[No] = []
        self._part = 0

    @contextmanager
    def of_parts(self, columns: int) -> Iterator[None]:
        """Context in which reductions are of parts of rows. columns: of a part; 0 for whole rows."""
        row, self.columns, self._part = self.columns, columns or self.columns, columns
        yield
        self.columns, self._part = row, 0

    def reduce(self, join: Join, value: Operand) -> Chain:
        return self.op(OF_PARTS[join], {"size": self._part}, input=value) if self._part else super().reduce(join, value)

    def operand(self, t: TensorId, in_memory: bool = False) -> Operand:
        """The value of a tensor. in_memory: read as rows even if it has one element."""
        if t not in self.values:
            tensor = self.graph.tensors[t]
            # With one row of one column all tensors have one element, and still have rows.
            if tensor.elements == 1 and not in_memory and (tensor.by_value or self.elements != 1):
                return Scalar.of(tensor)
            self.values[t] = self.load(t)
        return self.values[t]

    def load(self, t: TensorId) -> Load:
        return Load(self.loaded.setdefault(t, len(self.loaded)))

    def refuse(self, reason: str) -> None:
        """Records a reason why the match has no program."""
        self.faults.append(No(reason))

    def pair(self, t: TensorId, unit: EachPair) -> Load:
        """The value of a tensor with an element for each pair of columns."""
        if t in self.loaded and self.paired.get(t) != unit:
            self.refuse(f"{self.graph.tensors[t]} is read in more ways than one; accepted: as cos, or as sin")
        self.paired[t] = unit
        return self.load(t)

    def chain(self, t: TensorId) -> Chain:
        """The value of a tensor as the result of a step."""
        value = self.operand(t, in_memory=True)
        return value if isinstance(value, Chain) else self.op("identity", input=value)

    def rounded(self, t: TensorId | None) -> data_type | None:
        """Type that a tensor's value is rounded to for readers in the match; None for float32 or no readers."""
        if t is None or not set(self.graph.consumers.get(t, ())) & set(self.subgraph.node_ids):
            return None
        return self.rounding(t)

    def rounding(self, t: TensorId) -> data_type | None:
        """Type that a tensor's value is rounded to for all readers; None for float32."""
        dtype = self.graph.tensors[t].dtype
        return None if dtype is data_type.FLOAT else dtype

    def make(self, t: TensorId, value: Chain) -> None:
        """Sets the value of a tensor, rounded for its readers. Steps within the same op read it without rounding."""
        dtype, made_by = self.rounded(t), self.steps[value.index]
        if dtype is None or exchanges(made_by) and has_type(self.steps, value, dtype, self.type_or_number):
            self.values[t] = value
        elif self._is_as_made(value):
            self.values[t] = self.step(Step("identity", (("input", value),), (), dtype))
        else:
            self.steps[value.index] = replace(made_by, rounded=dtype)
            self.values[t] = value

    def _is_as_made(self, value: Chain) -> bool:
        """True if a rounding needs a separate step: steps read the unrounded value, or its own step cannot round."""
        is_read, step = any(o == value for step in self.steps for _, o in step.operands), self.steps[value.index]
        return is_read or exchanges(step)

    def move(self, t: TensorId, x: TensorId) -> None:
        """Adds a store of the value of `x` to rows of `t`, if `t` is written."""
        if t in self.subgraph.outputs:
            self.moved.add(t)
            self.stores.append(Written(t, self.chain(x)))

    def store_outputs(self, node: Node) -> None:
        """Adds stores of a node's outputs that are written and have a value."""
        written = self.subgraph.outputs
        self.stores += [Written(t, self.values[t]) for _, t in node.outputs if t in written and t in self.values]

    def rewrite(self, rewriting: Callable[[Sequence[AnyStep], Iterable[Operand]], Rewrite]) -> None:
        """Applies `rewriting` to the steps and to the operands that stores and sums read."""
        read = [w.value for w in self.stores] + [o for _, factors in self.sums for o in factors]
        found = rewriting(self.steps, read)
        if found is None:
            return
        steps, renames = found
        self.steps = list(steps)
        left = ((t, o) for t, o in self.values.items() if o in renames or not isinstance(o, Chain))
        self.values = {t: renames.get(o, o) for t, o in left}
        self.stores = [replace(w, value=renames[w.value]) for w in self.stores]
        self.sums = [(t, tuple(renames.get(o, o) for o in factors)) for t, factors in self.sums]

    @property
    def element_stores(self) -> list[tuple[Written, data_type]]:
        """Stores of elements that are not quantized in blocks, and their types."""
        of_elements = (w for w in self.stores if not (w.block_size or w.amax or w.scales_of))
        return [(w, self.graph.tensors[w.tensor].dtype) for w in of_elements]

    @property
    def saturating_stores(self) -> dict[Written, data_type]:
        """Stores whose conversion saturates, and their types."""
        return {w: dtype for w, dtype in self.element_stores if dtype in (*FP8, *SMALL_INTEGERS)}

    @property
    def only_written(self) -> dict[Operand, data_type]:
        """Values that are stored once, in a 16-bit type, and not read otherwise; with this type."""
        read = Counter(o for step in self.steps for _, o in step.operands)
        read.update([*(w.value for w in self.stores), *(o for _, factors in self.sums for o in factors)])
        return {w.value: dtype for w, dtype in self.element_stores if read[w.value] == 1 and dtype in SIXTEEN_BITS}

    def unbind(self) -> None:
        """Removes clamps and roundings before stores whose conversion does the same."""
        found = {w: unbounded(self.steps, w.value, dtype, self.number) for w, dtype in self.saturating_stores.items()}
        bare = {w: value for w, value in found.items() if value != w.value}
        self.values |= {w.tensor: value for w, value in bare.items()}
        self.stores = [replace(w, value=bare.get(w, w.value)) for w in self.stores]

    def number(self, o: Operand) -> float | None:
        """The number of a constant operand; None for other operands."""
        if isinstance(o, Number):
            return o.value
        value = self.graph.tensors[o.tensor].value if isinstance(o, Scalar) else None
        return None if value is None else float(value)

    def type_or_number(self, o: Operand) -> data_type | float | None:
        """The type of an operand that is read from memory; for others the result of `number`."""
        if isinstance(o, Load):
            return self.graph.tensors[[*self.loaded][o.index]].dtype
        return self.number(o)
