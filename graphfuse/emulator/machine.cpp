// Runs a kernel on one OS thread: CTA after CTA, cluster after cluster, or the whole grid at once if the
// launch is cooperative or one of several ranks. Each of the CUDA threads is a fiber that runs until it has to wait.
//
// Copies finish as late as the kernel allows: those that a thread waits for by itself at the wait, bulk
// copies when no thread can go on. Until then their destination reads as NaN, and is poisoned under
// AddressSanitizer. Whatever the machine forbids ends the launch with a message that names the place in
// the kernel's source. Not modelled: weak memory, proxies, approximate functions, registers, time.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "fiber.hpp"
#include "host.cuh"
#include "launch.hpp"
#include "sanitizers.hpp"

namespace {

using gf::Site;
using gf::host::WarpOperation;
using sanitizers::Quiet;
using u8 = unsigned char;
using u64 = unsigned long long;

constexpr unsigned WARP = 32;
constexpr std::size_t THREADS_KEPT = 2048;  // from launch to launch, with their stacks
constexpr unsigned FRUITLESS_ROUNDS = 64;  // of spinning until it is a deadlock
constexpr u64 NAN_BYTES = ~0ull;           // NaN in every floating-point type
constexpr u64 MBARRIER_MARK = 0x4d42415252494552ull;
constexpr u64 FORWARD = 0, REVERSE = 1;

enum class State { READY, WARP, BARRIER, CLUSTER, MBARRIER, SPINNING, ENDED };

const char* const WARP_CALLS[] = {"shuffle", "ballot", "warp_barrier"};

// Bytes are moved through volatile pointers: calls of memcpy and memset would be intercepted by the
// sanitizers, which take them for accesses of the kernel's thread.

void fill_nan(u8* begin, u64 bytes) {
  u64 i = 0;
  for (; i + 8 <= bytes; i += 8) *reinterpret_cast<volatile u64*>(begin + i) = NAN_BYTES;
  for (; i < bytes; ++i) static_cast<volatile u8*>(begin)[i] = 0xff;
}

void move_bytes(u8* to, const u8* from, u64 bytes) {
  for (u64 i = 0; i < bytes; ++i) static_cast<volatile u8*>(to)[i] = static_cast<const volatile u8*>(from)[i];
}

std::string text(Site site) { return std::string(site.file ? site.file : "?") + ":" + std::to_string(site.line); }

bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || !std::strcmp(a.file, b.file)); }

/// "0-31, 40".
std::string ranges(const std::vector<unsigned>& sorted) {
  std::string out;
  for (std::size_t i = 0; i < sorted.size();) {
    std::size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    out += (out.empty() ? "" : ", ") + std::to_string(sorted[i]);
    if (end > i + 1) out += "-" + std::to_string(sorted[end - 1]);
    i = end;
  }
  return out;
}

struct Cta;
struct Cluster;

/// The launches of one rank, of which one runs at a time.
struct Stream {
  unsigned rank = 0;
  unsigned call = 0;
  unsigned left = 0;  // CTAs of this launch that have not ended
  char clock = 0;
};

/// Where a number of threads meet, again and again. Two clocks take turns, as no thread is ever two rounds ahead.
struct Meeting {
  unsigned arrived = 0;
  unsigned round = 0;
  char clocks[2];

  char& clock() { return clocks[round % 2]; }
  void next() {
    arrived = 0;
    ++round;
  }
};

/// An asynchronous copy: to ThreadSanitizer another thread makes it, after what its issuer did before.
struct Copy {
  u8* to;
  const u8* from;  // null of one that has its value with it
  unsigned bytes;
  void* pc;
  Site site;
  float value = 0;
  std::unique_ptr<char> issued = sanitizers::races() ? std::make_unique<char>() : nullptr;  // clock
};

struct Mbarrier {
  unsigned arrivals = 0;
  unsigned pending = 0;  // arrivals that this phase waits for
  long long bytes = 0;   // announced and not yet come
  unsigned phase = 0;
  struct Thread* maker = nullptr;
  bool fenced = false;
  Site site{};
  char clocks[2];
};

/// A copy that counts towards an mbarrier. cta: whose memory and mbarrier it is.
struct BulkCopy {
  const char* call;
  Copy copy;
  Cta* cta;
  u64* mbarrier;
};

struct Warp {
  std::vector<struct Thread*> lanes;
  Meeting meeting;
  std::vector<unsigned> ended;
};

struct Thread {
  Fiber fiber;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  unsigned index = 0;
  State state = State::READY;
  const char* call = nullptr;  // the last that it made, and from where
  Site site{};
  WarpOperation operation{};
  u64 value = 0;
  unsigned source = 0;
  u64* awaited = nullptr;
  unsigned awaited_parity = 0;
  bool at_cluster = false;  // arrived and not yet waited
  char* cluster_clock = nullptr;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

/// One declaration's shared memory in one CTA; declaration is null for the dynamic part.
struct Shared {
  const void* declaration;
  u8* begin;
  u64 bytes;

