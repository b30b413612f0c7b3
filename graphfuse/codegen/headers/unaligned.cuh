// Pieces of a row that lie anywhere in memory, or of which the last is partial: read and written by the aligned vectors
// that they touch.
//
// Every piece of a row is as far behind a multiple of WIDTH, the bytes of a vector, as the row is: by its shift. GRAIN
// divides all shifts; where it is WIDTH there is none. A piece is read as the vectors that contain it and shifted in
// registers. It is written as those vectors whose other bytes belong to the piece before, which the neighbouring lane
// hands over. What is left at the ends of warps and of rows goes in accesses of NARROW bytes. So no access reaches
// beyond a row, but for reads where the caller knows of memory there.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

#if defined(__SANITIZE_THREAD__)
#define GF_SEES_RACES
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define GF_SEES_RACES
#endif
#endif

namespace gf {

/// Bytes that are read for a piece of COUNT.
template <int COUNT, int WIDTH, int GRAIN>
constexpr int around = GRAIN < WIDTH ? COUNT + WIDTH : COUNT;

/// How far an address is behind a multiple of WIDTH, a power of two.
template <int WIDTH, int GRAIN>
GF_DEVICE int shift_of(const void* address) {
  return GRAIN < WIDTH ? int(u32(reinterpret_cast<u64>(address)) % WIDTH) : 0;
}

/// The words of 8 bytes, low first, from bit `bits` on; below 32.
GF_DEVICE u32 funnel_down(u32 low, u32 high, u32 bits) {
#ifdef __CUDACC__
  return __funnelshift_r(low, high, bits);
#else
  return u32((u64(high) << 32 | low) >> bits);
#endif
}

/// The high word of 8 bytes that are moved up by `bits`, below 32.
GF_DEVICE u32 funnel_up(u32 low, u32 high, u32 bits) {
#ifdef __CUDACC__
  return __funnelshift_l(low, high, bits);
#else
  return u32((u64(high) << 32 | low) << bits >> 32);
#endif
}

/// Moves bytes down by a row's shift; what moves in from behind the last word is anything.
template <int WIDTH, int GRAIN, int WORDS>
GF_DEVICE void move_down(u32 (&words)[WORDS], int shift) {
#pragma unroll
  for (int i = 0; WIDTH > 8 && GRAIN <= 8 && i + 2 < WORDS; ++i) {
    words[i] = shift & 8 ? words[i + 2] : words[i];
  }
#pragma unroll
  for (int i = 0; WIDTH > 4 && GRAIN <= 4 && i + 1 < WORDS; ++i) {
    words[i] = shift & 4 ? words[i + 1] : words[i];
  }
#pragma unroll
  for (int i = 0; GRAIN < 4 && i + 1 < WORDS; ++i) {
    words[i] = funnel_down(words[i], words[i + 1], shift % 4 * 8);
  }
}

/// Moves bytes up by a row's shift; what moves in from before the first word is anything.
template <int WIDTH, int GRAIN, int WORDS>
GF_DEVICE void move_up(u32 (&words)[WORDS], int shift) {
#pragma unroll
  for (int i = WORDS - 1; WIDTH > 8 && GRAIN <= 8 && i >= 2; --i) {
    words[i] = shift & 8 ? words[i - 2] : words[i];
  }
#pragma unroll
  for (int i = WORDS - 1; WIDTH > 4 && GRAIN <= 4 && i >= 1; --i) {
    words[i] = shift & 4 ? words[i - 1] : words[i];
  }
#pragma unroll
  for (int i = WORDS - 1; GRAIN < 4 && i >= 1; --i) {
    words[i] = funnel_up(words[i - 1], words[i], shift % 4 * 8);
  }
}

/// A vector of which the bytes from `from` to `to` matter. Others may be written meanwhile, and are anything.
template <int WIDTH, Access ACCESS>
GF_DEVICE Pack<WIDTH> load_part(const void* address, int from, int to GF_SITE) {
#ifdef __CUDACC__
  return load_pack<WIDTH, ACCESS>(address);
#else
  host::check_access(address, WIDTH, false, site);
  u8 bytes[WIDTH];
#ifndef GF_SEES_RACES
  __builtin_memcpy(bytes, address, WIDTH);  // all must be there
#endif
  for (int i = 0; i < WIDTH; ++i) {
    bytes[i] = i >= from && i < to ? static_cast<const u8*>(address)[i] : u8(0xff);
  }
  Pack<WIDTH> pack = {};
  __builtin_memcpy(&pack, bytes, WIDTH);
  return pack;
#endif
}

/// What is read for a piece. row: the address of a piece of the row, `behind` bytes before this one; so the shift is known
/// once for all of them. first: it is the row's first. left: bytes of the row from the piece on. inner: a vector
/// that contains a byte of the row may be read whole. Bytes that are not the row's are anything, or zero.
template <int COUNT, int WIDTH, int GRAIN, int NARROW, Access ACCESS>
GF_DEVICE Bytes<around<COUNT, WIDTH, GRAIN>> load_around(const void* row, i64 behind, bool first, int left,
                                                            bool inner GF_SITE) {
  static_assert(COUNT % WIDTH == 0 && WIDTH >= 4 && GRAIN % NARROW == 0, "no vectors of these bytes");
  constexpr int VECTORS = around<COUNT, WIDTH, GRAIN> / WIDTH;
  const int shift = shift_of<WIDTH, GRAIN>(row);
  const void* const address = offset(offset(row, -shift), behind);  // of the first vector
  const bool far = left >= 2 * COUNT;  // the row's end, which is known of most steps when compiling
  Bytes<around<COUNT, WIDTH, GRAIN>> read = {};
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const int start = k * WIDTH - shift;  // of the vector, from the piece on
    if ((k > 0 && start >= COUNT) || (!far && start >= left)) {
      continue;
    }
    if (inner || (!(k == 0 && first && shift > 0) && (far || start + WIDTH <= left))) {
      const int end = COUNT < left ? COUNT : left;
      const Pack<WIDTH> vector = load_part<WIDTH, ACCESS>(offset(address, k * WIDTH), start < 0 ? -start : 0,
                                                          start + WIDTH < end ? WIDTH : end - start GF_FROM);
#pragma unroll
      for (int i = 0; i < WIDTH / 4; ++i) {
        read.word[k * WIDTH / 4 + i] = vector.word[i];
      }
      continue;
    }
#pragma unroll
    for (int at = 0; at < WIDTH; at += NARROW) {
      if (start + at >= 0 && start + at < COUNT && (far || start + at < left)) {
        const Pack<NARROW> part = load_pack<NARROW, ACCESS>(offset(address, k * WIDTH + at) GF_FROM);
#pragma unroll
        for (int i = 0; i < (NARROW + 3) / 4; ++i) {
          read.word[(k * WIDTH + at) / 4 + i] |= part.word[i] << at % 4 * 8;
        }
      }
    }
  }
  return read;
}

