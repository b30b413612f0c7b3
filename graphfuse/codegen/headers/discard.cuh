// Memory that is not read any more.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// Bytes of a line of the L2.
constexpr int LINE = 128;

/// Gives up what a line of global memory has, so that the L2 need not write it to memory. What is read there before it is
/// written again is undefined. The address is a multiple of LINE.
GF_DEVICE void discard(void* line GF_SITE) {
#ifdef __CUDACC__
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
#else
  Bytes<LINE> undefined;
  __builtin_memset(&undefined, 0xff, LINE);
  store<LINE, 16>(line, undefined GF_FROM);
#endif
}

}  // namespace gf
