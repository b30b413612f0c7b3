"""Runs kernels without a GPU: their source is compiled as C++, threads are fibers, and a GPU's rules are checked.

``kernel.load`` runs kernels in this process, ``check.check`` in a program with sanitizers. Weak memory ordering,
approximate functions, registers and time are not modelled.
"""
