// Sums and maxima over a row, in an order that does not depend on how the row is spread over threads.
//
// Thread j / COUNT % THREADS_PER_ROW has part j of a row, and takes COUNT neighbouring parts a step. The sum is the
// binary tree over j, padded with zeros to a power of two, that joins the highest bit of j first: steps, passes, then
// CTAs, warps and lanes, then the COUNT. Another THREADS_PER_ROW or COUNT only moves the boundaries between these
// levels. Adding a padding zero changes no sum of squares. So the bits stay the same.
#pragma once
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/send.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

struct Add {
  GF_DEVICE static float join(float a, float b) { return a + b; }
};
struct Max {
  GF_DEVICE static float join(float a, float b) { return max(a, b); }
};

GF_DEVICE constexpr int at_least_one(int count) { return count > 0 ? count : 1; }

/// How many phases before number `end` have any. counts: by phase.
template <int PHASES>
GF_DEVICE constexpr int phases_with(const int (&counts)[PHASES], int end = PHASES) {
  int found = 0;
  for (int phase = 0; phase < end; ++phase) {
    found += counts[phase] > 0;
  }
  return found;
}

/// The sum of COUNT products from number `first` on, accumulated in order.
template <int COUNT, int PIECE>
GF_DEVICE float sum_products(const float (&x)[PIECE], const float (&y)[PIECE], int first) {
  float sum = 0.0f;
#pragma unroll
  for (int i = first; i < first + COUNT; ++i) {
    sum = fma(x[i], y[i], sum);
  }
  return sum;
}

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

/// Levels of the tree over `count` parts, a power of two.
GF_DEVICE constexpr int levels(int count) { return count == 1 ? 0 : 1 + levels(count / 2); }

/// The same tree over parts that come one by one, of a row that is read in PASSES passes, a power of two. Part number i
/// must be that of pass `place(i)`.
template <class Join, int PASSES>
struct Passes {
  static constexpr int LEVELS = levels(PASSES);
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

/// The partial results that CTAs of a row exchange through distributed shared memory: FLOATS of each CTA, by its rank.
/// No CTA ends before all have arrived. A slot is reused two rows later. By then every reader has sent its part of the
/// row between, so values are all that a thread waits for, and no barrier is needed.
template <int CTAS, int FLOATS>
struct Exchange {
  Mbarrier arrived;
  float sent[CTAS][FLOATS];
};
template <int FLOATS>
struct Exchange<1, FLOATS> {};

/// The tree over the threads of each row. All of them get the result. THREADS: of a CTA. A row of more threads is
/// spread over the CTAs of a cluster. All threads of the CTA, or cluster, call it. ALIKE: how many neighbouring threads
/// have the same parts, which count once. MOST: how many values of a row are reduced at a time.
template <class Join, int THREADS_PER_ROW, int THREADS, int COUNT = 1, int ALIKE = 1, int MOST = 1>
struct RowReduction {
  static constexpr int CTAS = THREADS_PER_ROW <= THREADS ? 1 : THREADS_PER_ROW / THREADS;  // of one row
  static constexpr int ROW_THREADS = THREADS_PER_ROW / CTAS;  // of one row in one CTA
  static constexpr int WARPS = ROW_THREADS / WARP;  // likewise; 0 if rows share a warp
  static constexpr int LANES = ROW_THREADS < WARP ? ROW_THREADS : WARP;
  // Up to here every warp reads the partial results of all warps of its row, which costs one
  // barrier. Beyond, those WARPS^2 reads would take longer than a second barrier.
  static constexpr bool ONE_BARRIER = WARPS <= 8;
  static constexpr int EACH = COUNT * THREADS;  // parts of a value
  static constexpr int PARTS = MOST * EACH;
  static constexpr int TOTALS = WARPS <= 1 ? 1 : ONE_BARRIER ? PARTS : PARTS + MOST * THREADS / ROW_THREADS;

  /// Of a CTA. A reduction of row after row alternates between two.
  struct Shared : Exchange<CTAS, PARTS> {
    float totals[TOTALS];
  };

  Shared& shared;

  /// Initializes `count` of them, called by all threads of the CTA or cluster. `begun` is called before their first
  /// use, as late as possible.
  GF_DEVICE static void begin(Shared* shared, int count) {
    if constexpr (CTAS > 1) {
      if (thread_index() == 0) {
        for (int i = 0; i < count; ++i) {
          shared[i].arrived.init(1);
        }
        mbarrier_fence_init();
      }
      cluster_arrive_relaxed();
    }
  }

  GF_DEVICE static void begun() {
    if constexpr (CTAS > 1) {
      cluster_wait();
    }
  }

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

  /// phase: parity of the mbarrier.
  template <int VALUES>
  GF_DEVICE void over_ctas(float (&parts)[VALUES][COUNT], u32 phase) {
    const u32 thread = thread_index();
    const u32 rank = cluster_rank();
    if (thread == 0) {
      shared.arrived.arrive_expect((CTAS - 1) * VALUES * EACH * sizeof(float));
    }
#pragma unroll
    for (int i = 0; i < VALUES * COUNT; ++i) {
#pragma unroll
      for (u32 next = 1; next < CTAS; ++next) {
        send(parts[i / COUNT][i % COUNT], &shared.sent[rank][i * THREADS + thread], shared.arrived,
             (rank + next) % CTAS);
      }
    }
    shared.arrived.wait(phase);
#pragma unroll
    for (int i = 0; i < VALUES * COUNT; ++i) {
      float part[CTAS];
#pragma unroll
      for (u32 cta = 0; cta < CTAS; ++cta) {
        part[cta] = cta == rank ? parts[i / COUNT][i % COUNT] : shared.sent[cta][i * THREADS + thread];
      }
      parts[i / COUNT][i % COUNT] = tree<Join>(part);
    }
  }

