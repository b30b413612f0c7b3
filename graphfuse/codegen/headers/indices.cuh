// Rows that are chosen by an index.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

template <Access HOW = Access::READ_ONLY>
GF_DEVICE i64 integer(const int* address GF_SITE) {
  return int(load<4, 4, HOW>(address GF_FROM).word[0]);
}

template <Access HOW = Access::READ_ONLY>
GF_DEVICE i64 integer(const i64* address GF_SITE) {
  const Bytes<8> words = load<8, 8, HOW>(address GF_FROM);
  return i64(u64(words.word[1]) << 32 | words.word[0]);
}

/// An unspecified number, at no cost: that of a row that does not exist, of which nothing is read or stored.
GF_DEVICE i64 any_number() {
  i64 number = 0;
#ifdef __CUDACC__
  asm("" : "=l"(number));
#endif
  return number;
}

}  // namespace gf
