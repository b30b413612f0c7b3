// Overlap with the kernel before and after on the same stream, where the launch asks for it (programmatic
// dependent launch). Nothing before compute capability 9.0 and on a CPU.
#pragma once
#include "graphfuse/platform.cuh"

namespace gf {

/// Until the kernels before are over and what they wrote is seen. Before it, only what they do not write.
GF_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel begin once all CTAs have come here or ended.
GF_DEVICE void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gf
