"""Access to CUDA: devices, NVRTC, the kernel cache, launches and buffers."""
