// Programmatic dependent launch: overlap with the kernels before and after on the same stream, where the launch asks
// for it. Nothing happens below compute capability 9.0 and on a CPU.
#pragma once
#include "graphfuse/platform.cuh"

namespace gf {

/// Waits until the kernels before have ended and their writes are visible. Before that, a kernel may read only what
/// they do not write.
GF_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Triggers the dependent launch: the next kernel may begin once every CTA has called this, or ended.
GF_DEVICE void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gf
