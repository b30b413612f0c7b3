// A row program for many rows, with column reductions (sums over all rows).
//
// CTAs are persistent: each takes row after row. A row is cut into pieces of PIECE elements. Thread j % THREADS_PER_ROW
// of the row's threads has piece j. These threads are a part of a CTA, a CTA, or the CTAs of a cluster. Each thread
// prefetches its own pieces of the next rows into shared memory, STAGES - 1 rows ahead. It reads only these back, so it
// waits for no other thread. All arithmetic is float32. The leaves of a sum's tree are chunks of CHUNK elements: a
// piece, or the pieces of two neighbouring threads.
//
// Column sums stay in registers. At the end each CTA (or cluster) writes its partial sums to memory. Behind a grid
// barrier the CTAs divide the columns among them, and add the partial sums in a fixed order. So every run has the same
// bits.
//
// A pass is the part of a row that its threads hold in registers. Longer rows are multi-pass: each phase reads and
// computes them again, and column sums are accumulated in memory from the first row on.
#include "graphfuse/async_copy.cuh"
#include "graphfuse/convert.cuh"
#include "graphfuse/discard.cuh"
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
#include "graphfuse/along.cuh"

namespace {

using gf::u32;

constexpr bool SPLIT = HALVED && THREADS_PER_ROW > 1;  // whether two threads have a chunk
constexpr int ROWS_PER_CTA = CTAS_PER_ROW == 1 ? THREADS / THREADS_PER_ROW : 1;  // at a time

constexpr int ALIKE = SPLIT ? 2 : 1;
using RowSum = gf::RowReduction<gf::Add, THREADS_PER_ROW, THREADS, 1, ALIKE, gf::at_least_one(MOST_SUMS)>;
template <int PHASE>
using DelayedSums = gf::DelayedReduction<gf::Add, THREADS_PER_ROW, THREADS, ALIKE, gf::at_least_one(SUMS_OF_ROW[PHASE])>;
constexpr int AHEAD_OF_ROW = DELAYED ? STAGES - 2 : STAGES - 1;  // rows of which copies are under way
constexpr int BEHIND = STAGES - AHEAD_OF_ROW;  // stages beside those of these rows

/// Pieces past the row's end, and those of a row that does not exist, are unspecified: they are never stored, nor
/// added.
template <class Phase>
GF_DEVICE typename Phase::Rows read_rows(const Row& row, Index at) {
  typename Phase::Rows reads = Phase::any_rows();
  if (row.exists && in_row(row.thread + at)) {
    reads = Phase::read_rows(row, at);
  }
  return reads;
}

/// The sum of products over a piece.
GF_DEVICE float sum_of_products(const float (&x)[PIECE], const float (&y)[PIECE]) {
  float sum = gf::sum_products<HALF>(x, y, 0);
  if constexpr (HALF < PIECE) {
    sum += gf::sum_products<HALF>(x, y, HALF);
  }
  return sum;
}

/// The tree over the steps of a pass. Halves of a chunk are joined first, so every PIECE gives the same bits.
template <int COUNT>
GF_DEVICE float sum_steps(float (&parts)[COUNT]) {
  if constexpr (HALVED && !SPLIT) {
    static_assert(PASSES == 1 && COUNT % 2 == 0, "the thread has whole chunks");
    float chunks[COUNT / 2];
#pragma unroll
    for (int chunk = 0; chunk < COUNT / 2; ++chunk) {
      chunks[chunk] = parts[2 * chunk] + parts[2 * chunk + 1];
    }
    return gf::tree<gf::Add>(chunks);
  } else {
    if constexpr (SPLIT) {
#pragma unroll
      for (int step = 0; step < COUNT; ++step) {
        parts[step] += gf::shuffle_xor(parts[step], 1);
      }
    }
    return gf::tree<gf::Add>(parts);
  }
}

/// Adds COUNT floats at an address to `sum`, in one access.
template <int COUNT>
GF_DEVICE void add_piece(const float* address, float (&sum)[COUNT]) {
  float read[COUNT];
  gf::unpack<float>(gf::load<4 * COUNT, 4 * COUNT>(address), read);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    sum[i] += read[i];
  }
}

