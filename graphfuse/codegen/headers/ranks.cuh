// How kernels on the ranks of one host meet, that read each other's memory.
//
// Each rank has signals: words that its peers write, and words of its own. A call has a number for each peer, which the
// kernels count themselves. What a kernel reads was complete when it began, so any CTA of a rank may tell its peers so.
#pragma once
#include "graphfuse/atomics.cuh"
#include "graphfuse/indices.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

/// Lines of a rank's signals, each with a word for every peer. CALLS: calls that have ended. READERS: CTAs of this call
/// that have read. BEGUN, READ: the call that the peer has begun, or has read everything for; it writes these.
enum class Signal { CALLS, READERS, BEGUN, READ };

/// table: for each rank the address of its memory, then for each rank that of its signals. rank: this kernel's.
template <int SIZE>
struct Ranks {
  const void* table;
  u32 rank;

  /// Bytes from memory of this rank to the same of another.
  GF_DEVICE i64 to(u32 other) const { return address(other) - address(rank); }

  /// Waits until all peers have begun this call. All threads of the CTA call it.
  GF_DEVICE void begin() const {
    if (meets()) {
      const u32 call = this_call();
      store_release_system(word(peer(), Signal::BEGUN, rank), call);
      await(word(rank, Signal::BEGUN, peer()), call);
    }
    barrier();
  }

  /// Tells the peers, if all other CTAs have read, too, that all has been read. Whether this thread is to call `end`.
  /// All threads of the CTA call it.
  GF_DEVICE bool read() const {
    barrier();
    if (!meets()) return false;
    u32* const readers = word(rank, Signal::READERS, peer());
    if (atomic_add_release(readers, 1u) + 1 < grid_size()) return false;
    load_acquire(readers);  // after what all of them read
    store_release_system(word(peer(), Signal::READ, rank), this_call());
    return true;
  }

  /// Waits until a peer has read what this rank has: behind the kernel it may be overwritten.
  GF_DEVICE void end() const {
    const u32 call = this_call();
    await(word(rank, Signal::READ, peer()), call);
    atomic_exchange(word(rank, Signal::READERS, peer()), 0u);
    atomic_exchange(word(rank, Signal::CALLS, peer()), call);
  }

 private:
  GF_DEVICE static u32 peer() { return thread_index(); }
  GF_DEVICE bool meets() const { return peer() < SIZE && peer() != rank; }
  GF_DEVICE i64 address(u32 number) const { return integer(static_cast<const i64*>(table) + number); }
  GF_DEVICE u32* word(u32 of, Signal signal, u32 other) const {
    return reinterpret_cast<u32*>(address(SIZE + of)) + int(signal) * 32 + other;
  }
  GF_DEVICE u32 this_call() const { return load_relaxed(word(rank, Signal::CALLS, peer())) + 1; }
  GF_DEVICE static void await(const u32* flag, u32 call) {
    while (load_acquire_system(flag) != call) {
      spin();
    }
  }
};

/// A rank without peers.
template <>
struct Ranks<1> {
  GF_DEVICE void begin() const {}
  GF_DEVICE bool read() const { return false; }
  GF_DEVICE void end() const {}
};

}  // namespace gf
