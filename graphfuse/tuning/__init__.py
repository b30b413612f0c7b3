"""Tuning: timing of the proposed knobs on this machine's GPU, and storage of the fastest
(``graphfuse.tuned_tables``)."""
