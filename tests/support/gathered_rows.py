"""Norms of rows that each of several ranks has, written to the memory of all, as data: on the emulator.

What is normalized is the rank's own, or the sum over ranks of its part: a reduce-scatter, a norm and an all-gather.
"""

from dataclasses import dataclass

import torch

from graphfuse import data_type, norm_forward_phase, pygraph
from graphfuse.emulator.check import Memory, check_ranks
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from support import graphs, oracle
from support.graphs import BF16, TORCH
from support.sums_over_ranks import EPS, MEETS, REWRITES, SCALE, SIGNALS, Wrong, bytes_of, planned, read


@dataclass(frozen=True)
class GatheredRows:
    """Calls one after another on each of several ranks, which take parts of all rows in turns.

    summed: whether a part is added up over ranks, and a residual of the rank's to it. rows: of a part. out: as of
    ``SumOverRanks``: of the input's type, two buffers take turns, so that a call reads what another rank wrote.
    touched: whether another kernel reads and writes what a call has gathered, before the next call.
    """

    ranks: int = 2
    rows: int = 5
    columns: int = 64
    calls: int = 3
    summed: bool = False
    out: data_type = BF16
    knobs: ByRowKnobs | None = None
    touched: bool = False

    def graph(self, rank: int) -> pygraph:
        g = graphs.new(device="emulator")
        shape, length = [self.rows, self.columns], [1, 64 + 2 * self.ranks]
        x, weight = (g.tensor(s, data_type=BF16, name=n) for s, n in ((shape, "x"), ([1, self.columns], "weight")))
        if self.summed:
            total = g.all_reduce(x, g.tensor(length, data_type=data_type.INT64, name="peers"), rank=rank)
            x = g.add(total, g.tensor(shape, data_type=BF16, name="residual"))
            x.set_output().set_name("sum").set_data_type(BF16)
        y, _ = g.rmsnorm(x, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
        y = y if self.out is BF16 else g.mul(y, SCALE)
        out = g.all_gather(y, g.tensor(length, data_type=data_type.INT64, name="out_peers"), rank=rank)
        out.set_output().set_name("out").set_data_type(self.out)
        return g

    def parts(self) -> list:
        """The kernel of each rank, planned."""
        return [planned(self.graph(rank), self.knobs) for rank in range(self.ranks)]

    @property
    def source(self) -> str:
        (found,) = {part.engine.source(part.facts, part.knobs) for part, *_ in self.parts()}  # which knows no rank
        return found.replace(MEETS, REWRITES + MEETS) if self.touched else found

    def inputs(self) -> dict[str, torch.Tensor]:
        """What each rank begins with: all rows, a residual of one part, the weight of all ranks."""
        source = graphs.generator("cpu", 0)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=source).to(torch.bfloat16)

        made = {"weight": values(1, self.columns)}
        for rank in range(self.ranks):
            made[f"x{rank}"] = values(self.ranks * self.rows, self.columns)
            made[f"residual{rank}"] = values(self.rows, self.columns)
        return made

    def turn(self, rank: int, call: int) -> slice:
        """The rows that a rank takes in a call."""
        first = (rank + call) % self.ranks * self.rows
        return slice(first, first + self.rows)

    def run(self, build: Build, source: str | None = None) -> list[dict[str, bytes]]:
        """Memory afterwards, by schedule. source: another kernel for the same launches."""
        parts, given = self.parts(), self.inputs()
        own = self.out is BF16  # what is gathered is read by the next call
        row, out_row = 2 * self.columns, TORCH[self.out].itemsize * self.columns
        nbytes = self.ranks * self.rows * row
        slot = -(-nbytes // 256) * 256
        memory: dict[str, Memory] = {}

        def place(name: str, content: bytes) -> None:
            memory[name] = Memory((1 + len(memory)) << 32, content)

        def view(name: str, of: str, begin: int, length: int) -> None:
            memory[name] = Memory(memory[of].address + begin, memory[of].content[begin : begin + length])

        numbers = bytes(SIGNALS + 16 * self.ranks)
        for name in ("nobody", *(f"{kind}{rank}" for kind in ("peers", "out_peers") for rank in range(self.ranks))):
            place(name, numbers)
            view(f"table of {name}", name, SIGNALS, len(numbers) - SIGNALS)
        place("weight", bytes_of(given["weight"]))
        for rank in range(self.ranks):
            place(f"residual{rank}", bytes_of(given[f"residual{rank}"]))
            place(f"memory{rank}", bytes(256) + bytes_of(given[f"x{rank}"]) + b"\x5a" * (2 * slot - nbytes))
            place(f"out memory{rank}", bytes(512 + self.ranks * self.rows * out_row))
            view(f"{rank}.0", f"memory{rank}", 256, nbytes)
            view(f"{rank}.1", f"memory{rank}", 256 + slot, nbytes)
            view(f"out{rank}", f"out memory{rank}", 512, self.ranks * self.rows * out_row)
        calls = []
        for rank, (_, ids, _) in enumerate(parts):
            of_rank = []
            for call in range(self.calls):
                turn = self.turn(rank, call)
                reads, writes = f"{rank}.{call % 2 * own}", f"{rank}.{1 - call % 2}" if own else f"out{rank}"
                x, out = f"x of {rank} in {call}", f"out of {rank} in {call}"
                for name, of, width in ((x, reads, row), (out, writes, out_row)):
                    place_of, begin = memory[of], turn.start * width
                    content = place_of.content[begin : begin + self.rows * width]
                    memory[name] = Memory(place_of.address + begin, content)
                names = {
                    "x": x,
                    "out": out,
                    "weight": "weight",
                    "residual": f"residual{rank}",
                    "sum": f"residual{rank}",
                }
                names |= {"peers": f"peers{rank}", "out_peers": f"peers{rank}" if own else f"out_peers{rank}"}
                of_rank.append({ids[name]: where for name, where in names.items() if name in ids})
                if self.touched:  # rows that this rank did not write
                    other = f"x of {rank} in {call}, touched"
                    begin = self.turn(rank, call + 1).start * row
                    content = memory[writes].content[begin : begin + self.rows * row]
                    memory[other] = Memory(memory[writes].address + begin, content)
                    nobody = dict.fromkeys(("peers", "out_peers"), "nobody")
                    of_rank.append(of_rank[-1] | {ids[n]: at for n, at in ({"x": other} | nobody).items() if n in ids})
            calls.append(of_rank)
        tables = {}
        for kind, of in (("peers", "memory"), ("out_peers", "out memory")):
            names = [f"{name}{rank}" for name in (of, kind) for rank in range(self.ranks)]
            tables |= {f"table of {kind}{rank}": names for rank in range(self.ranks)}
        (part, _, frozen), *_ = parts
        scalars = {t.id: t.value for t in frozen.tensors if t.value is not None}
        launches = [p.outline for p, *_ in parts]
        return check_ranks(source or self.source, part.engine.entry, launches, memory, calls, tables, scalars, build)

    def hold(self, build: Build, source: str | None = None) -> None:
        """Wrong if a run, in any schedule, makes anything but what is expected, or ranks have different bits."""
        gathered, residuals = self.expected()
        tolerance = 0.02 if self.out is BF16 else 1 / 16
        for found in self.run(build, source):
            names = [f"{rank}.{self.calls % 2}" if self.out is BF16 else f"out{rank}" for rank in range(self.ranks)]
            if len({found[name] for name in names}) > 1:
                raise Wrong("ranks have different bits")
            y = read(found[names[0]], TORCH[self.out], gathered).double()
            if not torch.allclose(y, gathered.double(), rtol=tolerance, atol=0.02):
                raise Wrong(f"{y} is not {gathered}")
            for rank, residual in enumerate(residuals if self.summed else ()):
                got = read(found[f"residual{rank}"], torch.bfloat16, residual)
                if not torch.allclose(got.double(), residual.double(), rtol=0.02, atol=0.02):
                    raise Wrong(f"{got} is not {residual}")

    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What the last call gathers, unrounded, and the residuals."""
        given = self.inputs()
        x, residuals = ([given[f"{name}{rank}"] for rank in range(self.ranks)] for name in ("x", "residual"))
        for call in range(self.calls):
            gathered = torch.empty(self.ranks * self.rows, self.columns, dtype=torch.float64)
            for rank in range(self.ranks):
                turn = self.turn(rank, call)
                read_from = x[rank][turn].double()
                if self.summed:
                    total = sum(one[turn].double() for one in x) + residuals[rank].double()
                    read_from = residuals[rank] = total.to(torch.bfloat16)
                    read_from = read_from.double()
                gathered[turn] = oracle.rmsnorm(read_from, given["weight"], EPS)[0]
            if self.out is BF16:
                x = [gathered.to(torch.bfloat16)] * self.ranks
            else:
                gathered = gathered * SCALE
        return gathered, residuals
