// What a kernel may ask of the machine: who it is, exchange with other threads, memory accesses.
//
// On a GPU these are instructions. In plain C++ they are the functions of gf::host, which
// whoever runs the kernel on a CPU provides.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/types.cuh"
#include "graphfuse/convert.cuh"

namespace gf {

constexpr int WARP = 32;

#ifndef __CUDACC__
namespace host {
u32 thread_index();
u32 block_index();
u32 grid_size();
u32 shuffle_xor(u32 value, u32 lane_mask);
void barrier();
/// The CTA's memory for the declaration at `site`: one address for all its threads, 16-byte aligned.
void* shared_memory(const void* site, u64 bytes);
/// Called before each access with its width; an address that is not a multiple of it is an error.
void check_access(const void* address, u32 width, bool write);
}  // namespace host

#define GF_SHARED(type, name, count) \
  static const char name##_site = 0; \
  type* const name = static_cast<type*>(gf::host::shared_memory(&name##_site, sizeof(type) * (count)))
#else
#define GF_SHARED(type, name, count) __shared__ type name[count]
#endif

GF_DEVICE u32 thread_index() {
#ifdef __CUDACC__
  return threadIdx.x;
#else
  return host::thread_index();
#endif
}

GF_DEVICE u32 block_index() {
#ifdef __CUDACC__
  return blockIdx.x;
#else
  return host::block_index();
#endif
}

GF_DEVICE u32 grid_size() {
#ifdef __CUDACC__
  return gridDim.x;
#else
  return host::grid_size();
#endif
}

/// Makes the compiler take the bytes as new, so that it unpacks them again instead of keeping
/// registers with what it unpacked before.
template <int COUNT>
GF_DEVICE void forget_unpacked(Bytes<COUNT>& chunk) {
#ifdef __CUDACC__
  u32 zero;  // a grid has fewer than 2^31 CTAs, but the compiler does not see that this is one's size
  asm("{ .reg .u32 ctas; mov.u32 ctas, %%nctaid.x; shr.u32 %0, ctas, 31; }" : "=r"(zero));
#pragma unroll
  for (int i = 0; i < (COUNT + 3) / 4; ++i) {
    chunk.word[i] ^= zero;
  }
#else
  (void)chunk;
#endif
}

/// The value of the lane whose number differs in the bits of `lane_mask`. All lanes of the warp call it.
GF_DEVICE float shuffle_xor(float value, u32 lane_mask) {
#ifdef __CUDACC__
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
#else
  return as_float(host::shuffle_xor(as_bits(value), lane_mask));
#endif
}

/// All threads of the CTA arrive before any goes on; shared memory written before is seen after.
GF_DEVICE void barrier() {
#ifdef __CUDACC__
  __syncthreads();
#else
  host::barrier();
#endif
}

GF_DEVICE const void* offset(const void* address, i64 bytes) { return static_cast<const char*>(address) + bytes; }
GF_DEVICE void* offset(void* address, i64 bytes) { return static_cast<char*>(address) + bytes; }

/// What one access moves: WIDTH bytes of 1, 2, 4, 8 or 16, from an address that is a multiple of it.
template <int WIDTH>
using Pack = Bytes<WIDTH>;

#ifdef __CUDACC__
template <bool READ_ONLY, class T>
GF_DEVICE T fetch(const T* address) {
  if constexpr (READ_ONLY) {
    return __ldg(address);
  } else {
    return *address;
  }
}
#endif

/// READ_ONLY promises that nothing writes the memory while the kernel runs.
template <int WIDTH, bool READ_ONLY>
GF_DEVICE Pack<WIDTH> load_pack(const void* address) {
  static_assert(WIDTH == 1 || WIDTH == 2 || WIDTH == 4 || WIDTH == 8 || WIDTH == 16, "no access of this width");
#ifdef __CUDACC__
  if constexpr (WIDTH == 16) {
    const uint4 v = fetch<READ_ONLY>(static_cast<const uint4*>(address));
    return {{v.x, v.y, v.z, v.w}};
  } else if constexpr (WIDTH == 8) {
    const uint2 v = fetch<READ_ONLY>(static_cast<const uint2*>(address));
    return {{v.x, v.y}};
  } else if constexpr (WIDTH == 4) {
    return {{fetch<READ_ONLY>(static_cast<const u32*>(address))}};
  } else if constexpr (WIDTH == 2) {
    return {{fetch<READ_ONLY>(static_cast<const u16*>(address))}};
  } else {
    return {{fetch<READ_ONLY>(static_cast<const u8*>(address))}};
  }
#else
  host::check_access(address, WIDTH, false);
  Pack<WIDTH> pack = {};
  __builtin_memcpy(&pack, address, WIDTH);
  return pack;
#endif
}

template <int WIDTH>
GF_DEVICE void store_pack(void* address, const Pack<WIDTH>& pack) {
  static_assert(WIDTH == 1 || WIDTH == 2 || WIDTH == 4 || WIDTH == 8 || WIDTH == 16, "no access of this width");
#ifdef __CUDACC__
  if constexpr (WIDTH == 16) {
    *static_cast<uint4*>(address) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
  } else if constexpr (WIDTH == 8) {
    *static_cast<uint2*>(address) = make_uint2(pack.word[0], pack.word[1]);
  } else if constexpr (WIDTH == 4) {
    *static_cast<u32*>(address) = pack.word[0];
  } else if constexpr (WIDTH == 2) {
    *static_cast<u16*>(address) = u16(pack.word[0]);
  } else {
    *static_cast<u8*>(address) = u8(pack.word[0]);
  }
#else
  host::check_access(address, WIDTH, true);
  __builtin_memcpy(address, &pack, WIDTH);
#endif
}

/// COUNT bytes in accesses of WIDTH.
template <int COUNT, int WIDTH, bool READ_ONLY = false>
GF_DEVICE Bytes<COUNT> load(const void* address) {
  static_assert(COUNT % WIDTH == 0, "accesses must fill the chunk");
  Bytes<COUNT> chunk = {};
#pragma unroll
  for (int at = 0; at < COUNT; at += WIDTH) {
    const Pack<WIDTH> pack = load_pack<WIDTH, READ_ONLY>(offset(address, at));
#pragma unroll
    for (int i = 0; i < (WIDTH + 3) / 4; ++i) {
      chunk.word[at / 4 + i] |= pack.word[i] << (at % 4 * 8);
    }
  }
  return chunk;
}

/// COUNT bytes in accesses of WIDTH.
template <int COUNT, int WIDTH>
GF_DEVICE void store(void* address, const Bytes<COUNT>& chunk) {
  static_assert(COUNT % WIDTH == 0, "accesses must fill the chunk");
#pragma unroll
  for (int at = 0; at < COUNT; at += WIDTH) {
    Pack<WIDTH> pack;
#pragma unroll
    for (int i = 0; i < (WIDTH + 3) / 4; ++i) {
      pack.word[i] = chunk.word[at / 4 + i] >> (at % 4 * 8);
    }
    store_pack<WIDTH>(offset(address, at), pack);
  }
}

/// A scalar operand: by value, or one element of device memory.
GF_DEVICE float scalar(float value) { return value; }

template <class T>
GF_DEVICE float scalar(const T* address) {
  return decode<T>(load<sizeof(T), sizeof(T), true>(address).word[0]);
}

}  // namespace gf
