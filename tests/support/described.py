"""RMSNorm problems in the terms of one normalization - input, weight, bias, epilogue, output - and the row program
that the pattern would make of each."""

from dataclasses import dataclass, replace

from graphfuse.base.dtypes import data_type
from graphfuse.op_graph.ir import TensorId
from graphfuse.ops import EXPANSIONS
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.emitter import Emitter
from graphfuse.rows.program import RowProgram, Store
from graphfuse.rows.steps import Chain, Load, Scalar, Step
from graphfuse.rows.views import View


@dataclass(frozen=True)
class Tensor:
    """One operand: row_stride between rows, None for what is one row."""

    tensor: TensorId
    name: str
    dtype: data_type
    row_stride: int | None
    column_stride: int = 1
    alignment: int = 16

    def view(self, columns: bool = True) -> View:
        stride = (self.row_stride or 0,)
        rows = self.row_stride is not None
        return View(self.tensor, self.name, self.dtype, stride, self.column_stride, self.alignment, rows, columns)


@dataclass(frozen=True)
class Described:
    """output = epilogue(input * inverse_rms * weight + bias) on rows x columns.

    Operands of the epilogue's steps: Chain(0) is what it is applied to, Chain(k) the result of step k - 1.
    """

    rows: int
    columns: int
    input: Tensor
    weight: Tensor
    epsilon: Scalar
    epilogue: tuple[Step, ...]
    output: Tensor
    bias: Tensor | None = None
    inverse_rms: Tensor | None = None
    block_scale: Tensor | None = None
    block_size: int = 0
    node: str = "norm"

    def facts(self) -> RowFacts:
        inputs = [self.input.view(), self.weight.view(), *([self.bias.view()] if self.bias else [])]
        emitter, bias = Emitter(self.columns), {"bias": Load(2)} if self.bias else {}
        norm = EXPANSIONS["rmsnorm"].of(emitter, dict(input=Load(0), scale=Load(1), epsilon=self.epsilon, **bias), {})
        values = [norm["Y"]]
        for step in self.epilogue:
            operands = ((p, values[o.index] if isinstance(o, Chain) else o) for p, o in step.operands)
            values.append(emitter.step(replace(step, operands=tuple(operands))))
        scale = self.block_scale and self.block_scale.view()
        stores = [Store(self.output.view(), values[-1], self.block_size, scale)]
        if self.inverse_rms:
            stores.append(Store(self.inverse_rms.view(columns=False), norm["inv_variance"]))
        program = RowProgram(tuple(inputs), tuple(emitter.steps), tuple(stores))
        return RowFacts(self.node, (self.rows,), self.columns, program)
