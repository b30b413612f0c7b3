"""Modules that replace torch's norms and call the operators."""
