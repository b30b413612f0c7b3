// Rows whose elements are contiguous: how they are cut into pieces, and which pieces a thread has. Kernels include it
// behind the generated code of their problem, whose constants it uses.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/reduce.cuh"

namespace {

using gf::i64;
using namespace problem;

constexpr Index PIECES = COLUMNS / PIECE;
constexpr bool HALVED = PIECE < CHUNK;
constexpr int HALF = CHUNK == 8 ? 4 : CHUNK;  // elements that are summed one after another
constexpr bool TAILLESS = PIECES % (Index(STEPS) * PASSES * THREADS_PER_ROW) == 0;
constexpr int CTAS_PER_ROW = THREADS_PER_ROW <= THREADS ? 1 : THREADS_PER_ROW / THREADS;

/// The row's first piece of a step. The steps of a pass are far apart in a row, because the sum's tree joins steps
/// before passes.
GF_DEVICE Index first_piece(int step, Index pass) { return (step * PASSES + pass) * THREADS_PER_ROW; }

GF_DEVICE bool in_row(Index piece) { return TAILLESS || piece < PIECES; }

template <class Phase>
GF_DEVICE typename Phase::Columns read_columns(const Row& row, Index at) {
  typename Phase::Columns reads = {};
  if (in_row(row.thread + at)) {
    reads = Phase::read_columns(row, at);
  }
  return reads;
}

using RowMax = gf::RowReduction<gf::Max, THREADS_PER_ROW, THREADS, 1, 1, gf::at_least_one(MOST_MAXIMA)>;

/// Results of the reductions of a row behind a phase.
template <int PHASE>
struct Joined {
  float sums[gf::at_least_one(SUMS_OF_ROW[PHASE])];
  float maxima[gf::at_least_one(MAXIMA[PHASE])];
};

}  // namespace