/// The piece out of what was read for it. row: an address of the row that is a piece's.
template <int COUNT, int WIDTH, int GRAIN>
GF_DEVICE Bytes<COUNT> piece_of(const Bytes<around<COUNT, WIDTH, GRAIN>>& read, const void* row) {
  constexpr int WORDS = around<COUNT, WIDTH, GRAIN> / 4;
  u32 words[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    words[i] = read.word[i];
  }
  move_down<WIDTH, GRAIN>(words, shift_of<WIDTH, GRAIN>(row));
  Bytes<COUNT> piece;
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) {
    piece.word[i] = words[i];
  }
  return piece;
}

/// Stores a piece. row, behind: as of load_around. LANES: so many neighbouring lanes have neighbouring pieces of a row. left: bytes of the row from the
/// piece on, 0 of what is not stored. All lanes of a warp call it together.
template <int WIDTH, int GRAIN, int NARROW, int LANES, Access ACCESS, int COUNT>
GF_DEVICE void store_around(void* row, i64 behind, const Bytes<COUNT>& piece, int left GF_SITE) {
  static_assert(COUNT % WIDTH == 0 && WIDTH >= 4 && GRAIN % NARROW == 0, "no vectors of these bytes");
  constexpr int BEFORE = GRAIN < WIDTH ? WIDTH / 4 : 0;  // words of the piece before
  const int shift = shift_of<WIDTH, GRAIN>(row);
  void* const address = offset(row, behind);
  void* const vectors = offset(offset(row, -shift), behind);
  const bool far = left >= 2 * COUNT;
  u32 words[BEFORE + COUNT / 4];
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) {
    words[BEFORE + i] = piece.word[i];
  }
  // Whether vectors that two pieces share are left to no lane, so that each stores its own bytes of them.
  bool before_apart = false, behind_apart = false;
  if constexpr (GRAIN < WIDTH) {
    const u32 in_row = lane() % LANES;
    before_apart = shift > 0 && in_row == 0;
    behind_apart = shift > 0 && in_row == LANES - 1;
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) {
      words[i] = LANES > 1 ? shuffle(piece.word[COUNT / 4 - BEFORE + i], lane() + WARP - 1 GF_FROM) : 0u;
    }
    // Where the output lies over an input, its lane has read what this one writes of the piece before.
    warp_barrier(GF_FROM_ONLY);
    move_up<WIDTH, GRAIN>(words, shift);
  }
