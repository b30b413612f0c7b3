// Y = epilogue(input * inverse_rms * weight + bias), for rows of any length, stored in any output type.
//
// A row is cut into chunks of CHUNK elements, at most 16 bytes of input. Chunk j belongs to
// thread j % THREADS_PER_ROW of the row's threads. All arithmetic is float32. A pass is as much
// of the row as its threads hold in registers: with one pass the input stays there between the
// sum and the output, longer rows are read twice.
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

constexpr int INPUT_BYTES = CHUNK * gf::bits_of<Input> / 8;
constexpr int WEIGHT_BYTES = CHUNK * gf::bits_of<Weight> / 8;
constexpr int BIAS_BYTES = CHUNK * gf::bits_of<Bias> / 8;
constexpr int OUTPUT_BYTES = CHUNK * gf::bits_of<Output> / 8;

constexpr Index CHUNKS = COLUMNS / CHUNK;
constexpr int PASS_CHUNKS = STEPS * THREADS_PER_ROW;
constexpr Index PASSES = (CHUNKS + PASS_CHUNKS - 1) / PASS_CHUNKS;
constexpr int BLOCK_LANES = BLOCK == 0 ? 1 : BLOCK / CHUNK;  // neighbouring lanes that share a block
constexpr int CTA_ROWS = THREADS / THREADS_PER_ROW;
constexpr float PER_COLUMN = float(1.0 / double(COLUMNS));

// Weight and bias that take this few registers are read once, before the rows: more would cost occupancy.
constexpr bool HOLD_AFFINE =
    PASSES == 1 && STEPS * ((WEIGHT_BYTES + 3) / 4 + (HAS_BIAS ? (BIAS_BYTES + 3) / 4 : 0)) <= 4;

// 16-bit input, unpacked for the sum and kept, takes three times its room, which long rows do not have.
constexpr bool UNPACK_AGAIN = PASSES == 1 && sizeof(Input) == 2 && STEPS * CHUNK > 32;

using Chunk = gf::Bytes<INPUT_BYTES>;

struct Affine {
  gf::Bytes<WEIGHT_BYTES> weight;
  gf::Bytes<BIAS_BYTES> bias;
};

// One row as one of its threads sees it: addresses are those of the thread's first chunk. Others are
// `at` chunks further on, a constant where the row is one pass, so that one address register serves all.
struct Row {
  const void* input;
  void* output;
  void* block_scale;
  Index thread;
  bool exists;  // the last CTA may have fewer rows than threads for them
};

GF_DEVICE bool in_row(Index chunk) { return CHUNKS % PASS_CHUNKS == 0 || chunk < CHUNKS; }

GF_DEVICE Chunk read_input(const Row& row, Index at) {
  if (row.exists && in_row(row.thread + at)) {
    return gf::load<INPUT_BYTES, INPUT_ACCESS>(gf::offset(row.input, at * INPUT_BYTES));
  }
  return {};
}

GF_DEVICE Affine read_affine(const void* weight, const void* bias, Index thread, Index at) {
  Affine affine = {};
  if (in_row(thread + at)) {
    affine.weight = gf::load<WEIGHT_BYTES, WEIGHT_ACCESS, true>(gf::offset(weight, at * WEIGHT_BYTES));
    if constexpr (HAS_BIAS) {
      affine.bias = gf::load<BIAS_BYTES, BIAS_ACCESS, true>(gf::offset(bias, at * BIAS_BYTES));
    }
  }
  return affine;
}

GF_DEVICE float sum_of_squares(const Chunk& chunk) {
  float values[CHUNK];
  gf::unpack<Input>(chunk, values);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    sum = gf::fma(values[i], values[i], sum);
  }
  return sum;
}

/// Stores one chunk as it is (BLOCK_SIZE 0) or quantized with a scale per BLOCK_SIZE elements, which lie
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
    if (stored) {
      gf::store<COUNT / 2, OUTPUT_ACCESS>(output, gf::quantize_block(values, scale));
      if (row.thread % BLOCK_LANES == 0) {
        gf::store_pack<1>(gf::offset(row.block_scale, at / BLOCK_LANES), {{scale}});
      }
    }
  }
}

