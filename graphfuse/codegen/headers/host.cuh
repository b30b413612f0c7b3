// What the plain C++ side of the headers asks of whoever runs kernels on a CPU (graphfuse/emulator).
//
// The threads of a CTA are fibers there; each of these calls may let another one run. Needs no
// other header, of ours or the system's.
#pragma once
#ifndef __CUDACC__
namespace gf {

/// Where a kernel calls something: what reports name.
struct Site {
  const char* file;
  int line;

  /// The place of the outermost call, when it is the default of a parameter.
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

namespace host {

// Who a thread is.
unsigned thread_index();
unsigned block_index();
unsigned grid_size();
unsigned cluster_rank();
unsigned cluster_size();

// Meetings. Values are exchanged as bits; `source` is a lane of the warp.
enum class WarpOperation { SHUFFLE, BALLOT, BARRIER };
unsigned long long meet_warp(WarpOperation operation, unsigned long long value, unsigned source, Site site);
void meet_cta(Site site);
void arrive_cluster(Site site);
void wait_cluster(Site site);

/// The word for the barrier of a cooperative launch.
unsigned* grid_word(Site site);

/// A CTA's memory for the declaration whose variable is at `declaration`: the same for all its threads.
void* shared_memory(const void* declaration, unsigned long long bytes);
/// The memory that the launch asks for.
void* dynamic_shared_memory();
/// The address in another CTA of the cluster that corresponds to one in this CTA's shared memory.
void* map_shared(const void* address, unsigned rank, Site site);

/// Before each access of `width` bytes. global: in a way that shared memory does not have.
void check_access(const void* address, unsigned width, bool write, bool global, Site site);
/// Before each atomic operation; `changes` memory, so that a thread that spins may find what it waits for.
void check_atomic(const void* address, unsigned width, bool changes, Site site);
/// In each round of a loop that waits for memory to change.
void spin(Site site);

// Copies that finish as late as the kernel lets them.
void copy_async(void* shared, const void* global, unsigned bytes, Site site);
void commit_copies(Site site);
void wait_copies(unsigned pending, Site site);
void bulk_load(void* shared, const void* global, unsigned bytes, unsigned long long* mbarrier, Site site);
/// To the memory, and for an mbarrier, of any CTA of the cluster.
void send(float value, float* shared, unsigned long long* mbarrier, Site site);
void mbarrier_init(unsigned long long* mbarrier, unsigned arrivals, Site site);
void mbarrier_fence_init(Site site);
void mbarrier_arrive(unsigned long long* mbarrier, unsigned bytes, Site site);
void mbarrier_wait(unsigned long long* mbarrier, unsigned parity, Site site);

}  // namespace host
}  // namespace gf
#endif