  bool holds(const void* address, u64 count) const {
    const u8* const at = static_cast<const u8*>(address);
    return begin <= at && at + count <= begin + bytes;
  }
};

struct Cta {
  unsigned index = 0;
  unsigned rank = 0;
  Cluster* cluster = nullptr;
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  Meeting meeting;
  std::vector<unsigned> ended;
  bool begun = false;
  std::vector<Shared> shared;
  std::map<u64*, Mbarrier> mbarriers;

  bool over() const { return ended.size() == threads.size(); }
};

struct Cluster {
  Stream* stream;
  const u8* arguments;
  std::vector<Cta> ctas;
  Meeting meeting;
  std::vector<unsigned> ended;  // threads that did not arrive in this round and never will
};

class Machine {
 public:
  const char* run(const GfLaunch& launch, GfKernel kernel, const u8* arguments);

  // gf::host
  Thread& me() { return *current_; }
  Thread& enter(const char* call, Site site, bool may_yield = true);
  u64 meet_warp(WarpOperation operation, u64 value, unsigned source, Site site);
  void meet_cta(Site site);
  void arrive_cluster(Site site);
  void wait_cluster(Site site);
  unsigned* grid_word(Site site);
  Shared& shared_memory(Cta& cta, const void* declaration, u64 bytes);
  void* map_shared(const void* address, unsigned rank, Site site);
  void check_access(const void* address, unsigned width, const char* what, bool global, Site site);
  void progress() { progressed_ = true; }
  void spin(Site site);
  void copy_async(u8* to, const u8* from, unsigned bytes, void* pc, Site site);
  void commit_copies(Site site);
  void wait_copies(unsigned pending, Site site);
  void bulk_load(u8* to, const u8* from, unsigned bytes, u64* mbarrier, void* pc, Site site);
  void send(float value, u8* to, u64* mbarrier, void* pc, Site site);
  void mbarrier_init(u64* address, unsigned arrivals, void* pc, Site site);
  void mbarrier_fence_init(Site site);
  void mbarrier_arrive(u64* address, unsigned bytes, void* pc, Site site);
  void mbarrier_wait(u64* address, unsigned parity, void* pc, Site site);

  unsigned grid() const { return launch_.grid; }

 private:
  [[noreturn]] void fault(Site site, const std::string& what);
  [[noreturn]] void leave();
  std::string name(const Cta& cta) const;
  std::string who(const Thread& thread) const;
  std::string waiting() const;
  unsigned random(unsigned below);

  void run_together(const std::vector<unsigned>& clusters);
  void begin(Stream& stream, const std::vector<unsigned>& clusters);
  void release_memory();
  static void thread_main();
  void end_thread();
  void end_cta(Cta& cta);

  void wake(Thread& thread);
  void block(State state);
  void pass_on();
  Thread* take();
  bool unblock_someone();

  const Shared* find_shared(const Cta& cta, const void* address, u64 bytes) const;
  void check_copy(const char* call, u8* to, const u8* from, unsigned bytes, unsigned multiple, Site site);
  void start(const Copy& copy);
  void finish(const Copy* first, const Copy* last, char& done);
  Mbarrier& mbarrier_at(u64* address, const char* call, void* pc, Site site);
  void settle(u64* address, Mbarrier& mbarrier);
  void check_fenced(const BulkCopy& bulk);
  void finish_bulk(std::size_t which);

