// One element of a row, by the number of its column.
#pragma once
#include "graphfuse/convert.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"
#include "graphfuse/types.cuh"

namespace gf {

/// The element in column `column`, or 0 if there is no such column. first: the address of the first column. columns: up
/// to 2^24.
template <class T>
GF_DEVICE float element(const void* first, float column, i64 columns, bool exists) {
  const bool found = exists && column >= 0.0f && column < float(columns) && float(int(column)) == column;
  return found ? decode<T>(load<sizeof(T), sizeof(T), Access::USUAL>(offset(first, int(column) * i64(sizeof(T)))).word[0])
               : 0.0f;
}

}  // namespace gf
