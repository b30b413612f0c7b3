// A row program for rows of any length: each CTA takes some rows, or a part of one.
//
// A row is cut into pieces of PIECE elements. Thread j % THREADS_PER_ROW of the row's threads has piece j. These
// threads are a part of a warp, a CTA, or the CTAs of a cluster. The leaves of a sum's tree are chunks of CHUNK
// elements. A piece has one chunk, several, or half of one; then a neighbouring thread has the other half. All
// arithmetic is float32. A pass is the part of a row that its threads hold in registers. A row of one pass is read
// once. Longer rows are multi-pass: each phase reads and computes them again.
//
// Phase 0 precedes all reductions of a row. Phase P + 1 needs the results of those behind phase P.
#include "graphfuse/convert.cuh"
#include "graphfuse/dependent_launch.cuh"
#include "graphfuse/divide.cuh"
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

constexpr int CHUNKS = HALVED ? 1 : PIECE / CHUNK;  // of a piece
constexpr gf::u32 LAST_CTAS = 1024;  // about what is resident

/// Bytes that phase FIRST and the phases after it load of a piece.
struct Reads {
  int rows, columns;
};
template <int FIRST>
GF_DEVICE constexpr Reads reads_from() {
  if constexpr (FIRST > LAST_PHASE) {
    return {0, 0};
  } else {
    constexpr Reads later = reads_from<FIRST + 1>();
    return {int(sizeof(typename Phase<FIRST>::Rows)) + later.rows,
            int(sizeof(typename Phase<FIRST>::Columns)) + later.columns};
  }
}

// The inputs of later phases are loaded before the first reduction if they take few registers, or if AHEAD is set. More
// registers would cost occupancy.
constexpr bool ROWS_FIRST = PASSES == 1 && (AHEAD || STEPS * reads_from<1>().rows <= 4 * 16);
constexpr bool COLUMNS_FIRST = PASSES == 1 && (AHEAD || STEPS * reads_from<1>().columns <= 4 * 4);

/// Pieces past the row's end are zero. Those of a row that does not exist are unspecified: they are never stored.
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

/// The sum of products of each chunk of the piece. If two threads share a chunk, both get its sum.
GF_DEVICE void sum_products(const float (&x)[PIECE], const float (&y)[PIECE], float (&sums)[CHUNKS]) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    sums[chunk] = gf::sum_products<HALF>(x, y, chunk * CHUNK);
    if constexpr (HALVED) {
      sums[chunk] += gf::shuffle_xor(sums[chunk], 1);
    } else if constexpr (HALF < CHUNK) {
      sums[chunk] += gf::sum_products<HALF>(x, y, chunk * CHUNK + HALF);
    }
  }
}

constexpr int SUM_TURNS = gf::phases_with(SUMS_OF_ROW);
constexpr int SUM_PLACES = SUM_TURNS < 2 ? SUM_TURNS : 2;  // in shared memory, which phases take in turns

using RowSum = gf::RowReduction<gf::Add, THREADS_PER_ROW, THREADS, CHUNKS, HALVED ? 2 : 1,
                                gf::at_least_one(MOST_SUMS)>;

/// A thread's partial sums and maxima of a row, behind a phase.
template <int PHASE>
struct Parts {
  gf::Passes<gf::Add, PASSES> sums[gf::at_least_one(SUMS_OF_ROW[PHASE])][CHUNKS];
  float maxima[gf::at_least_one(MAXIMA[PHASE])];
};

/// Inputs of phase FIRST and the phases after it.
template <int FIRST>
struct Later : Later<FIRST + 1> {
  typename Phase<FIRST>::Rows rows[STEPS];
  typename Phase<FIRST>::Columns columns[STEPS];

  GF_DEVICE void read_all_rows(const Row& row) {
    read_rows<Phase<FIRST>>(row, 0, rows);
    Later<FIRST + 1>::read_all_rows(row);
  }

