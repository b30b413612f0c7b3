// Sums and maxima over a row in an order that does not depend on how the row is spread over threads.
//
// Part j of a row belongs to thread j / COUNT % THREADS_PER_ROW, which takes COUNT neighbouring ones a
// step. The sum is the binary tree over j, padded with zeros to a power of two, that joins the highest
// bit of j first: steps, passes, then CTAs, warps and lanes, then the COUNT. Another THREADS_PER_ROW or
// COUNT only moves the boundaries between them, and adding a padding zero changes no sum of squares, so the
// bits stay.
#pragma once
#include "graphfuse/cluster.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

struct Add {
  GF_DEVICE static float join(float a, float b) { return a + b; }
};
struct Max {
  GF_DEVICE static float join(float a, float b) { return max(a, b); }
};

/// The tree over parts[FIRST], parts[FIRST + STRIDE], ...: for eight
/// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). COUNT need not be a power of two.
template <class Join, int COUNT, int FIRST = 0, int STRIDE = 1>
GF_DEVICE float tree(const float (&parts)[COUNT]) {
  if constexpr (FIRST + STRIDE < COUNT) {
    return Join::join(tree<Join, COUNT, FIRST, 2 * STRIDE>(parts), tree<Join, COUNT, FIRST + STRIDE, 2 * STRIDE>(parts));
  } else {
    return parts[FIRST];
  }
}

/// The same tree over parts that come one by one, for a row that is read in several passes: of 2^LEVELS, number
/// i is to be that of pass `place(i)`.
template <class Join, int LEVELS>
struct Passes {
  float joined[LEVELS + 1];  // joined[l]: over 2^l parts that wait for their neighbours

  GF_DEVICE static int place(int i) {
    int pass = 0;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
      pass |= (i >> level & 1) << (LEVELS - 1 - level);
    }
    return pass;
  }

  GF_DEVICE void add(int i, float part) {
    bool carried = true;  // all bits of i below the level are set
#pragma unroll
    for (int level = 0; level <= LEVELS; ++level) {
      const bool waits = carried && !(i >> level & 1);
      part = carried && !waits ? Join::join(joined[level], part) : part;
      joined[level] = waits ? part : joined[level];
      carried = carried && !waits;
    }
  }

  GF_DEVICE float total() const { return joined[LEVELS]; }
};

/// The tree over the threads of each row, whose total all of them get. THREADS: a CTA's. Rows of more threads
/// than that are spread over the CTAs of a cluster. All threads of the CTA, or cluster, call it, once. ALIKE: how many
/// neighbouring threads have the same parts, which count once.
template <class Join, int THREADS_PER_ROW, int THREADS, int COUNT = 1, int ALIKE = 1>
struct RowReduction {
  static constexpr int CTAS = THREADS_PER_ROW <= THREADS ? 1 : THREADS_PER_ROW / THREADS;  // of one row
  static constexpr int ROW_THREADS = THREADS_PER_ROW / CTAS;  // of one row in one CTA
  static constexpr int WARPS = ROW_THREADS / WARP;  // likewise; 0 if rows share a warp
  static constexpr int LANES = ROW_THREADS < WARP ? ROW_THREADS : WARP;
  // Up to here every warp reads the partial results of all warps of its row, which costs one
  // barrier. Beyond, those WARPS^2 reads would take longer than a second barrier.
  static constexpr bool ONE_BARRIER = WARPS <= 8;
  static constexpr int PARTS = COUNT * THREADS;
  static constexpr int TOTALS = WARPS <= 1 ? 1 : ONE_BARRIER ? PARTS : PARTS + THREADS / ROW_THREADS;
  static constexpr int SHARED_FLOATS = CTAS == 1 ? TOTALS : TOTALS + PARTS;

  float* shared;  // SHARED_FLOATS of the CTA

