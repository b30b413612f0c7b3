"""Row programs: what a fused kernel computes, on tensors seen as rows x columns.

`program` is the whole, `steps` its parts, `emitter` the writer of steps. `clamping`, `contraction`, `division`,
`picking`, `pruning` and `rounding` make fewer or cheaper ones. `check_program` holds the rules.
"""
