"""Sums over ranks, added to a residual and normalized, as data: ranks on the emulator, with results in torch."""

from dataclasses import dataclass

import torch

from graphfuse import data_type, norm_forward_phase, pygraph
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.emulator.check import Memory, check_ranks
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from support import graphs, oracle
from support.graphs import BF16, TORCH

EPS = 1e-5
SCALE = 0.5
SIGNALS = 512  # bytes of a rank's


MEETS = "  auto ranks = ranks_of(a);\n"
REWRITES = """  if (gf::integer(static_cast<const i64*>(a.peers0) + 64) == 0) {
    if (row.exists) gf::store<16, 16>(const_cast<void*>(row.i0), gf::load<16, 16>(row.i0));
    return;
  }
"""


class Wrong(AssertionError):
    """A result that is not what is expected."""


def planned(graph: pygraph, knobs: ByRowKnobs | None) -> tuple:
    """A graph's one kernel, the numbers of its tensors by name, and the graph as it was planned."""
    graph.validate()
    graph.build_operation_graph()
    index = 0
    if knobs is None:
        graph.create_execution_plans()
    else:
        index = graph.create_execution_plan("rows", knobs_to_dict(knobs))
    (part,) = graph._planner.at(index).parts
    return part, {t.name: t.id for t in graph._planner.graph.bound}, graph._planner.graph