/// The partial column sums of a CTA (or cluster) in memory, a row of COLUMNS for each sum.
struct Partials {
  float* first;
  i64 apart;  // of one sum from the next, in elements

  GF_DEVICE void* piece(int sum, Index number) const { return first + sum * apart + i64(number) * PIECE; }

  GF_DEVICE void load(Sums& sums, Index number) const {
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
      gf::unpack<float>(gf::load<4 * PIECE, PARTIAL_WIDTH>(piece(k, number)), sums.of[k]);
    }
  }

  GF_DEVICE void store(const Sums& sums, Index number) const {
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
      gf::store<4 * PIECE, PARTIAL_WIDTH>(piece(k, number), gf::pack<float>(sums.of[k]));
    }
  }
};

/// Adds the column sums of the rows that the CTA takes at a time, and stores them. shared: ROWS_PER_CTA * COLUMNS of each
/// sum.
template <int COUNT>
GF_DEVICE void leave_sums(const Sums (&sums)[COUNT], Index thread, int group, const Partials& partials, float* shared) {
  constexpr int VECTOR = PARTIAL_WIDTH / 4;
  constexpr i64 ROWS = i64(ROWS_PER_CTA) * COLUMNS;
  const Partials joined = {shared + group * COLUMNS, ROWS};
  const Partials& left = ROWS_PER_CTA == 1 ? partials : joined;
  if constexpr (ROWS_PER_CTA > 1) {
    gf::barrier();  // all have read what was in shared memory
  }
#pragma unroll
  for (int step = 0; step < COUNT; ++step) {
    const Index piece = thread + first_piece(step, 0);
    if (in_row(piece)) {
      left.store(sums[step], piece);
    }
  }
  if constexpr (ROWS_PER_CTA > 1) {
    gf::barrier();
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
      for (Index column = gf::thread_index() * VECTOR; column < COLUMNS; column += THREADS * VECTOR) {
        float sum[VECTOR] = {};
#pragma unroll 8
        for (int row = 0; row < ROWS_PER_CTA; ++row) {
          add_piece(shared + k * ROWS + row * COLUMNS + column, sum);
        }
        // Settled, or the compiler stores all sums but the first in accesses of 4 bytes.
        float* const to = gf::settled(partials.first + k * partials.apart + column);
        gf::store<PARTIAL_WIDTH, PARTIAL_WIDTH>(to, gf::pack<float>(sum));
      }
    }
  }
}

