"""Runs kernels where there is no GPU: their own source as C++, threads as fibers, the machine's rules checked.

`load` is for execution in this process, `check` for a program with sanitizers. Weak memory,
approximate functions, registers and time are not modelled.
"""
