"""Runs kernels without a GPU: their source as C++, threads as fibers, the machine's rules checked.

`load` runs kernels in this process, `check` in a program with sanitizers. Weak memory, approximate functions, registers
and time are not modelled.
"""
