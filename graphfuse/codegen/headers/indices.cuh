// Rows that are chosen by number.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

GF_DEVICE i64 integer(const int* address GF_SITE) {
  return int(load<4, 4, Access::READ_ONLY>(address GF_FROM).word[0]);
}

GF_DEVICE i64 integer(const i64* address GF_SITE) {
  const Bytes<8> words = load<8, 8, Access::READ_ONLY>(address GF_FROM);
  return i64(u64(words.word[1]) << 32 | words.word[0]);
}

/// Where the row of this number lies, of `count` rows; null if it is none of them.
GF_DEVICE const void* row_at(const void* rows, i64 number, i64 apart, i64 count) {
  return u64(number) < u64(count) ? offset(rows, number * apart) : nullptr;
}
GF_DEVICE void* row_at(void* rows, i64 number, i64 apart, i64 count) {
  return u64(number) < u64(count) && rows != nullptr ? offset(rows, number * apart) : nullptr;
}

}  // namespace gf
