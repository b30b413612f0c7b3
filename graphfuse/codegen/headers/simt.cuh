// What a kernel may ask of the machine: indices, exchange between threads, barriers, memory accesses.
//
// On a GPU these are instructions. In plain C++ they are the functions of gf::host.
#pragma once
#include "graphfuse/platform.cuh"
#include "graphfuse/convert.cuh"
#include "graphfuse/types.cuh"

namespace gf {

constexpr int WARP = 32;

/// Shared memory of the CTA, uninitialized: `count` elements, known when compiling.
#ifdef __CUDACC__
#define GF_SHARED(type, name, count) __shared__ type name[count]
#else
#define GF_SHARED(type, name, count) \
  static const char name##_declaration = 0; \
  type* const name = static_cast<type*>(gf::host::shared_memory(&name##_declaration, sizeof(type) * (count)))
#endif

/// Dynamic shared memory, whose size the launch gives; 128-byte aligned. All uses name the same memory.
#ifdef __CUDACC__
#define GF_DYNAMIC_SHARED(type, name) \
  extern __shared__ __align__(128) unsigned char gf_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(gf_dynamic_shared)
#else
#define GF_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(gf::host::dynamic_shared_memory())
#endif

GF_DEVICE u32 thread_index() { return GF_GPU_OR_CPU(threadIdx.x, host::thread_index()); }

GF_DEVICE u32 block_index() { return GF_GPU_OR_CPU(blockIdx.x, host::block_index()); }

GF_DEVICE u32 grid_size() { return GF_GPU_OR_CPU(gridDim.x, host::grid_size()); }

/// Makes the compiler treat the bytes as new. So it unpacks them again, and keeps no registers for values that it
/// unpacked before.
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

/// Unspecified bytes, at no cost. Reading an uninitialized variable would be undefined.
template <int COUNT>
GF_DEVICE Bytes<COUNT> any_bytes() {
  Bytes<COUNT> chunk = {};
#ifdef __CUDACC__
#pragma unroll
  for (int i = 0; i < (COUNT + 3) / 4; ++i) {
    asm("" : "=r"(chunk.word[i]));
  }
#endif
  return chunk;
}

GF_DEVICE u32 lane() { return thread_index() % WARP; }

#ifndef __CUDACC__
/// `source` applied to the bits of a value. T has at most 8 bytes.
template <class T>
GF_DEVICE T shuffle_bits(T value, u32 source, Site site) {
  static_assert(sizeof(T) <= 8, "no shuffle of this width");
  u64 bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = host::meet_warp(host::WarpOperation::SHUFFLE, bits, source, site);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
#endif

// Warp shuffles and votes: all lanes of the warp call them together. They order no memory accesses; warp_barrier does.
// T: float, double or an integer of 4 or 8 bytes.

/// The value of the lane whose number is this one's xor `lane_mask`.
template <class T>
GF_DEVICE T shuffle_xor(T value, u32 lane_mask GF_SITE) {
  return GF_GPU_OR_CPU(__shfl_xor_sync(0xffffffffu, value, lane_mask), shuffle_bits(value, lane() ^ lane_mask, site));
}

/// The value of the lane `distance` above. The last lanes keep their own.
template <class T>
GF_DEVICE T shuffle_down(T value, u32 distance GF_SITE) {
  return GF_GPU_OR_CPU(__shfl_down_sync(0xffffffffu, value, distance),
                       shuffle_bits(value, lane() + distance < WARP ? lane() + distance : lane(), site));
}

/// The value of the lane `source` % 32.
template <class T>
GF_DEVICE T shuffle(T value, u32 source GF_SITE) {
  return GF_GPU_OR_CPU(__shfl_sync(0xffffffffu, value, source), shuffle_bits(value, source % WARP, site));
}

/// Bit i is set if lane i votes yes.
GF_DEVICE u32 ballot(bool yes GF_SITE) {
  return GF_GPU_OR_CPU(__ballot_sync(0xffffffffu, yes), u32(host::meet_warp(host::WarpOperation::BALLOT, yes, 0, site)));
}

GF_DEVICE bool any_lane(bool yes GF_SITE) {
  return GF_GPU_OR_CPU(__any_sync(0xffffffffu, yes), ballot(yes, site) != 0);
}

GF_DEVICE bool all_lanes(bool yes GF_SITE) {
  return GF_GPU_OR_CPU(__all_sync(0xffffffffu, yes), ballot(!yes, site) == 0);
}

/// Like barrier, for the lanes of the warp.
GF_DEVICE void warp_barrier(GF_SITE_ONLY) {
  GF_GPU_OR_CPU(__syncwarp(), host::meet_warp(host::WarpOperation::BARRIER, 0, 0, site));
}

/// A barrier of all threads of the CTA. Memory written before it is visible after it.
GF_DEVICE void barrier(GF_SITE_ONLY) { GF_GPU_OR_CPU(__syncthreads(), host::meet_cta(site)); }

/// A product of 64 bits. Of two numbers of 32 bits it is one instruction, which a compiler does not find where it has
/// widened one of them before a loop.
template <class X, class Y>
GF_DEVICE i64 times(X x, Y y) {
#ifdef __CUDACC__
  if constexpr (sizeof(X) == 4 && sizeof(Y) == 4) {
    i64 product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
    return product;
  }
#endif
  return i64(x) * i64(y);
}

GF_DEVICE const void* offset(const void* address, i64 bytes) { return static_cast<const char*>(address) + bytes; }
GF_DEVICE void* offset(void* address, i64 bytes) { return static_cast<char*>(address) + bytes; }

/// Makes the compiler compute an address in global memory here, once, instead of wherever it is used. For SM120 it is
/// left to the compiler, which would spill the address otherwise.
template <class T>
GF_DEVICE T* settled(T* address) {
#if defined(__CUDACC__) && __CUDA_ARCH__ < 1200
  size_t global = __cvta_generic_to_global(address);
  asm volatile("" : "+l"(global));
  return static_cast<T*>(__cvta_global_to_generic(global));
#else
  return address;
#endif
}

/// A number of which the compiler knows no more: what depends on it is worked out once before a loop, not in it.
GF_DEVICE u32 settled(u32 number) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(number));
#endif
  return number;
}

/// The type of one access of WIDTH bytes: 1, 2, 4, 8 or 16. The address is a multiple of WIDTH.
template <int WIDTH>
using Pack = Bytes<WIDTH>;

/// How memory is accessed; but for USUAL, global memory alone. READ_ONLY promises that nothing writes it while the kernel
/// runs. What was accessed LAST or FIRST is what the L2 gives up after all else, or before; a hint, in accesses of 4 bytes
/// and more for LAST.
enum class Access { USUAL, READ_ONLY, LAST, FIRST };

#ifdef __CUDACC__
#define GF_LOAD_LAST "{ .reg .b64 last; createpolicy.fractional.L2::evict_last.b64 last, 1.0; ld.global.L2::cache_hint"

template <Access ACCESS, class T>
GF_DEVICE T fetch(const T* address) {
  if constexpr (ACCESS == Access::READ_ONLY) {
    return __ldg(address);
  } else if constexpr (ACCESS == Access::FIRST) {
    return __ldcs(address);
  } else if constexpr (ACCESS == Access::LAST && sizeof(T) == 16) {
    T v;
    asm volatile(GF_LOAD_LAST ".v4.b32 {%0, %1, %2, %3}, [%4], last; }"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
  } else if constexpr (ACCESS == Access::LAST && sizeof(T) == 8) {
    T v;
    asm volatile(GF_LOAD_LAST ".v2.b32 {%0, %1}, [%2], last; }" : "=r"(v.x), "=r"(v.y) : "l"(address) : "memory");
    return v;
  } else if constexpr (ACCESS == Access::LAST && sizeof(T) == 4) {
    T v;
    asm volatile(GF_LOAD_LAST ".b32 %0, [%1], last; }" : "=r"(v) : "l"(address) : "memory");
    return v;
  } else {
    return *address;
  }
}

template <Access ACCESS, class T>
GF_DEVICE void put(T* address, T value) {
  static_assert(ACCESS == Access::USUAL || ACCESS == Access::FIRST, "no such store");
  if constexpr (ACCESS == Access::FIRST) {
    __stcs(address, value);
  } else {
    *address = value;
  }
}
#endif

template <int WIDTH, Access ACCESS>
GF_DEVICE Pack<WIDTH> load_pack(const void* address GF_SITE) {
  static_assert(WIDTH == 1 || WIDTH == 2 || WIDTH == 4 || WIDTH == 8 || WIDTH == 16, "no access of this width");
#ifdef __CUDACC__
  if constexpr (WIDTH == 16) {
    const uint4 v = fetch<ACCESS>(static_cast<const uint4*>(address));
    return {{v.x, v.y, v.z, v.w}};
  } else if constexpr (WIDTH == 8) {
    const uint2 v = fetch<ACCESS>(static_cast<const uint2*>(address));
    return {{v.x, v.y}};
  } else if constexpr (WIDTH == 4) {
    return {{fetch<ACCESS>(static_cast<const u32*>(address))}};
  } else if constexpr (WIDTH == 2) {
    return {{fetch<ACCESS>(static_cast<const u16*>(address))}};
  } else {
    return {{fetch<ACCESS>(static_cast<const u8*>(address))}};
  }
#else
  host::check_access(address, WIDTH, false, ACCESS != Access::USUAL, site);
  Pack<WIDTH> pack = {};
  __builtin_memcpy(&pack, address, WIDTH);
  return pack;
#endif
}

template <int WIDTH, Access ACCESS = Access::USUAL>
GF_DEVICE void store_pack(void* address, const Pack<WIDTH>& pack GF_SITE) {
  static_assert(WIDTH == 1 || WIDTH == 2 || WIDTH == 4 || WIDTH == 8 || WIDTH == 16, "no access of this width");
#ifdef __CUDACC__
  if constexpr (WIDTH == 16) {
    put<ACCESS>(static_cast<uint4*>(address), make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]));
  } else if constexpr (WIDTH == 8) {
    put<ACCESS>(static_cast<uint2*>(address), make_uint2(pack.word[0], pack.word[1]));
  } else if constexpr (WIDTH == 4) {
    put<ACCESS>(static_cast<u32*>(address), pack.word[0]);
  } else if constexpr (WIDTH == 2) {
    put<ACCESS>(static_cast<u16*>(address), u16(pack.word[0]));
  } else {
    put<ACCESS>(static_cast<u8*>(address), u8(pack.word[0]));
  }
#else
  host::check_access(address, WIDTH, true, ACCESS != Access::USUAL, site);
  __builtin_memcpy(address, &pack, WIDTH);
#endif
}

/// COUNT bytes in accesses of WIDTH.
template <int COUNT, int WIDTH, Access ACCESS = Access::USUAL>
GF_DEVICE Bytes<COUNT> load(const void* address GF_SITE) {
  static_assert(COUNT % WIDTH == 0, "accesses must fill the chunk");
  Bytes<COUNT> chunk = {};
#pragma unroll
  for (int at = 0; at < COUNT; at += WIDTH) {
    const Pack<WIDTH> pack = load_pack<WIDTH, ACCESS>(offset(address, at) GF_FROM);
#pragma unroll
    for (int i = 0; i < (WIDTH + 3) / 4; ++i) {
      chunk.word[at / 4 + i] |= pack.word[i] << (at % 4 * 8);
    }
  }
  return chunk;
}

/// COUNT bytes in accesses of WIDTH.
template <int COUNT, int WIDTH, Access ACCESS = Access::USUAL>
GF_DEVICE void store(void* address, const Bytes<COUNT>& chunk GF_SITE) {
  static_assert(COUNT % WIDTH == 0, "accesses must fill the chunk");
#pragma unroll
  for (int at = 0; at < COUNT; at += WIDTH) {
    Pack<WIDTH> pack;
#pragma unroll
    for (int i = 0; i < (WIDTH + 3) / 4; ++i) {
      pack.word[i] = chunk.word[at / 4 + i] >> (at % 4 * 8);
    }
    store_pack<WIDTH, ACCESS>(offset(address, at), pack GF_FROM);
  }
}

/// A scalar operand: by value, or one element of device memory.
GF_DEVICE float scalar(float value) { return value; }

template <class T>
GF_DEVICE float scalar(const T* address GF_SITE) {
  return decode<T>(load<sizeof(T), sizeof(T), Access::READ_ONLY>(address GF_FROM).word[0]);
}

}  // namespace gf
