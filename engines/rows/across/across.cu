// A row program for tensors in which neighbouring elements belong to neighbouring rows, such as channels-first images.
//
// A piece is one column's elements of PIECE neighbouring rows, read in one access. A CTA takes ACROSS pieces of
// neighbouring rows, and all columns of these rows in chunks of CHUNK. Its threads are GROUPS groups of ACROSS; group j
// % PLACES has chunk j. All arithmetic is float32. Sums over a row are the tree of reduce.cuh, for any number of
// groups: over a thread's chunks first, then over groups. A pass is the part of its rows that threads hold in
// registers. A row of one pass is read once. Longer rows are multi-pass: each phase reads and computes them again.
//
// Phase 0 precedes all reductions of a row. Phase P + 1 needs the results of those behind phase P.
#include "graphfuse/across.cuh"
#include "graphfuse/convert.cuh"
#include "graphfuse/dependent_launch.cuh"
#include "graphfuse/divide.cuh"
#include "graphfuse/grid.cuh"
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

constexpr Index CHUNKS = COLUMNS / CHUNK;
constexpr int HALF = CHUNK == 8 ? 4 : CHUNK;  // columns that are summed one after another
constexpr bool TAILLESS = Index(STEPS) * PASSES * GROUPS == CHUNKS;
constexpr gf::u32 LAST_CTAS = 1024;  // about what is resident

using gf::at_least_one;

/// The thread's chunk of a step. The steps of a pass are far apart in a row, because the sum's tree joins steps before
/// passes.
GF_DEVICE Index chunk_of(const Row& row, int step, Index pass) { return (step * PASSES + pass) * PLACES + row.thread; }

GF_DEVICE bool is_there(const Row& row, Index chunk) { return row.exists && (TAILLESS || chunk < CHUNKS); }

template <class Phase>
GF_DEVICE void read_rows(const Row& row, Index chunk, typename Phase::Rows (&reads)[CHUNK]) {
#pragma unroll
  for (int k = 0; k < CHUNK; ++k) {
    reads[k] = Phase::any_rows();
  }
  if (is_there(row, chunk)) {
#pragma unroll
    for (int k = 0; k < CHUNK; ++k) {
      reads[k] = Phase::read_rows(row, chunk * CHUNK + k);
    }
  }
}

/// A thread's partial sums and maxima of its rows, behind a phase.
template <int PHASE>
struct Parts {
  gf::Passes<gf::Add, PASSES> sums[at_least_one(SUMS_OF_ROW[PHASE])][PIECE];
  float maxima[at_least_one(MAXIMA[PHASE])][PIECE];
};

/// Results of the reductions behind a phase.
template <int PHASE>
struct Joined {
  float sums[at_least_one(SUMS_OF_ROW[PHASE])][PIECE];
  float maxima[at_least_one(MAXIMA[PHASE])][PIECE];
};

/// One chunk of a phase. sums: of each row, over the chunk.
template <int PHASE, int SUMS>
GF_DEVICE void run_chunk(const Row& row, Index chunk, const typename Phase<PHASE>::Rows (&rows)[CHUNK],
                         Held (&held)[CHUNK], const Operands& operands, const PerRow& per_row,
                         float (&largest)[AMAXES], float (&maxima)[at_least_one(MAXIMA[PHASE])][PIECE],
                         float (&sums)[SUMS][PIECE]) {
  typename Phase<PHASE>::Columns columns[CHUNK];
#pragma unroll
  for (int k = 0; k < CHUNK; ++k) {
    columns[k] = Phase<PHASE>::read_columns(row, chunk * CHUNK + k);
  }
  float halves[SUMS][PIECE] = {};
#pragma unroll
  for (int k = 0; k < CHUNK; ++k) {
    float x[SUMS][PIECE], y[SUMS][PIECE];
    Phase<PHASE>::run(row, chunk * CHUNK + k, true, rows[k], columns[k], held[k], operands, per_row, largest, maxima, x,
                      y);
    if constexpr (SUMS_OF_ROW[PHASE] > 0) {
#pragma unroll
      for (int sum = 0; sum < SUMS; ++sum) {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
          halves[sum][i] = gf::fma(x[sum][i], y[sum][i], halves[sum][i]);
          if (k + 1 == HALF) {
            sums[sum][i] = halves[sum][i];
            halves[sum][i] = 0.0f;
          } else if (k + 1 == CHUNK) {
            sums[sum][i] += halves[sum][i];
          }
        }
      }
    }
  }
}

