"""The hardware layer of generated kernels (namespace ``gf``), as package data.

Kernels say ``#include "graphfuse/NAME.cuh"`` and hold no intrinsic and no assembly of
their own. Every header has a branch for the GPU and one for plain C++, so the same
kernel source also compiles for a CPU. ``render`` inlines them; nothing else is included.
"""
