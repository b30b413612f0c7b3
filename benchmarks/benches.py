"""The benches there are, by name."""

from graphfuse.benchmarks import rmsnorm_silu

BENCHES = {bench.name: bench for bench in (rmsnorm_silu.BENCH,)}
