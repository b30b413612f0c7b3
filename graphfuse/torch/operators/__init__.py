"""Operators of torch with gradients: the graphs of each, and the formula that joins them."""
