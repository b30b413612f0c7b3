"""Tuning: times the knobs that engines propose on this machine's GPU and keeps the best (``graphfuse.tables``)."""
