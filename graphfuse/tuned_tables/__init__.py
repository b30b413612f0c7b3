"""Data for ranking plans: tuned knobs (entries, their order, their files), and the order of engines."""