/// Normalizes one chunk, applies the epilogue and stores the result.
GF_DEVICE void finish(const Row& row, Index at, const Chunk& raw, const Affine& affine, float inverse,
                      const Epilogue& epilogue) {
  float values[CHUNK];
  float weight[CHUNK];
  float bias[CHUNK];
  gf::unpack<Input>(raw, values);
  gf::unpack<Weight>(affine.weight, weight);
  gf::unpack<Bias>(affine.bias, bias);
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    const float normal = values[i] * inverse;
    values[i] = epilogue(HAS_BIAS ? gf::fma(normal, weight[i], bias[i]) : normal * weight[i]);
  }
  store_output<BLOCK>(row, at, values);
}

}  // namespace

/// Strides are bytes from one row to the next. bias, inverse_rms and block_scale are null where the
/// problem has none. Any number of CTAs covers all rows.
extern "C" GF_KERNEL(THREADS)
    rmsnorm(const void* input, const void* weight, const void* bias, void* output, void* inverse_rms,
            void* block_scale, i64 rows, i64 input_stride, i64 output_stride, i64 inverse_rms_stride,
            i64 block_scale_stride, Epsilon epsilon_operand EPILOGUE_PARAMETERS) {
  // Before anything in memory is touched: epsilon and weight too may be what the kernel before writes.
  gf::wait_for_previous_kernel();
  gf::let_next_kernel_begin();

  using Sum = gf::RowSum<THREADS_PER_ROW, THREADS>;
  GF_SHARED(float, shared, Sum::SHARED_FLOATS);
  Sum sum_over_row{shared};

  const Index thread = gf::thread_index() % THREADS_PER_ROW;
  weight = gf::offset(weight, thread * WEIGHT_BYTES);
  bias = gf::offset(bias, HAS_BIAS ? thread * BIAS_BYTES : 0);
  const int row_in_cta = int(gf::thread_index() / THREADS_PER_ROW);
  const float epsilon = gf::scalar(epsilon_operand);
  const Epilogue epilogue{EPILOGUE_ARGUMENTS};

  Affine held[STEPS];
  if constexpr (HOLD_AFFINE) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      held[step] = read_affine(weight, bias, thread, step * THREADS_PER_ROW);
    }
  }

  // Whole CTAs take part in every round, so that all threads meet at the shuffles and barriers.
  for (i64 first = i64(gf::block_index()) * CTA_ROWS; first < rows; first += i64(gf::grid_size()) * CTA_ROWS) {
    const i64 index = first + row_in_cta;
    const Row row = {gf::offset(input, index * input_stride + thread * INPUT_BYTES),
                     gf::offset(output, index * output_stride + thread * OUTPUT_BYTES),
                     gf::offset(block_scale, BLOCK == 0 ? 0 : index * block_scale_stride + thread / BLOCK_LANES),
                     thread, index < rows};

    Chunk chunks[STEPS];
    float sum = 0.0f;
#pragma unroll 1
    for (Index pass = 0; pass < PASSES; ++pass) {
      float parts[STEPS];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        chunks[step] = read_input(row, pass * PASS_CHUNKS + step * THREADS_PER_ROW);
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        parts[step] = sum_of_squares(chunks[step]);
      }
      sum += gf::tree_sum(parts);
    }
    const float inverse = gf::rsqrt(gf::fma(sum_over_row(sum), PER_COLUMN, epsilon));
    if constexpr (HAS_INVERSE_RMS) {
      if (thread == 0 && row.exists) {
        gf::store_pack<4>(gf::offset(inverse_rms, index * inverse_rms_stride), {{gf::as_bits(inverse)}});
      }
    }

#pragma unroll 1
    for (Index pass = 0; pass < PASSES; ++pass) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const Index at = pass * PASS_CHUNKS + step * THREADS_PER_ROW;
        if constexpr (PASSES > 1) {
          chunks[step] = read_input(row, at);
        }
        if constexpr (UNPACK_AGAIN) {
          gf::forget_unpacked(chunks[step]);
        }
        if constexpr (!HOLD_AFFINE) {
          held[step] = read_affine(weight, bias, thread, at);
        }
        finish(row, at, chunks[step], held[step], inverse, epilogue);
      }
    }
  }
}