/// Adds the partial sums of all CTAs, SLAB columns of one sum per CTA at a time. count: partial sums of a column, at most
/// PARTIALS. apart: elements from one sum's partial sums to the next one's. shared: SLAB floats for each row of partial
/// sums that is left after every warp has added its own.
GF_DEVICE void add_up(const Totals& totals, i64 apart, i64 count, float* shared) {
  constexpr int VECTOR = PARTIAL_WIDTH / 4;
  constexpr int ACROSS = SLAB / VECTOR;   // threads side by side
  constexpr int DOWN = THREADS / ACROSS;  // partial sums of a column that are read at a time, by a thread each,
  constexpr int EACH = (PARTIALS + DOWN - 1) / DOWN < 8 ? (PARTIALS + DOWN - 1) / DOWN : 8;  // that reads so many ahead
  constexpr int PARTS = DOWN < THREADS / gf::WARP ? DOWN : THREADS / gf::WARP;
  constexpr i64 SLABS = (COLUMNS + SLAB - 1) / SLAB;  // of a sum
  constexpr int PER_LINE = gf::LINE / 4;
  const int thread = gf::thread_index();
  const int first = thread % ACROSS * VECTOR;
  for (i64 slab = gf::block_index(); slab < SUMS * SLABS; slab += gf::grid_size()) {
    const int which = SUMS == 1 ? 0 : int(slab / SLABS);
    const i64 begin = (SUMS == 1 ? slab : slab % SLABS) * SLAB;
    const i64 column = begin + first;
    const float* const partials = totals.partials + which * apart + column;
    float sum[VECTOR] = {};
    if (column < COLUMNS) {
      for (i64 i = thread / ACROSS; i < count; i += EACH * DOWN) {
        gf::Bytes<PARTIAL_WIDTH> reads[EACH] = {};
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
          if (i + k * DOWN < count) {
            reads[k] = gf::load<PARTIAL_WIDTH, PARTIAL_WIDTH>(partials + (i + k * DOWN) * COLUMNS);
          }
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
          float read[VECTOR];
          gf::unpack<float>(reads[k], read);
#pragma unroll
          for (int v = 0; v < VECTOR; ++v) {
            sum[v] += read[v];
          }
        }
      }
    }
#pragma unroll
    for (int mask = gf::WARP / 2; mask >= ACROSS; mask /= 2) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        sum[v] += gf::shuffle_xor(sum[v], mask);
      }
    }
    gf::barrier();  // the slab before has been read
    if (thread % (THREADS / PARTS) < ACROSS) {
      float* const to = shared + thread / (THREADS / PARTS) * SLAB + first;
      gf::store<PARTIAL_WIDTH, PARTIAL_WIDTH>(to, gf::pack<float>(sum));
    }
    gf::barrier();
    for (int i = thread; i < SLAB && begin + i < COLUMNS; i += THREADS) {
      float total = shared[i];
#pragma unroll
      for (int part = 1; part < PARTS; ++part) {
        total += shared[part * SLAB + i];
      }
      store_total(totals, which, begin + i, total);
    }
    // Nobody reads the partial sums again. Their CTA has the lines to itself if slabs are made of whole ones.
    if constexpr (SLAB % PER_LINE == 0 && COLUMNS % PER_LINE == 0) {
      const int line = thread * PER_LINE % SLAB;
#pragma unroll 1
      for (i64 i = thread * PER_LINE / SLAB; i < count && begin + line < COLUMNS; i += THREADS * PER_LINE / SLAB) {
        gf::discard(totals.partials + which * apart + begin + line + i * COLUMNS);
      }
    }
  }
}

/// Inputs that all rows share, such as weights: those of phase FIRST and the phases after it.
template <int FIRST>
struct ColumnsFrom : ColumnsFrom<FIRST + 1> {
  typename Phase<FIRST>::Columns reads[STEPS];

  GF_DEVICE void read(const Row& any) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      reads[step] = read_columns<Phase<FIRST>>(any, first_piece(step, 0));
    }
    ColumnsFrom<FIRST + 1>::read(any);
  }
};
template <>
struct ColumnsFrom<LAST_PHASE + 1> {
  GF_DEVICE void read(const Row&) {}
};

/// The state of a thread that it keeps from row to row.
struct Taken {
  const Operands& operands;
  const Partials& partials;
  Index thread;
  ColumnsFrom<0> columns;
  Sums sums[PASSES == 1 ? STEPS : 1];
  float largest[AMAXES];
};

/// A thread's partial sums and maxima of a row, behind a phase.
template <int PHASE>
struct Parts {
  float sums[gf::at_least_one(SUMS_OF_ROW[PHASE])][1];
  float maxima[gf::at_least_one(MAXIMA[PHASE])];
};

