// Integers, one per row or one in all, as the nearest float.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

template <>
GF_DEVICE float decode<int>(u32 bits) {
  return float(int(bits));
}

/// Like scalar of other types. All 64 bits count: an integer without an exact float is rounded. It is never taken for
/// one that is smaller by a multiple of 2^32.
GF_DEVICE float scalar(const i64* address GF_SITE) {
  const Bytes<8> words = load<8, 8, Access::READ_ONLY>(address GF_FROM);
  return float(i64(u64(words.word[1]) << 32 | words.word[0]));
}

}  // namespace gf
