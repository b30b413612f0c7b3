// Rows that are chosen by an index.
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

/// `condition`, which the compiler is told to expect to be true.
GF_DEVICE bool likely(bool condition) { return __builtin_expect(condition, true); }

/// A row that is chosen from `count` rows by its index: the address of the first row, the stride in bytes, and the
/// index. An index out of range means no row.
template <class Address>
struct Chosen {
  Address first;
  i64 apart;
  i64 count;

  GF_DEVICE bool exists(i64 number) const { return u64(number) < u64(count); }
  GF_DEVICE Address of(i64 number) const { return offset(first, number * apart); }
};

}  // namespace gf
