"""Measurements with command lines of their own, each `python -m graphfuse.benchmarks.programs.NAME`, and what makes the
docs from records.

They need a clone of the repository: installed packages do not have this folder.
"""
