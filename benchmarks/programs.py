"""What `graphfuse bench NAME` leaves to programs of their own, by name."""

PROGRAMS = {"models": "graphfuse.benchmarks.models"}
"""Modules with main(arguments, program, no_gpu): a command line, how it is called, the exit code without a GPU."""
