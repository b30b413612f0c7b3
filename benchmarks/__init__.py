"""How fast the kernels are, and the peers beside them in the same process and run.

A bench is data: cases, peers and targets (`bench.Bench`; `rmsnorm_silu` is one). `session`
measures it by the protocol of `runtime.timing` into a record; `tables` and `plot` read
records only, and `render` puts both into the docs.
"""

if __name__ != "graphfuse.benchmarks":  # found on the path in the repository's root: all would exist twice
    raise ImportError("this folder is installed under another name: import graphfuse.benchmarks")