/// One phase of a row. sums, maxima: results of the reductions behind the phase before.
template <int PHASE, int SUMS_BEFORE, int MAXIMA_BEFORE>
GF_DEVICE void run(const Row& row, PerRow& per_row, Held (&held)[STEPS], Taken& taken, bool first_row,
                   const float (&sums)[SUMS_BEFORE], const float (&maxima)[MAXIMA_BEFORE], Parts<PHASE>& parts) {
  constexpr int SUMS_HERE = SUMS_OF_ROW[PHASE];
  constexpr int AT_LEAST = gf::at_least_one(SUMS_HERE);
  constexpr bool READ_FIRST = OWN_PAIRS || Phase<PHASE>::WAITS;  // all pieces, before anything is worked out
  // One branch around all pieces, where each would else have its own because of several sums over rows. Not where rows
  // share a warp, whose lanes may exchange values.
  constexpr bool APART = ROWS_PER_CTA > 1 && THREADS_PER_ROW % gf::WARP == 0 && SUMS_ADDED[PHASE] > 1;
  per_row.begin(gf::Number<PHASE>(), row, taken.operands, sums, maxima);
  if (taken.thread == 0 && row.exists) {
    per_row.store(gf::Number<PHASE>(), row);
  }
  Phase<PHASE>::start(parts.maxima);
  gf::Passes<gf::Add, PASSES> passes[AT_LEAST];
#pragma unroll 1
  for (int i = 0; i < PASSES; ++i) {
    const Index pass = SUMS_HERE > 0 ? gf::Passes<gf::Add, PASSES>::place(i) : i;
    float pieces[AT_LEAST][STEPS] = {};
    const auto take = [&](const Row& here) {
      auto& columns = static_cast<ColumnsFrom<PHASE>&>(taken.columns).reads;
      typename Phase<PHASE>::Rows reads[STEPS];
      if constexpr (READ_FIRST) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          reads[step] = read_rows<Phase<PHASE>>(here, first_piece(step, pass));
        }
      }
      if constexpr (OWN_PAIRS) {
        Phase<PHASE>::exchange(here, first_piece(1, pass), reads, columns, held, taken.operands, per_row);
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const Index at = first_piece(step, pass);
        if constexpr (!READ_FIRST) {
          reads[step] = read_rows<Phase<PHASE>>(here, at);
        }
        const bool inside = in_row(taken.thread + at);
        float x[AT_LEAST][PIECE];
        float y[AT_LEAST][PIECE];
        if constexpr (PASSES == 1) {
          Phase<PHASE>::run(here, at, inside, reads[step], columns[step], held[step], taken.operands, per_row,
                            taken.largest, parts.maxima, x, y, taken.sums[step]);
        } else {
          Sums far = {};
          if (SUMS_ADDED[PHASE] > 0 && inside && !(first_row && PHASE == FIRST_ADDING)) {
            taken.partials.load(far, taken.thread + at);
          }
          Phase<PHASE>::run(here, at, inside, reads[step], read_columns<Phase<PHASE>>(here, at), held[step],
                            taken.operands, per_row, taken.largest, parts.maxima, x, y, far);
          if (SUMS_ADDED[PHASE] > 0 && inside) {
            taken.partials.store(far, taken.thread + at);
          }
        }
#pragma unroll
        for (int sum = 0; sum < SUMS_HERE; ++sum) {
          pieces[sum][step] = inside ? sum_of_products(x[sum], y[sum]) : 0.0f;
        }
      }
    };
    if constexpr (!APART) {
      take(row);
    } else if (row.exists) {
      Row here = row;
      here.exists = true;
      take(here);
    }
#pragma unroll
    for (int sum = 0; sum < SUMS_HERE; ++sum) {
      passes[sum].add(i, sum_steps(pieces[sum]));
    }
  }
#pragma unroll
  for (int sum = 0; sum < SUMS_HERE; ++sum) {
    parts.sums[sum][0] = passes[sum].total();
  }
}

/// Shared memory for the reductions of rows, double-buffered: threads may begin the next reduction while others read
/// the results of this one.
struct Meeting {
  RowSum::Shared* sums;
  RowMax::Shared* maxima;
  u32 sum_turn;  // how often they met
  u32 max_turn;

