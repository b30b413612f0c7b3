"""Tuning: times the proposed knobs on this machine's GPU, and stores the fastest (``graphfuse.tuned_tables``)."""
