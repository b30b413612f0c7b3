// A row program for rows of any length: each CTA takes some rows, or a part of one.
//
// A row is cut into pieces of PIECE elements. Piece j belongs to thread j % THREADS_PER_ROW of the
// row's threads, which may be a part of a warp or several CTAs of a cluster. Sums over a row are made by chunks of
// CHUNK elements, one or several to a piece, or half of one, whose other half a neighbour has. All arithmetic is
// float32. A pass is as much of the row as its threads hold in registers: with one pass what is needed again stays
// there, longer rows are read and worked out again in each phase.
//
// Phase 0 is what comes before any reduction of a row, phase P + 1 what needs one of what phase P knows.
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
#include "graphfuse/along.cuh"

namespace {

constexpr int CHUNKS = HALVED ? 1 : PIECE / CHUNK;  // of a piece
constexpr gf::u32 LAST_CTAS = 1024;  // about what is resident

/// What the phases from FIRST on read of a piece, in bytes.
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

// What later phases read is read before the first reduction if it takes few registers, as more would cost occupancy, or
// if AHEAD says so.
constexpr bool ROWS_FIRST = PASSES == 1 && (AHEAD || STEPS * reads_from<1>().rows <= 4 * 16);
constexpr bool COLUMNS_FIRST = PASSES == 1 && (AHEAD || STEPS * reads_from<1>().columns <= 4 * 4);

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

/// The sum of products for each chunk of the piece; of a chunk that two threads have, both get it.
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

/// What a phase knows of a row that is to be joined.
template <int PHASE>
struct Parts {
  gf::Passes<gf::Add, PASSES> sums[gf::at_least_one(SUMS_OF_ROW[PHASE])][CHUNKS];
  float maxima[gf::at_least_one(MAXIMA[PHASE])];
};

/// What the phases from FIRST on read.
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

/// All of a phase. rows, columns: what was read already.
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
    float chunks[gf::at_least_one(SUMS)][CHUNKS][STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = first_piece(step, pass);
      const bool inside = in_row(row.thread + at);
      if constexpr (!COLUMNS_READ) {
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

/// Joins what the threads of a row know behind a phase.
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

/// The phases from PHASE on. later: what they read, as far as it was read already. before: parts of the phase before.
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

/// Strides are bytes from one row to the next. CTA i takes the rows from i * THREADS / THREADS_PER_ROW on. What a
/// CTA needs first comes first: the first six parameters are one line of the constant cache, others are awaited later.
GF_DEVICE void problem::start(const Arguments& a) {
  const i64 cta = gf::block_index();
  const Index thread = CTAS_PER_ROW == 1 ? gf::thread_index() % THREADS_PER_ROW
                                         : cta % CTAS_PER_ROW * THREADS + gf::thread_index();
  // The last CTA may have fewer rows than threads for them, which all meet at the shuffles and barriers.
  const i64 index = CTAS_PER_ROW == 1 ? cta * (THREADS / THREADS_PER_ROW) + gf::thread_index() / THREADS_PER_ROW
                                      : cta / CTAS_PER_ROW;
  Row row = row_of(a, index, thread);
  // Before anything in memory is touched: epsilon and weight too may be what the kernel before writes.
  gf::wait_for_previous_kernel();
  locate(row, a, index);
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
  // CTAs that say so start at half the rate. The last ones are enough: the next kernel may begin once the others ended.
  if (gf::u32(cta) + LAST_CTAS >= gf::grid_size()) {
    gf::let_next_kernel_begin();
  }
  // Outputs whose parameters are not in the first line of the constant cache: the reads above wait for no other.
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
}
