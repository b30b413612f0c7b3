"""The data that planning ranks by: tuned knobs (entries, their order, their files), and the order of engines."""
