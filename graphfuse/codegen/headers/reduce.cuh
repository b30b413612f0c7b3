// Sums over a row in an order that does not depend on how the row is spread over threads.
//
// Part j of a row belongs to thread j / COUNT % THREADS_PER_ROW, which takes COUNT neighbouring ones a
// step. The sum is the binary tree over j, padded with zeros to a power of two, that joins the highest
// bit of j first: steps, then warps, then lanes, then the COUNT. Another THREADS_PER_ROW or COUNT only
// moves the boundaries between the four, and adding a padding zero changes no sum of squares, so the
// bits stay.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

/// The tree over parts[FIRST], parts[FIRST + STRIDE], ...: for eight
/// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). COUNT need not be a power of two.
template <int COUNT, int FIRST = 0, int STRIDE = 1>
GF_DEVICE float tree_sum(const float (&parts)[COUNT]) {
  if constexpr (FIRST + STRIDE < COUNT) {
    return tree_sum<COUNT, FIRST, 2 * STRIDE>(parts) + tree_sum<COUNT, FIRST + STRIDE, 2 * STRIDE>(parts);
  } else {
    return parts[FIRST];
  }
}

/// The tree over the threads of each row, whose total all of them get.
/// All threads of the CTA call it, once.
template <int THREADS_PER_ROW, int THREADS, int COUNT = 1>
struct RowSum {
  static constexpr int WARPS = THREADS_PER_ROW / WARP;  // of one row; 0 if rows share a warp
  static constexpr int LANES = THREADS_PER_ROW < WARP ? THREADS_PER_ROW : WARP;
  // Up to here every warp reads the partial sums of all warps of its row, which costs one
  // barrier. Beyond, those WARPS^2 reads would take longer than a second barrier.
  static constexpr bool ONE_BARRIER = WARPS <= 8;
  static constexpr int PARTS = COUNT * THREADS;
  static constexpr int SHARED_FLOATS = WARPS <= 1 ? 1 : ONE_BARRIER ? PARTS : PARTS + THREADS / THREADS_PER_ROW;

  float* shared;  // SHARED_FLOATS of the CTA

  GF_DEVICE static float over_lanes(float (&parts)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int mask = LANES / 2; mask > 0; mask /= 2) {
        parts[i] += shuffle_xor(parts[i], mask);
      }
    }
    return tree_sum(parts);
  }

  GF_DEVICE static float over_row(const float* parts) {
    float sums[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float part[WARPS];
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        part[warp] = parts[i * THREADS + warp * WARP];
      }
      sums[i] = tree_sum(part);
    }
    return over_lanes(sums);
  }

  GF_DEVICE float operator()(float (&parts)[COUNT]) {
    if constexpr (WARPS <= 1) {
      return over_lanes(parts);
    } else {
      const u32 thread = thread_index();
      const u32 in_row = thread % THREADS_PER_ROW;
      const u32 row_start = thread - in_row;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        shared[i * THREADS + thread] = parts[i];
      }
      barrier();
      if constexpr (ONE_BARRIER) {
        return over_row(shared + row_start + thread % WARP);
      } else {
        float* const total = shared + PARTS + thread / THREADS_PER_ROW;
        if (in_row < WARP) {
          const float sum = over_row(shared + thread);
          if (in_row == 0) {
            *total = sum;
          }
        }
        barrier();
        return *total;
      }
    }
  }
};

}  // namespace gf
