"""Operators of torch with gradients: their graphs, and the autograd formula that joins the graphs."""
