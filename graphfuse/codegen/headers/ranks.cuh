// How kernels on the ranks of one host meet, that read or write each other's memory.
//
// Each rank has signals: words that its peers write, and words of its own. A call has a number for each peer, which the
// kernels count themselves. What a kernel reads was complete when it began, and what it writes was free, so any CTA of a
// rank may tell its peers so.
#pragma once
#include "graphfuse/atomics.cuh"
#include "graphfuse/indices.cuh"
#include "graphfuse/platform.cuh"
#include "graphfuse/simt.cuh"

namespace gf {

/// Lines of a rank's signals, each with a word for every peer. CALLS: calls that have ended. CTAS: those of this call
/// that have read and written what others have. BEGUN, DONE: the call that the peer has begun, or has read and written
/// everything for; it writes these.
enum class Signal { CALLS, CTAS, BEGUN, DONE };

constexpr int SIGNAL_LINE = 32;  // words

/// signals: this rank's; behind them for each rank the address of its memory, then for each rank that of its signals.
/// rank: this kernel's.
template <int SIZE>
struct Ranks {
  void* signals;
  u32 rank;
  bool meets;   // whether this thread meets a peer, the one with its number
  u32 call;     // the number of this call for them both
  u32* theirs;  // the peer's signals

  GF_DEVICE static Ranks of(const void* signals, u32 rank) {
    const u32 peer = thread_index();
    return {const_cast<void*>(signals), rank, peer < SIZE && peer != rank, 0, nullptr};
  }

  /// Bytes from memory of this rank to the same of another.
  GF_DEVICE i64 to(u32 other) const { return address(other) - address(rank); }

  /// Waits until all peers have begun this call. All threads of the CTA call it.
  GF_DEVICE void begin() {
    if (meets) {
      theirs = reinterpret_cast<u32*>(address(SIZE + thread_index()));
      call = load_relaxed(mine(Signal::CALLS)) + 1;
      store_relaxed_system(their(Signal::BEGUN), call);
      await(Signal::BEGUN);
    }
    barrier();
  }

  /// Tells the peers, if all other CTAs are done, too, that theirs has been read and written. Whether this thread is to
  /// call `end`.
  /// All threads of the CTA call it.
  GF_DEVICE bool done() const {
    barrier();
    if (!meets || atomic_add_acq_rel(mine(Signal::CTAS), 1u) + 1 < grid_size()) {
      return false;
    }
    store_release_system(their(Signal::DONE), call);
    return true;
  }

  /// Waits until a peer has read what this rank has: behind the kernel it may be overwritten. What the peer wrote here
  /// may be read.
  GF_DEVICE void end() const {
    await(Signal::DONE);
    store_pack<4>(mine(Signal::CTAS), {{0}});
    store_pack<4>(mine(Signal::CALLS), {{call}});
  }

 private:
  GF_DEVICE i64 address(u32 number) const {
    return integer(static_cast<const i64*>(offset(static_cast<const void*>(signals), 4 * 4 * SIGNAL_LINE)) + number);
  }
  GF_DEVICE u32* mine(Signal signal) const {
    return static_cast<u32*>(signals) + int(signal) * SIGNAL_LINE + thread_index();
  }
  GF_DEVICE u32* their(Signal signal) const { return theirs + int(signal) * SIGNAL_LINE + rank; }
  GF_DEVICE void await(Signal signal) const {
    while (load_acquire_system(mine(signal)) != call) {
      spin();
    }
  }
};

/// A rank without peers.
template <>
struct Ranks<1> {
  GF_DEVICE void begin() const {}
  GF_DEVICE bool done() const { return false; }
  GF_DEVICE void end() const {}
};

}  // namespace gf
