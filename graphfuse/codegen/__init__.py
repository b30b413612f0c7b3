"""From facts and knobs to CUDA C++ source text. Pure functions; nothing here touches a device."""