  GF_DEVICE static float over_lanes(float (&parts)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int mask = LANES / 2; mask >= ALIKE; mask /= 2) {
        parts[i] = Join::join(parts[i], shuffle_xor(parts[i], mask));
      }
    }
    return tree<Join>(parts);
  }

  GF_DEVICE static float over_row(const float* parts) {
    float results[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float part[WARPS];
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        part[warp] = parts[i * THREADS + warp * WARP];
      }
      results[i] = tree<Join>(part);
    }
    return over_lanes(results);
  }

  GF_DEVICE void over_ctas(float (&parts)[COUNT]) {
#ifdef GF_HAS_CLUSTERS
    float* const exchanged = shared + TOTALS;
    const u32 thread = thread_index();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      exchanged[i * THREADS + thread] = parts[i];
    }
    cluster_barrier();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float part[CTAS];
#pragma unroll
      for (int cta = 0; cta < CTAS; ++cta) {
        part[cta] = *map_shared(exchanged + i * THREADS + thread, cta);
      }
      parts[i] = tree<Join>(part);
    }
    cluster_arrive();  // what the others read is there until they have
#endif
  }

  /// What follows the last use of the results: a CTA stays until the others have read what it shares.
  GF_DEVICE static void leave() {
#ifdef GF_HAS_CLUSTERS
    if constexpr (CTAS > 1) {
      cluster_wait();
    }
#endif
  }

  GF_DEVICE float operator()(float (&parts)[COUNT]) {
    if constexpr (CTAS > 1) {
      over_ctas(parts);
    }
    if constexpr (WARPS <= 1) {
      return over_lanes(parts);
    } else {
      const u32 thread = thread_index();
      const u32 in_row = thread % ROW_THREADS;
      const u32 row_start = thread - in_row;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        shared[i * THREADS + thread] = parts[i];
      }
      barrier();
      if constexpr (ONE_BARRIER) {
        return over_row(shared + row_start + thread % WARP);
      } else {
        float* const total = shared + PARTS + thread / ROW_THREADS;
        if (in_row < WARP) {
          const float result = over_row(shared + thread);
          if (in_row == 0) {
            *total = result;
          }
        }
        barrier();
        return *total;
      }
    }
  }
};

/// The same tree for the sums of many rows, one after the other, each of which is asked for when the parts of the next
/// are known, so that no thread waits for another as long as that takes. For rows of several warps. All threads
/// of the CTA, or cluster, take turns: give, then wait, total and give for each row that follows, then wait, total, leave.
template <class Join, int THREADS_PER_ROW, int THREADS>
struct DelayedReduction {
  using Row = RowReduction<Join, THREADS_PER_ROW, THREADS>;
  static constexpr int SHARED_FLOATS = 2 * THREADS;

  float* shared;  // SHARED_FLOATS of the CTA

  /// parity: 0 and 1 in turns, for who still reads the parts of the row before.
  GF_DEVICE void give(float part, int parity) const {
    shared[parity * THREADS + thread_index()] = part;
#ifdef GF_HAS_CLUSTERS
    if constexpr (Row::CTAS > 1) {
      cluster_arrive();
    }
#endif
  }

  GF_DEVICE void wait() const {
#ifdef GF_HAS_CLUSTERS
    if constexpr (Row::CTAS > 1) {
      cluster_wait();
      return;
    }
#endif
    barrier();
  }

  /// Of the parts that were given with this parity.
  GF_DEVICE float total(int parity) const {
    const u32 thread = thread_index();
    float* const parts = shared + parity * THREADS + (thread - thread % Row::ROW_THREADS + thread % WARP);
    float over_warps[Row::WARPS < 1 ? 1 : Row::WARPS];
#pragma unroll
    for (int warp = 0; warp < Row::WARPS; ++warp) {
      float over_ctas[Row::CTAS];
#pragma unroll
      for (int cta = 0; cta < Row::CTAS; ++cta) {
#ifdef GF_HAS_CLUSTERS
        over_ctas[cta] = Row::CTAS == 1 ? parts[warp * WARP] : *map_shared(parts + warp * WARP, cta);
#else
        over_ctas[cta] = parts[warp * WARP];
#endif
      }
      over_warps[warp] = tree<Join>(over_ctas);
    }
    float joined[1] = {tree<Join>(over_warps)};
    return Row::over_lanes(joined);
  }

  /// A CTA stays until the others have read what it shares.
  GF_DEVICE void leave() const {
#ifdef GF_HAS_CLUSTERS
    if constexpr (Row::CTAS > 1) {
      cluster_barrier();
    }
#endif
  }
};

}  // namespace gf