  GF_DEVICE void read_all_columns(const Row& row) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      columns[step] = read_columns<Phase<FIRST>>(row, first_piece(step, 0));
    }
    Later<FIRST + 1>::read_all_columns(row);
  }
};
template <>
struct Later<LAST_PHASE + 1> {
  GF_DEVICE void read_all_rows(const Row&) {}
  GF_DEVICE void read_all_columns(const Row&) {}
};

/// One phase of a row. rows, columns: inputs that are loaded already.
template <int PHASE, bool ROWS_READ, bool COLUMNS_READ>
GF_DEVICE void run(const Row& row, typename Phase<PHASE>::Rows (&rows)[STEPS],
                   typename Phase<PHASE>::Columns (&columns)[STEPS], Held (&held)[STEPS], const Operands& operands,
                   const PerRow& per_row, float (&largest)[AMAXES], Parts<PHASE>& parts) {
  constexpr int SUMS = SUMS_OF_ROW[PHASE];
  Phase<PHASE>::start(parts.maxima);
#pragma unroll 1
  for (int i = 0; i < PASSES; ++i) {
    const Index pass = SUMS > 0 ? gf::Passes<gf::Add, PASSES>::place(i) : i;
    if constexpr (!ROWS_READ) {
      read_rows<Phase<PHASE>>(row, pass, rows);
    }
    if constexpr (OWN_PAIRS) {
#pragma unroll
      for (int step = 0; step < STEPS && !COLUMNS_READ; ++step) {
        columns[step] = read_columns<Phase<PHASE>>(row, first_piece(step, pass));
      }
      Phase<PHASE>::exchange(row, first_piece(1, pass), rows, columns, held, operands, per_row);
    }
    float chunks[gf::at_least_one(SUMS)][CHUNKS][STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = first_piece(step, pass);
      const bool inside = in_row(row.thread + at);
      if constexpr (!COLUMNS_READ && !OWN_PAIRS) {
        columns[step] = read_columns<Phase<PHASE>>(row, at);
      }
      float x[gf::at_least_one(SUMS)][PIECE], y[gf::at_least_one(SUMS)][PIECE];
      Phase<PHASE>::run(row, at, inside, rows[step], columns[step], held[step], operands, per_row, largest,
                        parts.maxima, x, y);
#pragma unroll
      for (int sum = 0; sum < SUMS; ++sum) {
        if constexpr (!TAILLESS && !Phase<PHASE>::ZEROS_STAY_ZERO) {
#pragma unroll
          for (int k = 0; k < PIECE; ++k) {
            x[sum][k] = inside ? x[sum][k] : 0.0f;
            y[sum][k] = inside ? y[sum][k] : 0.0f;
          }
        }
        float products[CHUNKS];
        sum_products(x[sum], y[sum], products);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          chunks[sum][chunk][step] = products[chunk];
        }
      }
    }
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        parts.sums[sum][chunk].add(i, gf::tree<gf::Add>(chunks[sum][chunk]));
      }
    }
  }
}

/// Combines the partial results of a row's threads, behind a phase.
template <int PHASE>
GF_DEVICE Joined<PHASE> join(const Parts<PHASE>& parts, RowSum::Shared* shared) {
  Joined<PHASE> joined;
  if constexpr (PHASE == 0 && SUM_TURNS > 0) {
    RowSum::begun();
  }
  if constexpr (SUMS_OF_ROW[PHASE] > 0) {
    constexpr int TURN = gf::phases_with(SUMS_OF_ROW, PHASE);
    float totals[SUMS_OF_ROW[PHASE]][CHUNKS];
#pragma unroll
    for (int sum = 0; sum < SUMS_OF_ROW[PHASE]; ++sum) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        totals[sum][chunk] = parts.sums[sum][chunk].total();
      }
    }
    RowSum{shared[TURN % SUM_PLACES]}(totals, joined.sums, TURN / SUM_PLACES);
  }
  if constexpr (MAXIMA[PHASE] > 0) {
    GF_SHARED(RowMax::Shared, place, 1);
    RowMax::begin(place, 1);
    RowMax::begun();
    RowMax{*place}(parts.maxima, joined.maxima);
  }
  return joined;
}

