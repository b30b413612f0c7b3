"""The hardware layer of generated kernels (namespace ``gf``), as package data.

Kernels include ``"graphfuse/NAME.cuh"``, and have no intrinsics and no assembly. Every header has a branch for the GPU
and one for plain C++, so a kernel's source also compiles for a CPU. ``render`` inlines the headers; nothing else is
included.
"""
