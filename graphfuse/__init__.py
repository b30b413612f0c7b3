"""graphfuse: a cuDNN-frontend-style graph fusion engine."""
