// Division by a number that the host knows: a product and a shift.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

/// n / divisor for n below 2^31, with multiplier and shift as ``graphfuse.codegen.parameters.divider`` gives them.
GF_DEVICE u32 divide(u32 n, u32 multiplier, u32 shift) { return u32(u64(times(n, multiplier)) >> shift); }

}  // namespace gf
