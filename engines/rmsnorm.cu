// Y = epilogue(input * inverse_rms * weight + bias), for rows of any length, stored in any output type.
//
// A row is cut into pieces of PIECE elements. Piece j belongs to thread j % THREADS_PER_ROW of the
// row's threads. Squares are summed by chunks of CHUNK elements, at most 16 bytes of input, one or
// several to a piece. All arithmetic is float32. A pass is as much of the row as its threads hold in
// registers: with one pass the input stays there between the sum and the output, longer rows are
// read twice.
#include "graphfuse/convert.cuh"
#include "graphfuse/dependent_launch.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/quantize.cuh"
#include "graphfuse/reduce.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

// This problem: namespace problem, struct Epilogue, EPILOGUE_PARAMETERS, EPILOGUE_ARGUMENTS.
#include "generated.cuh"

namespace {

using gf::i64;
using namespace problem;

constexpr int INPUT_BYTES = PIECE * gf::bits_of<Input> / 8;
constexpr int WEIGHT_BYTES = PIECE * gf::bits_of<Weight> / 8;
constexpr int BIAS_BYTES = PIECE * gf::bits_of<Bias> / 8;
constexpr int OUTPUT_BYTES = PIECE * gf::bits_of<Output> / 8;

constexpr Index PIECES = COLUMNS / PIECE;
constexpr int CHUNKS = PIECE / CHUNK;  // of a piece
constexpr int PASS_PIECES = STEPS * THREADS_PER_ROW;
constexpr Index PASSES = (PIECES + PASS_PIECES - 1) / PASS_PIECES;
constexpr int BLOCK_LANES = BLOCK == 0 ? 1 : BLOCK / PIECE;  // neighbouring lanes that share a block
constexpr int CTA_ROWS = THREADS / THREADS_PER_ROW;
constexpr float PER_COLUMN = float(1.0 / double(COLUMNS));

// Weight and bias that take this few registers are read before the sum: more would cost occupancy.
constexpr bool READ_AFFINE_FIRST =
    PASSES == 1 && STEPS * ((WEIGHT_BYTES + 3) / 4 + (HAS_BIAS ? (BIAS_BYTES + 3) / 4 : 0)) <= 4;

// 16-bit input, unpacked for the sum and kept, takes three times its room, which long rows do not have.
constexpr bool UNPACK_AGAIN = PASSES == 1 && sizeof(Input) == 2 && STEPS * PIECE > 40;

// Read-only loads may move ahead of the sum, for which the largest CTAs have no registers left.
constexpr bool AFFINE_MAY_MOVE = THREADS <= 512 || STEPS * PIECE <= 16;

using Piece = gf::Bytes<INPUT_BYTES>;

struct Affine {
  gf::Bytes<WEIGHT_BYTES> weight;
  gf::Bytes<BIAS_BYTES> bias;
};

// One row as one of its threads sees it: addresses are those of the thread's first piece. Others are
// `at` pieces further on, a constant where the row is one pass, so that one address register serves all.
struct Row {
  const void* input;
  void* output;
  void* block_scale;
  Index thread;
  bool exists;  // the last CTA may have fewer rows than threads for them
};

GF_DEVICE bool in_row(Index piece) { return PIECES % PASS_PIECES == 0 || piece < PIECES; }

/// Pieces past the row's end are zero; those of a row that does not exist are anything, for they are never stored.
GF_DEVICE void read_pass(const Row& row, Index pass, Piece (&pieces)[STEPS]) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    pieces[step] = gf::any_bytes<INPUT_BYTES>();
  }
  if (row.exists) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = pass * PASS_PIECES + step * THREADS_PER_ROW;
      pieces[step] = {};
      if (in_row(row.thread + at)) {
        pieces[step] = gf::load<INPUT_BYTES, INPUT_ACCESS>(gf::offset(row.input, at * INPUT_BYTES));
      }
    }
  }
}

GF_DEVICE Affine read_affine(const void* weight, const void* bias, Index thread, Index at) {
  Affine affine = {};
  if (in_row(thread + at)) {
    affine.weight = gf::load<WEIGHT_BYTES, WEIGHT_ACCESS, AFFINE_MAY_MOVE>(gf::offset(weight, at * WEIGHT_BYTES));
    if constexpr (HAS_BIAS) {
      affine.bias = gf::load<BIAS_BYTES, BIAS_ACCESS, AFFINE_MAY_MOVE>(gf::offset(bias, at * BIAS_BYTES));
    }
  }
  return affine;
}

/// One sum for each chunk of the piece.
GF_DEVICE void sum_squares(const float (&values)[PIECE], float (&sums)[CHUNKS]) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    sums[chunk] = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
      sums[chunk] = gf::fma(values[chunk * CHUNK + i], values[chunk * CHUNK + i], sums[chunk]);
    }
  }
}

