"""Generation of CUDA C++ source from facts and knobs, by pure functions. Nothing here uses a device."""
