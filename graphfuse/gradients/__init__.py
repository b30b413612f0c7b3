"""Gradients of graphs by the rules of their ops: ``differentiate``."""
