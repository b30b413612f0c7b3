"""Row programs: what a fused kernel computes of tensors seen as rows x columns.

`program` is the whole, `steps` what it is made of, `emitter` where they are written. `expansions` and `contraction`
make steps of the nodes of a graph.
"""
