// The worker pool behind parallel.h.
#include "parallel.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <sched.h>
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

// One job at a time. `ticket_` holds (job number, next unit): a unit is claimed by advancing it with
// compare-and-swap. Before a job's fields are rewritten its ticket is closed, so a late worker that read a mixture
// of two jobs holds a ticket that has changed, and its claim fails.
class Pool {
 public:
  void run(int threads, int units, void (*unit)(void*, int), void* context) {
    std::unique_lock<std::mutex> alone(owner_, std::try_to_lock);
    if (!alone.owns_lock()) {  // another thread of this process computes just now
      for (int u = 0; u < units; ++u) unit(context, u);
      return;
    }
    grow(threads - 1);
    const uint64_t last = ticket_.load(std::memory_order_relaxed) >> 32, job = (uint32_t)(last + 1);
    ticket_.store(last << 32 | CLOSED, std::memory_order_seq_cst);
    unit_.store(unit, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    units_.store(units, std::memory_order_release);
    helpers_.store(threads - 1, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    ticket_.store(job << 32, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    work(job);
    for (int spins = 0; done_.load(std::memory_order_acquire) < units; ++spins) {
      if (spins < 2000) relax();
      else sched_yield();  // the worker with the last unit may need this very core
    }
  }

 private:
  void grow(int workers) {
    while ((int)started_ < workers) {
      const int index = started_++;
      std::thread([this, index] { serve(index); }).detach();
    }
  }

  // Claims and runs units of job `job` until there are none.
  void work(uint64_t job) {
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      void (*unit)(void*, int) = unit_.load(std::memory_order_acquire);
      void* context = context_.load(std::memory_order_acquire);
      const uint32_t units = (uint32_t)units_.load(std::memory_order_acquire), next = (uint32_t)ticket;
      if (ticket >> 32 != job || next >= units) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      unit(context, (int)next);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void serve(int index) {
    uint64_t seen = 0;
    auto idle_since = Clock::now();
    for (;;) {
      const uint64_t job = ticket_.load(std::memory_order_acquire) >> 32;
      if (job != seen) {
        seen = job;
        if (index < helpers_.load(std::memory_order_acquire)) work(job);
        idle_since = Clock::now();
        continue;
      }
      for (int i = 0; i < 50; ++i) relax();
      if (Clock::now() - idle_since < SPIN) continue;
      std::unique_lock<std::mutex> guard(sleep_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(guard, [&] { return ticket_.load(std::memory_order_seq_cst) >> 32 != seen; });
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  std::mutex owner_, sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<void (*)(void*, int)> unit_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> units_{0}, helpers_{0};
  int started_ = 0;
};

}  // namespace

void run_units(int threads, int units, void (*unit)(void*, int), void* context) {
  static Pool* pool = new Pool;  // never destroyed: its threads outlive any static destructor
  pool->run(threads, units, unit, context);
}

}  // namespace sd
