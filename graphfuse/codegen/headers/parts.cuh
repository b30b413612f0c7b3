// Parts of a row: neighbouring columns that are joined by themselves, as for a scale of each.
//
// The tree joins neighbours first: elements of a piece, then pieces of neighbouring lanes. So another PIECE changes no
// bit of a sum.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/reduce.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// The tree over COUNT values from number FIRST on, a power of two.
template <class Join, int COUNT, int FIRST, int PIECE>
GF_DEVICE float join_neighbours(const float (&values)[PIECE]) {
  if constexpr (COUNT > 1) {
    return Join::join(join_neighbours<Join, COUNT / 2, FIRST>(values),
                      join_neighbours<Join, COUNT / 2, FIRST + COUNT / 2>(values));
  } else {
    return values[FIRST];
  }
}

/// All elements of a part of PART columns joined, for each of them. This thread has `values`, and neighbouring lanes
/// have the rest. All lanes of a warp call it together.
template <class Join, int PART, int PIECE>
GF_DEVICE void join_part(const float (&values)[PIECE], float (&joined)[PIECE]) {
  constexpr int LANES = PART / PIECE;
  static_assert(PART % PIECE == 0 && LANES <= WARP, "a part is whole pieces of one warp");
  float result = join_neighbours<Join, PIECE, 0>(values);
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) {
    result = Join::join(result, shuffle_xor(result, mask));
  }
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    joined[i] = result;
  }
}

/// Stores what is one a part, of LANES pieces. first: of the part of the thread's first piece. apart: bytes from one part
/// to the next. at: pieces from the thread's first one to this.
template <class T, int LANES, Access ACCESS>
GF_DEVICE void store_part(void* first, i64 apart, i64 thread, i64 at, float value, bool stored) {
  if (stored && thread % LANES == 0) {
    store_pack<bits_of<T> / 8, ACCESS>(offset(first, at / LANES * apart), {{encode<T>(value)}});
  }
}

}  // namespace gf