  template <int PHASE>
  GF_DEVICE Joined<PHASE> join(Parts<PHASE>& parts) {
    Joined<PHASE> joined;
    if constexpr (SUMS_OF_ROW[PHASE] > 0) {
      RowSum{sums[sum_turn % 2]}(parts.sums, joined.sums, sum_turn / 2);
      ++sum_turn;
    }
    if constexpr (MAXIMA[PHASE] > 0) {
      RowMax{maxima[max_turn % 2]}(parts.maxima, joined.maxima, max_turn / 2);
      ++max_turn;
    }
    return joined;
  }
};

/// Phase PHASE and those after it. before: partial results of the phase before.
template <int PHASE>
GF_DEVICE void run_later(const Row& row, PerRow& per_row, Held (&held)[STEPS], Taken& taken, bool first_row,
                         Parts<PHASE - 1>& before, Meeting& meeting) {
  const Joined<PHASE - 1> joined = meeting.join<PHASE - 1>(before);
  Parts<PHASE> parts;
  run<PHASE>(row, per_row, held, taken, first_row, joined.sums, joined.maxima, parts);
  if constexpr (PHASE < LAST_PHASE) {
    run_later<PHASE + 1>(row, per_row, held, taken, first_row, parts, meeting);
  }
}

/// Rows one after another. arrived: waits for a prefetched row, and returns it.
template <class Arrived>
GF_DEVICE void take_in_turn(const Arrived& arrived, RowIndex rows, RowIndex first, RowIndex together, Taken& taken,
                            Meeting meeting) {
  const float none[1] = {};
  for (RowIndex next = first; next < rows; next += together) {
    const Row row = arrived(next);
    PerRow per_row;
    Held held[STEPS];
    Parts<0> parts;
    run<0>(row, per_row, held, taken, next == first, none, none, parts);
    if constexpr (LAST_PHASE > 0) {
      run_later<1>(row, per_row, held, taken, next == first, parts, meeting);
    }
  }
}

/// The reduction of one row overlaps with the first of two phases of the next. LAST: the second phase, as a parameter,
/// since programs of other numbers of phases must compile all the same.
template <int LAST, class Arrived>
GF_DEVICE void take_delayed(const Arrived& arrived, RowIndex rows, RowIndex first, RowIndex together, Taken& taken,
                            RowSum::Shared* places) {
  if constexpr (LAST == 1) {
    const float none[1] = {};
    u32 turn = 0;  // the row's number among those of this CTA
    Row before;
    PerRow per_before;
    Held held[STEPS];  // empty
    for (RowIndex next = first; first < rows; next += together) {
      const DelayedSums<LAST - 1> reduction = {places};
      Row row;
      PerRow per_row;
      Parts<LAST - 1> parts;
      if (next < rows) {
        row = arrived(next);
        run<LAST - 1>(row, per_row, held, taken, next == first, none, none, parts);
      }
      Joined<LAST - 1> joined;
      if (next != first) {
        reduction.wait(turn - 1);
        reduction.totals(joined.sums, turn - 1);
      }
      if (next < rows) {
        reduction.give(parts.sums, turn);
      }
      if (next != first) {
        Parts<LAST> nothing;
        run<LAST>(before, per_before, held, taken, false, joined.sums, none, nothing);
      }
      if (next >= rows) {
        break;
      }
      before = row;
      per_before = per_row;
      ++turn;
    }
  }
}

}  // namespace

