"""Row programs: what a fused kernel computes, on tensors seen as rows x columns.

`program` is the whole, `steps` its parts, `emitter` the writer of steps. `contraction`, `picking` and `pruning` make
fewer steps of many. `check_program` holds the rules.
"""
