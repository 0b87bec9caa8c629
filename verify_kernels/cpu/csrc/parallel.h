// Work shared out to threads. Which thread does a unit never changes what the unit computes.
#pragma once
#include <atomic>
#include <omp.h>

namespace sd {

// Calls body(unit) for every unit in [0, units), handed out `grain` at a time.
template <class Body>
void for_units(int units, int grain, std::atomic<int>& next, Body body) {
  for (;;) {
    int begin = next.fetch_add(grain, std::memory_order_relaxed);
    if (begin >= units) return;
    int end = begin + grain < units ? begin + grain : units;
    for (int u = begin; u < end; ++u) body(u);
  }
}

}  // namespace sd
