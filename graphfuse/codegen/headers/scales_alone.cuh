// The scales of blocks without their elements: once more in another order, or of values that nobody keeps quantized.
#pragma once
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/quantize.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// Stores the scale that each BLOCK elements would have as T; all lanes of a warp call it together. Arguments as
/// store_blocks has them.
template <class T, int BLOCK, Access ACCESS, class Scales, int PIECE>
GF_DEVICE void store_scales(Scales scales, i64 thread, i64 at, const float (&values)[PIECE], bool stored) {
  constexpr int LANES = BLOCK / PIECE;
  static_assert(BLOCK % PIECE == 0 && LANES <= WARP, "a block is whole pieces of one warp");
  float amax = max_magnitude(values);
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) {
    amax = max(amax, shuffle_xor(amax, mask));
  }
  const u32 scale = block_scale<T>(amax);
  if (stored && thread % LANES == 0) {
    store_pack<sizeof(typename Blocks<T>::Scale), ACCESS>(scales.of(thread / LANES, at / LANES), {{scale}});
  }
}

}  // namespace gf
