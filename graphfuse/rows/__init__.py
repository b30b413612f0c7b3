"""Row programs: what a fused kernel computes, on tensors seen as rows x columns.

`program` is the whole, `steps` its parts, `emitter` the writer of steps. `expansions` and `contraction` turn nodes of a
graph into steps.
"""
