"""Models of convolutions: group norms, convolutions, their layout, and whole autoencoders."""
