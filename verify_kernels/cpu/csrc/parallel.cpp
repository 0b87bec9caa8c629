// The worker pool behind parallel.h.
#include "parallel.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <sched.h>
#include <system_error>
#include <thread>
#include <vector>

namespace sd {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto SPIN = std::chrono::microseconds(300);  // longer than the gaps inside a step, shorter than an idle one

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

constexpr uint32_t CLOSED = 0xffffffff;

constexpr int MAX_THREADS = 256;  // of one job; more would only wait for memory

// One job at a time. Its units are split into ranges, one per thread, so that each thread reads neighbouring weights and
// claims units without touching another thread's cache line; a thread that is done takes units from the other ranges.
// A range holds (job number, next unit): a unit is claimed by advancing it with compare-and-swap. Before a job's fields
// are rewritten its ranges are closed, so a late worker that read a mixture of two jobs holds a value that has changed,
// and its claim fails.
class Pool {
 public:
  void run(int threads, int units, void (*unit)(void*, int), void* context) {
    std::unique_lock<std::mutex> alone(owner_, std::try_to_lock);
    if (!alone.owns_lock()) {  // another thread of this process computes just now
      for (int u = 0; u < units; ++u) unit(context, u);
      return;
    }
    if (threads > most_) threads = most_;
    grow(threads - 1);
    const uint64_t last = job_.load(std::memory_order_relaxed), job = (uint32_t)(last + 1);
    const int ranges = threads < units ? threads : units;
    for (int r = 0; r < ranges_.load(std::memory_order_relaxed); ++r)
      range_[r].next.store(last << 32 | CLOSED, std::memory_order_seq_cst);
    unit_.store(unit, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    units_.store(units, std::memory_order_release);
    ranges_.store(ranges, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    for (int r = 0; r < ranges; ++r)
      range_[r].next.store(job << 32 | (uint64_t)begin(r, units, ranges), std::memory_order_release);
    job_.store(job, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    work(job, 0);
    for (int spins = 0; done_.load(std::memory_order_acquire) < units; ++spins) {
      if (spins < 2000) relax();
      else sched_yield();  // the worker with the last unit may need this very core
    }
  }

 private:
  static int begin(int range, int units, int ranges) { return (int)((int64_t)units * range / ranges); }

  // If the system refuses another thread, the existing threads do the work.
  void grow(int workers) {
    try {
      for (; started_ < workers; ++started_) std::thread([this, index = started_ + 1] { serve(index); }).detach();
    } catch (const std::system_error& error) {
      std::fprintf(stderr, "specdec: the system allows %d of %d threads: %s\n", started_ + 1, workers + 1, error.what());
      most_ = started_ + 1;
    }
  }

  // Claims and runs units of job `job`, of range `own` first, until there are none.
  void work(uint64_t job, int own) {
    const int ranges = ranges_.load(std::memory_order_acquire);
    for (int i = 0; i < ranges; ++i) work_on(job, (own + i) % ranges);
  }

  void work_on(uint64_t job, int range) {
    std::atomic<uint64_t>& next = range_[range].next;
    for (int done = 0;; ++done) {
      uint64_t claim = next.load(std::memory_order_acquire);
      void (*unit)(void*, int);
      void* context;
      do {
        unit = unit_.load(std::memory_order_acquire), context = context_.load(std::memory_order_acquire);
        const int units = units_.load(std::memory_order_acquire), ranges = ranges_.load(std::memory_order_acquire);
        if (claim >> 32 != job || (uint32_t)claim >= (uint32_t)begin(range + 1, units, ranges)) {
          if (done) done_.fetch_add(done, std::memory_order_release);
          return;
        }
      } while (!next.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel));
      unit(context, (int)(uint32_t)claim);
    }
  }

  void serve(int index) {
    uint64_t seen = 0;
    auto idle_since = Clock::now();
    for (;;) {
      const uint64_t job = job_.load(std::memory_order_acquire);
      if (job != seen) {
        seen = job;
        if (index < ranges_.load(std::memory_order_acquire)) work(job, index);
        idle_since = Clock::now();
        continue;
      }
      for (int i = 0; i < 50; ++i) relax();
      if (Clock::now() - idle_since < SPIN) continue;
      std::unique_lock<std::mutex> guard(sleep_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(guard, [&] { return job_.load(std::memory_order_seq_cst) != seen; });
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  std::mutex owner_, sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
  struct alignas(64) Range {
    std::atomic<uint64_t> next{0};
  };
  Range range_[MAX_THREADS];
  alignas(64) std::atomic<uint64_t> job_{0};
  std::atomic<void (*)(void*, int)> unit_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> units_{0}, ranges_{0};
  alignas(64) std::atomic<int> done_{0};
  int started_ = 0, most_ = MAX_THREADS;
};

}  // namespace

void run_units(int threads, int units, void (*unit)(void*, int), void* context) {
  static Pool* pool = new Pool;  // never destroyed: its threads outlive any static destructor
  pool->run(threads, units, unit, context);
}

}  // namespace sd
