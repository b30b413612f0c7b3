"""Attention by torch's own kernels: operators, and the passes that put them into graphs."""
