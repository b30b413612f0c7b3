"""Cross entropy problems as data, forward and backward, and a softmax of a part of each row, with float64 results."""

from dataclasses import dataclass

import numpy as np
import torch

from graphfuse import data_type, pygraph, reduction_mode
from support import graphs, oracle
from support.graphs import BF16, FLOAT, TORCH

INT32, INT64 = data_type.INT32, data_type.INT64
INTEGERS = {INT32: torch.int32, INT64: torch.int64}
_BEYOND = {INT32: 2**31 - 1, INT64: 2**32 + 3}  # the second is column 3 to who takes its low half for all of it


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of rows x columns, or its gradient.

    dtype: of the logits, and of their gradient. target: INT32 or INT64. by_hand: the loss as nodes of smaller ops.
    sums: whether the log of the sum is an output, too. The strides are those of rows, in elements; offset is how many
    elements into its memory each tensor of them begins.
    """

    rows: int = 12
    columns: int = 96
    dtype: data_type = BF16
    target: data_type = INT64
    backward: bool = False
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    by_hand: bool = False
    sums: bool = True
    stride: int | None = None
    offset: int = 0
    alignment: int = 16

    @property
    def attributes(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("ignore_index", "label_smoothing", "z_loss")}

    def graph(self, device: str = "cpu") -> pygraph:
        g = graphs.new(device=device)
        shape, row = [self.rows, self.columns], [self.rows, 1]
        stride = [self.stride or self.columns, 1]
        x = g.tensor(shape, stride, self.dtype, name="x", byte_alignment=self.alignment)
        target = g.tensor(row, data_type=self.target, name="target")
        if self.backward:
            grad, logsumexp = (g.tensor(row, data_type=FLOAT, name=name) for name in ("grad", "logsumexp"))
            dx = g.cross_entropy_backward(grad, x, target, logsumexp, **self.attributes)
            dx.set_output().set_name("dx").set_data_type(self.dtype).set_byte_alignment(self.alignment)
            dx.set_dim(shape).set_stride(stride)
            return g
        if self.by_hand:
            loss, logsumexp = _loss_by_hand(g, x, target, self)
        else:
            loss, logsumexp = g.cross_entropy(x, target, **self.attributes)
        loss.set_output().set_name("loss")
        if self.sums:
            logsumexp.set_output().set_name("logsumexp")
        return g

    def inputs(self, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        """Rows of each kind in turns, the first an ordinary one: of ignored targets, of some beyond either end, of
        logits far from 0, of some that are -infinity, of the target's that is."""
        source = graphs.generator("cpu", seed)
        x = torch.randn(self.rows, self.columns, generator=source) * 3
        target = torch.randint(self.columns, (self.rows, 1), generator=source)
        target[1::8], target[2::8] = self.ignore_index, self.columns
        target[3::8], target[4::8] = -1, _BEYOND[self.target]
        x[5::8] += 200
        x[6::8, 1::2] = -torch.inf
        target[6::8] = target[6::8] // 2 * 2
        for row in range(7, self.rows, 8):
            x[row, target[row]] = -torch.inf if self.columns > 1 else 0.0
        pack = {"x": graphs.placed(x.to(TORCH[self.dtype]), self.stride, self.offset)}
        pack["target"] = target.to(INTEGERS[self.target])
        if self.backward:
            pack["logsumexp"] = pack["x"].double().logsumexp(1, keepdim=True).float()
            pack["grad"] = torch.randn(self.rows, 1, generator=source)
        return {name: t.to(device) for name, t in pack.items()}

    def outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Memory for everything the graph writes, filled with a byte that no result is."""
        row = (self.rows, 1)
        made = {"dx": (self.rows, self.columns)} if self.backward else {"loss": row, "logsumexp": row}
        made = {name: shape for name, shape in made.items() if self.sums or name != "logsumexp"}
        pack = {}
        for name, shape in made.items():
            memory = torch.empty(shape, dtype=TORCH[self.dtype if name == "dx" else FLOAT], device=device)
            memory.view(torch.uint8).fill_(0xA5)
            pack[name] = graphs.placed(memory, self.stride, self.offset) if name == "dx" else memory
        return pack

    def exact(self, pack: dict[str, torch.Tensor]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Every output in float64, row by row, and by how much float32 may be off."""
        x, target = pack["x"].double().cpu().numpy(), pack["target"].cpu().numpy().astype(object)[:, 0]
        rows = [self._row(x[k], int(t), pack, k) for k, t in enumerate(target)]
        return {name: tuple(np.stack([row[name][i] for row in rows]) for i in (0, 1)) for name in rows[0]}

    def _row(self, x: np.ndarray, target: int, pack: dict, row: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        s, z, columns = self.label_smoothing, self.z_loss, self.columns
        largest = x.max()
        logsumexp = np.log(np.exp(x - largest).sum()) + largest
        hit = np.arange(columns) == target
        known = 0 <= target < columns
        if self.backward:
            given, grad = (pack[name][row].item() for name in ("logsumexp", "grad"))
            power = np.exp(x - given)
            dx = grad * (power * (1 + 2 * z * given) - (1 - s) * hit - s / columns)
            finite = np.where(np.isfinite(x), np.abs(x - given), 0)
            off = abs(grad) * (3e-7 * (hit + s) + power * (1 + 2 * z * abs(given)) * (5e-7 + 1.2e-7 * finite))
            dx = dx if known else np.full(columns, np.nan)
            return {"dx": (np.zeros(columns), off) if target == self.ignore_index else (dx, off)}
        picked = x[target] if known else np.nan
        with np.errstate(invalid="ignore"):
            loss = logsumexp - (1 - s) * picked - (s * x.mean() if s else 0) + z * logsumexp**2
        finite = x[np.isfinite(x)]
        # Large logits cancel nothing of the loss, but for their mean.
        apart = largest - finite.min() + (s > 0) * np.abs(finite).max() + z * logsumexp**2
        off = 1e-6 + 5e-7 * apart
        loss = 0.0 if target == self.ignore_index else loss
        sums = (np.array([logsumexp]), np.array([1e-6 + 2e-7 * abs(logsumexp)]))
        return {"loss": (np.array([loss]), np.array([off]))} | ({"logsumexp": sums} if self.sums else {})

    def hold(self, pack: dict, outputs: dict[str, torch.Tensor]) -> None:
        """Against float64, with one representable value of slack where types are narrow; ignored rows are zeros."""
        for name, (exact, off) in self.exact(pack).items():
            got = outputs[name].cpu()
            want, values = torch.from_numpy(exact), got.double()
            close = (values - want).abs() <= torch.from_numpy(off)
            close |= (values == want) | (values.isnan() & want.isnan())
            if got.dtype is not torch.float32:
                close |= oracle.ulps(got, oracle.rounded(want, got.dtype)) <= 1
            assert close.all(), f"{name}: {int((~close).sum())} elements are off, first at {(~close).nonzero()[0]}"
            ignored = (pack["target"].cpu() == self.ignore_index)[:, 0]
            if name != "logsumexp":
                assert not got[ignored].contiguous().view(torch.uint8).any(), f"{name}: ignored rows are not 0"
        if self.backward and (self.offset or self.stride):
            made = outputs["dx"]
            memory = torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage())
            made.view(torch.uint8).fill_(0x5A)
            assert (memory == 0x5A).all(), "memory beside the rows was written"


