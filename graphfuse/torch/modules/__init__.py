"""Modules that replace torch's, made of the operators."""
