// Pieces of a row on their way to memory: as they are, or quantized in blocks; and the largest magnitude of all.
#pragma once
#include "graphfuse/atomics.cuh"
#include "graphfuse/math.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/quantize.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// Stores a piece in accesses of WIDTH bytes. address: of the thread's first piece, `at` pieces before.
template <int WIDTH, Access ACCESS, int BYTES>
GF_DEVICE void store_piece(void* address, i64 at, const Bytes<BYTES>& piece, bool stored) {
  if (stored) {
    store<BYTES, WIDTH, ACCESS>(offset(address, at * BYTES), piece);
  }
}

/// Where a row's block scales lie, `apart` bytes from one to the next. first: that of the thread's first piece.
struct ScalesInRow {
  void* first;
  i64 apart;
  GF_DEVICE void* of(i64, i64 blocks) const { return offset(first, blocks * apart); }
};

/// The same, one byte each, in tiles of 128 rows x 4 blocks, in each of which the four of a row are neighbours and row r + 32
/// follows row r: what block-scaled matrix products of Blackwell read (F8_128x4).
/// first: the row's.
struct ScalesInTiles {
  void* first;
  GF_DEVICE void* of(i64 first_block, i64 blocks) const {
    const i64 block = first_block + blocks;
    return offset(first, block / 4 * 512 + block % 4);
  }
  /// The offset of a row's first scale. blocks: a row's.
  GF_DEVICE static i64 row(i64 index, u32 blocks) {
    return index / 128 * ((blocks + 3) / 4 * 512) + index % 32 * 16 + index % 128 / 32 * 4;
  }
};

/// The largest magnitude of the block of BLOCK elements, in neighbouring lanes, of which the thread has these.
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

/// Stores a piece quantized to T with a scale per BLOCK elements, which lie in neighbouring lanes; all lanes of a
/// warp call it together. thread: the number in its row of the thread's first piece, `at` pieces before this one.
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

/// Stores the scales without the elements: once more in another order, or of values that nobody keeps quantized.
template <class T, int BLOCK, Access ACCESS, class Scales, int PIECE>
GF_DEVICE void store_scales(Scales scales, i64 thread, i64 at, const float (&values)[PIECE], bool stored) {
  constexpr int LANES = BLOCK / PIECE;
  const u32 scale = block_scale<T>(block_amax<BLOCK>(values));
  if (stored && thread % LANES == 0) {
    store_pack<sizeof(typename Blocks<T>::Scale), ACCESS>(scales.of(thread / LANES, at / LANES), {{scale}});
  }
}

/// Raises a float in memory that is not negative to `value`, a maximum over the warp's lanes. NaN is the largest.
/// All lanes of a warp call it together.
GF_DEVICE void raise(void* address, float value) {
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) {
    value = max(value, shuffle_xor(value, mask));
  }
  if (lane() == 0) {
    // Most find that it is as large already, which a read tells sooner. As integers, such floats have their order.
    u32* const bits = static_cast<u32*>(address);
    if (as_bits(value) > load_relaxed(bits)) {
      atomic_max(bits, as_bits(value));
    }
  }
}

}  // namespace gf