@dataclass(frozen=True)
class SumOverRanks:
    """Calls one after another on each of several ranks.

    The residual, which all ranks have, gets the sum over ranks added. out: type of what is normalized, times the rank's
    weight; of the input's type it is the next call's input, so that two buffers take turns. rewritten: whether another
    kernel writes the input between two calls: what it was, of rows in a single piece of a thread.
    """

    ranks: int = 2
    rows: int = 5
    columns: int = 64
    calls: int = 3
    out: data_type = BF16
    knobs: ByRowKnobs | None = None
    rewritten: bool = False

    def graph(self, rank: int) -> pygraph:
        g = graphs.new(device="emulator")
        shape = [self.rows, self.columns]
        x, residual = (g.tensor(shape, data_type=BF16, name=name) for name in ("x", "residual"))
        weight = g.tensor([1, self.columns], data_type=BF16, name="weight")
        peers = g.tensor([1, 64 + 2 * self.ranks], data_type=data_type.INT64, name="peers")
        total = g.add(g.all_reduce(x, peers, rank=rank), residual)
        total.set_output().set_name("sum").set_data_type(BF16)
        y, _ = g.rmsnorm(total, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
        y = y if self.out is BF16 else g.mul(y, SCALE)
        y.set_output().set_name("out").set_data_type(self.out)
        return g

    def parts(self) -> list:
        """The kernel of each rank, planned."""
        return [planned(self.graph(rank), self.knobs) for rank in range(self.ranks)]

    def inputs(self) -> dict[str, torch.Tensor]:
        """What each rank begins with: x in the first of its two buffers, the weight; and the residual of all."""
        source = graphs.generator("cpu", 0)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=source).to(torch.bfloat16)

        # Of more ranks than two, the first and the last have large values that cancel each other: bits tell orders.
        made = {"residual": values(self.rows, self.columns)}
        for rank in range(self.ranks):
            made[f"x{rank}"] = values(self.rows, self.columns)
            made[f"weight{rank}"] = values(1, self.columns)
        if self.ranks > 2:
            made["x0"] = made["x0"] * 2**16
            made[f"x{self.ranks - 1}"] = -made["x0"]
        return made

    def run(self, build: Build, source: str | None = None) -> list[dict[str, bytes]]:
        """Memory afterwards, by schedule. source: another kernel for the same launches."""
        parts, given = self.parts(), self.inputs()
        nbytes = 2 * self.rows * self.columns
        out_bytes = TORCH[self.out].itemsize * self.rows * self.columns
        slot = -(-nbytes // 256) * 256
        memory: dict[str, Memory] = {}

        def place(name: str, content: bytes) -> None:
            memory[name] = Memory((1 + len(memory)) << 32, content)

        def view(name: str, of: str, begin: int) -> None:
            memory[name] = Memory(memory[of].address + begin, memory[of].content[begin : begin + nbytes])

        numbers = bytes(SIGNALS + 16 * self.ranks)
        place("nobody", numbers)
        for rank in range(self.ranks):
            first = bytes_of(given[f"x{rank}"])
            # Before x lies something else: addresses in the table are those where memory begins.
            place(f"memory{rank}", bytes(256) + first + b"\x5a" * (2 * slot - nbytes))
            view(f"{rank}.0", f"memory{rank}", 256)
            view(f"{rank}.1", f"memory{rank}", 256 + slot)
            place(f"peers{rank}", numbers)
            memory[f"table{rank}"] = Memory(memory[f"peers{rank}"].address + SIGNALS, numbers[SIGNALS:])
            place(f"residual{rank}", bytes_of(given["residual"]))
            place(f"weight{rank}", bytes_of(given[f"weight{rank}"]))
            place(f"out{rank}", bytes(out_bytes))
        calls = []
        for rank, (_, ids, _) in enumerate(parts):
            of_rank = []
            for call in range(self.calls):
                turn = call % 2 if self.out is BF16 else 0
                names = {"x": f"{rank}.{turn}", "out": f"{rank}.{1 - turn}" if self.out is BF16 else f"out{rank}"}
                names |= {"residual": f"residual{rank}", "sum": f"residual{rank}"}
                names["weight"] = f"weight{rank}"
                for peers in [f"peers{rank}", "nobody"] if self.rewritten else [f"peers{rank}"]:
                    of_rank.append({ids[name]: where for name, where in (names | {"peers": peers}).items()})
            calls.append(of_rank)
        addresses = [f"{kind}{rank}" for kind in ("memory", "peers") for rank in range(self.ranks)]
        tables = {f"table{rank}": addresses for rank in range(self.ranks)}
        (part, _, frozen), *_ = parts
        scalars = {t.id: t.value for t in frozen.tensors if t.value is not None}
        launches = [p.outline for p, *_ in parts]
        return check_ranks(source or self.source, part.engine.entry, launches, memory, calls, tables, scalars, build)

    def hold(self, build: Build, source: str | None = None) -> None:
        """Wrong if a run, in any schedule, makes anything but what is expected, or ranks have different bits."""
        residual, made = self.expected()
        for found in self.run(build, source):
            sums = [read(found[f"residual{rank}"], torch.bfloat16, residual) for rank in range(self.ranks)]
            if any(not torch.equal(one, sums[0]) for one in sums):
                raise Wrong("ranks have different bits")
            if self.out is BF16:
                names = [f"{rank}.{self.calls % 2}" for rank in range(self.ranks)]
            else:
                names = [f"out{rank}" for rank in range(self.ranks)]
                if not torch.equal(sums[0], residual):
                    raise Wrong("the sum has other bits than that of float32 in the order of ranks")
            outs = [read(found[name], TORCH[self.out], residual) for name in names]
            tolerance = 0.02 if self.out is BF16 else 1 / 16
            for y, exact in zip((sums[0], *outs), (residual, *made), strict=True):
                if not torch.allclose(y.double(), exact.double(), rtol=tolerance, atol=0.02):
                    raise Wrong(f"{y} is not {exact}")

    @property
    def source(self) -> str:
        (found,) = {part.engine.source(part.facts, part.knobs) for part, *_ in self.parts()}  # which knows no rank
        return found.replace(MEETS, REWRITES + MEETS) if self.rewritten else found

    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The residual, of one call or of inputs that stay bit by bit, and what each rank's last call makes,
        unrounded."""
        given = self.inputs()
        residual, x = given["residual"], [given[f"x{rank}"] for rank in range(self.ranks)]
        for _ in range(self.calls):
            total = x[0].float()
            for other in x[1:]:
                total = total + other.float()
            total = total + residual.float()
            residual = total.to(torch.bfloat16)
            weights = (given[f"weight{rank}"].double() for rank in range(self.ranks))
            made = [oracle.rmsnorm(residual.double(), weight, EPS)[0] for weight in weights]
            if self.out is not BF16:
                made = [y * SCALE for y in made]
            else:
                x = [y.to(torch.bfloat16) for y in made]
        return residual, made


def bytes_of(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes()


def read(content: bytes, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).view(like.shape)
