// Ranks, processes that compute one model together over a shared segment: their barrier, and row operations beside the
// layers. Nothing here adds numbers of two ranks, so sums are those of one rank.
#include <atomic>
#include <chrono>
#include <cstdint>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "parallel.h"
#include "prologue.h"

namespace {

using Clock = std::chrono::steady_clock;

// At the head of the segment, which begins as zeros.
struct Meeting {
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> round;  // counts meetings; waiters sleep on it
  std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> broken;
};
static_assert(sizeof(Meeting) <= 256 && std::atomic<uint32_t>::is_always_lock_free);

// Sleeps while `word` holds `value`; may return early.
void sleep_while(std::atomic<uint32_t>* word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, (uint32_t*)word, FUTEX_WAIT, value, nullptr, nullptr, 0);
#else
  sched_yield();
#endif
}

void wake_all(std::atomic<uint32_t>* word) {
#if defined(__linux__)
  syscall(SYS_futex, (uint32_t*)word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

extern "C" {

// Waits for all `ranks`; what any wrote before, all see after. Spins for `spin_us` and then sleeps: with more ranks than
// processors a spinning rank would keep the others from running. Returns 1 if a rank is lost, else 0.
int32_t sd_ranks_meet(void* segment, int32_t ranks, int32_t spin_us) {
  Meeting& m = *(Meeting*)segment;
  const uint32_t round = m.round.load(std::memory_order_seq_cst);
  if (m.broken.load(std::memory_order_seq_cst)) return 1;  // after `round`: sd_ranks_break writes them in reverse order
  if (m.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)ranks) {
    m.arrived.store(0, std::memory_order_relaxed);
    m.round.fetch_add(1, std::memory_order_seq_cst);
    if (m.sleeping.load(std::memory_order_seq_cst)) wake_all(&m.round);
    return m.broken.load(std::memory_order_acquire) != 0;
  }
  const auto until = Clock::now() + std::chrono::microseconds(spin_us);
  while (m.round.load(std::memory_order_acquire) == round && Clock::now() < until)
    for (int i = 0; i < 20; ++i) relax();
  if (m.round.load(std::memory_order_acquire) == round) {
    m.sleeping.fetch_add(1, std::memory_order_seq_cst);
    while (m.round.load(std::memory_order_seq_cst) == round) sleep_while(&m.round, round);
    m.sleeping.fetch_sub(1, std::memory_order_seq_cst);
  }
  return m.broken.load(std::memory_order_acquire) != 0;
}

// Marks a rank as lost: every wait, now and later, returns 1.
void sd_ranks_break(void* segment) {
  Meeting& m = *(Meeting*)segment;
  m.broken.store(1, std::memory_order_seq_cst);
  m.round.fetch_add(1, std::memory_order_seq_cst);
  wake_all(&m.round);
}

// out[r] = act(gate) * up of [gate | up], `n` each: sd_linear's prologue, on some of the channels.
void sd_gate(const float* src, int64_t ld_src, int32_t n, int32_t gelu, float* out, int64_t ld_out, int32_t rows,
             int32_t threads) {
  sd::for_units(threads, rows, [&](int row) {
    if (gelu) sd::gate(src + row * ld_src, n, out + row * ld_out, sd::gelu16);
    else sd::gate(src + row * ld_src, n, out + row * ld_out, sd::silu16);
  });
}

// dst[r] += y[r], RMS-normed if there is a `post_norm`: sd_linear's epilogue, on the gathered row.
void sd_add_rows(const float* y, int64_t ld_y, int32_t n, const float* post_norm, float eps, float* dst, int64_t ld_dst,
                 int32_t rows, int32_t threads) {
  sd::for_units(threads, rows, [&](int row) {
    const float* from = y + row * ld_y;
    float* to = dst + row * ld_dst;
    if (post_norm) sd::add_normed(from, post_norm, n, eps, to);
    else for (int i = 0; i < n; ++i) to[i] += from[i];
  });
}
}
