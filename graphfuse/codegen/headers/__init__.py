"""The hardware layer of generated kernels (namespace ``gf``), as package data.

Kernels include ``"graphfuse/NAME.cuh"``, and contain no intrinsics or assembly themselves. Every header has a branch
for the GPU and one for plain C++, so a kernel's source also compiles for a CPU. ``render`` inlines the headers; nothing
else is included.
"""
