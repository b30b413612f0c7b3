// A row program for few long rows: each row is spread over CTAS_PER_ROW CTAs, and all CTAs run at the same time.
//
// A row is cut into pieces of PIECE elements. Thread j % THREADS_PER_ROW of the row's threads has piece j. CTAs meet at
// the grid barrier, once behind each phase. The leaves of a sum's tree are chunks of CHUNK elements: a piece, or the
// pieces of two neighbouring threads. All arithmetic is float32.
//
// A pass is the part of a row that its threads hold in registers. A row of one pass is read once. Longer rows are
// multi-pass: each phase reads and computes them again. Every other phase goes through the passes backwards, and so begins
// with what the L2 has seen last. The sum is the same, as a + b is b + a.
//
// Phase 0 precedes all reductions of a row. Phase P + 1 needs the results of those behind phase P.
#include "graphfuse/convert.cuh"
#include "graphfuse/divide.cuh"
#include "graphfuse/grid.cuh"
#include "graphfuse/grid_reduce.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/ranks.cuh"
#include "graphfuse/reduce.cuh"
#include "graphfuse/rows.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

// This problem: constants, and what codegen.rowwise prints.
#include "generated.cuh"
#include "graphfuse/along.cuh"

namespace {

using gf::at_least_one;

using Sums = gf::GridReduction<gf::Add, CTAS_PER_ROW, THREADS, HALVED ? 2 : 1, at_least_one(MOST_SUMS)>;
using Maxima = gf::GridReduction<gf::Max, CTAS_PER_ROW, THREADS, 1, at_least_one(MOST_MAXIMA)>;
constexpr int LEFT = (MOST_SUMS + MOST_MAXIMA) * Sums::EACH;  // floats that the CTAs of a row leave behind a phase

/// Where the CTAs of a row meet. Phases take turns in two places in memory: those that write in one have passed the
/// barrier behind which all have read it.
struct Meeting {
  Sums::Shared& sums;
  Maxima::Shared& maxima;
  float* memory;
  gf::u32 cta;  // of the row

  template <int PHASE>
  GF_DEVICE float* place() const {
    return memory + PHASE % 2 * LEFT;
  }
};

/// A thread's partial sums and maxima of a row, behind a phase.
template <int PHASE>
struct Parts {
  gf::Passes<gf::Add, PASSES> sums[at_least_one(SUMS_OF_ROW[PHASE])];
  float maxima[at_least_one(MAXIMA[PHASE])];
};

/// The sum of products of the piece. If two threads share a chunk, both get its sum.
GF_DEVICE float sum_products(const float (&x)[PIECE], const float (&y)[PIECE]) {
  float sum = gf::sum_products<HALF>(x, y, 0);
  if constexpr (HALVED) {
    sum += gf::shuffle_xor(sum, 1);
  } else if constexpr (HALF < CHUNK) {
    sum += gf::sum_products<HALF>(x, y, HALF);
  }
  return sum;
}

template <int PHASE>
GF_DEVICE void run(const Row& row, Held (&held)[STEPS], const Operands& operands, const PerRow& per_row,
                   float (&largest)[AMAXES], Parts<PHASE>& parts) {
  constexpr int SUMS = SUMS_OF_ROW[PHASE];
  Phase<PHASE>::start(parts.maxima);
#pragma unroll 1
  for (int i = 0; i < PASSES; ++i) {
    const Index pass = gf::Passes<gf::Add, PASSES>::place(PHASE % 2 == 0 ? i : PASSES - 1 - i);
    typename Phase<PHASE>::Rows rows[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = first_piece(step, pass);
      rows[step] = Phase<PHASE>::any_rows();
      if (in_row(row.thread + at)) {
        rows[step] = Phase<PHASE>::read_rows(row, at);
      }
    }
    float chunks[at_least_one(SUMS)][STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = first_piece(step, pass);
      const bool inside = in_row(row.thread + at);
      float x[at_least_one(SUMS)][PIECE], y[at_least_one(SUMS)][PIECE];
      Phase<PHASE>::run(row, at, inside, rows[step], read_columns<Phase<PHASE>>(row, at), held[step], operands, per_row,
                        largest, parts.maxima, x, y);
#pragma unroll
      for (int sum = 0; sum < SUMS; ++sum) {
        const float products = sum_products(x[sum], y[sum]);
        chunks[sum][step] = inside ? products : 0.0f;
      }
    }
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
      parts.sums[sum].add(i, gf::tree<gf::Add>(chunks[sum]));
    }
  }
}

