// A row program with one RMS normalization, for rows of any length.
//
// A row is cut into pieces of PIECE elements. Piece j belongs to thread j % THREADS_PER_ROW of the
// row's threads, which may be a part of a warp or several CTAs of a cluster. Squares are summed by chunks of
// CHUNK elements, one or several to a piece, or half of one, whose other half a neighbour has. All arithmetic is
// float32. A pass is as much of the row as its threads hold in registers: with one pass what is needed again stays
// there, longer rows are read and worked out again in each phase.
//
// Phase 0 is what comes before the sum of squares, phase 1 what needs the inverse RMS, phase 2 what needs
// the largest magnitude of a row of phase 1.
#include "graphfuse/convert.cuh"
#include "graphfuse/dependent_launch.cuh"
#include "graphfuse/divide.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/reduce.cuh"
#include "graphfuse/rows.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

// This problem: constants, and what codegen.rowwise prints.
#include "generated.cuh"

namespace {

using gf::i64;
using namespace problem;

constexpr Index PIECES = COLUMNS / PIECE;
constexpr bool HALVED = PIECE < CHUNK;
constexpr int CHUNKS = HALVED ? 1 : PIECE / CHUNK;  // of a piece
constexpr int HALF = CHUNK == 8 ? 4 : CHUNK;        // elements that are summed one after another
constexpr bool TAILLESS = PIECES % (Index(STEPS) * PASSES * THREADS_PER_ROW) == 0;
constexpr gf::u32 LAST_CTAS = 1024;  // about what is resident
constexpr int CTAS_PER_ROW = THREADS_PER_ROW <= THREADS ? 1 : THREADS_PER_ROW / THREADS;

GF_DEVICE constexpr int levels(int count) { return count == 1 ? 0 : 1 + levels(count / 2); }
constexpr int PASS_LEVELS = levels(PASSES);

/// The row's first piece of a step. The steps of a pass lie far apart, as the sum joins them before the passes.
GF_DEVICE Index first_piece(int step, Index pass) { return (step * PASSES + pass) * THREADS_PER_ROW; }

// What later phases read is read before the sum if it takes few registers, as more would cost occupancy, or if AHEAD
// says so.
constexpr bool ROWS_FIRST = PASSES == 1 && (AHEAD || STEPS * int(sizeof(Phase1::Rows)) <= 4 * 16);
constexpr bool COLUMNS_FIRST = PASSES == 1 && (AHEAD || STEPS * int(sizeof(Phase1::Columns)) <= 4 * 4);

GF_DEVICE bool in_row(Index piece) { return TAILLESS || piece < PIECES; }

/// Pieces past the row's end are zero; those of a row that does not exist are anything, for they are never stored.
template <class Phase>
GF_DEVICE void read_rows(const Row& row, Index pass, typename Phase::Rows (&reads)[STEPS]) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    reads[step] = Phase::any_rows();
  }
  if (row.exists) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = first_piece(step, pass);
      reads[step] = {};
      if (in_row(row.thread + at)) {
        reads[step] = Phase::read_rows(row, at);
      }
    }
  }
}

template <class Phase>
GF_DEVICE typename Phase::Columns read_columns(const Row& row, Index at) {
  typename Phase::Columns reads = {};
  if (in_row(row.thread + at)) {
    reads = Phase::read_columns(row, at);
  }
  return reads;
}

GF_DEVICE float sum_half(const float (&values)[PIECE], int first) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    sum = gf::fma(values[first + i], values[first + i], sum);
  }
  return sum;
}

/// One sum for each chunk of the piece; of a chunk that two threads have, both get it.
GF_DEVICE void sum_squares(const float (&values)[PIECE], float (&sums)[CHUNKS]) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    sums[chunk] = sum_half(values, chunk * CHUNK);
    if constexpr (HALVED) {
      sums[chunk] += gf::shuffle_xor(sums[chunk], 1);
    } else if constexpr (HALF < CHUNK) {
      sums[chunk] += sum_half(values, chunk * CHUNK + HALF);
    }
  }
}

using RowSum = gf::RowReduction<gf::Add, THREADS_PER_ROW, THREADS, CHUNKS, HALVED ? 2 : 1>;
using RowMax = gf::RowReduction<gf::Max, THREADS_PER_ROW, THREADS>;

/// The largest of each of the values of a phase over the row's threads.
template <int PHASE, int SIZE>
GF_DEVICE void over_row(float (&maxima)[SIZE]) {
  if constexpr (MAXIMA[PHASE] > 0) {
    GF_SHARED(RowMax::Shared, shared, MAXIMA[PHASE]);
    RowMax::begin(shared, MAXIMA[PHASE]);
    RowMax::begun();
#pragma unroll
    for (int i = 0; i < MAXIMA[PHASE]; ++i) {
      float part[1] = {maxima[i]};
      maxima[i] = RowMax{shared[i]}(part);
    }
  }
}

