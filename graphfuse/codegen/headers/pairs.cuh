// Pairs of a row's columns: swapping their elements, and tensors with one column per pair. Lane number `piece` of a row
// has piece number `piece`.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// Columns i and PIECES * PIECE + i are a pair. Each gets the other's value; the first of a pair gets it negated. All
/// lanes of a warp call it together. WHOLE: whether all columns of the row are in pairs. If not, the columns beyond
/// become 0.
template <int PIECES, bool WHOLE, int PIECE>
GF_DEVICE void swap_halves(u32 piece, const float (&values)[PIECE], float (&swapped)[PIECE]) {
  constexpr bool BITS = (PIECES & (PIECES - 1)) == 0;
  const bool first = BITS && WHOLE ? (piece & PIECES) == 0 : piece < PIECES;
  const bool second = WHOLE ? !first : !first && piece < 2 * PIECES;
  const u32 partner = first ? lane() + PIECES : second ? lane() - PIECES : lane();
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    float other;
    if constexpr (BITS && WHOLE) {
      other = shuffle_xor(values[i], PIECES);
    } else {
      other = shuffle(values[i], partner);
    }
    swapped[i] = first ? -other : WHOLE || second ? other : 0.0f;
  }
}

/// The same for pairs of columns 2 i and 2 i + 1. COLUMNS columns are in pairs.
template <int COLUMNS, int PIECE>
GF_DEVICE void swap_neighbours(u32 piece, const float (&values)[PIECE], float (&swapped)[PIECE]) {
  const bool paired = piece < COLUMNS / PIECE;
#pragma unroll
  for (int i = 0; i < PIECE; i += 2) {
    swapped[i] = paired ? -values[i + 1] : 0.0f;
    swapped[i + 1] = paired ? values[i] : 0.0f;
  }
}

/// A piece in which every element is `value`.
template <class T, int COUNT>
GF_DEVICE Bytes<COUNT * bits_of<T> / 8> filled(float value) {
  if (bits_of<T> < 32 && is_nan(value)) {  // what a conversion makes of it, as a constant: that is an instruction
    Bytes<COUNT * bits_of<T> / 8> nan;
#pragma unroll
    for (u32& word : nan.word) {
      word = ~0u >> (COUNT * bits_of<T> < 32 ? 32 - COUNT * bits_of<T> : 0);
      word &= bits_of<T> == 16 ? 0x7fff7fffu : 0x7f7f7f7fu;
    }
    return nan;
  }
  float values[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = value;
  }
  return pack<T>(values);
}

/// What is read from `address` if it is there, else a piece of one value. Several such reads are one branch.
template <class T, int COUNT, int WIDTH, Access ACCESS>
GF_DEVICE Bytes<COUNT * bits_of<T> / 8> load_if(bool there, const void* address, float otherwise GF_SITE) {
  Bytes<COUNT * bits_of<T> / 8> piece = filled<T, COUNT>(otherwise);
  if (there) {
    piece = load<COUNT * bits_of<T> / 8, WIDTH, ACCESS>(address GF_FROM);
  }
  return piece;
}

/// Values per pair of neighbouring columns, given to both.
template <class T, int COUNT>
GF_DEVICE void unpack_pairs(const Bytes<COUNT / 2 * bits_of<T> / 8>& chunk, float (&values)[COUNT]) {
  float found[COUNT / 2];
  unpack<T>(chunk, found);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = found[i / 2];
  }
}

}  // namespace gf