/// Phase PHASE and those after it. later: their inputs, as far as these are loaded already. before: partial results of
/// the phase before.
template <int PHASE>
GF_DEVICE void run_later(const Row& row, Later<PHASE>& later, Held (&held)[STEPS], const Operands& operands,
                         PerRow& per_row, float (&largest)[AMAXES], const Parts<PHASE - 1>& before,
                         RowSum::Shared* shared, bool writes_rows) {
  if constexpr (PHASE <= LAST_PHASE) {
    const Joined<PHASE - 1> joined = join<PHASE - 1>(before, shared);
    per_row.begin(gf::Number<PHASE>(), row, operands, joined.sums, joined.maxima);
    if (writes_rows) {
      per_row.store(gf::Number<PHASE>(), row);
    }
    Parts<PHASE> parts;
    run<PHASE, ROWS_FIRST, COLUMNS_FIRST>(row, later.rows, later.columns, held, operands, per_row, largest, parts);
    run_later<PHASE + 1>(row, later, held, operands, per_row, largest, parts, shared, writes_rows);
  }
}

}  // namespace

/// Strides are in bytes from one row to the next. CTA i takes the rows from i * THREADS / THREADS_PER_ROW on. The
/// parameters that are needed first come first: six of them are one line of the constant cache, and loads do not wait
/// for the lines behind it.
GF_DEVICE void problem::start(const Arguments& a) {
  const i64 cta = gf::block_index();
  const Index thread = CTAS_PER_ROW == 1 ? gf::thread_index() % THREADS_PER_ROW
                                         : cta % CTAS_PER_ROW * THREADS + gf::thread_index();
  // The last CTA may have threads without a row. They take part in shuffles and barriers all the same.
  const RowIndex index = CTAS_PER_ROW == 1 ? cta * (THREADS / THREADS_PER_ROW) + gf::thread_index() / THREADS_PER_ROW
                                           : cta / CTAS_PER_ROW;
  Row row = row_of(a, index, thread);
  // Before the first memory access: the kernel before may write epsilon and weight, too.
  gf::wait_for_previous_kernel();
  locate(row, a, index);
  auto ranks = ranks_of(a);
  ranks.begin();
  GF_SHARED(RowSum::Shared, shared, gf::at_least_one(SUM_PLACES));
  if constexpr (SUM_TURNS > 0) {
    RowSum::begin(shared, SUM_PLACES);
  }
  Phase<0>::Rows rows0[STEPS];
  if constexpr (PASSES == 1) {
    read_rows<Phase<0>>(row, 0, rows0);
  }
  Later<1> later;
  if constexpr (ROWS_FIRST) {
    later.read_all_rows(row);
  }
  if constexpr (COLUMNS_FIRST) {
    later.read_all_columns(row);
  }
  // Before anything is written here, for which telling the peers would wait.
  constexpr bool DONE_READING = PASSES == 1 && RANKS_LAST == 0;
  bool ends = DONE_READING && ranks.done();
  // CTAs that trigger a dependent launch start at half the rate. It is enough that the last ones do: the next kernel
  // may begin once every CTA has triggered or ended.
  if (gf::u32(cta) + LAST_CTAS >= gf::grid_size()) {
    gf::let_next_kernel_begin();
  }
  // Addresses of outputs, whose parameters are in later lines of the constant cache. The loads above did not wait for
  // them.
  complete(row, a, index);
  const Operands operands = operands_of(a);
  PerRow per_row;
  const float none[1] = {};
  per_row.begin(gf::Number<0>(), row, operands, none, none);
  const bool writes_rows = thread == 0 && row.exists;
  if (writes_rows) {
    per_row.store(gf::Number<0>(), row);
  }

  Held held[STEPS];
  float largest[AMAXES] = {};
  Phase<0>::Columns columns0[STEPS];
  Parts<0> parts;
  run<0, PASSES == 1, false>(row, rows0, columns0, held, operands, per_row, largest, parts);
  run_later<1>(row, later, held, operands, per_row, largest, parts, shared, writes_rows);
  raise_amaxes(row, largest);
  if constexpr (!DONE_READING) {
    ends = ranks.done();
  }
  if (ends) {
    ranks.end();
  }
}
