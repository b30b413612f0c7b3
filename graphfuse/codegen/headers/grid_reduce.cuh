// Sums and maxima over rows that are spread over CTAs of a grid, which meet at the grid barrier.
//
// A row's thread has the number (warp * CTAS + cta) * WARP + lane. The highest bits are those of the warp, so the tree of
// reduce.cuh joins the warps of a CTA first, in its shared memory, then the CTAs, and the lanes last. So a CTA leaves one
// value for each lane in global memory, however many threads it has.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/reduce.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

/// The tree over the threads of a row, of CTAS CTAs of THREADS threads. All of them get the result. ALIKE: how many
/// neighbouring threads have the same parts, which count once. MOST: how many values of a row are reduced at a time. All
/// threads of the grid call: leave; grid_barrier; collect.
template <class Join, int CTAS, int THREADS, int ALIKE = 1, int MOST = 1>
struct GridReduction {
  static constexpr int WARPS = THREADS / WARP;
  static constexpr int FEW = WARPS < 8 ? WARPS : 8;
  static constexpr int READERS = CTAS < FEW ? CTAS : FEW;  // warps that read what CTAs left, which all warps read then
  static constexpr int EACH = CTAS * WARP;  // floats that the CTAs of a row leave of each value

  /// Of a CTA. Nobody writes what others may still read: the grid barrier comes between.
  struct Shared {
    float left[MOST * THREADS];
    float collected[MOST * READERS * WARP];
  };

  Shared& shared;
  float* memory;  // EACH floats for each value, which the CTAs of the row share
  u32 cta;        // of the row

  template <int VALUES>
  GF_DEVICE void leave(const float (&parts)[VALUES]) const {
    static_assert(VALUES <= MOST, "there is no room for more");
    const u32 thread = thread_index();
#pragma unroll
    for (int value = 0; value < VALUES; ++value) {
      shared.left[value * THREADS + thread] = parts[value];
    }
    barrier();
#pragma unroll
    for (int first = 0; first < VALUES; first += WARPS) {
      const int value = first + thread / WARP;
      if (value < VALUES) {
        float part[WARPS];
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
          part[warp] = shared.left[value * THREADS + warp * WARP + lane()];
        }
        store_pack<4>(memory + value * EACH + cta * WARP + lane(), {{as_bits(tree<Join>(part))}});
      }
    }
  }

  template <int VALUES>
  GF_DEVICE void collect(float (&results)[VALUES]) const {
    constexpr int ROUNDS = CTAS / READERS;
    const u32 thread = thread_index();
    if (thread < READERS * WARP) {
#pragma unroll
      for (int value = 0; value < VALUES; ++value) {
        float part[ROUNDS];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
          const float* const left = memory + value * EACH + round * READERS * WARP + thread;
          part[round] = as_float(load_pack<4, Access::USUAL>(left).word[0]);
        }
        shared.collected[value * READERS * WARP + thread] = tree<Join>(part);
      }
    }
    barrier();
#pragma unroll
    for (int value = 0; value < VALUES; ++value) {
      float part[READERS];
#pragma unroll
      for (int reader = 0; reader < READERS; ++reader) {
        part[reader] = shared.collected[(value * READERS + reader) * WARP + lane()];
      }
      float joined[1] = {tree<Join>(part)};
      results[value] = RowReduction<Join, WARP, WARP, 1, ALIKE>::over_lanes(joined);
    }
  }
};

}  // namespace gf