/// Combines the partial results of a row's threads, behind a phase.
template <int PHASE>
GF_DEVICE Joined<PHASE> join(const Parts<PHASE>& parts, const Meeting& meeting) {
  constexpr int SUMS = SUMS_OF_ROW[PHASE];
  const Sums sums = {meeting.sums, meeting.place<PHASE>(), meeting.cta};
  const Maxima maxima = {meeting.maxima, meeting.place<PHASE>() + SUMS * Sums::EACH, meeting.cta};
  if constexpr (SUMS > 0) {
    float totals[SUMS];
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
      totals[sum] = parts.sums[sum].total();
    }
    sums.leave(totals);
  }
  if constexpr (MAXIMA[PHASE] > 0) {
    maxima.leave(parts.maxima);
  }
  gf::grid_barrier();
  Joined<PHASE> joined;
  if constexpr (SUMS > 0) {
    sums.collect(joined.sums);
  }
  if constexpr (MAXIMA[PHASE] > 0) {
    maxima.collect(joined.maxima);
  }
  return joined;
}

/// Phase PHASE and those after it. before: partial results of the phase before.
template <int PHASE>
GF_DEVICE void run_later(const Row& row, Held (&held)[STEPS], const Operands& operands, PerRow& per_row,
                         float (&largest)[AMAXES], const Parts<PHASE - 1>& before, const Meeting& meeting,
                         bool writes_rows) {
  const Joined<PHASE - 1> joined = join<PHASE - 1>(before, meeting);
  per_row.begin(gf::Number<PHASE>(), row, operands, joined.sums, joined.maxima);
  if (writes_rows) {
    per_row.store(gf::Number<PHASE>(), row);
  }
  Parts<PHASE> parts;
  run<PHASE>(row, held, operands, per_row, largest, parts);
  if constexpr (PHASE < LAST_PHASE) {
    run_later<PHASE + 1>(row, held, operands, per_row, largest, parts, meeting, writes_rows);
  }
}

}  // namespace

/// Strides are in bytes from one row to the next. The launch is cooperative, and CTAs i * CTAS_PER_ROW and those after it
/// take row i.
GF_DEVICE void problem::start(const Arguments& a) {
  const gf::u32 cta = gf::block_index() % CTAS_PER_ROW;
  const RowIndex index = gf::block_index() / CTAS_PER_ROW;
  const Index thread = (gf::thread_index() / gf::WARP * CTAS_PER_ROW + cta) * gf::WARP + gf::lane();
  Row row = row_of(a, index, thread);
  locate(row, a, index);
  complete(row, a, index);
  const Operands operands = operands_of(a);
  GF_SHARED(Sums::Shared, sums, 1);
  GF_SHARED(Maxima::Shared, maxima, 1);
  const Meeting meeting = {*sums, *maxima, static_cast<float*>(a.scratch) + i64(index) * 2 * LEFT, cta};
  PerRow per_row;
  const float none[1] = {};
  per_row.begin(gf::Number<0>(), row, operands, none, none);
  const bool writes_rows = thread == 0;
  if (writes_rows) {
    per_row.store(gf::Number<0>(), row);
  }

  Held held[STEPS];
  float largest[AMAXES] = {};
  Parts<0> parts;
  run<0>(row, held, operands, per_row, largest, parts);
  run_later<1>(row, held, operands, per_row, largest, parts, meeting, writes_rows);
  raise_amaxes(row, largest);
}