/// All of a phase behind the first. reads, columns: what was read already.
template <class Phase, bool ROWS_READ, bool COLUMNS_READ, int SIZE>
GF_DEVICE void run(const Row& row, typename Phase::Rows (&rows)[STEPS], typename Phase::Columns (&columns)[STEPS],
                   Held (&held)[STEPS], const Operands& operands, const PerRow& per_row, float (&largest)[AMAXES],
                   float (&maxima)[SIZE]) {
#pragma unroll 1
  for (int pass = 0; pass < PASSES; ++pass) {
    if constexpr (!ROWS_READ) {
      read_rows<Phase>(row, pass, rows);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = first_piece(step, pass);
      if constexpr (!COLUMNS_READ) {
        columns[step] = read_columns<Phase>(row, at);
      }
      Phase::run(row, at, in_row(row.thread + at), rows[step], columns[step], held[step], operands, per_row, largest,
                 maxima);
    }
  }
}

}  // namespace

/// Strides are bytes from one row to the next. CTA i takes the rows from i * THREADS / THREADS_PER_ROW on. What a
/// CTA needs first comes first: the first six parameters are one line of the constant cache, others are awaited later.
extern "C" GF_KERNEL(THREADS) rmsnorm(KERNEL_PARAMETERS) {
  const i64 cta = gf::block_index();
  const Index thread = CTAS_PER_ROW == 1 ? gf::thread_index() % THREADS_PER_ROW
                                         : cta % CTAS_PER_ROW * THREADS + gf::thread_index();
  // The last CTA may have fewer rows than threads for them, which all meet at the shuffles and barriers.
  const i64 index = CTAS_PER_ROW == 1 ? cta * (THREADS / THREADS_PER_ROW) + gf::thread_index() / THREADS_PER_ROW
                                      : cta / CTAS_PER_ROW;
  ROW_AXES
  Row row = ROW;
  // Before anything in memory is touched: epsilon and weight too may be what the kernel before writes.
  gf::wait_for_previous_kernel();
  GF_SHARED(RowSum::Shared, shared, 1);
  RowSum::begin(shared, 1);
  Phase0::Rows rows0[STEPS];
  if constexpr (PASSES == 1) {
    read_rows<Phase0>(row, 0, rows0);
  }
  Phase1::Rows rows1[STEPS];
  if constexpr (ROWS_FIRST) {
    read_rows<Phase1>(row, 0, rows1);
  }
  Phase1::Columns columns1[STEPS];
  if constexpr (COLUMNS_FIRST) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      columns1[step] = read_columns<Phase1>(row, step * THREADS_PER_ROW);
    }
  }
  // CTAs that say so start at half the rate. The last ones are enough: the next kernel may begin once the others ended.
  if (gf::u32(cta) + LAST_CTAS >= gf::grid_size()) {
    gf::let_next_kernel_begin();
  }
  // Outputs whose parameters are not in the first line of the constant cache: the reads above wait for no other.
  ROW_LATER
  const Operands operands = OPERANDS;
  PerRow per_row;
  const float none[1] = {};
  per_row.begin0(row, operands, none);
  const bool writes_rows = thread == 0 && row.exists;
  if (writes_rows) {
    per_row.store0(row);
  }

  Held held[STEPS];
  float largest[AMAXES] = {};
  float maxima0[MAXIMA[0] + (MAXIMA[0] == 0)] = {};
  gf::Passes<gf::Add, PASS_LEVELS> sums[CHUNKS];
#pragma unroll 1
  for (int i = 0; i < PASSES; ++i) {
    const Index pass = gf::Passes<gf::Add, PASS_LEVELS>::place(i);
    if constexpr (PASSES > 1) {
      read_rows<Phase0>(row, pass, rows0);
    }
    float parts[CHUNKS][STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = first_piece(step, pass);
      const bool inside = in_row(thread + at);
      float x[PIECE];
      Phase0::run(row, at, inside, rows0[step], read_columns<Phase0>(row, at), held[step], operands, per_row, largest,
                  maxima0, x);
      if constexpr (!TAILLESS && !ZEROS_STAY_ZERO) {
#pragma unroll
        for (int k = 0; k < PIECE; ++k) {
          x[k] = inside ? x[k] : 0.0f;
        }
      }
      float squares[CHUNKS];
      sum_squares(x, squares);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        parts[chunk][step] = squares[chunk];
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      sums[chunk].add(i, gf::tree<gf::Add>(parts[chunk]));
    }
  }
  float totals[CHUNKS];
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    totals[chunk] = sums[chunk].total();
  }
  RowSum::begun();
  const float sum = RowSum{*shared}(totals);
  over_row<0>(maxima0);
  per_row.begin1(row, operands, sum, maxima0);
  if (writes_rows) {
    per_row.store1(row);
  }
  float maxima1[MAXIMA[1] + (MAXIMA[1] == 0)] = {};
  run<Phase1, ROWS_FIRST, COLUMNS_FIRST>(row, rows1, columns1, held, operands, per_row, largest, maxima1);

  if constexpr (LAST_PHASE == 2) {
    over_row<1>(maxima1);
    per_row.begin2(row, operands, maxima1);
    if (writes_rows) {
      per_row.store2(row);
    }
    Phase2::Rows rows2[STEPS];
    Phase2::Columns columns2[STEPS];
    float unused[1] = {};
    run<Phase2, false, false>(row, rows2, columns2, held, operands, per_row, largest, unused);
  }
  raise_amaxes(row, largest);
}
