// Pieces that lie across rows: one column's elements of neighbouring rows.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/reduce.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// The one element in `bits`, COUNT times.
template <class T, int BYTES, int COUNT>
GF_DEVICE void spread(const Bytes<BYTES>& bits, float (&values)[COUNT]) {
  const float value = decode<T>(bits.word[0]);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = value;
  }
}

/// Stores one value of each row, `apart` bytes from one row to the next. first: the address of the first row's.
template <class T, int COUNT>
GF_DEVICE void store_apart(void* first, i64 apart, const float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    store_pack<sizeof(T)>(offset(first, i * apart), {{encode<T>(values[i])}});
  }
}

/// Shared memory of a CTA, for partial results of ROWS rows from GROUPS groups of threads.
template <int GROUPS, int ROWS>
struct alignas(16) GroupParts {
  float parts[GROUPS][ROWS];
  float totals[ROWS];
};
template <int ROWS>
struct GroupParts<1, ROWS> {};

/// The tree of reduce.cuh over GROUPS groups of threads that have parts of the same rows. Thread t is of group t /
/// ACROSS, and has PIECE neighbouring rows. The group's number is the lowest bits of a part's number. All threads of a
/// CTA call it.
///
/// Each row is joined by one thread. Rows lie so that the accesses of neighbouring threads do side by side.
template <class Join, int ACROSS, int GROUPS, int PIECE>
struct GroupReduction {
  static constexpr int ROWS = ACROSS * PIECE;
  static constexpr int VECTOR = PIECE < 4 ? PIECE : 4;  // rows that lie together

  /// Can be reused at once. A thread writes parts again only behind the second barrier, which follows their last read,
  /// and totals only behind the first, which follows theirs.
  GroupParts<GROUPS, ROWS>& shared;

  GF_DEVICE static int place(int first) { return (first / VECTOR * ACROSS + int(thread_index()) % ACROSS) * VECTOR; }

  /// The tree over the parts of row `place` from group FIRST on, every STRIDE-th.
  template <int FIRST, int STRIDE>
  GF_DEVICE float over(int place) const {
    if constexpr (FIRST + STRIDE < GROUPS) {
      return Join::join(over<FIRST, 2 * STRIDE>(place), over<FIRST + STRIDE, 2 * STRIDE>(place));
    } else {
      return shared.parts[FIRST][place];
    }
  }

  /// parts: of each row of the thread; replaced by the rows' results.
  GF_DEVICE void operator()(float (&parts)[PIECE]) const {
    if constexpr (GROUPS > 1) {
      const int thread = thread_index();
#pragma unroll
      for (int first = 0; first < PIECE; first += VECTOR) {
        Pack<4 * VECTOR> pack;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          pack.word[i] = as_bits(parts[first + i]);
        }
        store_pack<4 * VECTOR>(&shared.parts[thread / ACROSS][place(first)], pack);
      }
      barrier();
#pragma unroll
      for (int row = 0; row < ROWS; row += ACROSS * GROUPS) {
        if (row + thread < ROWS) {
          shared.totals[row + thread] = over<0, 1>(row + thread);
        }
      }
      barrier();
#pragma unroll
      for (int first = 0; first < PIECE; first += VECTOR) {
        const Pack<4 * VECTOR> pack = load_pack<4 * VECTOR, Access::USUAL>(&shared.totals[place(first)]);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          parts[first + i] = as_float(pack.word[i]);
        }
      }
    }
  }
};

}  // namespace gf