def _loss_by_hand(g: pygraph, x, target, problem: CrossEntropy):
    def over(value, mode):
        return g.reduction(value, mode=mode).set_dim([problem.rows, 1])

    largest = over(x, reduction_mode.MAX)
    total = g.log(over(g.exp(g.sub(x, largest)), reduction_mode.ADD))
    logsumexp = g.add(total, largest)
    mask = g.cmp_eq(g.gen_index(x, axis=1), target)
    below = g.sub(over(g.binary_select(x, 0.0, mask), reduction_mode.ADD), largest)
    known = g.mul(g.cmp_ge(target, 0.0), g.cmp_lt(target, float(problem.columns)))
    loss = g.binary_select(g.sub(total, below), float("nan"), known)
    return g.binary_select(loss, 0.0, g.cmp_neq(target, float(problem.ignore_index))), logsumexp


@dataclass(frozen=True)
class Window:
    """Softmax of the elements of each row behind column `low` and up to column `high`, of which there is one a row;
    those outside become 0."""

    rows: int = 12
    columns: int = 96
    dtype: data_type = BF16

    def graph(self, device: str = "cpu") -> pygraph:
        g = graphs.new(device=device)

        def over(value, mode):
            return g.reduction(value, mode=mode).set_dim([self.rows, 1])

        x = g.tensor([self.rows, self.columns], data_type=self.dtype, name="x")
        low, high = (g.tensor([self.rows, 1], data_type=INT32, name=name) for name in ("low", "high"))
        index = g.gen_index(x, axis=-1)
        inside = g.mul(g.cmp_gt(index, low), g.cmp_le(index, high))
        seen = g.binary_select(x, float("-inf"), inside)
        powers = g.exp(g.sub(seen, over(seen, reduction_mode.MAX)))
        y = g.div(powers, over(powers, reduction_mode.ADD))
        y.set_output().set_name("out").set_data_type(FLOAT)
        return g

    def inputs(self, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        source = graphs.generator("cpu", seed)
        x = torch.randn(self.rows, self.columns, generator=source).to(TORCH[self.dtype])
        ends = torch.randint(-1, self.columns, (self.rows, 2), generator=source).sort(1).values
        low = ends[:, :1].clamp(max=self.columns - 2)
        high = torch.maximum(ends[:, 1:], low + 1)
        made = {"x": x, "low": low.to(torch.int32), "high": high.to(torch.int32)}
        return {name: t.to(device) for name, t in made.items()}

    def outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        return {"out": torch.full((self.rows, self.columns), float("nan"), device=device)}

    def hold(self, pack: dict, outputs: dict[str, torch.Tensor]) -> None:
        column = torch.arange(self.columns, device=pack["x"].device)
        outside = (column <= pack["low"]) | (column > pack["high"])
        exact = pack["x"].double().masked_fill(outside, -torch.inf).softmax(1)
        assert ((outputs["out"].double() - exact).abs() <= 2e-6 * exact).all()
        assert not outputs["out"][outside].any()