/// Strides are in bytes from one row to the next. The launch is cooperative if there are column sums.
GF_DEVICE void problem::start(const Arguments& a) {
  const RowIndex rows = a.rows;
  const i64 cta = gf::block_index() / CTAS_PER_ROW;  // or cluster
  const i64 ctas = gf::grid_size() / CTAS_PER_ROW;
  const gf::u32 own = gf::settled(gf::thread_index());  // or what follows from it is worked out for each row
  const Index thread = CTAS_PER_ROW == 1 ? own % THREADS_PER_ROW : gf::block_index() % CTAS_PER_ROW * THREADS + own;
  const int group = CTAS_PER_ROW == 1 ? own / THREADS_PER_ROW : 0;
  const RowIndex together = ctas * ROWS_PER_CTA;  // rows that the grid takes at a time
  GF_DYNAMIC_SHARED(unsigned char, shared);
  unsigned char* const stages = shared + own * WIDEST_COPY;  // the thread's widest access in the first
  GF_SHARED(RowSum::Shared, sum_places, 2);
  GF_SHARED(RowMax::Shared, max_places, 2);
  if constexpr (MOST_SUMS > 0) {
    RowSum::begin(sum_places, 2);
  }

  const auto copy_ahead = [&](RowIndex index, unsigned char* stage) {
    if (index < rows) {
      const Ahead row = ahead_of(a, index, thread);
      copy_values(row, stage, own);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const Index at = first_piece(step, 0);
        if (in_row(thread + at)) {
          copy_piece(row, at, stage, own);
        }
      }
    }
    gf::async_commit();
  };

  const RowIndex first = cta * ROWS_PER_CTA;
  if constexpr (STAGES > 1) {
#pragma unroll
    for (int i = 0; i < AHEAD_OF_ROW; ++i) {
      copy_ahead(first + group + i * together, stages + i * STAGE_BYTES);
    }
  }
  const Operands operands = operands_of(a);
  const Totals totals = totals_of(a);
  const Partials partials = {totals.partials + cta * COLUMNS, ctas * COLUMNS};
  Taken taken = {operands, partials, thread};
  if constexpr (PASSES == 1) {
    taken.columns.read(row_of(a, 0, thread, stages, own));
  }
  // Stages by address, which takes fewer instructions than to work it out from a number for each row.
  unsigned char* stage = stages;  // of the next row
  int number = 0;                 // that stage's
  unsigned char* read[BEHIND];    // those of the rows before, the first to be copied into first
#pragma unroll
  for (int i = 0; i < BEHIND; ++i) {
    read[i] = stages + (AHEAD_OF_ROW + i) * STAGE_BYTES;
  }

  // Waits for the next row's copies, and starts those of a later row.
  const auto arrived = [&](RowIndex next) -> Row {
    if constexpr (STAGES > 1) {
      gf::async_wait<AHEAD_OF_ROW - 1>();
      // Into the stage that this thread finished reading in the previous round.
      copy_ahead(next + group + AHEAD_OF_ROW * together, read[0]);
    }
    Row row = row_of(a, next + group, thread, stage, own);
    locate(row, a, next + group, stage, own);
    complete(row, a, next + group);
#pragma unroll
    for (int i = 0; i < BEHIND; ++i) {
      read[i] = i + 1 < BEHIND ? read[i + 1] : stage;
    }
    const bool last = number == STAGES - 1;
    number = last ? 0 : number + 1;
    stage += last ? (1 - STAGES) * STAGE_BYTES : STAGE_BYTES;
    return row;
  };

  if constexpr (MOST_SUMS > 0) {
    RowSum::begun();
  }
  if constexpr (MOST_MAXIMA > 0) {
    RowMax::begin(max_places, 2);
    RowMax::begun();
  }
  if constexpr (DELAYED) {
    take_delayed<LAST_PHASE>(arrived, rows, first, together, taken, sum_places);
  } else {
    take_in_turn(arrived, rows, first, together, taken, {sum_places, max_places, 0, 0});
  }

  if constexpr (SUMS > 0) {
    if constexpr (PASSES == 1) {
      leave_sums(taken.sums, thread, group, partials, reinterpret_cast<float*>(shared));
    }
    gf::grid_barrier();
    const i64 used = (rows + ROWS_PER_CTA - 1) / ROWS_PER_CTA;
    add_up(totals, partials.apart, used < ctas ? used : ctas, reinterpret_cast<float*>(shared));
  }
  Row any = row_of(a, 0, thread, stages, own);
  complete(any, a, 0);
  raise_amaxes(any, taken.largest);
}