  GfLaunch launch_{};
  GfKernel kernel_ = nullptr;
  const u8* arguments_ = nullptr;
  std::string error_;
  bool failed_ = false;
  u64 random_state_ = 0;
  Fiber outer_;
  Thread* current_ = nullptr;
  std::vector<std::unique_ptr<Thread>> pool_;
  std::deque<Cluster> clusters_;  // that run now
  std::deque<Thread*> ready_;
  std::vector<Thread*> spinning_;
  bool progressed_ = false;
  unsigned fruitless_ = 0;
  unsigned alive_ = 0;
  unsigned used_ = 0;  // threads of the pool
  std::vector<unsigned> order_;  // of clusters
  std::vector<Stream> streams_;
  std::deque<BulkCopy> bulk_;
  std::vector<void*> memory_;  // of CTAs that ended
  char begin_clock_ = 0;
  char end_clock_ = 0;
  unsigned grid_word_ = 0;
};

Machine machine;

// Reports

std::string Machine::name(const Cta& cta) const {
  const std::string rank = launch_.ranks > 1 ? " of rank " + std::to_string(cta.cluster->stream->rank) : "";
  return "CTA " + std::to_string(cta.index) + rank;
}

std::string Machine::who(const Thread& thread) const {
  return "thread " + std::to_string(thread.index) + " of " + name(*thread.cta);
}

/// The order in which CTAs are told.
struct Earlier {
  bool operator()(const Cta* a, const Cta* b) const {
    return std::tie(a->cluster->stream, a->index) < std::tie(b->cluster->stream, b->index);
  }
};

/// Whoever waits or has ended, grouped by where.
std::string Machine::waiting() const {
  std::map<std::string, std::map<const Cta*, std::vector<unsigned>, Earlier>> places;  // -> CTA -> threads
  for (const Cluster& cluster : clusters_) {
    for (const Cta& cta : cluster.ctas) {
      for (const Thread* thread : cta.threads) {
        std::string place = "ended";
        if (thread->state != State::ENDED) {
          place = thread->call ? std::string("at ") + thread->call + ", " + text(thread->site) : "not begun";
        }
        if (thread->state == State::MBARRIER) {
          const Mbarrier& mbarrier = cta.mbarriers.at(thread->awaited);
          place += " for " + std::to_string(mbarrier.pending) + " arrivals and " + std::to_string(mbarrier.bytes) +
                   " bytes";
        }
        places[place][&cta].push_back(thread->index);
      }
    }
  }
  std::string out;
  unsigned lines = 0;
  for (const auto& [place, ctas] : places) {
    for (const auto& [cta, threads] : ctas) {
      if (++lines > 20) return out + "\n  ...";
      out += "\n  threads " + ranges(threads) + " of " + name(*cta) + ": " + place;
    }
  }
  return out;
}

void Machine::fault(Site site, const std::string& what) {
  error_ = text(site) + ": " + what + " (" + who(me()) + ")";
  leave();
}

/// Back to the outer fiber; those of the threads are abandoned where they are.
void Machine::leave() {
  failed_ = true;
  me().fiber.switch_to(outer_);
  std::abort();
}

unsigned Machine::random(unsigned below) {
  random_state_ = random_state_ * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned((random_state_ >> 33) % below);
}

// Taking turns

void Machine::wake(Thread& thread) {
  thread.state = State::READY;
  ready_.push_back(&thread);
}

Thread* Machine::take() {
  if (ready_.empty()) return nullptr;
  if (launch_.schedule == REVERSE) {
    Thread* const last = ready_.back();
    ready_.pop_back();
    return last;
  }
  if (launch_.schedule != FORWARD) std::swap(ready_.front(), ready_[random(unsigned(ready_.size()))]);
  Thread* const first = ready_.front();
  ready_.pop_front();
  return first;
}

/// The next thread runs, or the outer fiber if none can.
void Machine::pass_on() {
  Thread& from = me();
  current_ = take();
  if (current_ != &from) from.fiber.switch_to(current_ ? current_->fiber : outer_);
}

void Machine::block(State state) {
  me().state = state;
  pass_on();
}

/// What each call of a kernel begins with. Random schedules let another thread run here now and then.
Thread& Machine::enter(const char* call, Site site, bool may_yield) {
  Thread& thread = me();
  thread.call = call;
  thread.site = site;
  if (may_yield && launch_.schedule > REVERSE && random(8) == 0) {
    wake(thread);
    pass_on();
  }
  return thread;
}

/// No thread can run: the latest moment for bulk copies, and another try for those that spin.
bool Machine::unblock_someone() {
  if (!bulk_.empty()) {
    const std::size_t last = bulk_.size() - 1;
    finish_bulk(launch_.schedule == FORWARD ? 0 : launch_.schedule == REVERSE ? last : random(unsigned(last + 1)));
    return true;
  }
  if (spinning_.empty() || (!progressed_ && ++fruitless_ > FRUITLESS_ROUNDS)) return false;
  if (progressed_) fruitless_ = 0;
  progressed_ = false;
  for (Thread* thread : spinning_) wake(*thread);
  spinning_.clear();
  return true;
}

void Machine::spin(Site site) {
  const Quiet quiet;
  spinning_.push_back(&enter("spin", site, false));
  block(State::SPINNING);
}

// Beginning and end

const char* Machine::run(const GfLaunch& launch, GfKernel kernel, const u8* arguments) {
  launch_ = launch;
  kernel_ = kernel;
  arguments_ = arguments;
  failed_ = false;
  error_.clear();
  random_state_ = launch.schedule;
  grid_word_ = launch.schedule == FORWARD ? 0 : 0x80000000u;  // as launches before may have left it
  outer_.adopt_current();
  if (launch.cluster == 0 || launch.grid % launch.cluster != 0) {
    error_ = "the grid of " + std::to_string(launch.grid) + " CTAs is no multiple of the cluster's " +
             std::to_string(launch.cluster);
    return error_.c_str();
  }
  if (launch.cooperative && launch.ranks > 1) return "a cooperative launch on several ranks";
  const bool all = launch.cooperative || launch.ranks > 1;
  const u64 together = u64(launch.block) * (all ? launch.grid * launch.ranks * launch.calls : launch.cluster);
  if (sanitizers::races() && together > Fiber::MOST_RACE_STATES) {
    error_ = std::to_string(together) + " threads run at the same time; ThreadSanitizer follows at most " +
             std::to_string(Fiber::MOST_RACE_STATES);
    return error_.c_str();
  }
  std::vector<unsigned>& order = order_;
  order.resize(launch.grid / launch.cluster);
  for (unsigned i = 0; i < order.size(); ++i) {
    order[i] = launch.schedule == REVERSE ? unsigned(order.size()) - 1 - i : i;
  }
  for (unsigned i = unsigned(order.size()); launch.schedule > REVERSE && i > 1; --i) std::swap(order[i - 1], order[random(i)]);
  if (all) {
    run_together(order);
  } else {
    for (std::size_t i = 0; i < order.size() && !failed_; ++i) run_together({order[i]});
  }
  sanitizers::acquire(end_clock_);
  release_memory();
  if (!failed_) Fiber::spare_all_race_states();
  if (pool_.size() > THREADS_KEPT) pool_.resize(THREADS_KEPT);
  return failed_ ? error_.c_str() : nullptr;
}

void Machine::run_together(const std::vector<unsigned>& clusters) {
  clusters_.clear();
  ready_.clear();
  spinning_.clear();
  bulk_.clear();
  fruitless_ = 0;
  alive_ = used_ = 0;
  streams_.assign(launch_.ranks, {});
  for (unsigned rank = 0; rank < launch_.ranks; ++rank) streams_[rank].rank = rank;
  for (Stream& stream : streams_) begin(stream, clusters);
  sanitizers::release(begin_clock_);
  do {
    current_ = take();
    if (current_) outer_.switch_to(current_->fiber);
  } while (!failed_ && alive_ && (!ready_.empty() || unblock_someone()));
  if (alive_ && !failed_) {
    failed_ = true;
    error_ = "deadlock: no thread can go on" + waiting();
    if (!launch_.cooperative && launch_.ranks == 1 && !spinning_.empty() && launch_.grid > launch_.cluster) {
      error_ += "\n  the launch is not cooperative: other CTAs begin only when these have ended";
    }
  }
  for (Cluster& cluster : clusters_) {
    for (Cta& cta : cluster.ctas) {
      for (Shared& shared : cta.shared) memory_.push_back(shared.begin);
    }
  }
  // What a later CTA writes into memory freed by an earlier one would count as a race of the two.
  if (!sanitizers::races()) release_memory();
  current_ = nullptr;
}

/// Threads of these clusters of a stream's launch, ready to run.
void Machine::begin(Stream& stream, const std::vector<unsigned>& clusters) {
  stream.left = unsigned(clusters.size()) * launch_.cluster;
  for (unsigned number : clusters) {
    Cluster& cluster = clusters_.emplace_back();
    cluster.stream = &stream;
    cluster.arguments = arguments_ + (stream.rank * launch_.calls + stream.call) * launch_.argument_bytes;
    cluster.ctas.resize(launch_.cluster);
    for (unsigned rank = 0; rank < launch_.cluster; ++rank) {
      Cta& cta = cluster.ctas[rank];
      cta.index = number * launch_.cluster + rank;
      cta.rank = rank;
      cta.cluster = &cluster;
      cta.warps.resize((launch_.block + WARP - 1) / WARP);
      shared_memory(cta, nullptr, launch_.shared_bytes);
      for (unsigned index = 0; index < launch_.block; ++index) {
        if (used_ == pool_.size()) pool_.push_back(std::make_unique<Thread>());
        Thread& thread = *pool_[used_++];
        ++alive_;
        thread.cta = &cta;
        thread.warp = &cta.warps[index / WARP];
        thread.index = index;
        thread.call = nullptr;
        thread.at_cluster = false;
        thread.open.clear();
        thread.groups.clear();
        thread.fiber.prepare(thread_main);
        thread.warp->lanes.push_back(&thread);
        cta.threads.push_back(&thread);
        wake(thread);
      }
    }
  }
}

unsigned* Machine::grid_word(Site site) {
  if (!launch_.cooperative) fault(site, "grid_barrier in a launch that is not cooperative");
  return &grid_word_;
}

void Machine::release_memory() {
  const Quiet quiet;  // after a fault threads are where they are, and nothing is ordered with this
  for (void* memory : memory_) std::free(memory);
  memory_.clear();
}

void Machine::thread_main() {
  Fiber::begin(machine.outer_);
  sanitizers::acquire(machine.begin_clock_);
  Stream& stream = *machine.me().cta->cluster->stream;
  if (stream.call) sanitizers::acquire(stream.clock);  // of the launches before
  {
    const Quiet quiet;
    Cta& cta = *machine.me().cta;
    if (!cta.begun) {
      cta.begun = true;
      for (Shared& shared : cta.shared) sanitizers::unpoison(shared.begin, shared.bytes);
    }
  }
  machine.kernel_(machine.me().cta->cluster->arguments);
  machine.end_thread();
}

void Machine::end_thread() {
  Thread& thread = me();
  {
    const Quiet quiet;
    Cta& cta = *thread.cta;
    for (const auto& group : thread.groups) {
      if (!group.empty()) fault(group[0].site, "copy_async that the thread never waited for");
    }
    if (!thread.open.empty()) fault(thread.open[0].site, "copy_async without async_commit");
    if (thread.at_cluster) fault(thread.site, "cluster_arrive without cluster_wait before the end of the thread");
    thread.state = State::ENDED;
    --alive_;
    progress();
    cta.ended.push_back(thread.index);
    thread.warp->ended.push_back(thread.index % WARP);
    for (const Thread* other : cta.threads) {
      if (other->state == State::WARP && other->warp == thread.warp) {
        fault(other->site, std::string(other->call) + " names lane " + std::to_string(thread.index % WARP) +
                               ", which has ended, of thread " + std::to_string(other->index));
      }
      if (other->state == State::BARRIER) {
        fault(other->site, "barrier that " + who(thread) + " does not come to: it has ended");
      }
    }
    for (const Cta& other : cta.cluster->ctas) {
      for (const Thread* waits : other.threads) {
        if (waits->state == State::CLUSTER) {
          fault(waits->site, "cluster_wait for " + who(thread) + ", which has ended");
        }
      }
    }
    cta.cluster->ended.push_back(thread.index);
    Stream& stream = *cta.cluster->stream;
    sanitizers::release(stream.clock);
    sanitizers::release(end_clock_);
    if (cta.over()) {
      end_cta(cta);
      if (--stream.left == 0 && ++stream.call < launch_.calls) begin(stream, order_);
    }
    current_ = take();
  }
  thread.fiber.switch_to(current_ ? current_->fiber : outer_, true);
  std::abort();
}

/// Its shared memory is nobody's from here on.
void Machine::end_cta(Cta& cta) {
  for (const BulkCopy& bulk : bulk_) {
    if (bulk.cta == &cta) fault(bulk.copy.site, std::string(bulk.call) + " that nobody waited for before the CTA ended");
  }
  for (auto& [address, mbarrier] : cta.mbarriers) {
    if (mbarrier.bytes != 0) {
      fault(mbarrier.site, "mbarrier that still expects " + std::to_string(mbarrier.bytes) + " bytes when the CTA ends");
    }
    sanitizers::unpoison(address, 8);
  }
  if (cta.cluster->ctas.size() == 1) return;
  for (const Shared& shared : cta.shared) {
    fill_nan(shared.begin, shared.bytes);
    sanitizers::poison(shared.begin, shared.bytes);
  }
}

// Meetings

u64 Machine::meet_warp(WarpOperation operation, u64 value, unsigned source, Site site) {
  const Quiet quiet;
  const char* const call = WARP_CALLS[int(operation)];
  Thread& thread = enter(call, site);
  Warp& warp = *thread.warp;
  if (!warp.ended.empty()) {
    fault(site, std::string(call) + " names lanes that have ended: " + ranges(warp.ended));
  }
  if (source >= warp.lanes.size()) {
    fault(site, std::string(call) + " reads lane " + std::to_string(source) + ", of a thread that the CTA does not have");
  }
  thread.operation = operation;
  thread.value = value;
  thread.source = source;
  char& clock = warp.meeting.clock();
  const bool orders = operation == WarpOperation::BARRIER;
  if (orders) sanitizers::release(clock);
  if (++warp.meeting.arrived < warp.lanes.size()) {
    block(State::WARP);
  } else {
    u64 received[WARP] = {};
    u64 votes = 0;
    for (std::size_t i = 0; i < warp.lanes.size(); ++i) {
      const Thread& lane = *warp.lanes[i];
      if (lane.operation != operation || !same(lane.site, site)) {
        fault(site, std::string(call) + " meets " + lane.call + " of " + who(lane) + ", " + text(lane.site));
      }
      received[i] = warp.lanes[lane.source]->value;
      votes |= (lane.value & 1) << i;
    }
    warp.meeting.next();
    for (std::size_t i = 0; i < warp.lanes.size(); ++i) {
      Thread& lane = *warp.lanes[i];
      lane.value = operation == WarpOperation::BALLOT ? votes : received[i];
      if (&lane != &thread) wake(lane);
    }
  }
  if (orders) sanitizers::acquire(clock);
  return thread.value;
}

void Machine::meet_cta(Site site) {
  const Quiet quiet;
  Thread& thread = enter("barrier", site);
  Cta& cta = *thread.cta;
  if (!cta.ended.empty()) {
    fault(site, "barrier that threads " + ranges(cta.ended) + " do not come to: they have ended");
  }
  char& clock = cta.meeting.clock();
  sanitizers::release(clock);
  if (++cta.meeting.arrived < cta.threads.size()) {
    block(State::BARRIER);
  } else {
    for (const Thread* other : cta.threads) {
      if (!same(other->site, site)) {
        fault(site, "divergent barrier: " + who(*other) + " is at another, " + text(other->site));
      }
    }
    cta.meeting.next();
    for (Thread* other : cta.threads) {
      if (other != &thread) wake(*other);
    }
  }
  sanitizers::acquire(clock);
}

void Machine::arrive_cluster(Site site) {
  const Quiet quiet;
  Thread& thread = enter("cluster_arrive", site);
  Cluster& cluster = *thread.cta->cluster;
  if (thread.at_cluster) fault(site, "cluster_arrive a second time, without cluster_wait between");
  if (!cluster.ended.empty()) fault(site, "cluster_arrive when threads of the cluster have ended");
  thread.at_cluster = true;
  thread.cluster_clock = &cluster.meeting.clock();
  sanitizers::release(*thread.cluster_clock);
  progress();
  if (++cluster.meeting.arrived < cluster.ctas.size() * launch_.block) return;
  cluster.meeting.next();
  for (Cta& cta : cluster.ctas) {
    for (Thread* other : cta.threads) {
      if (other->state == State::CLUSTER) wake(*other);
    }
  }
}

void Machine::wait_cluster(Site site) {
  const Quiet quiet;
  Thread& thread = enter("cluster_wait", site);
  Cluster& cluster = *thread.cta->cluster;
  if (!thread.at_cluster) fault(site, "cluster_wait without cluster_arrive");
  // The round that it arrived in is over if the clock is no longer that round's.
  if (thread.cluster_clock == &cluster.meeting.clock()) block(State::CLUSTER);
  thread.at_cluster = false;
  sanitizers::acquire(*thread.cluster_clock);
}

// Memory

Shared& Machine::shared_memory(Cta& cta, const void* declaration, u64 bytes) {
  for (Shared& shared : cta.shared) {
    if (shared.declaration == declaration) return shared;
  }
  void* memory;
  if (posix_memalign(&memory, 128, bytes ? bytes : 1)) throw std::bad_alloc();
  fill_nan(static_cast<u8*>(memory), bytes);
  // Memory of a CTA that may not run yet must not be touched by its cluster.
  if (!cta.begun) sanitizers::poison(memory, bytes);
  cta.shared.push_back({declaration, static_cast<u8*>(memory), bytes});
  return cta.shared.back();
}

const Shared* Machine::find_shared(const Cta& cta, const void* address, u64 bytes) const {
  for (const Shared& shared : cta.shared) {
    if (shared.holds(address, bytes)) return &shared;
  }
  return nullptr;
}

void* Machine::map_shared(const void* address, unsigned rank, Site site) {
  const Quiet quiet;
  Thread& thread = enter("map_shared", site);
  Cluster& cluster = *thread.cta->cluster;
  const Shared* const mine = find_shared(*thread.cta, address, 1);
  if (!mine) fault(site, "map_shared of an address that is not in this CTA's shared memory");
  if (rank >= cluster.ctas.size()) {
    fault(site, "map_shared to rank " + std::to_string(rank) + " of a cluster of " + std::to_string(cluster.ctas.size()));
  }
  Cta& other = cluster.ctas[rank];
  if (other.over()) {
    fault(site, "map_shared to CTA " + std::to_string(other.index) + ", which has ended: its shared memory is gone");
  }
  const u64 offset = u64(static_cast<const u8*>(address) - mine->begin);
  const Shared declared = *mine;
  return shared_memory(other, declared.declaration, declared.bytes).begin + offset;
}

void Machine::check_access(const void* address, unsigned width, const char* what, bool global, Site site) {
  if (launch_.schedule > REVERSE) {
    const Quiet quiet;
    enter(what, site);
  }
  const u64 at = u64(address);
  const bool elsewhere = global && find_shared(*me().cta, address, width);
  if (at % width == 0 && at >= 4096 && !elsewhere) return;
  const Quiet quiet;
  const std::string access = std::string(what) + " of " + std::to_string(width) + " bytes";
  if (elsewhere) fault(site, access + " of shared memory, in a way that only global memory has");
  if (at < 4096) fault(site, access + " at the null address");
  fault(site, access + " at an address that is a multiple of " + std::to_string(at & -at));
}

// Copies

void Machine::check_copy(const char* call, u8* to, const u8* from, unsigned bytes, unsigned multiple, Site site) {
  const auto refuse = [&](const std::string& why) {
    fault(site, std::string(call) + " of " + std::to_string(bytes) + " bytes" + why);
  };
  const auto no_multiple = [&](const char* what) {
    refuse(what + std::string(" that is no multiple of ") + std::to_string(multiple));
  };
  if (bytes % multiple) no_multiple(", a number");
  if (u64(to) % multiple) no_multiple(" to an address");
  if (u64(from) % multiple) no_multiple(" from an address");
  if (!find_shared(*me().cta, to, bytes)) refuse(" to memory that is not this CTA's shared memory");
  if (sanitizers::poisoned(to, bytes)) refuse(" to memory that is in use by another copy or an mbarrier");
  if (sanitizers::poisoned(from, bytes)) refuse(" from outside the buffers");
}

void Machine::start(const Copy& copy) {
  if (copy.issued) sanitizers::release(*copy.issued);
  fill_nan(copy.to, copy.bytes);
  sanitizers::poison(copy.to, copy.bytes);
}

/// Copies in the order in which one thread issued them: together they are a thread to ThreadSanitizer, each after what
/// its issuer did before it. done: the clock of whoever waits for them.
void Machine::finish(const Copy* first, const Copy* last, char& done) {
  if (first == last) return;
  for (const Copy* copy = first; copy != last; ++copy) {
    sanitizers::unpoison(copy->to, copy->bytes);
    move_bytes(copy->to, copy->from ? copy->from : reinterpret_cast<const u8*>(&copy->value), copy->bytes);
  }
  sanitizers::as_another_thread(outer_.race_state(), [&] {
    for (const Copy* copy = first; copy != last; ++copy) {
      sanitizers::acquire(*copy->issued);
      if (copy->from) sanitizers::reads(copy->from, copy->bytes, copy->pc);
      sanitizers::writes(copy->to, copy->bytes, copy->pc);
    }
    sanitizers::release(done);
  });
}

void Machine::copy_async(u8* to, const u8* from, unsigned bytes, void* pc, Site site) {
  const Quiet quiet;
  Thread& thread = enter("copy_async", site);
  check_copy("copy_async", to, from, bytes, bytes, site);
  thread.open.push_back({to, from, bytes, pc, site});
  start(thread.open.back());
}

void Machine::commit_copies(Site site) {
  const Quiet quiet;
  Thread& thread = enter("async_commit", site);
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

void Machine::wait_copies(unsigned pending, Site site) {
  const Quiet quiet;
  Thread& thread = enter("async_wait", site);
  for (; thread.groups.size() > pending; thread.groups.pop_front()) {
    const std::vector<Copy>& group = thread.groups.front();
    char done;
    finish(group.data(), group.data() + group.size(), done);
    sanitizers::acquire(done);
  }
}

void Machine::bulk_load(u8* to, const u8* from, unsigned bytes, u64* address, void* pc, Site site) {
  mbarrier_at(address, "bulk_load", pc, site);
  const Quiet quiet;
  Thread& thread = enter("bulk_load", site);
  if (!bytes) fault(site, "bulk_load of no bytes");
  check_copy("bulk_load", to, from, bytes, 16, site);
  bulk_.push_back({"bulk_load", {to, from, bytes, pc, site}, thread.cta, address});
  check_fenced(bulk_.back());
  start(bulk_.back().copy);
}

void Machine::send(float value, u8* to, u64* address, void* pc, Site site) {
  sanitizers::reads(address, 8, pc);
  const Quiet quiet;
  Cluster& cluster = *enter("send", site).cta->cluster;
  const auto has = [&](Cta& cta) { return find_shared(cta, to, sizeof value) && cta.mbarriers.count(address); };
  const auto found = std::find_if(cluster.ctas.begin(), cluster.ctas.end(), has);
  if (found == cluster.ctas.end()) fault(site, "send to memory and an mbarrier that no CTA of the cluster has both");
  if (sanitizers::poisoned(to, sizeof value)) fault(site, "send to memory that is in use by another copy or an mbarrier");
  bulk_.push_back({"send", {to, nullptr, sizeof value, pc, site, value}, &*found, address});
  check_fenced(bulk_.back());
  start(bulk_.back().copy);
}

void Machine::check_fenced(const BulkCopy& bulk) {
  const Mbarrier& mbarrier = bulk.cta->mbarriers.at(bulk.mbarrier);
  if (!mbarrier.fenced) {
    fault(bulk.copy.site,
          std::string(bulk.call) + " on an mbarrier without mbarrier_fence_init, made at " + text(mbarrier.site));
  }
}

void Machine::finish_bulk(std::size_t which) {
  BulkCopy bulk = std::move(bulk_[which]);
  if (which == 0) {
    bulk_.pop_front();
  } else {  // the last or a random one, whose place the last takes: there may be ten thousand, too many to move up
    if (which + 1 < bulk_.size()) bulk_[which] = std::move(bulk_.back());
    bulk_.pop_back();
  }
  Mbarrier& mbarrier = bulk.cta->mbarriers.at(bulk.mbarrier);
  finish(&bulk.copy, &bulk.copy + 1, mbarrier.clocks[mbarrier.phase % 2]);
  mbarrier.bytes -= bulk.copy.bytes;
  settle(bulk.mbarrier, mbarrier);
}

Mbarrier& Machine::mbarrier_at(u64* address, const char* call, void* pc, Site site) {
  sanitizers::reads(address, 8, pc);
  const Quiet quiet;
  Thread& thread = enter(call, site);
  const auto found = thread.cta->mbarriers.find(address);
  if (found == thread.cta->mbarriers.end()) fault(site, std::string(call) + " on what is no mbarrier: nobody made it");
  if (*static_cast<volatile u64*>(address) != MBARRIER_MARK) {
    fault(site, std::string(call) + " on an mbarrier that was written over");
  }
  return found->second;
}

void Machine::mbarrier_init(u64* address, unsigned arrivals, void* pc, Site site) {
  sanitizers::writes(address, 8, pc);
  const Quiet quiet;
  Thread& thread = enter("mbarrier init", site);
  if (u64(address) % 8 || !find_shared(*thread.cta, address, 8)) {
    fault(site, "mbarrier that is not 8 aligned bytes of this CTA's shared memory");
  }
  if (!arrivals) fault(site, "mbarrier for no arrivals");
  if (thread.cta->mbarriers.count(address)) fault(site, "mbarrier made a second time");
  Mbarrier& mbarrier = thread.cta->mbarriers[address];
  mbarrier.arrivals = mbarrier.pending = arrivals;
  mbarrier.maker = &thread;
  mbarrier.site = site;
  *static_cast<volatile u64*>(address) = MBARRIER_MARK;
  sanitizers::poison(address, 8);
}

void Machine::mbarrier_fence_init(Site site) {
  const Quiet quiet;
  Thread& thread = enter("mbarrier_fence_init", site);
  for (auto& [address, mbarrier] : thread.cta->mbarriers) mbarrier.fenced |= mbarrier.maker == &thread;
}

void Machine::mbarrier_arrive(u64* address, unsigned bytes, void* pc, Site site) {
  Mbarrier& mbarrier = mbarrier_at(address, "mbarrier arrive", pc, site);
  const Quiet quiet;
  if (!mbarrier.pending) {
    fault(site, "mbarrier arrive when all " + std::to_string(mbarrier.arrivals) + " arrivals of the phase have come");
  }
  sanitizers::release(mbarrier.clocks[mbarrier.phase % 2]);
  mbarrier.bytes += bytes;
  --mbarrier.pending;
  settle(address, mbarrier);
}

void Machine::mbarrier_wait(u64* address, unsigned parity, void* pc, Site site) {
  Mbarrier& mbarrier = mbarrier_at(address, "mbarrier wait", pc, site);
  const Quiet quiet;
  Thread& thread = me();
  if (parity > 1) fault(site, "mbarrier wait for parity " + std::to_string(parity) + "; it is 0 or 1");
  if (mbarrier.phase % 2 == parity) {
    thread.awaited = address;
    thread.awaited_parity = parity;
    block(State::MBARRIER);
  }
  sanitizers::acquire(mbarrier.clocks[parity]);
}

/// Ends the phase if nothing is missing.
void Machine::settle(u64* address, Mbarrier& mbarrier) {
  progress();
  if (mbarrier.pending || mbarrier.bytes) return;
  ++mbarrier.phase;
  mbarrier.pending = mbarrier.arrivals;
  for (Cluster& cluster : clusters_) {
    for (Cta& cta : cluster.ctas) {
      for (Thread* thread : cta.threads) {
        if (thread->state == State::MBARRIER && thread->awaited == address) wake(*thread);
      }
    }
  }
}

}  // namespace

namespace gf {
namespace host {

unsigned thread_index() { return machine.me().index; }
unsigned block_index() { return machine.me().cta->index; }
unsigned grid_size() { return machine.grid(); }
unsigned cluster_rank() { return machine.me().cta->rank; }
unsigned cluster_size() { return unsigned(machine.me().cta->cluster->ctas.size()); }

unsigned long long meet_warp(WarpOperation operation, unsigned long long value, unsigned source, Site site) {
  return machine.meet_warp(operation, value, source, site);
}
void meet_cta(Site site) { machine.meet_cta(site); }
void arrive_cluster(Site site) { machine.arrive_cluster(site); }
void wait_cluster(Site site) { machine.wait_cluster(site); }
unsigned* grid_word(Site site) { return machine.grid_word(site); }

void* shared_memory(const void* declaration, unsigned long long bytes) {
  const Quiet quiet;
  return machine.shared_memory(*machine.me().cta, declaration, bytes).begin;
}
void* dynamic_shared_memory() { return shared_memory(nullptr, 0); }
void* map_shared(const void* address, unsigned rank, Site site) { return machine.map_shared(address, rank, site); }

void check_access(const void* address, unsigned width, bool write, bool global, Site site) {
  machine.check_access(address, width, write ? "store" : "load", global, site);
}
void check_atomic(const void* address, unsigned width, bool changes, Site site) {
  if (changes) machine.progress();
  machine.check_access(address, width, "atomic operation", false, site);
}
void spin(Site site) { machine.spin(site); }

void copy_async(void* shared, const void* global, unsigned bytes, Site site) {
  machine.copy_async(static_cast<u8*>(shared), static_cast<const u8*>(global), bytes, __builtin_return_address(0), site);
}
void commit_copies(Site site) { machine.commit_copies(site); }
void wait_copies(unsigned pending, Site site) { machine.wait_copies(pending, site); }
void bulk_load(void* shared, const void* global, unsigned bytes, unsigned long long* mbarrier, Site site) {
  machine.bulk_load(static_cast<u8*>(shared), static_cast<const u8*>(global), bytes, mbarrier,
                    __builtin_return_address(0), site);
}
void send(float value, float* shared, unsigned long long* mbarrier, Site site) {
  machine.send(value, reinterpret_cast<u8*>(shared), mbarrier, __builtin_return_address(0), site);
}
void mbarrier_init(unsigned long long* mbarrier, unsigned arrivals, Site site) {
  machine.mbarrier_init(mbarrier, arrivals, __builtin_return_address(0), site);
}
void mbarrier_fence_init(Site site) { machine.mbarrier_fence_init(site); }
void mbarrier_arrive(unsigned long long* mbarrier, unsigned bytes, Site site) {
  machine.mbarrier_arrive(mbarrier, bytes, __builtin_return_address(0), site);
}
void mbarrier_wait(unsigned long long* mbarrier, unsigned parity, Site site) {
  machine.mbarrier_wait(mbarrier, parity, __builtin_return_address(0), site);
}

}  // namespace host
}  // namespace gf

extern "C" const char* gf_launch(const GfLaunch* launch, GfKernel kernel, const unsigned char* arguments) try {
  return machine.run(*launch, kernel, arguments);
} catch (const std::bad_alloc&) {
  return "there is not enough memory for the stacks or the shared memory of so many threads";
}
