"""What tests share: problems as data, references, calls, and how kernels are run and looked at."""