#pragma unroll
  for (int k = 0; k < COUNT / WIDTH; ++k) {
    const int start = k * WIDTH - shift;
    if ((far || start + WIDTH <= left) && !(k == 0 && before_apart)) {
      Pack<WIDTH> vector;
#pragma unroll
      for (int i = 0; i < WIDTH / 4; ++i) {
        vector.word[i] = words[BEFORE + k * WIDTH / 4 + i];
      }
      store_pack<WIDTH, ACCESS>(offset(vectors, k * WIDTH), vector GF_FROM);
    }
  }
  if (LANES > 1 && far) {
    // Of one lane what its first vector has of the piece, of the other what the last has: the rest of a vector's bytes.
    if (before_apart || behind_apart) {
      void* const first = offset(address, behind_apart ? COUNT - WIDTH : 0);
#pragma unroll
      for (int at = 0; at < WIDTH; at += NARROW) {
        Pack<NARROW> part;
#pragma unroll
        for (int i = 0; i < (NARROW + 3) / 4; ++i) {
          const int word = at / 4 + i;
          part.word[i] = (behind_apart ? piece.word[(COUNT - WIDTH) / 4 + word] : piece.word[word]) >> at % 4 * 8;
        }
        if ((at < WIDTH - shift) == before_apart) {
          store_pack<NARROW, ACCESS>(offset(first, at), part GF_FROM);
        }
      }
    }
    return;
  }
  // From here on, and up to there, the piece lies in vectors that no lane stores: the row ends in them, or they are apart.
  const int whole = far ? COUNT : (left + shift) / WIDTH * WIDTH - shift;
  const int from = behind_apart && COUNT - shift < whole ? COUNT - shift : whole;
  const int to = before_apart ? WIDTH - shift : 0;
  if ((far || left > 0) && (from < COUNT || to > 0)) {
#pragma unroll
    for (int at = 0; at < COUNT; at += NARROW) {
      if ((at < to || at >= from) && (far || at < left)) {
        Pack<NARROW> part;
#pragma unroll
        for (int i = 0; i < (NARROW + 3) / 4; ++i) {
          part.word[i] = piece.word[at / 4 + i] >> at % 4 * 8;
        }
        store_pack<NARROW, ACCESS>(offset(address, at), part GF_FROM);
      }
    }
  }
}

/// The first `count` of an array of values, `other` in place of the rest.
template <int COUNT>
GF_DEVICE void keep_first(float (&values)[COUNT], int count, float other) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = i < count ? values[i] : other;
  }
}

}  // namespace gf
