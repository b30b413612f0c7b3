"""Access to CUDA: devices, NVRTC, the cache of compiled kernels, launches and buffers."""