/// Stores one piece as it is (BLOCK_SIZE 0) or quantized with a scale per BLOCK_SIZE elements, which lie
/// in neighbouring lanes; all lanes of a warp call it together.
template <int BLOCK_SIZE, int COUNT>
GF_DEVICE void store_output(const Row& row, Index at, const float (&values)[COUNT]) {
  const bool stored = row.exists && in_row(row.thread + at);
  void* const output = gf::offset(row.output, at * OUTPUT_BYTES);
  if constexpr (BLOCK_SIZE == 0) {
    if (stored) {
      gf::store<OUTPUT_BYTES, OUTPUT_ACCESS>(output, gf::pack<Output>(values));
    }
  } else {
    float amax = gf::max_magnitude(values);
#pragma unroll
    for (int mask = 1; mask < BLOCK_LANES; mask *= 2) {
      amax = gf::max(amax, gf::shuffle_xor(amax, mask));
    }
    const gf::u32 scale = gf::block_scale(amax);
    gf::Bytes<OUTPUT_BYTES> elements = gf::quantize_block(values, scale);
    // Asked of the warp, because a branch of each lane's own costs more.
    if (gf::any_lane(!gf::is_usual_scale(scale))) {
      elements = gf::is_usual_scale(scale) ? elements : gf::constant_block<COUNT>(scale);
    }
    if (stored) {
      gf::store<OUTPUT_BYTES, OUTPUT_ACCESS>(output, elements);
      if (row.thread % BLOCK_LANES == 0) {
        gf::store_pack<1>(gf::offset(row.block_scale, at / BLOCK_LANES), {{scale}});
      }
    }
  }
}

/// Normalizes one piece, applies the epilogue and stores the result.
GF_DEVICE void finish(const Row& row, Index at, float (&values)[PIECE], const Affine& affine, float inverse,
                      const Epilogue& epilogue) {
  float weight[PIECE];
  float bias[PIECE];
  gf::unpack<Weight>(affine.weight, weight);
  gf::unpack<Bias>(affine.bias, bias);
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    const float normal = values[i] * inverse;
    values[i] = epilogue(HAS_BIAS ? gf::fma(normal, weight[i], bias[i]) : normal * weight[i]);
  }
  store_output<BLOCK>(row, at, values);
}

}  // namespace

/// Strides are bytes from one row to the next. bias, block_scale and inverse_rms are null where the
/// problem has none. CTA i takes CTA_ROWS rows from row i * CTA_ROWS on. What a CTA needs first comes first:
/// the six parameters up to output_stride are one line of the constant cache, the others are awaited later.
extern "C" GF_KERNEL(THREADS)
    rmsnorm(const void* input, i64 rows, i64 input_stride, const void* weight, void* output, i64 output_stride,
            Epsilon epsilon_operand, const void* bias, void* block_scale, i64 block_scale_stride, void* inverse_rms,
            i64 inverse_rms_stride EPILOGUE_PARAMETERS) {
  const Index thread = gf::thread_index() % THREADS_PER_ROW;
  const i64 index = i64(gf::block_index()) * CTA_ROWS + gf::thread_index() / THREADS_PER_ROW;
  // The last CTA may have fewer rows than threads for them, which all meet at the shuffles and barriers.
  const Row row = {gf::offset(input, index * input_stride + thread * INPUT_BYTES),
                   gf::settled(gf::offset(output, index * output_stride + thread * OUTPUT_BYTES)),
                   gf::settled(gf::offset(
                       block_scale, BLOCK == 0 ? 0 : index * block_scale_stride + thread / BLOCK_LANES)),
                   thread, index < rows};
  // Before anything in memory is touched: epsilon and weight too may be what the kernel before writes.
  gf::wait_for_previous_kernel();
  gf::let_next_kernel_begin();
  Piece pieces[STEPS];
  if constexpr (PASSES == 1) {
    read_pass(row, 0, pieces);
  }
  weight = gf::offset(weight, thread * WEIGHT_BYTES);
  bias = gf::offset(bias, HAS_BIAS ? thread * BIAS_BYTES : 0);
  Affine affine[STEPS];
  if constexpr (READ_AFFINE_FIRST) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      affine[step] = read_affine(weight, bias, thread, step * THREADS_PER_ROW);
    }
  }
  const float epsilon = gf::scalar(epsilon_operand);
  const Epilogue epilogue{EPILOGUE_ARGUMENTS};

  float values[STEPS][PIECE];
  float sums[CHUNKS] = {};
#pragma unroll 1
  for (Index pass = 0; pass < PASSES; ++pass) {
    if constexpr (PASSES > 1) {
      read_pass(row, pass, pieces);
    }
    float parts[CHUNKS][STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      gf::unpack<Input>(pieces[step], values[step]);
      float squares[CHUNKS];
      sum_squares(values[step], squares);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        parts[chunk][step] = squares[chunk];
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const float sum = gf::tree_sum(parts[chunk]);
      sums[chunk] = PASSES == 1 ? sum : sums[chunk] + sum;
    }
  }
  using Sum = gf::RowSum<THREADS_PER_ROW, THREADS, CHUNKS>;
  GF_SHARED(float, shared, Sum::SHARED_FLOATS);
  const float inverse = gf::rsqrt(gf::fma(Sum{shared}(sums), PER_COLUMN, epsilon));
  if constexpr (HAS_INVERSE_RMS) {
    if (thread == 0 && row.exists) {
      gf::store_pack<4>(gf::offset(inverse_rms, index * inverse_rms_stride), {{gf::as_bits(inverse)}});
    }
  }

#pragma unroll 1
  for (Index pass = 0; pass < PASSES; ++pass) {
    if constexpr (PASSES > 1) {
      read_pass(row, pass, pieces);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const Index at = pass * PASS_PIECES + step * THREADS_PER_ROW;
      if constexpr (UNPACK_AGAIN) {
        gf::forget_unpacked(pieces[step]);
      }
      if constexpr (PASSES > 1 || UNPACK_AGAIN) {
        gf::unpack<Input>(pieces[step], values[step]);
      }
      if constexpr (!READ_AFFINE_FIRST) {
        affine[step] = read_affine(weight, bias, thread, at);
      }
      finish(row, at, values[step], affine[step], inverse, epilogue);
    }
  }
}