/// One phase. rows: inputs, which are loaded already if READ.
template <int PHASE, bool READ>
GF_DEVICE void run(const Row& row, typename Phase<PHASE>::Rows (&rows)[STEPS][CHUNK], Held (&held)[STEPS][CHUNK],
                   const Operands& operands, const PerRow& per_row, float (&largest)[AMAXES], Parts<PHASE>& parts) {
  constexpr int SUMS = at_least_one(SUMS_OF_ROW[PHASE]);
  Phase<PHASE>::start(parts.maxima);
#pragma unroll 1
  for (int i = 0; i < PASSES; ++i) {
    const Index pass = SUMS_OF_ROW[PHASE] > 0 ? gf::Passes<gf::Add, PASSES>::place(i) : i;
    float chunks[SUMS][PIECE][STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index chunk = chunk_of(row, step, pass);
      if constexpr (!READ) {
        read_rows<Phase<PHASE>>(row, chunk, rows[step]);
      }
      float sums[SUMS][PIECE] = {};  // those of a chunk past the row's end
      if (is_there(row, chunk)) {
        run_chunk<PHASE, SUMS>(row, chunk, rows[step], held[step], operands, per_row, largest, parts.maxima, sums);
      }
#pragma unroll
      for (int sum = 0; sum < SUMS; ++sum) {
#pragma unroll
        for (int k = 0; k < PIECE; ++k) {
          chunks[sum][k][step] = sums[sum][k];
        }
      }
    }
    if constexpr (SUMS_OF_ROW[PHASE] > 0) {
#pragma unroll
      for (int sum = 0; sum < SUMS; ++sum) {
#pragma unroll
        for (int k = 0; k < PIECE; ++k) {
          parts.sums[sum][k].add(i, gf::tree<gf::Add>(chunks[sum][k]));
        }
      }
    }
  }
}

template <class Join>
using Reduction = gf::GroupReduction<Join, ACROSS, GROUPS, PIECE>;
using Shared = gf::GroupParts<GROUPS, ACROSS * PIECE>;

/// Combines the partial results of the groups, behind a phase.
template <int PHASE>
GF_DEVICE Joined<PHASE> join(const Parts<PHASE>& parts, Shared& shared) {
  Joined<PHASE> joined;
  if constexpr (SUMS_OF_ROW[PHASE] > 0) {
#pragma unroll
    for (int sum = 0; sum < SUMS_OF_ROW[PHASE]; ++sum) {
#pragma unroll
      for (int k = 0; k < PIECE; ++k) {
        joined.sums[sum][k] = parts.sums[sum][k].total();
      }
      Reduction<gf::Add>{shared}(joined.sums[sum]);
    }
  }
  if constexpr (MAXIMA[PHASE] > 0) {
#pragma unroll
    for (int i = 0; i < MAXIMA[PHASE]; ++i) {
#pragma unroll
      for (int k = 0; k < PIECE; ++k) {
        joined.maxima[i][k] = parts.maxima[i][k];
      }
      Reduction<gf::Max>{shared}(joined.maxima[i]);
    }
  }
  return joined;
}

/// Phase PHASE and those after it. before: partial results of the phase before.
template <int PHASE>
GF_DEVICE void run_later(const Row& row, Held (&held)[STEPS][CHUNK], const Operands& operands, PerRow& per_row,
                         float (&largest)[AMAXES], const Parts<PHASE - 1>& before, Shared& shared, bool writes_rows) {
  const Joined<PHASE - 1> joined = join<PHASE - 1>(before, shared);
  per_row.begin(gf::Number<PHASE>(), row, operands, joined.sums, joined.maxima);
  if (writes_rows) {
    per_row.store(gf::Number<PHASE>(), row);
  }
  typename Phase<PHASE>::Rows rows[STEPS][CHUNK];
  Parts<PHASE> parts;
  run<PHASE, false>(row, rows, held, operands, per_row, largest, parts);
  if constexpr (PHASE < LAST_PHASE) {
    run_later<PHASE + 1>(row, held, operands, per_row, largest, parts, shared, writes_rows);
  }
}

}  // namespace

/// Strides are in bytes from one row, or column, to the next. CTA i takes the rows from i * ACROSS * PIECE on. These
/// rows may lie in several runs of neighbours; a piece lies in one run.
GF_DEVICE void problem::start(const Arguments& a) {
  const Index thread = gf::thread_index() / ACROSS;  // of those of its rows: the group
  const i64 index = (i64(gf::block_index()) * ACROSS + gf::thread_index() % ACROSS) * PIECE;
  Row row = row_of(a, index, thread);
  // Before the first memory access: the kernel before may write epsilon and weight, too.
  gf::wait_for_previous_kernel();
  GF_SHARED(Shared, shared, 1);
  Phase<0>::Rows reads[STEPS][CHUNK];
  if constexpr (PASSES == 1) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      read_rows<Phase<0>>(row, chunk_of(row, step, 0), reads[step]);
    }
  }
  // CTAs that trigger a dependent launch start at half the rate. It is enough that the last ones do: the next kernel
  // may begin once every CTA has triggered or ended.
  if (gf::block_index() + LAST_CTAS >= gf::grid_size()) {
    gf::let_next_kernel_begin();
  }
  // Addresses of outputs, whose parameters are in later lines of the constant cache. The loads above did not wait for
  // them.
  complete(row, a, index);
  const Operands operands = operands_of(a);
  PerRow per_row;
  const float none[1][PIECE] = {};
  per_row.begin(gf::Number<0>(), row, operands, none, none);
  const bool writes_rows = thread == 0 && row.exists;
  if (writes_rows) {
    per_row.store(gf::Number<0>(), row);
  }

  Held held[STEPS][CHUNK];
  float largest[AMAXES] = {};
  Parts<0> parts;
  run<0, PASSES == 1>(row, reads, held, operands, per_row, largest, parts);
  if constexpr (LAST_PHASE > 0) {
    run_later<1>(row, held, operands, per_row, largest, parts, shared[0], writes_rows);
  }
  raise_amaxes(row, largest);
}
