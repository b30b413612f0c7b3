// Stores of pieces of a row, plain or quantized in blocks, and the largest magnitude of a tensor.
#pragma once
#include "graphfuse/atomics.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/quantize.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// Stores a piece in accesses of WIDTH bytes. address: of the thread's first piece. at: pieces from that one to this.
template <int WIDTH, Access ACCESS, int BYTES>
GF_DEVICE void store_piece(void* address, i64 at, const Bytes<BYTES>& piece, bool stored) {
  if (stored) {
    store<BYTES, WIDTH, ACCESS>(offset(address, at * BYTES), piece);
  }
}

/// A row's block scales, which are `apart` bytes from each other. first: that of the thread's first piece.
struct ScalesInRow {
  void* first;
  i64 apart;
  GF_DEVICE void* of(i64, i64 blocks) const { return offset(first, blocks * apart); }
};

/// Block scales of one byte in tiles of 128 rows x 4 blocks. The four scales of a row are neighbours, and row r + 32
/// follows row r. This is what block-scaled matrix products of Blackwell read (F8_128x4). first: the row's first scale.
struct ScalesInTiles {
  void* first;
  GF_DEVICE void* of(i64 first_block, i64 blocks) const {
    const i64 block = first_block + blocks;
    return offset(first, block / 4 * 512 + block % 4);
  }
  /// The offset of a row's first scale. blocks: of a row.
  GF_DEVICE static i64 row(i64 index, u32 blocks) {
    return index / 128 * ((blocks + 3) / 4 * 512) + index % 32 * 16 + index % 128 / 32 * 4;
  }
};

/// The largest magnitude of a block of BLOCK elements, of which this thread has `values` and neighbouring lanes the
/// rest.
template <int BLOCK, int PIECE>
GF_DEVICE float block_amax(const float (&values)[PIECE]) {
  constexpr int LANES = BLOCK / PIECE;
  static_assert(BLOCK % PIECE == 0 && LANES <= WARP, "a block is whole pieces of one warp");
  float amax = max_magnitude(values);
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) {
    amax = max(amax, shuffle_xor(amax, mask));
  }
  return amax;
}

/// Stores a piece quantized to T, with a scale per BLOCK elements. The elements of a block are in neighbouring lanes,
/// and all lanes of a warp call it together. thread: the number in its row of the thread's first piece. at: pieces from
/// that one to this.
template <class T, int BLOCK, int WIDTH, Access ACCESS, class Scales, int PIECE>
GF_DEVICE void store_blocks(void* address, Scales scales, i64 thread, i64 at, const float (&values)[PIECE],
                            bool stored) {
  constexpr int LANES = BLOCK / PIECE;
  constexpr int BYTES = PIECE * bits_of<T> / 8;
  const u32 scale = block_scale<T>(block_amax<BLOCK>(values));
  const Bytes<BYTES> elements = Blocks<T>::quantized(values, scale);
  if (stored) {
    store<BYTES, WIDTH, ACCESS>(offset(address, at * BYTES), elements);
    if (thread % LANES == 0) {
      store_pack<sizeof(typename Blocks<T>::Scale), ACCESS>(scales.of(thread / LANES, at / LANES), {{scale}});
    }
  }
}

/// Stores the scales without the elements: a second copy in another order, or scales of values that are not stored.
template <class T, int BLOCK, Access ACCESS, class Scales, int PIECE>
GF_DEVICE void store_scales(Scales scales, i64 thread, i64 at, const float (&values)[PIECE], bool stored) {
  constexpr int LANES = BLOCK / PIECE;
  const u32 scale = block_scale<T>(block_amax<BLOCK>(values));
  if (stored && thread % LANES == 0) {
    store_pack<sizeof(typename Blocks<T>::Scale), ACCESS>(scales.of(thread / LANES, at / LANES), {{scale}});
  }
}

/// Atomic maximum of a float in memory, which is not negative, and `value` of all lanes of the warp. NaN is the
/// largest. All lanes of a warp call it together.
GF_DEVICE void raise(void* address, float value) {
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) {
    value = max(value, shuffle_xor(value, mask));
  }
  if (lane() == 0) {
    // Most warps find a value that is at least as large, and a read tells that sooner than an atomic operation. Floats
    // that are not negative are ordered like integers.
    u32* const bits = static_cast<u32*>(address);
    if (as_bits(value) > load_relaxed(bits)) {
      atomic_max(bits, as_bits(value));
    }
  }
}

}  // namespace gf