  /// turn: how often this shared memory was used before.
  template <int VALUES>
  GF_DEVICE void operator()(float (&parts)[VALUES][COUNT], float (&results)[VALUES], u32 turn = 0) {
    static_assert(VALUES <= MOST, "there is no room for more");
    if constexpr (CTAS > 1) {
      over_ctas(parts, turn % 2);
    }
    if constexpr (WARPS <= 1) {
#pragma unroll
      for (int value = 0; value < VALUES; ++value) {
        results[value] = over_lanes(parts[value]);
      }
    } else {
      const u32 thread = thread_index();
      const u32 in_row = thread % ROW_THREADS;
      const u32 row_start = thread - in_row;
#pragma unroll
      for (int i = 0; i < VALUES * COUNT; ++i) {
        shared.totals[i * THREADS + thread] = parts[i / COUNT][i % COUNT];
      }
      barrier();
      if constexpr (ONE_BARRIER) {
#pragma unroll
        for (int value = 0; value < VALUES; ++value) {
          results[value] = over_row(shared.totals + value * EACH + row_start + thread % WARP);
        }
      } else {
        float* const totals = shared.totals + PARTS + thread / ROW_THREADS * MOST;
        if (in_row < WARP) {
#pragma unroll
          for (int value = 0; value < VALUES; ++value) {
            const float result = over_row(shared.totals + value * EACH + thread);
            if (in_row == 0) {
              totals[value] = result;
            }
          }
        }
        barrier();
#pragma unroll
        for (int value = 0; value < VALUES; ++value) {
          results[value] = totals[value];
        }
      }
    }
  }

  /// For threads with one part of each value.
  template <int VALUES>
  GF_DEVICE void operator()(const float (&parts)[VALUES], float (&results)[VALUES], u32 turn = 0) {
    float each[VALUES][1];
#pragma unroll
    for (int value = 0; value < VALUES; ++value) {
      each[value][0] = parts[value];
    }
    (*this)(each, results, turn);
  }
};

/// The same tree for values of many rows, delayed: the results of a row are asked for after the parts of the next row
/// are known, which hides the latency of the exchange. For rows of several warps. All threads of the CTA, or cluster,
/// call in this order: give; for each further row wait, totals, give; then wait and totals.
template <class Join, int THREADS_PER_ROW, int THREADS, int ALIKE = 1, int VALUES = 1>
struct DelayedReduction {
  using Row = RowReduction<Join, THREADS_PER_ROW, THREADS, 1, ALIKE, VALUES>;

  typename Row::Shared* shared;  // two, made by Row::begin, for every other row

  /// row: its number, from 0 on.
  GF_DEVICE void give(const float (&parts)[VALUES][1], u32 row) const {
    auto& mine = shared[row % 2];
    const u32 thread = thread_index();
    if constexpr (Row::CTAS == 1) {
#pragma unroll
      for (int value = 0; value < VALUES; ++value) {
        mine.totals[value * THREADS + thread] = parts[value][0];
      }
    } else {
      const u32 rank = cluster_rank();
      if (thread == 0) {
        mine.arrived.arrive_expect(VALUES * THREADS_PER_ROW * sizeof(float));
      }
#pragma unroll
      for (int value = 0; value < VALUES; ++value) {
#pragma unroll
        for (u32 next = 0; next < Row::CTAS; ++next) {
          send(parts[value][0], &mine.sent[rank][value * THREADS + thread], mine.arrived, (rank + next) % Row::CTAS);
        }
      }
    }
  }

  GF_DEVICE void wait(u32 row) const {
    if constexpr (Row::CTAS == 1) {
      barrier();
    } else {
      shared[row % 2].arrived.wait(row / 2 % 2);
    }
  }

  GF_DEVICE void totals(float (&results)[VALUES], u32 row) const {
    const auto& mine = shared[row % 2];
    const u32 thread = thread_index();
    const u32 first = thread - thread % Row::ROW_THREADS + thread % WARP;
#pragma unroll
    for (int value = 0; value < VALUES; ++value) {
      float over_warps[Row::WARPS < 1 ? 1 : Row::WARPS];
#pragma unroll
      for (int warp = 0; warp < Row::WARPS; ++warp) {
        const u32 at = value * THREADS + first + warp * WARP;
        float over_ctas[Row::CTAS];
#pragma unroll
        for (int cta = 0; cta < Row::CTAS; ++cta) {
          if constexpr (Row::CTAS == 1) {
            over_ctas[cta] = mine.totals[at];
          } else {
            over_ctas[cta] = mine.sent[cta][at];
          }
        }
        over_warps[warp] = tree<Join>(over_ctas);
      }
      float joined[1] = {tree<Join>(over_warps)};
      results[value] = Row::over_lanes(joined);
    }
  }
};

}  // namespace gf
