"""Row programs: what a fused kernel computes, on tensors viewed as rows x columns.

`program` has the programs, `steps` their parts, `emitter` appends steps. `clamping`, `contraction`, `division`,
`picking`, `pruning` and `rounding` replace steps by fewer or cheaper ones. `check_program` checks the rules.
"""
